"""A broker without a network: requests go in as calls, time is a number.

For tests of rules.  Replies are recorded only when the broker releases them, so what a test
sees as OK is what a client would have seen.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.server import BrokerServer
from popmq.broker.store.message_store import ReplicaListener, StoreThreads
from popmq.common.disk import Disk
from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.message import tag_hash
from popmq.common.settings.settings import MessageSettings, Settings, StoreSettings, TimerSettings
from popmq.common.step_loop import Done, Work
from popmq.common.topics import (
    CheckPoints,
    GroupType,
    MessageType,
    Permission,
    StartAt,
    SubscriptionGroup,
    TopicConfig,
)
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.clock import ManualClock


@dataclass(slots=True)
class Answer:
    """A request's outcome; `body` is set once the reply was released."""

    body: bytes | None = None
    error: PopmqError | None = None
    id: int = 0

    def on_result(self, reply: bytes | PopmqError) -> None:
        assert not self.heard, "answered twice"
        if isinstance(reply, PopmqError):
            self.error = reply
        else:
            self.body = reply

    @property
    def heard(self) -> bool:
        return self.body is not None or self.error is not None


# Small segments, so that a test crosses many of them.
SMALL = Settings(
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=32 << 10),
    message=MessageSettings(max_body_bytes=256 << 10),
    timer=TimerSettings(wheel_slots=3_600, log_segment_bytes=64 << 10),
)
# Nothing is read from memory, so that damage and cold pages show.
WITHOUT_TAIL = replace(SMALL, store=replace(SMALL.store, tail_bytes=0))


class QueuedFlusher:
    """A flusher whose work, and the news of its end, wait in the broker's own queue of calls."""

    def __init__(self, calls: deque[Callable[[], None]]) -> None:
        self._calls = calls

    def submit(self, work: Work, done: Done) -> None:
        def run() -> None:
            error: OSError | None = None
            try:
                work()
            except OSError as failure:
                error = failure
            self._calls.append(lambda: done(error))

        self._calls.append(run)


