"""ClientDirectory: what is known of the clients that were heard at this proxy, for people.

The first call of a client says its language and address, its settings and heartbeats the rest.
`client_reporter.py` gives it to the brokers, which show the clients of all proxies together
(docs/concepts/proxy.md).

Invariant: the contents have at most BYTES_LIMIT bytes, each at most DESCRIPTION_BYTES.  What does
not fit is not described, and is served all the same.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from popmq.common.clock import Clock
from popmq.common.protocol.messaging_payloads import DESCRIPTION_BYTES
from popmq.common.quantities import MIB
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.transport.interface import Call, Caller

CLIENTS_LIMIT = 20_000
BYTES_LIMIT = 16 * MIB
REPORTED_BYTES = MIB  # at a time: brokers read them in one turn of their loop
KEEP_MS = 60_000  # Remoting clients that have nothing to do are silent for 30 s
_TEXT_LIMIT = 256
_FIELD_OVERHEAD = 4  # of a text or message inside: its tag and its length
_KINDS = {
    pb.ClientType.PRODUCER: "producer",
    pb.ClientType.PUSH_CONSUMER: "push consumer",
    pb.ClientType.SIMPLE_CONSUMER: "simple consumer",
    pb.ClientType.PULL_CONSUMER: "pull consumer",
    pb.ClientType.LITE_PUSH_CONSUMER: "lite push consumer",
    pb.ClientType.LITE_SIMPLE_CONSUMER: "lite simple consumer",
}
_LANGUAGES = {number: name for name, number in pb.Language.items() if number}
Subscribed = tuple[str, str]  # topic, filter


class _Known:
    """A client; `has_kind`: it has said what it is."""

    __slots__ = ("content", "has_kind", "heard_ms", "since_ms")

    def __init__(self, content: bytes, since_ms: int, heard_ms: int, has_kind: bool) -> None:
        self.content = content
        self.since_ms = since_ms
        self.heard_ms = heard_ms
        self.has_kind = has_kind


class ClientDirectory:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the one silent for longest first
        self._bytes = 0
        self._changed: dict[str, None] = {}  # since it was reported
        self._left: dict[str, None] = {}

    # -- what clients say

    def on_call(self, client_id: str, call: Caller) -> None:
        """A gRPC call of that client came: the first one describes it."""
        if client_id not in self._known and client_id and self._has_room:
            self._put(_of_call(client_id, call), call.peer)

    def on_settings(self, client_id: str, call: Call, settings: pb.Settings) -> None:
        """It sent these on the stream `call`."""
        client = _of_call(client_id, call)
        agent = settings.user_agent
        client.language = _LANGUAGES.get(agent.language) or client.language
        client.version = printable(agent.version) or client.version
        if settings.HasField("publishing"):
            client.kind = _KINDS.get(settings.client_type, "producer")
            add_topics(client, [topic.name for topic in settings.publishing.topics])
        else:
            client.kind = _KINDS.get(settings.client_type, "consumer")
            entries = settings.subscription.subscriptions
            subscribed = [(entry.topic.name, _filter(entry.expression)) for entry in entries]
            add_group(client, settings.subscription.group.name, subscribed)
        self._put(client, call.peer)

    def on_heartbeat(self, client_id: str, kind: pb.ClientType.ValueType, group: str) -> None:
        """It says what it is.  Its settings say more, but a client whose stream broke may be
        without one for minutes."""
        known = self._known.get(client_id)
        if known is None or known.has_kind:
            return
        client = admin_pb2.ConnectedClient.FromString(known.content)
        client.kind = _KINDS.get(kind, "")
        if group:
            add_group(client, group, ())
        self._put(client, client.connections[0].address)

    def on_remoting(self, client: admin_pb2.ConnectedClient, peer: str) -> None:
        """A Remoting client's heartbeat says this."""
        self._put(client, peer)

    def on_left(self, client_id: str) -> None:
        """Its last connection here has ended."""
        if self._drop(client_id):
            self._left[client_id] = None

    def on_closed(self, client_id: str) -> None:
        """It said good-bye, which brokers hear in another way."""
        self._drop(client_id)

    # -- what brokers are told

    def mark_seen(self, client_id: str) -> bool:
        """Whether it is described; it is kept for longer then."""
        known = self._known.get(client_id)
        if known is None:
            return False
        known.heard_ms = self._clock.boot_ms()
        self._known.move_to_end(client_id)
        return True

    def forget_silent(self) -> None:
        now_ms = self._clock.boot_ms()
        while self._known:
            client_id, oldest = next(iter(self._known.items()))
            if now_ms - oldest.heard_ms <= KEEP_MS:
                return
            self._drop(client_id)

    def take_changed(self) -> Sequence[bytes]:
        """Contents that are new or have changed, and were not taken yet; as many as may be reported
        at a time."""
        changed = self.contents(self._changed)
        for client_id in list(self._changed)[: len(changed)]:
            del self._changed[client_id]
        return changed

    def take_left(self, *, everybody: bool = False) -> Sequence[str]:
        """Clients that left since the last time; or all, because this proxy ends."""
        left, self._left = self._left, {}
        return [*left, *self._known] if everybody else list(left)

    def contents(self, client_ids: Iterable[str]) -> Sequence[bytes]:
        """Each a ConnectedClient of `wire/admin.proto`, of the first of those that are known."""
        contents: list[bytes] = []
        left_bytes = REPORTED_BYTES
        for client_id in client_ids:
            if (client := self._known.get(client_id)) is not None:
                left_bytes -= len(client.content)
                if left_bytes < 0:
                    break
                contents.append(client.content)
        return contents

    def check_invariants(self) -> None:
        sizes = [len(client.content) for client in self._known.values()]
        assert self._bytes == sum(sizes) <= BYTES_LIMIT, "the size of the descriptions"
        assert max(sizes, default=0) <= DESCRIPTION_BYTES, "a description is too long"

    def _put(self, client: admin_pb2.ConnectedClient, peer: str) -> None:
        client_id = client.client_id
        before = self._known.get(client_id)
        since_ms = before.since_ms if before else self._clock.wall_ms()
        del client.connections[:]
        client.connections.add(address=printable(peer), since_ms=since_ms)
        content = client.SerializeToString()
        if before is not None and before.content == content:
            return
        if before is not None:
            self._bytes -= len(before.content)
            del self._known[client_id]
        if not client_id or not self._has_room or len(content) > DESCRIPTION_BYTES:
            self._changed.pop(client_id, None)
            return
        heard_ms = self._clock.boot_ms()
        self._known[client_id] = _Known(content, since_ms, heard_ms, bool(client.kind))
        self._bytes += len(content)
        self._changed[client_id] = None
        self._left.pop(client_id, None)

    @property
    def _has_room(self) -> bool:
        """For one more, however long."""
        fits = self._bytes + DESCRIPTION_BYTES <= BYTES_LIMIT
        return fits and len(self._known) < CLIENTS_LIMIT

    def _drop(self, client_id: str) -> bool:
        """Whether it was known."""
        gone = self._known.pop(client_id, None)
        self._changed.pop(client_id, None)
        if gone is not None:
            self._bytes -= len(gone.content)
        return gone is not None


