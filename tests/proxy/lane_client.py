"""What the clients of tests/proxy/lane_world.py say: calls, most of them ordinary, and frames."""

import gzip
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from hpack import Encoder
from proxy.send_requests import NOW_MS, ordinary, spoil

from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.delay import TTL_MS
from popmq.proxy.rpc.rpc import SERVICE
from popmq.proxy.transport.lean import frames
from proxy import lane_users

TOPICS = ("orders", "more", "fifo", "mixed")
GROUP, ORDERED = "workers", "ordered"
BROKERS = ("broker-a", "broker-b")
SEND, ACK, RECEIVE = SERVICE + "SendMessage", SERVICE + "AckMessage", SERVICE + "ReceiveMessage"
CHANGE = SERVICE + "ChangeInvisibleDuration"
USUAL = 60  # of calls for each that is not, in one respect


def topic_of(chance: random.Random) -> str:
    return chance.choice(TOPICS + ("orders",) * 6 + ("none",))


def message_to(topic: str, chance: random.Random) -> pb.Message:
    """Small, and mostly ordinary."""
    message = pb.Message(topic=pb.Resource(name=topic), body=chance.randbytes(20))
    system = message.system_properties
    system.message_id = f"01{chance.getrandbits(16 if chance.random() < 0.1 else 128):032X}"
    if topic == "fifo":
        system.message_group = chance.choice(("g", "h"))
    if topic == "mixed" and chance.random() < 0.3:
        system.delivery_timestamp.FromMilliseconds(NOW_MS + 5_000)
    match chance.randrange(44):
        case 0:
            system.tag = "a|b"
        case 1:
            system.delivery_timestamp.FromMilliseconds(1)
        case 2:
            message.user_properties["color"] = "red"
        case 3:
            message.body = b""
        case 4:
            system.message_type = pb.MessageType.TRANSACTION
        case 5:
            system.message_group = "g"
        case 6:
            system.tag = "a"
        case 7:
            message.user_properties[TTL_MS] = chance.choice(("1", "1500", "0", "x"))
        case 8:
            message.body = chance.randbytes(
                chance.choice((127, 128, 1_999, 11_900, 12_000, 12_001))
            )
        case 9 | 10:
            wide = ordinary(chance)
            wide.topic.name, wide.body = topic, wide.body[:300]
            if chance.random() < 0.3:
                spoil(wide, chance)
            return wide
    return message


