"""Telemetry, Heartbeat and NotifyClientTermination: what keeps a client content.

Clients wait for the answer to their settings before they start, some of them for ever, so it
comes at once and with the group's defaults when the group cannot be asked.  Nothing else depends
on a stream being open: a client whose server restarted may be without one for minutes.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial

from popmq.common.address import host_of
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.quantities import KIB, MIB
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, SubscriptionGroup, check_group_name
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.auth.calls import RevocableCall
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.client_directory import ClientDirectory
from popmq.proxy.messaging.client_settings import (
    LITE_CONSUMERS,
    consumer_settings,
    is_node,
    producer_settings,
    unknown_group,
    used_settings,
)
from popmq.proxy.messaging.connected_subscriptions import ConnectedClient
from popmq.proxy.messaging.publishers import Publishers, PublishRights, Sender
from popmq.proxy.rpc.convert import OK_ONLY, name_of, ok, parse, status_only
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.namespaces import NamespaceCall, NamespaceTranslator, namespace_of
from popmq.proxy.rpc.rpc import Rpc, check_client
from popmq.proxy.transport.interface import Call, GrpcStatus, StreamListener

logger = logging.getLogger(__name__)

# The Node client asks for the routes of its topics one by one and loses settings that come before
# the last of them; then it waits for 5 min. How long its routes take nobody knows: each wait is
# twice the one before, so it starts at most as late again as they took.
SEND_AGAIN_S = 0.5
SEND_AGAIN_LAST_S = 64.0
MAX_STREAMS = 100_000
# What is kept of settings: for one client, and for all.
CLIENT_KEPT_BYTES, ALL_KEPT_BYTES = 64 * KIB, 64 * MIB


class Telemetry:
    """The open streams, by client id; a client may have several."""

    def __init__(
        self,
        routes: MetadataCache,
        settings: Settings,
        metrics: ProxyMetrics,
        directory: ClientDirectory,
        rights: PublishRights,
    ) -> None:
        self.routes = routes
        self.directory = directory
        self.settings = settings
        self._metrics = metrics
        self._streams: dict[str, list[_Stream]] = {}
        self._draining = False
        self._kept_bytes = 0
        self.publishers = Publishers(self._streams_from, rights)

    def open(self, call: Call) -> StreamListener:
        client_id = call.metadata.get("x-mq-client-id", "").strip()
        stream = _Stream(self, call, client_id)
        try:
            check_client(call)
            if namespace := namespace_of(call.metadata):
                stream = _Stream(self, call, client_id, NamespaceTranslator(namespace, "Telemetry"))
            if self._metrics.open_streams >= MAX_STREAMS:
                raise TooManyRequests(f"{MAX_STREAMS} telemetry streams are open on this proxy")
        except PopmqError as error:
            self._metrics.refuse(error)
            stream.refuse(error)
            return stream
        self._metrics.open_streams += 1
        self._streams.setdefault(client_id, []).append(stream)
        self.publishers.changed()
        call.on_cancelled(stream.end)
        if self._draining:
            stream.half_closed()
        return stream

    def streams_of(self, client_id: str) -> Sequence["_Stream"]:
        return tuple(self._streams.get(client_id, ()))

    def _streams_from(self, sender: Sender) -> Sequence["_Stream"]:
        streams = self._streams.get(sender.client_id, ())
        return [stream for stream in streams if host_of(stream.peer) == sender.host]

    def mark_seen(self) -> Iterator[ConnectedClient]:
        """The clients that have a stream here, and what they said last on each."""
        for client_id, streams in list(self._streams.items()):
            for stream in streams:
                if stream.kept:
                    settings = pb.Settings.FromString(stream.kept)
                    yield ConnectedClient(client_id, stream.peer, settings)

    def keep(self, stream: "_Stream", settings: bytes) -> bool:
        """Keep what a client said on this stream instead of what it said there before.

        False: there is no room, and nothing is kept.  Older streams of the client yield first.
        """
        self._drop(stream)
        for other in self.streams_of(stream.client_id):
            kept = sum(len(stream.kept) for stream in self.streams_of(stream.client_id))
            if kept + len(settings) <= CLIENT_KEPT_BYTES:
                break
            self._drop(other)
        if self._kept_bytes + len(settings) > ALL_KEPT_BYTES or stream.ended:
            return False
        stream.kept = settings
        self._kept_bytes += len(settings)
        return True

    def _drop(self, stream: "_Stream") -> None:
        self._kept_bytes -= len(stream.kept)
        stream.kept = b""

    def has_lite_stream(self, client_id: str) -> bool:
        """Whether it has a stream here, and said that it consumes lite topics."""
        return any(stream.consumes_lite for stream in self.streams_of(client_id))

    def unsubscribe_lite(self, client_id: str, names: Sequence[str]) -> None:
        """The server ended its subscriptions to these lite topics: it is to forget them."""
        for stream in self.streams_of(client_id)[-1:]:
            for name in names:
                notice = service.NotifyUnsubscribeLiteCommand(lite_topic=name)
                command = service.TelemetryCommand(notify_unsubscribe_lite_command=notice)
                stream.send(command.SerializeToString())
                self._metrics.lite_notices += 1

    def drain(self) -> None:
        """End every stream, also later ones, as clients like it; they open another one where they
        find a proxy."""
        self._draining = True
        for streams in list(self._streams.values()):
            for stream in tuple(streams):
                stream.half_closed()

    def closed(self, stream: "_Stream") -> None:
        """Take a stream out of the table, if it is there."""
        self._drop(stream)
        streams = self._streams.get(stream.client_id, [])
        if stream in streams:
            streams.remove(stream)
            self.publishers.changed()
            self._metrics.open_streams -= 1
        if not streams:
            self._streams.pop(stream.client_id, None)


class _Stream:
    """One Telemetry call; implements `interface.StreamListener`."""

    def __init__(
        self, owner: Telemetry, call: Call, client_id: str, names: NamespaceTranslator | None = None
    ) -> None:
        self.client_id = client_id
        self._owner = owner
        self._opened = call
        self._call = call if names is None else NamespaceCall(call, names.outward)
        self._names = names
        self._again: asyncio.TimerHandle | None = None
        self.ended = False
        self.consumes_lite = False
        self.kept = b""  # the newest settings, with whole names, as far as they are used
        self.peer = call.peer

    def message(self, data: bytes) -> None:
        if self.ended:
            return
        try:
            whole = data if self._names is None else self._names.inward(data)
            command = parse(service.TelemetryCommand, whole)
            if command.WhichOneof("command") == "settings":
                self._settings(command.settings)
        except PopmqError as error:
            self._finish(GrpcStatus.INVALID_ARGUMENT, str(error))

    @property
    def user(self) -> str:
        return self._opened.user if isinstance(self._opened, RevocableCall) else ""

    def send(self, command: bytes) -> None:
        """A command of the server's own."""
        if not self.ended:
            self._call.send(command)

    def half_closed(self) -> None:
        # The Node client dies of any other end than OK, and the Java client waits for it.
        self._finish(GrpcStatus.OK)

    def refuse(self, error: PopmqError) -> None:
        self._call.send(status_only(error))
        self._finish(GrpcStatus.OK)

    def end(self) -> None:
        self.ended = True
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._owner.closed(self)

    def _settings(self, asked: pb.Settings) -> None:
        self._owner.keep(self, used_settings(asked, CLIENT_KEPT_BYTES))
        match asked.WhichOneof("pub_sub"):
            case "publishing":
                self._answer(asked, producer_settings(asked, self._owner.settings))
            case "subscription":
                self._consumer(asked)
            case _:
                raise Refused(
                    Code.BAD_REQUEST,
                    "there is no publishing or subscription data in settings",
                )
        self._owner.directory.on_settings(self.client_id, self._call, asked)

    def _consumer(self, asked: pb.Settings) -> None:
        self.consumes_lite = asked.client_type in LITE_CONSUMERS
        try:
            name = name_of(asked.subscription.group)
            check_group_name(name)
        except PopmqError as error:
            self._group_known(asked, error)
            return
        self._owner.routes.group(name, partial(self._group_known, asked))

    def _group_known(self, asked: pb.Settings, group: SubscriptionGroup | PopmqError) -> None:
        """Answers with the defaults for a group that is unknown, misnamed or out of reach.

        A receive will say what is wrong with it; a client without settings would only hang.
        """
        settings = self._owner.settings
        if isinstance(group, PopmqError):
            # Clients ask for the routes of their topics first, so these are known.
            names = (entry.topic.name for entry in asked.subscription.subscriptions)
            known = filter(None, map(self._owner.routes.known_topic, names))
            fifo = any(topic.type is MessageType.FIFO for topic in known)
            group = unknown_group(asked.subscription.group.name, settings, fifo=fifo)
        self._answer(asked, consumer_settings(asked, group, settings))

    def _answer(self, asked: pb.Settings, settings: pb.Settings) -> None:
        if self.ended:
            return
        command = service.TelemetryCommand(status=ok(), settings=settings).SerializeToString()
        self._call.send(command)
        if is_node(asked) and len(command) <= CLIENT_KEPT_BYTES:
            if self._again is not None:
                self._again.cancel()
            self._send_again(command, SEND_AGAIN_S)

    def _send_again(self, command: bytes, after_s: float) -> None:
        def send() -> None:
            self._again = None
            self._call.send(command)
            if after_s < SEND_AGAIN_LAST_S:
                self._send_again(command, 2 * after_s)

        self._again = asyncio.get_running_loop().call_later(after_s, send)

    def _finish(self, code: GrpcStatus, detail: str = "") -> None:
        if not self.ended:
            self.end()
            self._call.finish(code, detail)


def heartbeat(directory: ClientDirectory, rpc: Rpc) -> None:
    """OK for every client that says what it is, also when its settings were never seen here."""
    request = parse(service.HeartbeatRequest, rpc.data)
    kind = request.client_type
    if kind == pb.ClientType.CLIENT_TYPE_UNSPECIFIED or kind not in pb.ClientType.values():
        raise Refused(Code.UNRECOGNIZED_CLIENT_TYPE, f"client type {kind} is unknown")
    directory.on_heartbeat(rpc.client_id, kind, request.group.name)
    rpc.reply(OK_ONLY)


def notify_client_termination(rpc: Rpc) -> None:
    parse(service.NotifyClientTerminationRequest, rpc.data)
    rpc.reply(OK_ONLY)