@dataclass(slots=True)
class CoreBroker:
    """`settle` runs what the event loop and the flusher would run, `tick` one piece of it;
    until then nothing is confirmed."""

    disk: Disk = field(default_factory=LyingDisk)
    clock: ManualClock = field(default_factory=ManualClock)
    seed: int = 1
    settings: Settings = SMALL
    node: ReplicaListener | None = None
    broker: Broker = field(init=False)
    server: BrokerServer = field(init=False)
    _soon: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin (again) on what the disk holds."""
        self._soon.clear()
        self.broker = Broker(
            self.settings,
            disk=self.disk,
            clock=self.clock,
            threads=StoreThreads.of_one(QueuedFlusher(self._soon), self._soon.append),
            rng=random.Random(self.seed),
            node=self.node,
        )
        self.server = BrokerServer(self.broker)
        self.begin(self.broker)
        self.run_until_idle()

    def begin(self, broker: Broker) -> None:
        """How it starts: alone."""
        broker.start()

    def stop(self) -> None:
        self.broker.stop()
        self.run_until_idle()
        self.broker.close()

    def run_until_idle(self) -> None:
        while self._soon:
            self._soon.popleft()()

    def tick(self) -> None:
        """One call of the loop, or one piece of the flusher's work, if any waits."""
        if self._soon:
            self._soon.popleft()()

    def advance(self, ms: int) -> None:
        """Let time pass, with the background steps run as it does."""
        for part in [ms // 10] * 9 + [ms - ms // 10 * 9]:
            self.clock.advance(part)
            self.run_steps()

    def run_steps(self) -> None:
        while self.broker.step():
            self.run_until_idle()
        self.run_until_idle()

    # -- requests, as a proxy would make them

    def ask(self, kind: Kind, body: bytes, *, settle: bool = True) -> Answer:
        answer = Answer()
        answer.id = self.server.request(kind, body, 10_000, answer.on_result)
        if settle:
            self.run_until_idle()
        return answer

    def reply(self, kind: Kind, body: bytes) -> bytes:
        answer = self.ask(kind, body)
        if answer.error is not None:
            raise answer.error
        assert answer.body is not None, "not answered"
        return answer.body

    def topic(
        self,
        name: str,
        *,
        queues: int = 4,
        type: MessageType = MessageType.NORMAL,
        permission: Permission = Permission.READ_WRITE,
    ) -> TopicConfig:
        topic = self.broker.registry.create_topic(TopicConfig(0, name, queues, type, permission))
        self.run_until_idle()
        return topic

    def group(
        self,
        name: str,
        *,
        type: GroupType = GroupType.NORMAL,
        max_attempts: int = 17,
        start_at: StartAt = StartAt.OLDEST,
        check_points: CheckPoints = CheckPoints.DURABLE,
    ) -> SubscriptionGroup:
        group = self.broker.registry.create_group(
            SubscriptionGroup(
                0, name, type, max_attempts, start_at=start_at, check_points=check_points
            )
        )
        self.run_until_idle()
        return group

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str = "",
        queue_id: int = -1,
        message_group: str = "",
    ) -> hop.PutResult:
        """One NORMAL message, or a FIFO one of that message group; its `head` is the body, since
        the broker does not look into it."""
        kind = MessageType.FIFO if message_group else MessageType.NORMAL
        properties = grouped(message_group.encode()) if message_group else b""
        entry = hop.PutEntry(kind, body, tagged(tag) + properties, tag_hash(tag), queue_id)
        reply = self.reply(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [entry])))
        return hop.decode_put_reply(reply)[0]

    def put_ranked(self, topic: str, body: bytes, priority: int) -> hop.PutResult:
        """One PRIORITY message, as a proxy puts it."""
        entry = hop.PutEntry(MessageType.PRIORITY, body, b"", 0, priority)
        reply = self.reply(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [entry])))
        return hop.decode_put_reply(reply)[0]

    def receive(
        self,
        topic: str,
        group: str,
        *,
        limit: int = 32,
        invisible_ms: int = 60_000,
        attempt_id: str = "",
        client_id: str = "a-client",
        expression: str = "",
        queue_id: int = -1,
    ) -> list[Delivery]:
        request = pop(
            topic,
            group,
            limit=limit,
            invisible_ms=invisible_ms,
            attempt_id=attempt_id,
            client_id=client_id,
            expression=expression,
            queue_id=queue_id,
        )
        return list(hop.decode_pop_reply(self.reply(Kind.POP, request)).deliveries)

    def ack(self, topic: str, group: str, *handles: bytes) -> list[hop.AckResult]:
        body = hop.encode_ack(hop.AckRequest(topic, group, handles))
        return hop.decode_ack_reply(self.reply(Kind.ACK, body))

    def reject(self, topic: str, group: str, handle: bytes) -> hop.AckResult:
        """Give the message up: a dead letter at once."""
        body = hop.encode_ack(hop.AckRequest(topic, group, [handle]))
        (result,) = hop.decode_ack_reply(self.reply(Kind.REJECT, body))
        return result

    def change(self, topic: str, group: str, handle: bytes, invisible_ms: int) -> bytes:
        body = hop.encode_change(hop.ChangeRequest(topic, group, handle, invisible_ms))
        return self.reply(Kind.CHANGE, body)


def pop(
    topic: str,
    group: str,
    *,
    limit: int = 32,
    invisible_ms: int = 60_000,
    poll_ms: int = 0,
    expression: str = "",
    auto_renew: bool = False,
    queue_id: int = -1,
    reply_bytes: int = 8 << 20,
    attempt_id: str = "",
    client_id: str = "a-client",
    sql: bool = False,
) -> bytes:
    """An encoded POP request; `expression` is one of tags, or in SQL."""
    filter_type = hop.FilterType.TAG if expression else hop.FilterType.NONE
    filter_type = hop.FilterType.SQL if expression and sql else filter_type
    return hop.encode_pop(
        hop.PopRequest(
            topic,
            group,
            client_id,
            limit,
            invisible_ms,
            poll_ms,
            queue_id,
            auto_renew,
            filter_type,
            expression,
            attempt_id,
            reply_bytes=reply_bytes,
        )
    )


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    """What was delivered, sorted: queues are visited in no order that matters."""
    return sorted(delivery.head for delivery in deliveries)


def tagged(tag: str) -> bytes:
    """Field 1 of SystemProperties; tags of up to 127 bytes."""
    return b"\x0a" + bytes((len(tag.encode()),)) + tag.encode() if tag else b""


def grouped(name: bytes) -> bytes:
    """Field 17 of the public protocol's SystemProperties; names of up to 127 bytes."""
    return b"\x8a\x01" + bytes((len(name),)) + name