@dataclass
class Client:
    """One connection's client: what it has to say, and what it was told."""

    chance: random.Random
    coding: str
    timeouts: tuple[str, ...]
    unusual: bool = True  # some of its calls are
    widens: bool = False  # as gRPC's C core does with each call
    gathers: bool = False  # HEADERS of several calls before their DATA, as nghttp2 does
    prioritizes: bool = False  # its HEADERS say on what they depend, as those of Netty
    steady: bool = False  # its calls have the same headers
    user: str = ""  # it signs as
    accepts: str = ""  # codings of answers
    later: bytes = b""
    encoder: Encoder = field(default_factory=Encoder)
    unsent: bytes = b""
    last_id: int = -1
    handles: list[tuple[str, str]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)  # requests, of which some are sent again

    def __post_init__(self) -> None:
        window = self.chance.choice((1 << 20, 65_535, 65_535, 90))
        self.unsent = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
        if self.chance.random() < 0.8:
            self.unsent += frames.window_update(0, 1 << 24)

    def block(self, path: str, *rare: tuple[str, str]) -> bytes:
        chance = self.chance
        pick = chance.choice if self.unusual else operator.itemgetter(0)
        steady = [
            (":method", pick(("POST",) * USUAL + ("GET",))),
            (":scheme", "http"),
            (":path", path),
            ("te", "trailers"),
            ("content-type", pick(("application/grpc",) * USUAL + ("text/html",))),
            ("x-mq-client-id", pick(("me@1",) * USUAL + ("", "you@2", "me\t1"))),
        ]
        if self.accepts:
            steady.append(("grpc-accept-encoding", self.accepts))
        number = 7 if self.steady else chance.getrandbits(64)
        changing = [("x-mq-request-id", f"{number:016x}"), *self._signature(), *rare]
        timeout = self.timeouts[0] if self.steady else pick((*self.timeouts * 10, "50m", "x"))
        if timeout:
            changing.append(("grpc-timeout", timeout))
        seldom = [
            *(("x-mq-namespace", "n"), ("content-length", "7"), ("grpc-encoding", "gzip")),
            *(("grpc-encoding", "identity"), ("grpc-encoding", "snappy"), ("te", "x" * 5_000)),
        ]
        if self.unusual and chance.random() < 0.05:
            changing.append(chance.choice(seldom))
        plain = [(name, value) for name, value in steady]
        first: bytes = self.encoder.encode(plain, huffman=self.coding != "plain")
        if self.coding == "indexed":
            return first + bytes(self.encoder.encode(changing, huffman=True))
        never = [(name.encode(), value.encode(), True) for name, value in changing]
        return first + bytes(self.encoder.encode(never, huffman=self.coding == "huffman"))

    def _signature(self) -> Sequence[tuple[str, str]]:
        if not self.user:
            return (("x-mq-date-time", lane_users.DATE),)
        if self.unusual and self.chance.random() < 0.02:
            return lane_users.signed(self.user, b"another secret, of forty characters too")
        return lane_users.signed(self.user)

    def call(self, path: str, request: bytes) -> None:
        chance = self.chance
        if self.unusual and request and chance.random() < 0.02:
            at = chance.randrange(len(request))
            other = bytes((chance.randrange(256),))
            request = request[:at] + other + request[at + chance.randrange(2) :]
        self.last_id += 2
        self.open.append(self.last_id)
        if self.unusual and chance.random() < 0.04:
            self.unsent += self.later + self._unusual_call(path, request)
            self.later = b""
            return
        content = framed(request)
        head = self._headers(self.block(path))
        if self.unusual and chance.random() < 0.05:  # in two frames
            half = len(content) // 2
            data = frames.frame(frames.DATA, 0, self.last_id, content[:half])
            content = content[half:]
        else:
            data = b""
        behind = b""
        if self.widens:
            data = frames.window_update(self.last_id, self.increment()) + data
            behind = frames.window_update(0, self.increment())
        data += frames.frame(frames.DATA, frames.END_STREAM, self.last_id, content)
        if self.gathers and (not self.unusual or self.chance.random() < 0.7):
            self.unsent += head
            self.later += data + behind
        else:
            self.unsent += head + self.later + data + behind
            self.later = b""

    def _headers(self, block: bytes) -> bytes:
        """A whole block, in Netty's way or in that of others."""
        flags = frames.END_HEADERS
        if self.prioritizes:
            flags |= frames.PRIORITIZED
            block = bytes((0, 0, 0, 0, 15)) + block
        return frames.frame(frames.HEADERS, flags, self.last_id, block)

    def _unusual_call(self, path: str, request: bytes) -> bytes:
        """Frames that a client may send, and some that it may not."""
        chance, stream_id = self.chance, self.last_id
        content, end, whole = framed(request), frames.END_STREAM, frames.END_HEADERS
        kind = chance.randrange(17)
        if kind == 0:
            content = framed(gzip.compress(request, mtime=0), b"\1")
        block = self.block(path, *([("grpc-encoding", "gzip")] if kind == 0 else []))
        head = frames.frame(frames.HEADERS, whole, stream_id, block)
        data = frames.frame(frames.DATA, end, stream_id, content)
        padded = b"\3" + content + bytes(3)
        match kind:
            case 1:
                data = frames.frame(frames.DATA, end | frames.PADDED, stream_id, padded)
            case 2:
                flags = whole | frames.PADDED | frames.PRIORITIZED
                head = frames.frame(
                    frames.HEADERS, flags, stream_id, b"\2\0\0\0\0\5" + block + bytes(2)
                )
            case 3:
                head = frames.frame(frames.HEADERS, 0, stream_id, block[:9])
                head += frames.frame(frames.CONTINUATION, whole, stream_id, block[9:])
            case 4:  # trailers
                data = frames.frame(frames.DATA, 0, stream_id, content)
                trailers = bytes(self.encoder.encode([("x-end", "1")]))
                data += frames.frame(frames.HEADERS, whole | end, stream_id, trailers)
            case 5:  # no message
                head = frames.frame(frames.HEADERS, whole | end, stream_id, block)
                data = b""
            case 6:
                data = frames.frame(frames.DATA, 0, stream_id, content)
                data += frames.frame(frames.DATA, end, stream_id)
            case 7:  # two messages, none, or half
                other = chance.choice((content * 2, b"", content[:3], content[:-1], content + b"x"))
                data = frames.frame(frames.DATA, end, stream_id, other)
            case 8:  # a kind that is not known, or is of the connection
                frame = frames.frame(chance.choice((9, 11, 200)), 0, stream_id, b"?")
                head += chance.choice((frame, frames.ping(bytes(8)), frames.goaway(0, 0)))
            case 9:
                head += frames.reset(stream_id, 8)
            case 10:
                data += data
            case 11:  # an id that is none of a client's
                head = frames.frame(frames.HEADERS, whole, stream_id + 1, block)
            case 12:
                data += frames.window_update(stream_id, self.increment())
            case 14:  # it depends on another, or on itself, or that is cut off
                depends = chance.choice((1, stream_id)).to_bytes(4, "big") + b"\5"
                content = (depends + block)[: chance.choice((3, 1_000))]
                flags = whole | frames.PRIORITIZED
                head = frames.frame(frames.HEADERS, flags, stream_id, content)
            case 15:  # the reserved bit
                head = frames.frame(frames.HEADERS, whole, 1 << 31 | stream_id, block)
            case 16:
                head = self._headers(self.block(SERVICE + "Nothing"))
            case 13:
                head += frames.frame(frames.WINDOW_UPDATE, 0, stream_id, b"\0\0\0\0\1")
        return head + data

    def increment(self) -> int:
        if self.unusual and self.chance.random() < 0.01:
            return self.chance.choice((0, (1 << 31) - 1, 1 << 31))
        return self.chance.choice((1, 5, 300))

    def send(self) -> None:
        chance = self.chance
        if self.sent and chance.random() < 0.08:
            request = chance.choice(self.sent)
            if chance.random() < 0.4:  # the same id with another content, or as another type
                same = service.SendMessageRequest.FromString(request)
                if chance.random() < 0.5:
                    same.messages[0].body = chance.randbytes(9)
                else:
                    same.messages[0].system_properties.ClearField("delivery_timestamp")
                request = same.SerializeToString()
        else:
            message = message_to(topic_of(chance), chance)
            messages = [message] * (2 if chance.random() < 0.02 else 1)
            request = service.SendMessageRequest(messages=messages).SerializeToString()
            self.sent = [*self.sent[-7:], request]
        self.call(SEND, request)

    def ack(self) -> None:
        if not self.handles:
            self.receive()
            return
        topic, handle = self._handle()
        chance = self.chance
        entry = service.AckMessageEntry(message_id="m", receipt_handle=handle)
        if chance.random() < 0.02:
            entry.message_id = chance.choice(("", "m" * 200))
        if chance.random() < 0.01:
            entry.lite_topic = "lite"
        entries = [entry] * (2 if chance.random() < 0.05 else 1)
        request = service.AckMessageRequest(
            group=pb.Resource(name=self.group(topic)),
            topic=pb.Resource(name=topic),
            entries=entries,
        )
        if chance.random() < 0.02:
            wrong = chance.choice((request.group, request.topic))
            wrong.name = chance.choice(("", "absent", "a b", "x" * 130))
        if chance.random() < 0.01:
            request.topic.resource_namespace = "n"
        if chance.random() < 0.01:  # an entry where a name belongs
            request.ClearField(chance.choice(("topic", "group")))
            request.entries.insert(0, service.AckMessageEntry(receipt_handle="x"))
        self.call(ACK, request.SerializeToString())

    def group(self, topic: str) -> str:
        return ORDERED if topic == "fifo" and self.chance.random() < 0.95 else GROUP

    def _handle(self) -> tuple[str, str]:
        """Mostly a good one, and its topic."""
        chance = self.chance
        topic, handle = chance.choice(self.handles)
        if chance.random() < 0.1:
            at = chance.randrange(len(handle))
            handle = handle[:at] + chance.choice('AB-_"\u00e9') + handle[at + 1 :]
        if chance.random() < 0.01:
            handle = chance.choice(("", handle * 4, "x"))
        return topic, handle

    def change(self) -> None:
        if not self.handles:
            return
        topic, handle = self._handle()
        request = service.ChangeInvisibleDurationRequest(
            group=pb.Resource(name=self.group(topic)),
            topic=pb.Resource(name=topic),
            receipt_handle=handle,
            message_id="m",
        )
        request.invisible_duration.seconds = self.chance.choice((10, 60, 0))
        self.call(CHANGE, request.SerializeToString())

    def receive(self) -> None:
        topic = topic_of(self.chance)
        queue = pb.MessageQueue(
            topic=pb.Resource(name=topic),
            id=-1,
            broker=pb.Broker(name=self.chance.choice(BROKERS)),
        )
        request = service.ReceiveMessageRequest(
            group=pb.Resource(name=self.group(topic)),
            message_queue=queue,
            batch_size=self.chance.choice((16, 16, 1)),
        )
        request.filter_expression.type = pb.FilterType.TAG
        request.filter_expression.expression = self.chance.choice(("*", "*", "a"))
        request.invisible_duration.seconds = 30
        self.call(RECEIVE, request.SerializeToString())

    def other(self) -> None:
        """A frame that is no call."""
        chance = self.chance
        stream_id = chance.choice(self.open[-20:]) if self.open else 1
        match chance.randrange(8):
            case 0 | 1:
                self.unsent += frames.reset(stream_id, 8)
            case 2:
                self.unsent += frames.window_update(stream_id, chance.choice((1, 500, 1 << 16)))
            case 3:
                self.unsent += frames.ping(chance.randbytes(8))
            case 4:
                window = {frames.INITIAL_WINDOW_SIZE: chance.choice((65_535, 1 << 20, 120))}
                self.unsent += frames.settings(window)
            case 5:
                self.unsent += frames.goaway(0, 0)
            case 6:
                self.unsent += frames.window_update(0, chance.choice((100, 1 << 16)))
            case _:
                self.unsent += frames.frame(frames.DATA, 1, stream_id, b"late")

    def take(self) -> bytes:
        """What leaves in this turn: all of it, or up to anywhere."""
        if not self.unusual or self.chance.random() < 0.9:
            self.unsent, self.later = self.unsent + self.later, b""
        chance, data = self.chance, self.unsent
        size = len(data) if chance.random() < 0.7 else chance.randrange(len(data) + 1)
        data, self.unsent = data[:size], data[size:]
        if data and chance.random() < 0.01:
            at = chance.randrange(len(data))
            data = data[:at] + bytes((chance.randrange(256),)) + data[at + 1 :]
        return data

    def hear(self, output: dict[int, list[frames.Frame]]) -> None:
        for answer in output.values():
            content = b"".join(payload for kind, _, _, payload in answer if kind == frames.DATA)
            at = 0
            while at + 5 <= len(content):
                size = int.from_bytes(content[at + 1 : at + 5], "big")
                self._hear_message(content[at + 5 : at + 5 + size])
                at += 5 + size

    def _hear_message(self, content: bytes) -> None:
        if not content.startswith(b"\x12"):  # no `message` of a ReceiveMessageResponse
            return
        try:
            received = service.ReceiveMessageResponse.FromString(content).message
        except DecodeError:  # half a message, as its window is small
            return
        if handle := received.system_properties.receipt_handle:
            self.handles = [*self.handles[-63:], (received.topic.name, handle)]


def framed(message: bytes, flag: bytes = b"\0") -> bytes:
    """As gRPC frames a message."""
    return flag + len(message).to_bytes(4, "big") + message
