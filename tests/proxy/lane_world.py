"""The same bytes to two servers, one with lanes and one without: both must do the same.

A server is what `popmq up` is, without sockets: connections, proxy, brokers, logs.  Bytes go in
turn by turn, cut anywhere; after each turn the frames that brokers were sent, the answers of every
stream and the connections' own frames are compared, and in the end the logs.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from google.protobuf.message import DecodeError
from hpack import Encoder

from popmq.common.errors import Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.topics import MessageType, TopicConfig
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.rpc.rpc import SERVICE
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns
from popmq.testing.harness.core_broker import SMALL, CoreBroker

CONNECTIONS = 3
TOPICS = ("orders", "more", "fifo")
GROUP = "workers"
SEND, ACK, RECEIVE = SERVICE + "SendMessage", SERVICE + "AckMessage", SERVICE + "ReceiveMessage"
Put = tuple[str, Kind, bytes]


@dataclass
class Asked:
    """A request that waits for its broker."""

    core: CoreBroker
    kind: Kind
    body: bytes
    on_reply: OnReply
    id: int = 0


class WaitingPort:
    """Requests reach the broker when the world says so; some are refused at once."""

    def __init__(self, server: "Server", name: str) -> None:
        self.core = CoreBroker(settings=SMALL)
        self._server, self._name = server, name
        self.waiting: dict[int, Asked] = {}
        self._running: dict[int, int] = {}
        self._number = 0
        self.refuses = False
        self.timeouts_ms: list[int] = []  # of what waits or waited
        for topic in TOPICS:
            kind = MessageType.FIFO if topic == "fifo" else MessageType.NORMAL
            self.core.broker.registry.create_topic(TopicConfig(0, topic, 4, kind))
        self.core.group(GROUP)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._number += 1
        self.timeouts_ms.append(timeout_ms)
        if kind in (Kind.PUT, Kind.ACK):
            self._server.asked.append((self._name, kind, body))
        if self.refuses:
            on_reply(Unavailable("the broker is away"))
        else:
            self.waiting[self._number] = Asked(self.core, kind, body, on_reply)
        return self._number

    def cancel(self, request_id: int) -> None:
        if self.waiting.pop(request_id, None) is None:
            self._server.cancelled += 1

    def serve(self) -> None:
        while self.waiting:
            asked = self.waiting.pop(next(iter(self.waiting)))
            self.core.server.request(asked.kind, asked.body, 10_000, asked.on_reply)
        self.core.run_until_idle()


class Server:
    def __init__(self, *, lanes: bool, names: tuple[str, ...]) -> None:
        self.asked: list[Put] = []
        self.cancelled = 0
        self.soon: list[Callable[[], None]] = []
        self.ports = {name: WaitingPort(self, name) for name in names}
        self.clock = next(iter(self.ports.values())).core.clock
        self.limits = replace(SMALL.lean, lanes=lanes, max_streams=40)
        settings = replace(SMALL, lean=self.limits)
        self.proxy = Proxy(settings, StaticBrokers(self.ports), self.clock, soon=self.soon.append)
        self.methods = {method.path: method for method in self.proxy.methods()}
        self.counters = LeanCounters()
        self.shared = SharedInflow(self.limits, InflationTurns(self.soon.append))
        self.connections = [self.connect() for _ in range(CONNECTIONS)]

    def connect(self) -> LeanConnection:
        return LeanConnection(
            self.methods,
            self.limits,
            self.counters,
            self.clock.boot_ms,
            lambda: None,
            self.shared,
            "10.0.0.9:999",
        )

    def end_turn(self) -> None:
        for callback in self.soon:  # those that come meanwhile are met too
            callback()
        self.soon.clear()

    def serve(self) -> None:
        for port in self.ports.values():
            port.serve()
        self.end_turn()

    def calls(self, path: str) -> int:
        """How many calls that path served."""
        counts = self.proxy.metrics.calls_by_path
        return sum(count for (_, by), count in counts.items() if by == path)

    def log(self) -> list[bytes]:
        stores = [port.core.broker.store for port in self.ports.values()]
        return [store.record_bytes(store.start, store.end - store.start) for store in stores]

    def advance(self, ms: int) -> None:
        for port in self.ports.values():
            port.core.advance(ms)


@dataclass
class Client:
    """One connection's client: what it has to say, and what it was told."""

    chance: random.Random
    coding: str
    timeouts: tuple[str, ...]
    unusual: bool = True  # some of its calls are
    widens: bool = False  # as gRPC's C core does with each call
    gathers: bool = False  # HEADERS of several calls before their DATA, as nghttp2 does
    later: bytes = b""
    encoder: Encoder = field(default_factory=Encoder)
    unsent: bytes = b""
    last_id: int = -1
    handles: list[tuple[str, str]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        window = self.chance.choice((1 << 20, 65_535, 65_535, 90))
        self.unsent = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: window})
        self.unsent += frames.window_update(0, 1 << 24)

    def block(self, path: str) -> bytes:
        chance = self.chance
        pick = chance.choice if self.unusual else operator.itemgetter(0)
        steady = [
            (":method", pick(("POST",) * 60 + ("GET",))),
            (":scheme", "http"),
            (":path", path),
            ("te", "trailers"),
            ("content-type", pick(("application/grpc",) * 60 + ("text/html",))),
            ("x-mq-client-id", pick(("me@1",) * 60 + ("", "you@2"))),
        ]
        changing = [
            ("x-mq-request-id", f"{chance.getrandbits(64):016x}"),
            ("x-mq-date-time", "20261121T000000Z"),
            ("grpc-timeout", pick((*self.timeouts * 10, "50m", "x"))),
        ]
        rare = [("x-mq-namespace", "n"), ("content-length", "7"), ("grpc-encoding", "gzip")]
        if self.unusual and chance.random() < 0.05:
            changing.append(chance.choice(rare))
        plain = [(name, value) for name, value in steady]
        first: bytes = self.encoder.encode(plain, huffman=self.coding != "plain")
        if self.coding == "indexed":
            return first + bytes(self.encoder.encode(changing, huffman=True))
        never = [(name.encode(), value.encode(), True) for name, value in changing]
        return first + bytes(self.encoder.encode(never, huffman=self.coding == "huffman"))

    def call(self, path: str, request: bytes) -> None:
        chance = self.chance
        self.last_id += 2
        self.open.append(self.last_id)
        content = b"\0" + len(request).to_bytes(4, "big") + request
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, self.last_id, self.block(path))
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
        data += frames.frame(frames.DATA, 1, self.last_id, content)
        if self.gathers and (not self.unusual or self.chance.random() < 0.7):
            self.unsent += head
            self.later += data + behind
        else:
            self.unsent += head + self.later + data + behind
            self.later = b""

    def increment(self) -> int:
        if self.unusual and self.chance.random() < 0.01:
            return self.chance.choice((0, (1 << 31) - 1, 1 << 31))
        return self.chance.choice((1, 5, 300))

    def send(self) -> None:
        chance = self.chance
        topic = chance.choice(TOPICS + ("orders",) * 6 + ("none",))
        message = pb.Message(topic=pb.Resource(name=topic), body=chance.randbytes(20))
        system = message.system_properties
        system.message_id = f"01{chance.getrandbits(16 if chance.random() < 0.1 else 128):032X}"
        if topic == "fifo":
            system.message_group = chance.choice(("g", "h"))
        match chance.randrange(40):
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
        messages = [message] * (2 if chance.random() < 0.02 else 1)
        self.call(SEND, service.SendMessageRequest(messages=messages).SerializeToString())

    def ack(self) -> None:
        if not self.handles:
            self.receive()
            return
        chance = self.chance
        topic, handle = chance.choice(self.handles)
        if chance.random() < 0.1:
            at = chance.randrange(len(handle))
            handle = handle[:at] + chance.choice('AB-_"') + handle[at + 1 :]
        entry = service.AckMessageEntry(message_id="m", receipt_handle=handle)
        entries = [entry] * (2 if chance.random() < 0.05 else 1)
        request = service.AckMessageRequest(
            group=pb.Resource(name=GROUP), topic=pb.Resource(name=topic), entries=entries
        )
        self.call(ACK, request.SerializeToString())

    def receive(self) -> None:
        queue = pb.MessageQueue(
            topic=pb.Resource(name="orders"), id=-1, broker=pb.Broker(name="broker-a")
        )
        request = service.ReceiveMessageRequest(
            group=pb.Resource(name=GROUP), message_queue=queue, batch_size=16
        )
        request.filter_expression.type = pb.FilterType.TAG
        request.filter_expression.expression = "*"
        request.invisible_duration.seconds = 30
        self.call(RECEIVE, request.SerializeToString())

    def other(self) -> None:
        """A frame that is no call."""
        chance = self.chance
        stream_id = chance.choice(self.open[-20:]) if self.open else 1
        match chance.randrange(6):
            case 0 | 1:
                self.unsent += frames.reset(stream_id, 8)
            case 2:
                self.unsent += frames.window_update(stream_id, chance.choice((1, 500, 1 << 16)))
            case 3:
                self.unsent += frames.ping(chance.randbytes(8))
            case 4:
                window = {frames.INITIAL_WINDOW_SIZE: chance.choice((65_535, 1 << 20, 120))}
                self.unsent += frames.settings(window)
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


