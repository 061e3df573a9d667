"""Where a load goes: connections to one proxy, and the names of what it uses there."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from popmq.cli.client import CallRefused, Client
from popmq.cli.load.http2 import Headers, Http2Channel
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import ReceiveTemplate
from popmq.common.errors import Code
from popmq.common.settings.settings import parse_address
from popmq.common.signing import Signer, signer_of
from popmq.common.wire import admin_pb2 as admin

READY_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    endpoint: str
    topic: str
    group: str
    brokers: tuple[str, ...]
    variant: str = "indexed"
    signer: Signer = field(default_factory=Signer)

    def connect(self, reactor: Reactor, connections: int) -> list[Http2Channel]:
        """That many connections, ready to be asked. LoadError if one is not ready in 10 s."""
        address = parse_address(self.endpoint)
        client_id = f"bench@1@{secrets.token_hex(4)}"
        headers = Headers(self.endpoint, client_id, self.variant, signer=self.signer)
        channels = [Http2Channel(reactor, address, headers) for _ in range(connections)]
        reactor.run(
            lambda: all(channel.ready for channel in channels),
            limit_s=READY_S,
            what=f"HTTP/2 settings of {self.endpoint}",
        )
        return channels

    def receives(self, *, wait_ms: int, invisible_ms: int = 60_000) -> list[ReceiveTemplate]:
        """One for each broker."""
        return [
            ReceiveTemplate(
                self.topic, self.group, broker, wait_ms=wait_ms, invisible_ms=invisible_ms
            )
            for broker in self.brokers
        ]


class PopmqTopic:
    """A topic and a group of popmq, made for a load and deleted after it."""

    def __init__(
        self,
        endpoint: str,
        topic: str,
        group: str,
        *,
        queues: int = 8,
        admin_endpoint: str = "",
        signer: Signer | None = None,
    ) -> None:
        self.endpoint, self.topic, self.group = endpoint, topic, group
        self._admin_endpoint = admin_endpoint
        self._signer = signer_of(os.environ) if signer is None else signer
        with self._client() as client:
            requested = admin.Topic(name=topic, queues=queues, type="mixed")
            client.topic(admin.CreateTopicRequest(topic=requested))
            new_group = admin.Group(name=group, type="normal", start_at="oldest")
            client.group(admin.CreateGroupRequest(group=new_group))

    def _client(self) -> Client:
        return Client(
            self.endpoint,
            signer=self._signer,
            admin_endpoint=self._admin_endpoint,
        )

    def target(self, *, variant: str = "indexed") -> Target:
        with self._client() as client:
            route = client.query_route(self.topic)
        brokers = tuple(sorted({queue.broker.name for queue in route}))
        return Target(self.endpoint, self.topic, self.group, brokers, variant, self._signer)

    def stored(self) -> int:
        """Messages that the topic's queues ever got: the sum of their next offsets."""
        request = admin.ResetOffsetRequest(
            group=self.group, topic=self.topic, newest=True, dry_run=True
        )
        with self._client() as client:
            reply = client.call_admin(request, admin.ResetOffsetReply)
        if reply.incomplete:
            raise LoadError(f"cannot count what is stored: {reply.incomplete}")
        return sum(queue.after for queue in reply.queues if queue.topic == self.topic)

    def left(self) -> int:
        """What the group has still to do, in flight included."""
        with self._client() as client:
            reply = client.call_admin(
                admin.LagRequest(group=self.group, topic=self.topic), admin.LagReply
            )
        return sum(lag.ready + lag.in_flight + lag.blocked for lag in reply.lags)

    def delete(self) -> None:
        with self._client() as client:
            try:
                client.topic(admin.DeleteTopicRequest(name=self.topic))
                client.group(admin.DeleteGroupRequest(name=self.group))
            except CallRefused as refused:
                if refused.number not in (Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND):
                    raise


def check_stored(what: str, answered_ok: int, before: int, after: int) -> None:
    """LoadError unless the server has what it answered OK; more is fine for what was refused."""
    if after - before != answered_ok:
        raise LoadError(f"{what}: {answered_ok} answered OK, {after - before} stored")


def names() -> Sequence[str]:
    """A topic and a group that nobody else has."""
    mark = secrets.token_hex(4)
    return f"popmq-bench-{mark}", f"popmq-bench-{mark}"
