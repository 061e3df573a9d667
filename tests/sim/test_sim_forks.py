"""Copies of a run: each begins where it was made, and says what it found, or the run fails."""

import os
from functools import partial

import pytest

from popmq.testing.sim.forks import Forks


def say(count: int) -> object:
    return os.getpid(), count


def run(forks: Forks, until: int) -> int:
    """Count; at each number a copy says it, unless another one was in the state of its half."""
    count = 0
    while count < until:
        if forks.fork():
            if forks.is_new(bytes((count // 2,))):
                forks.leave(partial(say, count))
            forks.leave(lambda: None)
        count += 1
    return count


def test_a_copy_goes_on_from_where_it_was_made_and_its_run_too() -> None:
    connected: list[object] = []
    forks = Forks(2, connected.append)
    assert run(forks, 6) == 6
    forks.finish()
    reported_connected = [item for item in connected if isinstance(item, tuple)]
    assert connected.count(None) == 3
    assert sorted(number // 2 for _, number in reported_connected) == [0, 1, 2]
    assert len({pid for pid, _ in reported_connected} | {os.getpid()}) == 4
    assert not forks.is_copy


def test_a_copy_that_ends_without_a_word_fails_the_run() -> None:
    forks = Forks(2, lambda answer: None)
    if forks.fork():
        os._exit(0)
    with pytest.raises(AssertionError, match="without a word"):
        forks.finish()
