"""Brokers of a group on machines whose wall clocks differ: nothing is early, nothing is deleted."""

from dataclasses import replace

import pytest
from ha.node_rig import TOPIC, Node, Rig

from popmq.broker.ha.role import BrokerRole
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record import message_deadline as expiry
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import MessageSettings
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.harness.core_broker import SMALL, pop

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
INVISIBLE_MS = 60 * SECOND
BOTH_WAYS = [
    *(100 * HOUR, -100 * HOUR),
    *(
        pytest.param(sign * seconds * SECOND, marks=pytest.mark.more)
        for seconds in (5, 30)
        for sign in (1, -1)
    ),
]
# Times since boot differ too: no machine may take another's for its own.
BOOTED = {"node-a": 0, "node-b": 5_000_000, "node-c": 90_000_000}
SETTINGS = replace(
    SMALL,
    store=replace(SMALL.store, segment_bytes=16 << 10, snapshot_bytes=4 << 10, retention_hours=1),
    message=MessageSettings(max_body_bytes=2 << 10, max_properties_bytes=64),
)


def skewed(ahead_ms: int) -> Rig:
    """Node a leads, and the wall clocks of the others are ahead of its own."""
    machines = {
        name: (ahead_ms * (name != "node-a"), boot_ahead_ms)
        for name, boot_ahead_ms in BOOTED.items()
    }
    rig = Rig("abc", settings=SETTINGS, machines=machines)
    assert rig.ready() is rig.node("a")
    rig.make_topic()
    rig.master.node.broker.registry.create_group(SubscriptionGroup(0, "late"))
    rig.advance(100)
    return rig


def send_all(rig: Rig, *bodies: bytes, to: Node | None = None) -> None:
    for body in bodies:
        answer = rig.send(body, to=to)
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.error is None


def receive_all(
    rig: Rig,
    group: str,
    *,
    topic: str = TOPIC,
    invisible_ms: int = INVISIBLE_MS,
    of: Node | None = None,
) -> list[hop.Delivery]:
    found_deliveries: list[hop.Delivery] = []
    while True:
        answer = rig.ask(Kind.POP, pop(topic, group, invisible_ms=invisible_ms), of=of)
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.body is not None, answer.error
        deliveries = hop.decode_pop_reply(answer.body).deliveries
        if not deliveries:
            return found_deliveries
        found_deliveries += deliveries


def refused(rig: Rig, deliveries: list[hop.Delivery]) -> list[str]:
    """Why acks of these were refused."""
    reasons = []
    for delivery in deliveries:
        answer = rig.ack(delivery.handle)
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.body is not None, answer.error
        (result,) = hop.decode_ack_reply(answer.body)
        if result.code != Code.OK:
            reasons.append(result.message)
    return reasons


def hand_over(rig: Rig, heir: Node) -> None:
    old = rig.master
    asked = pb.FailoverRequest(group="group-a", node=heir.name).SerializeToString()
    assert rig.controller is not None
    rig.controller.request(Kind.FAILOVER, asked, 10_000, lambda reply: None)
    rig.until(lambda: rig.masters == [heir] and old.role is BrokerRole.SLAVE)


def fail_over(rig: Rig) -> Node:
    rig.master.kill(power=True)
    rig.until(lambda: bool(rig.masters))
    return rig.master


def log_ms(node: Node) -> int:
    return node.node.broker.store.log_ms()


BODIES = [b"%04d" % number + bytes(400) for number in range(60)]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("ahead_ms", BOTH_WAYS)
def test_a_failover_to_a_skewed_machine_returns_nothing_early_and_deletes_nothing(
    ahead_ms: int, planned: bool
) -> None:
    rig = skewed(ahead_ms)
    send_all(rig, *BODIES)
    popped_ms = rig.clock.boot_ms()
    held = receive_all(rig, "g")
    assert len(held) == len(BODIES)
    rig.advance(10 * SECOND)  # nothing is written: only the time tells the slaves
    hand_over(rig, rig.node("b")) if planned else fail_over(rig)
    assert rig.master is not rig.node("a")
    rig.advance(popped_ms + INVISIBLE_MS - 3 * SECOND - rig.clock.boot_ms(), step_ms=100)
    assert receive_all(rig, "g") == []
    half = len(held) // 2
    assert refused(rig, held[:half]) == []
    assert len(receive_all(rig, "late")) == len(BODIES), "retention deleted unread messages"
    assert rig.master.node.broker.store.retention.deleted_segments == 0
    # What is not acked is not late either.
    rig.advance(popped_ms + INVISIBLE_MS + 2 * SECOND - rig.clock.boot_ms(), step_ms=100)
    assert len(receive_all(rig, "g")) == len(held) - half


@pytest.mark.parametrize("planned", [True, False])
def test_a_skewed_machine_that_takes_over_deletes_nothing_that_is_seconds_old(
    planned: bool,
) -> None:
    rig = skewed(100 * HOUR)
    body = admin.CreateTopicRequest(
        topic=admin.Topic(name="brief", queues=1, retention_ms=10 * MINUTE)
    )
    assert rig.ask(Kind.CREATE_TOPIC, body.SerializeToString()).error is None
    send_all(rig, *BODIES)
    deadline_ms = rig.master.node.broker.clock.wall_ms() + 5 * MINUTE
    properties = expiry.with_deadline(b"", deadline_ms)
    for topic in ("brief", TOPIC):
        entry = hop.PutEntry(MessageType.NORMAL, b"expires", properties)
        answer = rig.ask(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [entry])))
        rig.until(lambda answer=answer: answer.heard)  # type: ignore[misc]
        assert answer.error is None
    hand_over(rig, rig.node("b")) if planned else fail_over(rig)
    rig.advance(60 * SECOND, step_ms=100)
    assert len(receive_all(rig, "g")) == len(BODIES) + 1
    assert len(receive_all(rig, "g", topic="brief")) == 1
    assert rig.master.node.broker.store.retention.deleted_segments == 0


