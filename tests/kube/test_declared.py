"""Topics and ConsumerGroups: a small API server on one side, a whole popmq on the other."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from kube.asked import Asked
from kube.clusters import cluster, read
from kube.desk import Desk
from kube.world import NOW

from popmq.common.topics import CUSTOMISED_BACK_OFF_MS
from popmq.common.wire import admin_pb2 as admin
from popmq.operator.cluster.reconcile import LeaseLost
from popmq.operator.declared.declared_resources import Change, ChangeKind
from popmq.operator.declared.metadata_client import NetworkMetadataClient, ProxyAccess
from popmq.operator.model.manifest import CONSUMER_GROUP, TOPIC
from popmq.testing.running_broker import RunningBroker


@pytest.fixture(scope="module")
def popmq() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


Story = Callable[[Desk], Awaitable[None]]


def play(popmq: RunningBroker, story: Story) -> None:
    async def whole() -> None:
        async with Desk(popmq.endpoint) as desk:
            await story(desk)

    asyncio.run(whole())


def test_one_value_that_cannot_be_harms_its_own_object_only(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "endless", retention="999999999999999d")
        desk.declare("Topic", "odd", queues="many")
        desk.declare("Topic", "plain")
        desk.declare("ConsumerGroup", "readers")
        await desk.settle()
        assert set(desk.topics()) >= {"plain"}
        assert "readers" in desk.groups()
        for name in ("endless", "odd"):
            ready = desk.condition("Topic", name)
            assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
        assert desk.condition("Topic", "endless")["message"] == (
            "spec.retention = 999999999999999d: at most 99999d"
        )
        for kind, name in (("Topic", "plain"), ("ConsumerGroup", "readers")):
            assert desk.condition(kind, name)["status"] == "True"

    play(popmq, story)


def test_topics_and_groups_are_made_as_they_are_declared(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain")
        expected = {"type": "FIFO", "queues": 3, "permission": "r", "retention": "2h"}
        desk.declare("Topic", "orders", name="Orders_EU", **expected)
        desk.declare("Topic", "urgent", type="Priority")
        desk.declare("Topic", "chats", type="Lite", queues=8)
        desk.declare("ConsumerGroup", "readers")
        desk.declare(
            "ConsumerGroup",
            "workers",
            maxAttempts=3,
            startAt="Newest",
            checkPoints="Buffered",
            backOff=["1s", "5m"],
        )
        await desk.settle()
        plain, orders = desk.topics()["plain"], desk.topics()["Orders_EU"]
        assert (plain.type, plain.queues, plain.permission) == ("normal", 8, "rw")
        assert (orders.type, orders.queues, orders.permission) == ("fifo", 3, "r")
        assert orders.retention_ms == 7_200_000
        assert desk.topics()["urgent"].type == "priority"
        assert (desk.topics()["chats"].type, desk.topics()["chats"].queues) == ("lite", 1)
        readers, workers = desk.groups()["readers"], desk.groups()["workers"]
        assert (readers.max_attempts, readers.start_at) == (17, "oldest")
        assert tuple(readers.back_off_ms) == CUSTOMISED_BACK_OFF_MS
        assert (workers.max_attempts, workers.start_at) == (3, "newest")
        assert workers.check_points == "buffered"
        assert list(workers.back_off_ms) == [1_000, 300_000]
        for kind, name in (("Topic", "orders"), ("ConsumerGroup", "workers")):
            assert desk.condition(kind, name)["status"] == "True"
            assert desk.condition(kind, name, "Drifted")["status"] == "False"
        before = {
            key: message.body["metadata"]["resourceVersion"] for key, message in _stored(desk)
        }
        await desk.look()
        assert before == {
            key: message.body["metadata"]["resourceVersion"] for key, message in _stored(desk)
        }

    play(popmq, story)


def _stored(desk: Desk) -> list[tuple[Any, Any]]:
    return list(desk.api.objects.items())


def test_a_change_of_the_object_is_a_change_of_the_topic_and_no_drift(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", queues=4, retention="2h")
        desk.declare("ConsumerGroup", "readers", backOff=["1s"])
        await desk.settle()
        desk.declare("Topic", "plain", queues=6, permission="w")
        desk.declare("ConsumerGroup", "readers", maxAttempts=5)
        await desk.settle()
        plain = desk.topics()["plain"]
        assert (plain.queues, plain.permission, plain.retention_ms) == (6, "w", 0)
        assert desk.groups()["readers"].max_attempts == 5
        assert tuple(desk.groups()["readers"].back_off_ms) == CUSTOMISED_BACK_OFF_MS
        assert desk.drift("Topic", "plain") == []
        assert "Drifted" not in desk.events()

    play(popmq, story)


def test_how_long_lite_topics_live_is_declared_and_put_right(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        for ttl, wanted_ms in (("90m", 5_400_000), ("1h", 3_600_000), ("", 0)):
            desk.declare("Topic", "chats", type="Lite", **({"liteTtl": ttl} if ttl else {}))
            await desk.settle()
            assert desk.topics()["chats"].lite_ttl_ms == wanted_ms
        desk.alter("chats", lite_ttl_ms=60_000)
        await desk.settle()
        assert desk.topics()["chats"].lite_ttl_ms == 0
        assert "liteTtl is 60000, not 0" in desk.drift("Topic", "chats")[-1]

    play(popmq, story)


def test_what_a_send_waits_for_is_declared_and_put_right(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        def durability() -> str:
            return desk.topics()["quick"].durability

        for declared, expected in (({}, "disk"), ({"durability": "Memory"}, "memory")):
            desk.declare("Topic", "quick", **declared)
            await desk.settle()
            assert durability() == expected
        assert desk.drift("Topic", "quick") == []
        desk.alter("quick", durability="disk")
        await desk.settle()
        assert durability() == "memory"
        assert desk.drift("Topic", "quick")[-1].endswith("Z durability is disk, not memory")
        assert desk.condition("Topic", "quick", "Drifted")["reason"] == "PutRight"
        desk.declare("Topic", "quick")
        await desk.settle()
        assert durability() == "disk"

    play(popmq, story)


def test_transactions_wait_for_disks_whatever_is_declared(popmq: RunningBroker) -> None:
    """The API server refuses the first one (crds/topic.yaml), if its definition is of today."""

    async def story(desk: Desk) -> None:
        desk.declare("Topic", "payments", type="Transaction", durability="Memory")
        await desk.settle()
        refused = desk.condition("Topic", "payments")
        assert refused["reason"] == "Refused"
        assert "payments is TRANSACTION: its durability is disk" in refused["message"]
        assert "payments" not in desk.topics()
        desk.declare("Topic", "payments", type="Transaction")
        await desk.settle()
        assert desk.topics()["payments"].durability == "disk"
        desk.declare("Topic", "other", name="payments", durability="Memory")
        desk.api.remove("topics", "apps", "payments")
        await desk.settle()
        condition = desk.condition("Topic", "other")
        assert condition["reason"] == "CannotChange"
        assert "type is transaction" in condition["message"]
        assert (
            "durability is disk, and that of a Transaction topic is fixed" in condition["message"]
        )

    play(popmq, story)


def test_what_others_changed_is_put_right_and_told(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain")
        desk.declare("ConsumerGroup", "readers")
        await desk.settle()
        desk.alter("plain", permission="none", retention_ms=3_600_000)
        exponential = admin.Group(name="readers", retry="exponential")
        desk.client.group(admin.AlterGroupRequest(group=exponential))
        await desk.settle()
        assert desk.topics()["plain"].permission == "rw"
        assert desk.topics()["plain"].retention_ms == 0
        assert desk.groups()["readers"].retry == "customised"
        drifted = desk.condition("Topic", "plain", "Drifted")
        assert (drifted["status"], drifted["reason"]) == ("True", "PutRight")
        assert "permission is none, not rw" in drifted["message"]
        assert desk.drift("Topic", "plain")[0].endswith("Z permission is none, not rw")
        assert desk.condition("Topic", "plain")["status"] == "True"
        assert desk.events().count("Drifted") == 2
        # After a while the condition says that all is well again; the lines stay.
        desk.now = NOW + timedelta(minutes=11)
        await desk.settle()
        assert desk.condition("Topic", "plain", "Drifted")["status"] == "False"
        assert len(desk.drift("Topic", "plain")) == 2

    play(popmq, story)


def test_a_topic_that_somebody_deleted_is_made_again_and_said_to_be_empty(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain")
        await desk.settle()
        desk.client.topic(admin.DeleteTopicRequest(name="plain"))
        await desk.settle()
        assert "plain" in desk.topics()
        assert "without what it held" in desk.condition("Topic", "plain", "Drifted")["message"]

    play(popmq, story)


def test_what_cannot_be_changed_is_told_with_what_to_do(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", queues=4)
        await desk.settle()
        desk.alter("plain", queues=16, permission="r")
        await desk.settle()
        ready = desk.condition("Topic", "plain")
        assert (ready["status"], ready["reason"]) == ("False", "CannotChange")
        assert "set spec.queues to 16" in ready["message"]
        assert desk.condition("Topic", "plain", "Drifted")["reason"] == "CannotPutRight"
        assert desk.topics()["plain"].permission == "rw"  # the rest is put right
        desk.now = NOW + timedelta(minutes=11)
        await desk.settle()
        assert desk.condition("Topic", "plain", "Drifted")["status"] == "True"
        desk.declare("Topic", "plain", queues=16)
        await desk.settle()
        assert desk.condition("Topic", "plain")["status"] == "True"
        assert desk.condition("Topic", "plain", "Drifted")["status"] == "False"

    play(popmq, story)


def test_a_topic_that_was_there_with_another_type_stays(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        topic = admin.Topic(name="plain", type="fifo", queues=2)
        desk.client.topic(admin.CreateTopicRequest(topic=topic))
        desk.declare("Topic", "plain", type="Delay")
        await desk.settle()
        message = desk.condition("Topic", "plain")["message"]
        assert "type is fifo" in message
        assert "that of a FIFO topic is fixed" in message
        assert desk.topics()["plain"].type == "fifo"

    play(popmq, story)


def test_what_the_cluster_refuses_is_told_and_tried_again(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", retention="9999d")
        await desk.look()
        ready = desk.condition("Topic", "plain")
        assert (ready["status"], ready["reason"]) == ("False", "Refused")
        assert "store.retention_hours" in ready["message"]
        assert desk.events() == ["Refused"]
        await desk.look()
        assert desk.events() == ["Refused"]  # told once
        desk.declare("Topic", "plain", retention="1h")
        await desk.settle()
        assert desk.condition("Topic", "plain")["status"] == "True"

    play(popmq, story)


@pytest.mark.parametrize(("on_delete", "stays"), [("Retain", True), ("Delete", False)])
def test_with_the_object_goes_the_topic_only_if_that_is_asked_for(
    popmq: RunningBroker, on_delete: str, stays: bool
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", onDelete=on_delete)
        desk.declare("ConsumerGroup", "readers", onDelete=on_delete)
        await desk.settle()
        desk.api.remove("topics", "apps", "plain")
        desk.api.remove("consumergroups", "apps", "readers")
        assert (desk.api.get("topics", "apps", "plain") is None) is stays
        await desk.settle()
        assert desk.api.get("topics", "apps", "plain") is None
        assert desk.api.get("consumergroups", "apps", "readers") is None
        assert ("plain" in desk.topics()) is stays
        assert ("readers" in desk.groups()) is stays
        assert (await desk.look()).gone

    play(popmq, story)


def test_a_topic_that_another_object_declares_too_outlives_the_first_one(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "a", name="shared", queues=4, onDelete="Delete")
        desk.declare("Topic", "b", name="shared", queues=2)
        await desk.settle()
        ready = desk.condition("Topic", "b")
        assert (ready["reason"], desk.topics()["shared"].queues) == ("Duplicate", 4)
        assert "a declares shared already" in ready["message"]
        desk.api.remove("topics", "apps", "a")
        await desk.settle()
        assert desk.api.get("topics", "apps", "a") is None
        assert "shared" in desk.topics()
        assert desk.condition("Topic", "b")["reason"] == "CannotChange"

    play(popmq, story)


def test_a_paused_cluster_is_told_of_and_not_changed(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", onDelete="Delete")
        await desk.settle()
        owner = desk.api.get("brokerclusters", "apps", "demo")
        assert owner is not None
        owner["metadata"]["annotations"] = {"popmq.io/pause": "true"}
        desk.api.put("brokerclusters", owner)
        desk.alter("plain", permission="r")
        desk.declare("Topic", "later")
        await desk.settle()
        assert desk.topics()["plain"].permission == "r"
        assert "later" not in desk.topics()
        ready = desk.condition("Topic", "plain")
        assert (ready["reason"], ready["status"]) == ("Paused", "False")
        assert "permission is r, not rw" in ready["message"]
        desk.api.remove("topics", "apps", "plain")
        await desk.settle()
        assert "plain" in desk.topics()
        assert desk.api.get("topics", "apps", "plain") is not None
        owner["metadata"]["annotations"] = {}
        desk.api.put("brokerclusters", owner)
        await desk.settle()
        assert set(desk.topics()) >= {"later"}
        assert "plain" not in desk.topics()

    play(popmq, story)


def test_without_a_cluster_objects_say_so_and_can_go(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", onDelete="Delete")
        await desk.settle()
        desk.api.remove("brokerclusters", "apps", "demo")
        await desk.look()
        assert desk.condition("Topic", "plain")["reason"] == "NoCluster"
        desk.api.remove("topics", "apps", "plain")
        await desk.look()
        assert desk.api.get("topics", "apps", "plain") is None
        assert "plain" in desk.topics()

    play(popmq, story)


def test_nothing_is_concluded_from_a_cluster_that_does_not_answer(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain", onDelete="Delete")
        await desk.settle()
        desk.api.remove("topics", "apps", "plain")
        await desk.look("127.0.0.1:1")
        await desk.look("localhost:1")  # with other words
        assert desk.events().count("NoAnswer") == 1
        ready = desk.condition("Topic", "plain")
        assert (ready["status"], ready["reason"]) == ("Unknown", "NoAnswer")
        assert desk.api.get("topics", "apps", "plain") is not None
        await desk.settle()
        assert "plain" not in desk.topics()

    play(popmq, story)


def test_what_is_gone_already_is_deleted(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        plane = NetworkMetadataClient(desk.client.endpoint)
        gone = [Change(ChangeKind.DELETE, kind, "nobody") for kind in (TOPIC, CONSUMER_GROUP)]
        assert await plane.change(read(cluster()), ProxyAccess(), gone) == ["", ""]

    play(popmq, story)


def test_an_operator_without_the_lease_changes_no_topic(popmq: RunningBroker) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain")
        operator = desk.operator()
        operator._may_write = lambda: False
        with pytest.raises(LeaseLost):
            await operator.reconcile("apps", "demo")
        assert "plain" not in desk.topics()
        assert not any(asked.writes for asked in desk.api.asked)

    play(popmq, story)


@pytest.mark.parametrize("kind", ["conflict", "error", "lost", "drop"])
def test_a_write_that_fails_once_changes_nothing_of_the_end(
    popmq: RunningBroker, kind: str
) -> None:
    async def story(desk: Desk) -> None:
        for number in range(1, 7):
            left = [number]

            def fault(asked: Asked, left: list[int] = left) -> str:
                if asked.writes and asked.plural != "events":
                    left[0] -= 1
                    return kind if left[0] == 0 else ""
                return ""

            desk.api.fault = fault
            name = f"t{number}"
            desk.declare("Topic", name, onDelete="Delete")
            desk.declare("ConsumerGroup", name)
            await desk.settle()
            assert name in desk.topics()
            assert desk.condition("ConsumerGroup", name)["status"] == "True"
            desk.api.remove("topics", "apps", name)
            await desk.settle()
            assert name not in desk.topics()

    play(popmq, story)
