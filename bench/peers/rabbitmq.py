"""RabbitMQ: one quorum queue on one node, publisher confirms, prefetch of 32, an ack each."""

import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.bodies import stamp_of, stamped
from bench.peers.cache import debian_env, debian_program, debian_root
from bench.peers.processes import Process, free_port, wait_for_port
from popmq.cli.load.consuming import ConsumeStats
from popmq.cli.load.reactor import Channel, LoadError, Reactor
from popmq.cli.load.requests import BATCH
from popmq.cli.load.sending import OnSent

QUEUE = b"bench"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
CHANNEL_MAX, FRAME_MAX = 2_047, 131_072

# (class, method) of AMQP 0-9-1
START, START_OK, TUNE, TUNE_OK = (10, 10), (10, 11), (10, 30), (10, 31)
OPEN, OPEN_OK, CLOSE, CHANNEL_CLOSE = (10, 40), (10, 41), (10, 50), (20, 40)
CHANNEL_OPEN, CHANNEL_OPEN_OK = (20, 10), (20, 11)
DECLARE, DECLARE_OK = (50, 10), (50, 11)
QOS, QOS_OK, CONSUME, CONSUME_OK = (60, 10), (60, 11), (60, 20), (60, 21)
CANCEL, CANCEL_OK = (60, 30), (60, 31)
PUBLISH, DELIVER, ACK, NACK = (60, 40), (60, 60), (60, 80), (60, 120)
SELECT, SELECT_OK = (85, 10), (85, 11)


class RabbitMq:
    def __init__(self) -> None:
        self.name = "RabbitMQ quorum"
        self.settings = "3.10; one node, x-queue-type quorum, persistent, publisher confirms"
        self.warm_up = 20_000
        self._processes: list[Process] = []
        self._port = 0
        self._acked = 0

    def start(self, folder: Path) -> None:
        root = debian_root()
        home = debian_program("usr/lib/rabbitmq/lib")
        server = next(home.glob("rabbitmq_server-*"))
        self._port, names, distribution = free_port(), free_port(), free_port()
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._port}\n"
            "log.console = true\nlog.file = false\n"
            # All of memory is not ours: what is paged out is measured by nobody.
            "vm_memory_high_watermark.absolute = 4GB\ndisk_free_limit.absolute = 1GB\n"
        )
        (folder / "enabled_plugins").write_text("[].\n")
        erlang = root / "usr/lib/erlang"
        env = {
            **debian_env(),
            "PATH": f"{_erl(folder, erlang)}:/usr/sbin:/usr/bin:/sbin:/bin",
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "HOME": str(folder),
            "RABBITMQ_HOME": str(server),
            "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_PLUGINS_DIR": str(server / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_SCHEMA_DIR": str(folder / "schema"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
        }
        epmd = next(erlang.glob("erts-*/bin/epmd"))
        self._processes.append(Process("epmd", [str(epmd)], folder, env))
        argv = ["sh", str(server / "sbin/rabbitmq-server")]
        self._processes.append(Process("rabbitmq", argv, folder, env))
        wait_for_port(self._processes[-1], self._port)
        self._declare()

    def processes(self) -> Sequence[Process]:
        return self._processes

    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence["RabbitLane"]:
        channels = self._channels(reactor, connections)
        for channel in channels:
            channel.method(SELECT, b"\0")
            channel.flush()
        _wait(reactor, channels, SELECT_OK)
        return [RabbitLane(channel, body) for channel in channels]

    def stored(self) -> int:
        """What is in the queue, and what was acked before."""
        return _settled(self._declare) + self._acked

    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats | None:
        if acks != "each":
            return None
        result = ConsumeStats()
        for tally in (result.receives, result.acks, result.arrivals):
            tally.begin()
        before = _settled(self._declare)
        channels = self._channels(reactor, connections * loops)
        for channel in channels:
            channel.delivered = _acker(channel, result)
            channel.method(QOS, struct.pack(">IHB", 0, BATCH, 0))
            channel.method(CONSUME, b"\0\0" + _short(QUEUE) + _short(b"") + b"\0" + b"\0\0\0\0")
            channel.flush()
        until = time.perf_counter() + seconds
        reactor.at(until, lambda: None)
        reactor.run(
            lambda: time.perf_counter() >= until or result.acks.done >= before,
            limit_s=seconds + 30,
            what="deliveries",
        )
        _finish(reactor, channels)
        # An ack has no answer: what is no longer in the queue was acked.
        left = _settled(self._declare)
        if before - left != result.acks.done:
            raise LoadError(f"{result.acks.done} acked, but {before - left} are gone")
        self._acked += result.acks.done
        return result

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()
        self._processes.clear()

    def _channels(self, reactor: Reactor, count: int) -> list["AmqpChannel"]:
        channels = [AmqpChannel(reactor, ("127.0.0.1", self._port)) for _ in range(count)]
        _wait(reactor, channels, CHANNEL_OPEN_OK)
        return channels

    def _declare(self) -> int:
        """Make the queue if it is not there; how many messages are ready in it."""
        reactor = Reactor()
        try:
            channels = self._channels(reactor, 1)
            table = _short(b"x-queue-type") + b"S" + _long(b"quorum")
            arguments = struct.pack(">I", len(table)) + table
            channels[0].method(DECLARE, b"\0\0" + _short(QUEUE) + b"\x02" + arguments)
            channels[0].flush()
            _wait(reactor, channels, DECLARE_OK)
            payload = channels[0].answers[DECLARE_OK]
            (ready,) = struct.unpack_from(">I", payload, 5 + payload[4])
            return int(ready)
        finally:
            reactor.close()


def _erl(folder: Path, erlang: Path) -> Path:
    """A folder with an `erl` that finds its root where we unpacked it; Debian's names its own."""
    runtime = next(erlang.glob("erts-*"))
    script = folder / "bin" / "erl"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\nexport ROOTDIR="{erlang}" BINDIR="{runtime}/bin" EMU=beam PROGNAME=erl\n'
        'exec "$BINDIR/erlexec" "$@"\n'
    )
    script.chmod(0o755)
    return script.parent


