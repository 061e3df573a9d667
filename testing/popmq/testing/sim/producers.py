"""Producers of the simulator: they send, and send again what they got no answer to.

A resend of a message id stores nothing new, whether its first attempt was answered, is still
open, or was lost with a broker that had stored it or had not.
"""

from collections import deque
from dataclasses import dataclass

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import tag_hash
from popmq.common.record.send_fingerprint import fingerprint_of
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import tagged
from popmq.testing.harness.sometimes import Sometimes
from popmq.testing.oracle.client_history import ResourceIncarnation, SentMessageHistory
from popmq.testing.sim.requests import Requests


def _field(number: int, data: bytes) -> bytes:
    """A field of the client's SystemProperties, as protobuf has it."""
    return bytes((number << 3 | 2, len(data))) + data


TAGS = ("", "A", "B")
KEYS = (b"", b"a", b"a", b"b", b"c", b"d")
FIFO_QUEUES = 2
NAMED = (_field(3, b"m000000")[:2], b"")  # how properties begin that are some
QUIET = "quiet"  # a topic that hardly anything is sent to
RESEND_MS = 300_000  # a producer that had no answer gives up after that; ids are known longer
_REMEMBERED = 6


def queue_of(sent: SentMessageHistory) -> int:
    """Where a message of its message group belongs."""
    return (sent.key or b"a")[0] % FIFO_QUEUES


def _id_of(sent: SentMessageHistory) -> str:
    """Empty for a message without an id; for one that others have too unless its fingerprint tells
    it from them."""
    name = f"m{sent.number:06}"
    if _field(3, name.encode()) in sent.properties:
        return name
    if not fingerprint_of(sent.properties):
        return ""
    at = sent.properties.index(NAMED[0])
    return sent.properties[at + 2 : at + 9].decode()


@dataclass(slots=True, eq=False)
class Put:
    """One request of a producer, which may be sent again as it is."""

    topic: ResourceIncarnation
    batch: list[SentMessageHistory]
    body: bytes
    lost: bool = False  # nobody will ever answer an attempt
    open: int = 0  # attempts that are not answered