def add_topics(client: admin_pb2.ConnectedClient, topics: Iterable[str]) -> None:
    """That it publishes to, as many as fit."""
    left_bytes = _left_bytes(client)
    for topic in topics:
        left_bytes -= len(topic.encode()) + _FIELD_OVERHEAD
        if left_bytes < 0:
            client.shortened = True
            return
        client.topics.append(topic)


def add_group(client: admin_pb2.ConnectedClient, name: str, topics: Iterable[Subscribed]) -> None:
    """With as many of its subscriptions as fit."""
    left_bytes = _left_bytes(client) - len(name.encode()) - 2 * _FIELD_OVERHEAD
    if left_bytes < 0:
        client.shortened = True
        return
    group = client.groups.add(name=name)
    for topic, expression in topics:
        left_bytes -= len(topic.encode()) + len(expression.encode()) + 3 * _FIELD_OVERHEAD
        if left_bytes < 0:
            client.shortened = True
            return
        group.subscriptions.add(topic=topic, filter=expression)


def printable(text: str) -> str:
    """The text, as far as it may be long; empty if it has what cannot be printed."""
    return text[:_TEXT_LIMIT] if text.isprintable() else ""


def _left_bytes(client: admin_pb2.ConnectedClient) -> int:
    """The address and times of the connection come to it."""
    return DESCRIPTION_BYTES - client.ByteSize() - 2 * _TEXT_LIMIT


def _of_call(client_id: str, call: Caller) -> admin_pb2.ConnectedClient:
    metadata = call.metadata
    return admin_pb2.ConnectedClient(
        client_id=client_id,
        language=printable(metadata.get("x-mq-language", "")),
        version=printable(metadata.get("x-mq-client-version", "")),
        protocol="grpc",
    )


def _filter(expression: pb.FilterExpression) -> str:
    return "" if expression.expression == "*" else expression.expression
