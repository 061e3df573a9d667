"""The operator's commands against real processes, and a redrive that everybody is killed in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import Cluster, RoleFailed, role_environment

LETTERS = 400
RATE = 30


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def make_letters(cluster: Cluster, count: int) -> list[str]:
    """Messages of group g that ran out of attempts; returns their ids."""
    cluster.popmq("topic", "create", "orders")
    cluster.popmq("group", "create", "g", "--max-attempts", "1")
    cluster.popmq("send", "orders", "body", "--tag", "a", "--key", "k", "--count", str(count))
    cluster.popmq("recv", "orders", "--group", "g", "--count", str(count), "--invisible", "300ms")
    deadline_s = time.monotonic() + 20
    while True:
        listed = objects(cluster.popmq("dlq", "list", "g", "--count", str(2 * count), "--json"))
        if len(listed) == count:
            return [message["message_id"] for message in listed]
        assert time.monotonic() < deadline_s, f"{len(listed)} of {count} dead letters"


@pytest.mark.more
def test_the_operators_commands_show_and_move_a_real_group(tmp_path: Path) -> None:
    with Cluster(tmp_path, proxies=1) as cluster:
        (message_id, *_) = make_letters(cluster, 3)
        assert "max attempts" in cluster.popmq("dlq", "list", "g")
        assert message_id in cluster.popmq("dlq", "peek", "g")
        (reported_objects,) = objects(cluster.popmq("explain", message_id, "--json"))
        assert (reported_objects["group"], reported_objects["state"]) == ("g", "DEAD_LETTERED")
        assert "3 would be redriven" in cluster.popmq("dlq", "redrive", "g", "--dry-run")
        assert "0 redriven" in cluster.popmq("dlq", "redrive", "g", "--filter", "tag=b")
        assert "3 redriven" in cluster.popmq("dlq", "redrive", "g", "--filter", "key=k")
        assert "g: READY" in cluster.popmq("explain", message_id, "--group", "g")
        with pytest.raises(RoleFailed, match="no message nothing"):
            cluster.popmq("explain", "nothing")
        (lag, dead) = objects(cluster.popmq("lag", "--group", "g", "--json"))
        assert (lag["lag"], lag["retries"]) == (3, 3)
        assert (dead["dead_letters"], dead["redriven"]) == (3, 3)
        assert "orders" in cluster.popmq("lag")
        reset = ("--group", "g", "--topic", "orders", "--to", "newest", "--yes")
        cluster.popmq("reset-offset", *reset)
        (lag, _) = objects(cluster.popmq("lag", "--group", "g", "--json"))
        assert lag["lag"] == 0
        assert "SKIPPED" in cluster.popmq("explain", message_id)
        args = ("--retry", "exponential", "--initial", "2s", "--jitter", "10%")
        (group,) = objects(cluster.popmq("group", "alter", "g", *args, "--json"))
        assert (group["retry"], group["jitter"]) == ("exponential", "10%")


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_a_redrive_that_everybody_is_killed_in_loses_none_and_doubles_none(tmp_path: Path) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        ids = make_letters(cluster, LETTERS)
        first, second = cluster.endpoints

        run = redrive(tmp_path, first)
        wait_for(cluster, LETTERS // 6)
        os.kill(run.pid, signal.SIGKILL)  # the command
        run.wait()

        run = redrive(tmp_path, second)
        wait_for(cluster, LETTERS // 3)
        cluster.proxies[1].kill9()  # its proxy: the command is of no use any more
        os.kill(run.pid, signal.SIGKILL)
        run.wait()

        run = redrive(tmp_path, first)
        wait_for(cluster, LETTERS // 2)
        cluster.broker.kill9()  # the broker: the command waits for it
        cluster.broker.restart()
        assert run.wait(60) == 0
        redriven = redriven_count(cluster)
        print(f"\nredriven at last: {redriven} of {LETTERS}")
        assert redriven == LETTERS

        expected = ("--count", str(LETTERS + 1), "--wait", "3s")
        text = cluster.popmq("recv", "orders", "--group", "g", "--ack", "--json", *expected)
        got = Counter(message["message_id"] for message in objects(text))
        assert sorted(got) == sorted(ids)
        assert set(got.values()) == {1}


def redrive(folder: Path, endpoint: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "popmq.cli", "dlq", "redrive", "g", "--rate", f"{RATE}/s"],
        cwd=folder,
        env=role_environment({"POPMQ_ENDPOINT": endpoint}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def redriven_count(cluster: Cluster) -> int:
    (*_, dead) = objects(cluster.popmq("lag", "--group", "g", "--json"))
    count: int = dead["redriven"]
    return count


def wait_for(cluster: Cluster, count: int) -> None:
    """Until at least so many were redriven, and not yet all."""
    deadline_s = time.monotonic() + 30
    while (redriven := redriven_count(cluster)) < count:
        assert time.monotonic() < deadline_s, f"{redriven} of {count} redriven"
    assert redriven < LETTERS, "the redrive was over before anybody was killed"