class Producers(Requests):
    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._puts: deque[Put] = deque(maxlen=_REMEMBERED)

    def send(self, to: ResourceIncarnation | None = None) -> None:
        rng = self._rng
        usual = [p for name, p in self.topics.items() if p is not None and name != QUIET]
        topic = to or rng.choice(usual)
        batch: list[SentMessageHistory] = []
        entries = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            sent = self._message(topic)
            batch.append(sent)
            queue_id = rng.choice((-1, -1, 0))
            kind = MessageType.NORMAL
            if topic.fifo:
                kind, queue_id = self._in_order(sent)
            if NAMED[0] in sent.properties[:12]:
                sent.properties += self.ids.fingerprint(sent.number)
            entry = hop.PutEntry(kind, sent.head, sent.properties, tag_hash(sent.tag), queue_id)
            entries.append(entry._replace(message_id=_id_of(sent)))

        put = Put(topic, batch, hop.encode_put(hop.PutRequest(topic.name, entries)))

        def hear(answer: bytes | PopmqError) -> None:
            put.open -= 1
            if isinstance(answer, PopmqError):
                for sent in batch:
                    sent.refused = True
                full = answer.code == Code.TOO_MANY_REQUESTS
                self._tally.hit(Sometimes.SEND_REFUSED, int(full))
                self._check_known(topic, answer)
                return
            for sent, result in zip(batch, hop.decode_put_reply(answer), strict=True):
                if result.code == Code.OK:
                    self._stored(sent, result)
                else:
                    sent.refused = True
                assert result.code != Code.OK or not topic.fifo or queue_of(sent) == sent.queue_id
            self._note(f"sent {[sent.number for sent in batch if sent.ok_at]}")

        def lost() -> None:
            put.open -= 1
            put.lost = True

        put.open += 1
        names = ",".join(f"{sent.number}{sent.tag}" for sent in batch)
        self._ask(f"put {topic.name} {names}", Kind.PUT, put.body, hear, lost=lost)
        if all(map(_id_of, batch)):
            self._puts.append(put)

    def resend(self) -> None:
        """The same messages again: their producer had no answer yet, or none will come."""
        known = [put for put in self._puts if self._may_repeat(put)]
        if not known or self._oracle.log_lost:
            return
        put = self._rng.choice(known)

        def hear(answer: bytes | PopmqError) -> None:
            put.open -= 1
            if isinstance(answer, PopmqError):
                self._check_known(put.topic, answer)
                return
            for sent, result in zip(put.batch, hop.decode_put_reply(answer), strict=True):
                if result.code == Code.OK:
                    self._resent(put, sent, result)

        def lost() -> None:
            put.open -= 1
            put.lost = True

        put.open += 1
        for sent in put.batch:  # which attempt is stored, nobody knows
            sent.asked_wall_ms = min(sent.asked_wall_ms, self._machine.clock.wall_ms())
        names = ",".join(str(sent.number) for sent in put.batch)
        self._ask(f"put again {put.topic.name} {names}", Kind.PUT, put.body, hear, lost=lost)

    def _may_repeat(self, put: Put) -> bool:
        """Not what was refused; and what is in order only while its first attempt is remembered,
        because a later one of its message group may stand before it by now."""
        there = self.topics.get(put.topic.name) is put.topic and not put.topic.gone
        young = self._machine.log_ms - put.batch[0].asked_log_ms < RESEND_MS
        unsure = put.topic.fifo and not all(sent.ok_at for sent in put.batch)
        return there and young and not unsure and not any(sent.refused for sent in put.batch)

    def _resent(self, put: Put, sent: SentMessageHistory, result: hop.PutResult) -> None:
        if not sent.ok_at:
            self._tally.hit(Sometimes.RESENT_LOST, int(put.lost))
            self._stored(sent, result)
            return
        self._tally.hit(Sometimes.RESENT_STORED)
        if (sent.queue_id, sent.offset) != (result.queue_id, result.queue_offset):
            self._oracle.report_violation(
                "I17 stored-once",
                f"message {sent.number} was stored in queue {sent.queue_id} at {sent.offset}, "
                f"and again in queue {result.queue_id} at {result.queue_offset}",
            )

    def _stored(self, sent: SentMessageHistory, result: hop.PutResult) -> None:
        sent.ok_at, sent.ok_ms = self._oracle.at, self._oracle.now_ms
        sent.queue_id = result.queue_id
        self._oracle.numbered(sent, result.queue_offset)

    def _message(self, topic: ResourceIncarnation) -> SentMessageHistory:
        rng = self._rng
        number = len(self._oracle.messages)
        size = self.uniform or rng.choice((20, 60, 100, 300, 1_200, 2_000))
        front = b"%06d|" % number
        head = front + rng.randbytes(size - len(front))
        properties = self._properties(number, ordered=topic.fifo)
        tag = rng.choice(TAGS)
        if tag:  # what is no protobuf has none
            properties = tagged(tag) + (properties if properties[:2] in NAMED else b"")
        sent = SentMessageHistory(number, topic, tag, head, properties, self._oracle.at)
        sent.asked_log_ms = self._machine.log_ms
        sent.asked_ran_ms = self._machine.ran_ms
        sent.asked_wall_ms = self._machine.clock.wall_ms()
        self._oracle.messages.append(sent)
        return sent

    def _in_order(self, sent: SentMessageHistory) -> tuple[MessageType, int]:
        """Of one of a few message groups, each in a queue of its own; now and then of none."""
        sent.key = self._rng.choice(KEYS)
        if sent.key:
            sent.properties += b"\x8a\x01" + bytes((len(sent.key),)) + sent.key
        sent.queue_id = queue_of(sent)
        self._oracle.order.put(sent)
        return (MessageType.FIFO if sent.key else MessageType.NORMAL), sent.queue_id

    def _properties(self, number: int, *, ordered: bool) -> bytes:
        """An id, now and then one that others have too, and a key of several messages; or
        nothing that can be looked up."""
        rng = self._rng
        shared = rng.random() < 0.1
        own = self.ids.name("", f"m{number:06}").encode()
        named = _field(3, b"t%06d" % (number // 4) if shared else own)
        named += _field(2, b"k%02d" % (number % 23))
        # What is no protobuf has no message group.
        others = (b"",) if ordered else (b"", rng.randbytes(40))
        return named if self.uniform else rng.choice((named, named, *others))
