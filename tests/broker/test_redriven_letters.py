"""The set of redriven dead letters, kept as runs."""

import random

from popmq.broker.deliveries.redriven_dead_letters import RedrivenDeadLetters
from popmq.common.record.message import RedrivenLetter


def test_runs_say_the_same_as_a_set_and_come_back_from_a_snapshot() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        letters, plain = RedrivenDeadLetters(), set()
        for _ in range(rng.randrange(80)):
            place = rng.randrange(2), rng.randrange(40)
            letters.apply(RedrivenLetter(*place))
            plain.add(place)
        restored = RedrivenDeadLetters()
        for content, _ in letters.begin_snapshot():
            restored.restore(content)
        for dead_letter in (letters, restored):
            for topic in (0, 1):
                has = [offset for offset in range(45) if dead_letter.has(topic, offset)]
                assert has == sorted(o for t, o in plain if t == topic), seed
                assert dead_letter.count(topic, 10) == len([o for o in has if o >= 10])


def test_a_run_without_a_gap_takes_two_numbers() -> None:
    letters = RedrivenDeadLetters()
    for offset in range(10_000):
        letters.apply(RedrivenLetter(70, offset))
    assert [len(content) for content, _ in letters.begin_snapshot()] == [20]


def test_a_snapshot_states_the_moment_at_which_it_began() -> None:
    letters = RedrivenDeadLetters()
    letters.apply(RedrivenLetter(70, 1))
    pieces = letters.begin_snapshot()
    letters.apply(RedrivenLetter(70, 2))
    letters.drop_topic(70)
    restored = RedrivenDeadLetters()
    for content, _ in pieces:
        restored.restore(content)
    assert (restored.has(70, 1), restored.has(70, 2)) == (True, False)
    assert not letters.has(70, 1)
