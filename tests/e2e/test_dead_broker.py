"""Commands while one of two broker groups is dead: none takes long, and each names it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.processes import Cluster, role_environment

pytestmark = [pytest.mark.more, pytest.mark.alone]

LONGEST_S = 3.0
START_S = 1.0  # of Python and of what is imported, on a busy machine
DELETIONS_S = LONGEST_S + 0.5  # a deletion waits for its copies after the list of clients


@contextmanager
def beside(folder: Path, *, frozen: bool) -> Iterator[Cluster]:
    """Two broker groups, of which broker-b was killed or does nothing, and some messages."""
    with Cluster(folder, groups=2) as cluster:
        for name in ("orders", "gone"):
            cluster.create(topic=name, groups=[name])
        cluster.popmq("topic", "create", "there", "--brokers", "broker-b")
        cluster.popmq("send", "orders", "here", "--count", "16")
        cluster.popmq("recv", "orders", "--group", "orders", "--ack")
        broker = cluster.brokers[1]
        if frozen:
            os.kill(broker.pid, signal.SIGSTOP)
        else:
            broker.kill9()
        try:
            yield cluster
        finally:
            if frozen:
                os.kill(broker.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with beside(tmp_path_factory.mktemp("frozen"), frozen=True) as cluster:
        yield cluster


def run(cluster: Cluster, line: str, within_s: float = LONGEST_S) -> tuple[int, str, str]:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "popmq", *line.split()],
        env=role_environment({"POPMQ_ENDPOINT": cluster.endpoints[0]}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    took_s = time.monotonic() - began_s
    assert took_s < within_s + START_S, f"{line}: {took_s:.1f} s, {done}"
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_a_deletion_names_the_broker_group_that_has_not_copied_it(
    tmp_path: Path, *, frozen: bool
) -> None:
    with beside(tmp_path, frozen=frozen) as cluster:
        for kind in ("topic", "group"):
            code, out, error = run(cluster, f"{kind} delete gone --yes", DELETIONS_S)
            assert (code, out) == (0, f"deleted {kind} gone\n")
            assert "broker group broker-b has not copied the deletion yet" in error


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("send there hello", 3),
        ("drain broker-b --yes", 3),
        ("keys rotate", 3),
        ("reset-offset --group orders --topic orders --to newest --yes", 1),
        ("topic purge orders --yes", 1),
    ],
)
def test_a_change_at_a_frozen_broker_group_is_given_up_and_says_that_its_outcome_is_unknown(
    frozen: Cluster, line: str, code: int
) -> None:
    exit_code, _, error = run(frozen, line)
    assert exit_code == code
    assert "broker broker-b at" in error
    assert "whether it was done is unknown" in error


def test_a_cancellation_that_finds_no_message_names_the_broker_group_that_was_not_asked(
    frozen: Cluster,
) -> None:
    code, _, error = run(frozen, "timers cancel 01AB --yes")
    assert code == 4
    assert "not everything: broker broker-b at" in error


@pytest.mark.parametrize("line", ["recv orders --latest 100", "recv orders --from oldest"])
def test_stored_messages_of_the_other_broker_group_are_shown_and_the_dead_one_is_named(
    frozen: Cluster, line: str
) -> None:
    _shows_the_rest(frozen, line)


def test_stored_messages_are_shown_beside_a_broker_group_that_was_killed(tmp_path: Path) -> None:
    with beside(tmp_path, frozen=False) as cluster:
        for line in ("recv orders --latest 100", "recv orders --from oldest"):
            _shows_the_rest(cluster, line)


def _shows_the_rest(cluster: Cluster, line: str) -> None:
    code, out, error = run(cluster, line)
    assert code == 0
    assert 0 < len(out.splitlines()) < 16
    assert error.startswith("popmq: not everything: broker group broker-b")
    assert len(error.splitlines()) == 1