def _settled(count: Callable[[], int]) -> int:
    """The first count that is there twice, 200 ms apart; at most 10 s."""
    before = count()
    for _ in range(50):
        time.sleep(0.2)
        now = count()
        if now == before:
            return now
        before = now
    raise LoadError("the queue's length does not come to rest")


def _finish(reactor: Reactor, channels: Sequence["AmqpChannel"]) -> None:
    """No more deliveries, and every ack that was sent has been read."""
    for channel in channels:
        tag = channel.answers[CONSUME_OK][4:]
        channel.method(CANCEL, tag + b"\0")
        channel.flush()
    _wait(reactor, channels, CANCEL_OK)
    for channel in channels:
        del channel.answers[QOS_OK]
        channel.method(QOS, struct.pack(">IHB", 0, BATCH, 0))  # has an answer, in its turn
        channel.flush()
    _wait(reactor, channels, QOS_OK)
    for channel in channels:
        channel.close()


def _wait(reactor: Reactor, channels: Sequence["AmqpChannel"], method: tuple[int, int]) -> None:
    reactor.run(
        lambda: all(method in channel.answers for channel in channels),
        limit_s=30,
        what=f"AMQP method {method}",
    )


class AmqpChannel(Channel):
    """A connection with one AMQP channel. `answers` holds the last payload of each method."""

    def __init__(self, reactor: Reactor, address: tuple[str, int]) -> None:
        super().__init__(reactor, address)
        self.answers: dict[tuple[int, int], bytes] = {}
        self.confirmed: Callable[[int, bool, bool], None] | None = None
        self.delivered: Callable[[int, bytes], None] | None = None
        self._rest = b""
        self._tag = 0
        self._size = 0
        self._parts: list[bytes] = []
        self.out.append(b"AMQP\0\0\x09\x01")
        self.flush()

    def method(self, method: tuple[int, int], arguments: bytes, channel: int = 1) -> None:
        self.out.append(frame(METHOD, channel, struct.pack(">HH", *method) + arguments))

    def received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        place, end = 0, len(data)
        while end - place >= 8:
            kind, channel, size = struct.unpack_from(">BHI", data, place)
            stop = place + 8 + size
            if stop > end:
                break
            self._frame(kind, channel, data[place + 7 : stop - 1])
            place = stop
        self._rest = data[place:]

    def _frame(self, kind: int, channel: int, payload: bytes) -> None:
        if kind == METHOD:
            self._on_method((payload[1] | payload[0] << 8, payload[3] | payload[2] << 8), payload)
        elif kind == HEADER:
            (self._size,) = struct.unpack_from(">Q", payload, 4)
            self._parts = []
        elif kind == BODY:
            self._parts.append(payload)
            if sum(map(len, self._parts)) >= self._size and self.delivered is not None:
                self.delivered(self._tag, b"".join(self._parts))
        elif kind == HEARTBEAT:
            self.out.append(frame(HEARTBEAT, 0, b""))

    def _on_method(self, method: tuple[int, int], payload: bytes) -> None:
        if method in (ACK, NACK):
            assert self.confirmed is not None
            tag, many = struct.unpack_from(">Q?", payload, 4)
            self.confirmed(tag, many, method == ACK)
        elif method == DELIVER:
            (self._tag,) = struct.unpack_from(">Q", payload, 5 + payload[4])
        elif method in (CLOSE, CHANNEL_CLOSE):
            text = payload[7 : 7 + payload[6]].decode()
            raise LoadError(f"RabbitMQ refused: {text}")
        else:
            self.answers[method] = payload
            self._handshake(method)

    def _handshake(self, method: tuple[int, int]) -> None:
        if method == START:
            login = _long(b"\0guest\0guest")
            self.method(START_OK, b"\0\0\0\0" + _short(b"PLAIN") + login + _short(b"en_US"), 0)
        elif method == TUNE:
            self.method(TUNE_OK, struct.pack(">HIH", CHANNEL_MAX, FRAME_MAX, 0), 0)
            self.method(OPEN, _short(b"/") + b"\0\0", 0)
        elif method == OPEN_OK:
            self.method(CHANNEL_OPEN, b"\0")


