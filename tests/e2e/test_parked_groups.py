"""A stuck message group is parked, shown and ended by the commands of an operator."""

import json
from pathlib import Path

import pytest
from e2e.processes import Cluster, RoleFailed

pytestmark = pytest.mark.more

SETTINGS = {"POPMQ_POP_FIFO_OPEN_OFFSETS": "4", "POPMQ_POP_FIFO_PARK_AFTER_MS": "1"}


def received(cluster: Cluster, *flags: str) -> list[str]:
    printed = cluster.popmq(
        "recv", "orders", "--group", "g", "--json", "--wait", "1s", "--count", "10", *flags
    )
    return [json.loads(line)["body"] for line in printed.splitlines()]


def send(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.popmq("send", "orders", name, "--group-key", name[0])


@pytest.mark.timeout(120)
def test_an_operator_sees_resumes_and_skips_parked_message_groups(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.popmq("topic", "create", "orders", "--type", "fifo", "--queues", "1")
        cluster.popmq("group", "create", "g", "--type", "fifo")
        send(cluster, "a1")
        assert received(cluster) == ["a1"], "in flight for a minute from now on"
        send(cluster, "a2", "a3", "a4", "b1")
        assert received(cluster, "--ack") == ["b1"], "behind the bound until `a` is parked"

        shown = json.loads(cluster.popmq("group", "show", "g", "--json"))
        assert shown["parked_keys"] == 1
        (parked,) = shown["parked"]
        assert parked.pop("parked_ms") >= 0
        assert parked.pop("broker")
        assert parked == {
            "topic": "orders",
            "key": "a",
            "queue": 0,
            "messages": 3,
            "state": "parked",
        }
        table = cluster.popmq("group", "show", "g").splitlines()
        assert table[-3] == "parked message groups: 1"
        header = ["BROKER", "TOPIC", "KEY", "QUEUE", "MESSAGES", "PARKED", "STATE"]
        assert table[-2].split() == header
        assert table[-1].split()[1:5] == ["orders", "a", "0", "3"]

        with pytest.raises(RoleFailed, match="message group 'b' of topic orders is not parked"):
            cluster.popmq("group", "resume", "g", "--topic", "orders", "--key", "b")
        cluster.popmq("group", "resume", "g", "--topic", "orders", "--key", "a")
        resumed = json.loads(cluster.popmq("group", "show", "g", "--json"))
        assert resumed["parked"][0]["state"] == "resumed"

        output = cluster.popmq("group", "dead-letter", "g", "--topic", "orders", "--key", "a")
        assert output == "dead-letter: 3 messages of message group 'a'\n"
        cluster.popmq("group", "create", "reader")
        printed = cluster.popmq(
            "recv", "%DLQ%g", "--group", "reader", "--json", "--wait", "5s", "--count", "3"
        )
        assert [json.loads(line)["body"] for line in printed.splitlines()] == ["a2", "a3", "a4"]
        assert json.loads(cluster.popmq("group", "show", "g", "--json"))["parked"] == []
