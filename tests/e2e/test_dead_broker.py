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
DELETIONS_S = LONGEST_S + 2.5  # a deletion waits for its copies after the look at the clients


@contextmanager
def beside(folder: Path, *, frozen: bool) -> Iterator[Cluster]:
    """Two broker groups, of which broker-b was killed or does nothing, and some messages."""
    with Cluster(folder, groups=2) as cluster:
        for name in ("orders", "gone"):
            cluster.create(topic=name, groups=[name])
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
