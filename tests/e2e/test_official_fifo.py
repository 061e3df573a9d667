"""A FIFO group with the official Python client, unmodified: order per message group."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from e2e.official import OfficialClient
from e2e.processes import Cluster

ROUNDS = 6
INVISIBLE_S = 1


@pytest.mark.more
@pytest.mark.parametrize("keys", [200])
@pytest.mark.timeout(120)
def test_message_groups_with_failures_are_consumed_in_order_by_the_python_client(
    tmp_path: Path, keys: int
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.popmq("topic", "create", "ordered", "--type", "fifo")
        cluster.popmq("group", "create", "in-order", "--type", "fifo")
        command = [sys.executable, "-m", "e2e.ordered_client"]
        with OfficialClient("ordered", command, folder=tmp_path) as client:
            client.tell(
                op="start", endpoint=cluster.endpoints[0], topic="ordered", group="in-order"
            )
            client.wait(lambda: client.count("ready") > 0, "being ready", within_s=30)
            client.tell(op="send", keys=keys, rounds=ROUNDS)
            client.wait(lambda: client.count("done") > 0, "messages sent", within_s=60)
            client.tell(op="consume", count=keys * ROUNDS, invisible_s=INVISIBLE_S)
            client.wait(lambda: client.count("consumed") > 0, "all acked", within_s=60)

        acked: dict[str, list[int]] = defaultdict(list)
        for event in client.of("acked"):
            acked[event["key"]].append(event["number"])
        assert acked == {f"key-{key}": list(range(ROUNDS)) for key in range(keys)}
        first_failures = [event for event in client.of("failed") if event["attempt"] == 1]
        failing = len(range(0, keys, 7))
        assert len(first_failures) >= 2 * failing, "numbers 0 and 3 of every seventh key"
        again = [event for event in client.of("acked") if event["attempt"] > 1]
        assert len(again) >= 2 * failing

        cluster.popmq("send", "ordered", "one more", "--group-key", "key-0")
        printed = cluster.popmq("recv", "ordered", "--group", "in-order", "--ack", "--wait", "5s")
        assert "one more" in printed


@pytest.mark.more
@pytest.mark.timeout(120)
def test_a_push_consumer_of_the_python_client_handles_each_message_group_in_order(
    tmp_path: Path,
) -> None:
    keys, rounds = 50, 5
    with Cluster(tmp_path) as cluster:
        cluster.popmq("topic", "create", "ordered", "--type", "fifo", "--queues", "4")
        cluster.popmq("group", "create", "in-order", "--type", "fifo")
        command = [sys.executable, "-m", "e2e.ordered_client"]
        with OfficialClient("ordered", command, folder=tmp_path) as client:
            client.tell(
                op="start", endpoint=cluster.endpoints[0], topic="ordered", group="in-order"
            )
            client.wait(lambda: client.count("ready") > 0, "being ready", within_s=30)
            client.tell(op="push")
            client.tell(op="send", keys=keys, rounds=rounds)
            total = keys * rounds
            client.wait(lambda: client.count("acked") >= total, "all handled", within_s=60)

        handled: dict[str, list[int]] = defaultdict(list)
        for event in client.of("acked"):
            handled[event["key"]].append(event["number"])
        assert handled == {f"key-{key}": list(range(rounds)) for key in range(keys)}
        assert client.count("failed") == 2 * len(range(0, keys, 7)), "each once"