class World:
    """`turn` raises AssertionError as soon as the two servers differ."""

    def __init__(self, seed: int, brokers: int = 1) -> None:
        self.chance = random.Random(seed)
        names = ("broker-a", "broker-b")[:brokers]
        self.with_lanes = Server(lanes=True, names=names)
        self.without = Server(lanes=False, names=names)
        # Requests to a broker are not shared by calls with other timeouts, so a server with lanes
        # may ask in another order then.
        self.timeouts = self.chance.choice((("3S", "2999m"), ("60S", "7H")))
        self.clients = [self._client() for _ in range(CONNECTIONS)]

    def _client(self) -> Client:
        coding = self.chance.choice(("indexed", "plain", "huffman"))
        return Client(
            random.Random(self.chance.getrandbits(64)),
            coding,
            self.timeouts,
            widens=self.chance.random() < 0.5,
        )

    def turn(self) -> None:
        chance = self.chance
        for number, client in enumerate(self.clients):
            for _ in range(chance.randrange(5)):
                step = chance.choices(
                    (client.send, client.ack, client.receive, client.other), (60, 30, 4, 6)
                )
                step[0]()
            data = client.take()
            for server in (self.with_lanes, self.without):
                server.connections[number].receive(data, server.clock.boot_ms())
        if chance.random() < 0.005:
            number = chance.randrange(CONNECTIONS)
            for server in (self.with_lanes, self.without):
                server.connections[number].drain("it is time")
        served, late = chance.random() < 0.8, chance.random() < 0.02
        refuses = chance.random() < 0.02
        for server in (self.with_lanes, self.without):
            for port in server.ports.values():
                port.refuses = refuses
            server.end_turn()
            if served:
                server.serve()
            if late:
                server.advance(chance.choice((2_000,)))
                for connection in server.connections:
                    connection.tick(server.clock.boot_ms())
        self.compare()

    def finish(self) -> None:
        for server in (self.with_lanes, self.without):
            server.serve()
            server.serve()
        self.compare()
        assert self.with_lanes.log() == self.without.log(), "the logs differ"
        for server in (self.with_lanes, self.without):
            for connection in server.connections:
                connection.lost()
            assert server.counters.streams == 0

    def compare(self) -> None:
        ours, theirs = self.with_lanes, self.without
        assert ours.asked == theirs.asked, "the brokers were asked otherwise"
        assert ours.cancelled == theirs.cancelled
        ours.asked.clear()
        theirs.asked.clear()
        counts = ours.counters, theirs.counters
        assert counts[0] == counts[1], "the transports counted otherwise"
        metrics = ours.proxy.metrics, theirs.proxy.metrics
        assert metrics[0].sends == metrics[1].sends
        assert metrics[0].acks == metrics[1].acks
        assert metrics[0].refused == metrics[1].refused
        for number, client in enumerate(self.clients):
            pair = ours.connections[number], theirs.connections[number]
            output = by_stream(pair[0].outbox.take())
            assert output == by_stream(pair[1].outbox.take()), "the answers differ"
            assert pair[0].done == pair[1].done
            client.hear(output)
            if pair[0].done:
                for server in (ours, theirs):
                    server.connections[number] = server.connect()
                self.clients[number] = self._client()

    def calls(self, path: str) -> int:
        return self.with_lanes.calls(path)


def by_stream(data: bytes) -> dict[int, list[frames.Frame]]:
    """The frames of each stream in their order; those of the connection are of stream 0."""
    result: dict[int, list[frames.Frame]] = {}
    reader = frames.Http2FrameReader(1 << 24)
    for frame in reader.feed(data):
        result.setdefault(frame[2], []).append(frame)
    assert not reader.held_bytes, "an answer ends inside a frame"
    return result
