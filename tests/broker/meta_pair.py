"""A broker group that owns topics and one that follows it: two brokers, no network."""

from dataclasses import replace
from functools import partial

from popmq.broker.node.meta_follower import ASK_MS, MetaFollower
from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.topics import FIRST_LOCAL_TOPIC_ID
from popmq.common.wire.replication_pb2 import CopyMetaRequest
from popmq.testing.harness.core_broker import SMALL, CoreBroker


def named(name: str, *, auto_create: bool = False) -> CoreBroker:
    broker = replace(SMALL.broker, name=name)
    topic = replace(SMALL.topic, auto_create=auto_create)
    return CoreBroker(settings=replace(SMALL, broker=broker, topic=topic))


class Two:
    """broker-a owns, broker-b follows."""

    def __init__(self, *, auto_create: bool = False) -> None:
        self.owner = named("broker-a", auto_create=auto_create)
        self.other = named("broker-b", auto_create=auto_create)
        self.away = False
        self.asked = 0
        self.now_ms = 0
        self.replies: list[bytes] = []  # of the owner, in their order
        self.replay: bytes | None = None  # what an old master says instead of the owner
        self.open: OnReply | None = None  # of the question that the owner keeps back
        self.follower = self.new_follower()

    def new_follower(self) -> MetaFollower:
        meta_follower = MetaFollower(
            cluster="popmq",
            group="broker-b",
            open_port=lambda address: self,
            now_ms=lambda: self.now_ms,
        )
        meta_follower.hear("broker-a", "owner:1")
        return meta_follower

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """To the owner."""
        assert kind is Kind.COPY_META
        self.asked += 1
        if self.away:
            on_reply(Unavailable("the owner is away"))
        elif self.replay is not None:
            on_reply(self.replay)
        else:
            self.open = on_reply
            then = partial(self._reply, on_reply)
            number = self.owner.server.request(kind, body, timeout_ms, then)
            self.owner.run_until_idle()
            return number
        return 0

    def _reply(self, on_reply: OnReply, answer: bytes | PopmqError) -> None:
        if self.open is not on_reply:
            return
        self.open = None
        if isinstance(answer, bytes):
            self.replies.append(answer)
        on_reply(answer)

    def cancel(self, request_id: int) -> None:
        self.open = None
        self.owner.server.cancel(request_id)

    def cut(self) -> None:
        """The connection to the owner breaks: the next question meets whoever is there then."""
        if self.open is not None:
            on_reply, self.open = self.open, None
            on_reply(Unavailable("connection lost", unknown=True))

    def replaced(self, reply: bytes | None) -> None:
        """From now on another master answers, always with `reply`; None: the owner again."""
        self.cut()
        self.replay = reply

    def restart_owner(self) -> None:
        """It leads another epoch from now on."""
        self.cut()
        restart(self.owner)

    def follow(self, ms: int = ASK_MS) -> None:
        """Let time pass, and the follower ask."""
        self.now_ms += ms
        self.owner.advance(ms)
        self.run()

    def run(self) -> None:
        for _ in range(20):
            self.follower.step(self.other.broker)
            self.other.run_until_idle()

    def same(self) -> bool:
        mine, theirs = self.owner.broker.registry, self.other.broker.registry
        topics = [topic for topic in theirs.topics() if topic.id < FIRST_LOCAL_TOPIC_ID]
        return list(mine.topics()) == topics and list(mine.groups()) == list(theirs.groups())


def restart(broker: CoreBroker) -> None:
    """The broker leads another epoch from now on."""
    broker.stop()
    broker.start()


def copy_request() -> bytes:
    return CopyMetaRequest(cluster="popmq").SerializeToString()