class RabbitLane:
    """Publishes to the queue by its name; a confirm may be for all up to its number."""

    def __init__(self, channel: AmqpChannel, body: int) -> None:
        self._channel = channel
        self._body = body
        self._number = 0
        self._open: dict[int, tuple[float, OnSent]] = {}  # in the order of their numbers
        self.flush = channel.flush
        channel.confirmed = self._confirmed
        publish = struct.pack(">HHH", *PUBLISH, 0) + _short(b"") + _short(QUEUE) + b"\0"
        # Property flag 12 is the delivery mode; 2 is persistent.
        header = struct.pack(">HHQHB", 60, 0, body, 1 << 12, 2)
        self._head = frame(METHOD, 1, publish) + frame(HEADER, 1, header)

    def put(self, asked_s: float, on_sent: OnSent) -> None:
        self._number += 1
        self._open[self._number] = (asked_s, on_sent)
        self._channel.out.append(self._head)
        self._channel.out.append(frame(BODY, 1, stamped(self._body, asked_s)))

    def _confirmed(self, tag: int, many: bool, good: bool) -> None:
        numbers = [n for n in list(self._open) if n <= tag] if many else [tag]
        for number in numbers:
            asked_s, on_sent = self._open.pop(number)
            on_sent(self, asked_s, "" if good else "basic.nack")


def _acker(channel: AmqpChannel, result: ConsumeStats) -> Callable[[int, bytes], None]:
    def delivered(tag: int, body: bytes) -> None:
        result.arrivals.ok(stamp_of(body))
        channel.method(ACK, struct.pack(">QB", tag, 0))
        result.acks.done += 1  # how long it takes, nobody is told
        result.acks.ended = time.perf_counter()

    return delivered


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def _short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


def _long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text
