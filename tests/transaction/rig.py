"""A broker and its transactions, as a proxy would use them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from popmq.common.disk import Disk
from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutResult
from popmq.common.record.message import tag_hash
from popmq.common.record.producer_group import with_producer_group
from popmq.common.settings.send_settings import TransactionSettings
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType
from popmq.common.wire import transaction_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, Answer, CoreBroker, tagged

FIRST_MS, INTERVAL_MS = 6_000, 30_000


def broker(base: Settings = SMALL, *, disk: Disk | None = None, **transaction: int) -> CoreBroker:
    settings = replace(base, transaction=TransactionSettings(**transaction))
    new_broker = CoreBroker(disk=disk or LyingDisk(), settings=settings)
    new_broker.topic("orders", queues=2, type=MessageType.TRANSACTION)
    new_broker.topic("others", queues=1, type=MessageType.MIXED)
    new_broker.group("g")
    return new_broker


def entry(
    name: str, *, check_ms: int = 0, tag: str = "", queue_id: int = 0, producers: str = ""
) -> hop.PutEntry:
    """With `producers`, their group, it is as a Remoting client sends it."""
    own = api.SystemProperties(message_id=name, message_type=api.TRANSACTION)
    properties = tagged(tag) + own.SerializeToString()
    return hop.PutEntry(
        MessageType.TRANSACTION,
        f"body of {name}".encode(),
        with_producer_group(properties, producers) if producers else properties,
        tag_hash(tag),
        queue_id,
        check_ms,
        "" if producers else name,
    )


def begin(core: CoreBroker, name: str, topic: str = "orders", **more: object) -> PutResult:
    """Store a half message; the result's `message` is its transaction id."""
    item = entry(name, **more)  # type: ignore[arg-type]
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [item])))
    (result,) = hop.decode_put_reply(reply)
    return result


def ask_end(
    core: CoreBroker,
    name: str,
    transaction: str,
    *,
    commit: bool = True,
    topic: str = "orders",
    settle: bool = False,
) -> Answer:
    request = pb.EndTransactionRequest(
        topic=topic, message_id=name, transaction_id=transaction, commit=commit
    )
    return core.ask(Kind.END_TRANSACTION, request.SerializeToString(), settle=settle)


def end(
    core: CoreBroker, name: str, transaction: str, *, commit: bool = True, topic: str = "orders"
) -> PopmqError | None:
    """What it was refused with."""
    answer = ask_end(core, name, transaction, commit=commit, topic=topic)
    core.run_until_idle()
    assert answer.heard
    return answer.error


def wait(
    core: CoreBroker, *topics: str, wait_ms: int = 10_000, producer_groups: Sequence[str] = ()
) -> Answer:
    """A proxy with producers of these topics; of orders, if it has neither those nor groups."""
    if not (topics or producer_groups):
        topics = ("orders",)
    request = pb.ChecksRequest(topics=topics, wait_ms=wait_ms, producer_groups=producer_groups)
    return core.ask(Kind.CHECKS, request.SerializeToString())


def checks(answer: Answer) -> list[pb.Check] | None:
    """What a proxy was told to ask; None while it waits."""
    if answer.error is not None:
        raise answer.error
    return None if answer.body is None else list(pb.ChecksReply.FromString(answer.body).checks)


def names(answer: Answer) -> list[str] | None:
    found_checks = checks(answer)
    if found_checks is None:
        return None
    return [api.SystemProperties.FromString(check.properties).message_id for check in found_checks]


def received(core: CoreBroker, topic: str = "orders") -> list[str]:
    return sorted(
        delivery.head.decode().removeprefix("body of ") for delivery in core.receive(topic, "g")
    )


def crash(core: CoreBroker) -> None:
    cast(LyingDisk, core.disk).restore_power()
    core.start()


def restart(core: CoreBroker, *, clean: bool) -> None:
    if clean:
        core.stop()
        core.start()
    else:
        crash(core)
