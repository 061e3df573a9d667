"""A broker with lite topics, as proxies would use it."""

from collections.abc import Sequence
from dataclasses import replace

from popmq.broker.lite.lite_service import Action
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType
from popmq.common.wire.lite_pb2 import LiteNotices, SyncLite
from popmq.testing.harness.core_broker import SMALL, CoreBroker

TOPIC = "chats"


def small(lite: LiteSettings | None = None) -> Settings:
    return replace(SMALL, lite=lite or LiteSettings())


def made(lite: LiteSettings | None = None) -> CoreBroker:
    core = CoreBroker(settings=small(lite))
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    return core


def named(name: str) -> bytes:
    """Field 21 of the public protocol's SystemProperties; names of up to 127 bytes."""
    return b"\xaa\x01" + bytes((len(name.encode()),)) + name.encode()


def put(core: CoreBroker, name: str, body: bytes, *, message_id: str = "") -> hop.PutResult:
    entry = hop.PutEntry(MessageType.LITE, body, named(name), 0, 0, message_id=message_id)
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest(TOPIC, [entry])))
    (result,) = hop.decode_put_reply(reply)
    return result


def sync(
    core: CoreBroker,
    names: Sequence[str],
    *,
    client: str = "a",
    group: str = "g",
    action: Action = Action.PARTIAL_ADD,
    newest: bool | None = None,
    offset: int | None = None,
    tail: int | None = None,
    stored_ms: int | None = None,
) -> None:
    request = SyncLite(
        topic=TOPIC,
        group=group,
        client_id=client,
        action=int(action),
        names=names,
    )
    if newest is not None:
        request.newest = newest
    if offset is not None:
        request.offset = offset
    if tail is not None:
        request.tail = tail
    if stored_ms is not None:
        request.stored_ms = stored_ms
    core.reply(Kind.SYNC_LITE, request.SerializeToString())


def receive(
    core: CoreBroker, client: str = "a", *, group: str = "g", limit: int = 32, attempt_id: str = ""
) -> list[Delivery]:
    return core.receive(TOPIC, group, client_id=client, limit=limit, attempt_id=attempt_id)


def take(core: CoreBroker, client: str = "a", *, group: str = "g", limit: int = 32) -> list[bytes]:
    """Receive and ack: the bodies, in the order in which they came."""
    got = receive(core, client, group=group, limit=limit)
    if got:
        core.ack(TOPIC, group, *(delivery.handle for delivery in got))
    return [delivery.head for delivery in got]


def forgets(core: CoreBroker, client: str = "a") -> list[str]:
    """Report the client as one that listens: the lite topics that it is to forget."""
    report = hop.encode_clients(hop.ClientsReport(alive=[client], listening_clients=[client]))
    endings = LiteNotices.FromString(core.reply(Kind.CLIENTS, report)).ended
    assert [ending.client_id for ending in endings] in ([], [client])
    return [name for ending in endings for name in ending.names]


def live(core: CoreBroker) -> list[str]:
    """Names of the lite topics that there are."""
    topic = core.broker.registry.topic(TOPIC)
    return sorted(lite.name for lite in core.broker.registry.lites.of(topic.id))