@pytest.mark.parametrize("ahead_ms", BOTH_WAYS)
def test_a_group_that_was_down_counts_its_downtime_by_the_clock_of_the_new_master(
    ahead_ms: int,
) -> None:
    """Every process starts cold, and another machine leads than before: it knows its own clock.
    Where its clock is behind that of the master before, it counts less: late rather than early."""
    rig = skewed(ahead_ms)
    send_all(rig, *BODIES)
    popped_ms = rig.clock.boot_ms()
    held = receive_all(rig, "g")
    rig.advance(15 * SECOND, step_ms=100)  # the slaves make a checkpoint
    down_ms = 20 * SECOND
    for node in rig.nodes:
        node.kill()
    rig.clock.advance(down_ms)
    for name in ("b", "c"):
        rig.node(name).start()
        rig.node(name).clock.reboot()
    rig.until(lambda: bool(rig.masters))
    passed_ms = rig.clock.boot_ms() - popped_ms  # since the newest record of the master before
    rig.advance(popped_ms + INVISIBLE_MS - 3 * SECOND - rig.clock.boot_ms(), step_ms=100)
    assert receive_all(rig, "g") == []
    half = len(held) // 2
    assert refused(rig, held[:half]) == []
    assert len(receive_all(rig, "late")) == len(BODIES)
    assert rig.master.node.broker.store.retention.deleted_segments == 0
    # Behind by what passed since the checkpoint and until this process leads, and no more.
    late_ms = 15 * SECOND + min(passed_ms, max(0, -ahead_ms))
    rig.advance(popped_ms + INVISIBLE_MS + late_ms - rig.clock.boot_ms(), step_ms=100)
    assert len(receive_all(rig, "g")) == len(held) - half


@pytest.mark.parametrize("ahead_ms", BOTH_WAYS)
def test_time_before_the_newest_record_is_no_downtime(ahead_ms: int) -> None:
    """The new master's own note is older than the newest record, which another machine wrote."""
    rig = skewed(ahead_ms)
    for number in range(15):
        sent_ms = rig.clock.boot_ms()
        send_all(rig, b"%d" % number)
        rig.advance(SECOND)
    down_ms = 20 * SECOND
    for node in rig.nodes:
        node.kill()
    rig.clock.advance(down_ms)
    for name in ("b", "c"):
        rig.node(name).start()
        rig.node(name).clock.reboot()
    rig.until(lambda: bool(rig.masters))
    downtime_ms = rig.master.node.broker.store.log_time.downtime_ms
    least_ms = max(0, down_ms + min(0, ahead_ms))  # less, where its clock is behind the other one
    assert least_ms <= downtime_ms <= rig.clock.boot_ms() - sent_ms


def test_a_clock_that_was_set_while_another_machine_led_is_no_downtime() -> None:
    """The note of the new master is of before the step, the newest record of after it."""
    rig = skewed(0)
    send_all(rig, *BODIES)
    for node in rig.nodes:
        node.clock.step_wall(HOUR)
    send_all(rig, b"later")
    sent_ms = rig.clock.boot_ms()
    for node in rig.nodes:
        node.kill()
    for name in ("b", "c"):
        rig.node(name).start()
        rig.node(name).clock.reboot()
    rig.until(lambda: bool(rig.masters))
    downtime_ms = rig.master.node.broker.store.log_time.downtime_ms
    assert downtime_ms <= rig.clock.boot_ms() - sent_ms


@pytest.mark.parametrize("stepped_ms", [100 * HOUR, -100 * HOUR])
def test_a_clock_that_is_set_while_a_broker_is_down_counts_up_to_the_limit_and_deletes_nothing(
    stepped_ms: int,
) -> None:
    rig = Rig("a", settings=SETTINGS, replication=ReplicationSettings())
    (alone,) = rig.nodes
    limit_ms = SETTINGS.store.max_downtime_ms
    rig.advance(20)
    registry = alone.node.broker.registry
    registry.create_topic(TopicConfig(0, TOPIC, 4, MessageType.NORMAL))
    for group in ("g", "late", "long"):
        registry.create_group(SubscriptionGroup(0, group))
    send_all(rig, *BODIES, to=alone)
    assert len(receive_all(rig, "g", of=alone)) == len(BODIES)
    assert len(receive_all(rig, "long", invisible_ms=limit_ms + HOUR, of=alone)) == len(BODIES)
    before_ms = log_ms(alone)
    alone.kill()
    alone.clock.step_wall(stepped_ms)
    alone.start()
    rig.advance(20)
    jump_ms = log_ms(alone) - before_ms
    assert abs(jump_ms - (limit_ms if stepped_ms > 0 else 0)) < SECOND
    rig.advance(30 * SECOND, step_ms=100)
    assert len(receive_all(rig, "g", of=alone)) == (len(BODIES) if stepped_ms > 0 else 0)
    assert receive_all(rig, "long", of=alone) == []
    # A second start must not forget that the jump was no time that passed.
    alone.kill()
    alone.clock.step_wall(stepped_ms)
    alone.start()
    rig.advance(30 * SECOND, step_ms=100)
    assert alone.node.broker.store.retention.deleted_segments == 0
    assert len(receive_all(rig, "late", of=alone)) == len(BODIES)
