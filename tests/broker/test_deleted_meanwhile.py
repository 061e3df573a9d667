"""What takes steps, and its topic or its group is deleted between two of them."""

from collections.abc import Callable

import pytest

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import pull_pb2, report_pb2
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.harness.core_broker import CoreBroker

MOST_STEPS = 500


def made(queues: int) -> CoreBroker:
    """Messages of one id in every state: waiting, in flight, acked, back, dead."""
    core = CoreBroker()
    core.topic("orders", queues=queues)
    for name in ("g", "h", "once"):
        core.group(name, max_attempts=1 if name == "once" else 16)
    core.group("ordered", type=GroupType.FIFO)
    properties = SystemProperties(message_id="A").SerializeToString()
    for number in range(4):
        entry = hop.PutEntry(MessageType.NORMAL, b"%d" % number, properties, 0, number)
        core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    for group in ("g", "once", "ordered"):
        for _ in range(3):
            core.receive("orders", group, limit=1, invisible_ms=1_000)
        core.advance(2_000)
        for delivery in core.receive("orders", group, limit=2):
            core.ack("orders", group, delivery.handle)
    return core


def delete_topic(core: CoreBroker) -> None:
    core.broker.registry.delete_topic("orders")


def delete_groups(core: CoreBroker) -> None:
    for name in ("g", "h", "once", "ordered"):
        core.broker.registry.delete_group(name)


def delete_letters(core: CoreBroker) -> None:
    core.broker.registry.delete_topic("%DLQ%once")


RAW = report_pb2.ReadRawRequest(layout="record", table="messages", next=100)
REQUESTS = {
    "reset": (Kind.RESET_OFFSET, admin.ResetOffsetRequest(topic="orders", group="g", oldest=True)),
    "reset to a time": (
        Kind.RESET_OFFSET,
        admin.ResetOffsetRequest(topic="orders", group="ordered", stored_ms=1),
    ),
    "time spans": (Kind.TIME_SPANS, admin.TimeSpansRequest(topics=["orders"], group="g")),
    "explain": (Kind.EXPLAIN, admin.ExplainRequest(message_id="A")),
    "explain of a topic": (Kind.EXPLAIN, admin.ExplainRequest(message_id="A", topic="orders")),
    "lag": (Kind.LAG, admin.LagRequest()),
    "letters": (Kind.LIST_DEAD_LETTERS, admin.ListDeadLettersRequest(group="once", bodies=True)),
    "redrive": (Kind.REDRIVE, admin.RedriveRequest(group="once")),
    "tables": (Kind.DESCRIBE_TABLES, report_pb2.DescribeRequest(sample=True)),
    "messages": (Kind.READ_RAW, RAW),
    "timers": (Kind.LIST_TIMERS, admin.ListTimersRequest(topic="orders")),
    "offset at a time": (
        Kind.QUERY_OFFSET,
        pull_pb2.QueryOffsetRequest(topic="orders", queue_id=1, stored_ms=1),
    ),
}

MANY_STEPS = ("explain", "explain of a topic")


@pytest.mark.parametrize("delete", [delete_topic, delete_groups, delete_letters])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.more] if what in MANY_STEPS else [])
        for what in REQUESTS
    ],
)
def test_what_takes_steps_is_answered_whenever_its_topic_or_group_is_deleted(
    what: str, delete: Callable[[CoreBroker], None]
) -> None:
    for steps in range(MOST_STEPS):
        core = made(queues=1_001 if what == "tables" else 33)  # more than are looked at in a step
        kind, request = REQUESTS[what]
        if request is RAW:
            RAW.topic_id = core.broker.registry.topic("orders").id
        answer = core.ask(kind, request.SerializeToString(), settle=False)
        for _ in range(steps):
            core.tick()
        over = answer.heard
        delete(core)
        core.advance(1_000)
        assert answer.heard, f"nobody was told, after {steps} steps"
        if over:
            return
    raise AssertionError(f"not answered in {MOST_STEPS} steps")
