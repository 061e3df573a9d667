"""Requests about timers to a broker without a network, as a proxy makes them."""

from typing import Any

from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutRequest,
    PutResult,
    RecallResult,
)
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.harness.core_broker import CoreBroker

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def core_with_topic(**options: Any) -> CoreBroker:
    broker = CoreBroker(**options)
    broker.topic("orders", queues=1, type=MessageType.MIXED)
    broker.group("g")
    return broker


def send(
    core: CoreBroker, message_id: str, due_ms: int, *, topic: str = "orders", body: bytes = b""
) -> PutResult:
    """A DELAY message whose body is its id if nothing else; `due_ms` as in PutEntry."""
    properties = SystemProperties(message_id=message_id).SerializeToString()
    body = body or message_id.encode()
    entry = PutEntry(MessageType.DELAY, body, properties, 0, 0, due_ms, message_id, 0)
    (result,) = hop.decode_put_reply(
        core.reply(Kind.PUT, hop.encode_put(PutRequest(topic, [entry])))
    )
    assert result.code == Code.OK, result.message
    return result


def send_all(core: CoreBroker, due: dict[str, int], *, topic: str = "orders") -> None:
    """Timers by their ids, so many milliseconds from now; into the wheel with them."""
    now_ms = core.clock.wall_ms()
    for message_id, ahead_ms in due.items():
        send(core, message_id, now_ms + ahead_ms, topic=topic)
    core.run_steps()


def received(core: CoreBroker, topic: str = "orders") -> list[bytes]:
    deliveries = core.receive(topic, "g")
    for delivery in deliveries:
        assert core.ack(topic, "g", delivery.handle)[0].code == Code.OK
    return [entry.head for entry in deliveries]


def crash(core: CoreBroker) -> None:
    """The process is killed; what was confirmed is on the disk."""
    core.broker.release_files()
    core.start()


def recall(
    core: CoreBroker, message_id: str, *, topic: str = "orders", due_ms: int = 0
) -> RecallResult:
    request = pb.RecallRequest(topic=topic, message_id=message_id, due_ms=due_ms)
    reply = pb.RecallReply.FromString(core.reply(Kind.RECALL, request.SerializeToString()))
    assert reply.status.code == Code.OK
    return RecallResult(reply.outcome)


def reschedule(core: CoreBroker, message_id: str, new_due_ms: int) -> pb.RescheduleReply:
    request = pb.RescheduleRequest(topic="orders", message_id=message_id, new_due_ms=new_due_ms)
    reply = core.reply(Kind.RESCHEDULE, request.SerializeToString())
    return pb.RescheduleReply.FromString(reply)


def list_timers(core: CoreBroker, **fields: Any) -> pb.ListTimersReply:
    request = pb.ListTimersRequest(**fields)
    reply = core.reply(Kind.LIST_TIMERS, request.SerializeToString())
    return pb.ListTimersReply.FromString(reply)


def listed(core: CoreBroker, **fields: Any) -> list[str]:
    """The ids of a list that is complete."""
    reply = list_timers(core, **fields)
    assert reply.incomplete == ""
    return [timer.message_id for timer in reply.timers]


def forecast(core: CoreBroker, topic: str = "") -> pb.ForecastTimersReply:
    request = pb.ForecastTimersRequest(topic=topic)
    reply = core.reply(Kind.FORECAST_TIMERS, request.SerializeToString())
    return pb.ForecastTimersReply.FromString(reply)
