"""Redis Streams: XADD, XREADGROUP and XACK, each message of the append-only file synced."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from bench.peers.bodies import stamp_of, stamped
from bench.peers.cache import debian_env, debian_program
from bench.peers.processes import Process, free_port, wait_for_port
from popmq.cli.load.consuming import ConsumeStats
from popmq.cli.load.reactor import Channel, LoadError, Reactor
from popmq.cli.load.requests import BATCH
from popmq.cli.load.sending import OnSent

STREAM, GROUP = b"bench", b"bench"

Value: TypeAlias = "bytes | int | Exception | list[Value] | None"
OnValue = Callable[[Value, float], None]


class Redis:
    def __init__(self) -> None:
        self.name = "Redis Streams"
        self.settings = "7.0; appendonly yes, appendfsync always, save off; one stream"
        self.warm_up = 20_000
        self._server: Process | None = None
        self._port = 0

    def start(self, folder: Path) -> None:
        program = debian_program("usr/bin/redis-server")
        self._port = free_port()
        settings = {
            "port": str(self._port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            # Rewriting the file would be work that the others put off too.
            "auto-aof-rewrite-percentage": "0",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._server = Process("redis", [str(program), *words], folder, debian_env())
        wait_for_port(self._server, self._port)
        self.ask(b"XGROUP", b"CREATE", STREAM, GROUP, b"0", b"MKSTREAM")

    def processes(self) -> Sequence[Process]:
        assert self._server is not None
        return [self._server]

    def ask(self, *words: bytes) -> Value:
        """One command on a connection of its own."""
        reactor = Reactor()
        try:
            answers: list[Value] = []
            lane = RespChannel(reactor, ("127.0.0.1", self._port))
            lane.command(words, lambda value, asked_s: answers.append(value))
            lane.flush()
            reactor.run(lambda: bool(answers), limit_s=10, what=words[0].decode())
            if isinstance(answers[0], Exception):
                raise answers[0]
            return answers[0]
        finally:
            reactor.close()

    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence["RedisLane"]:
        address = ("127.0.0.1", self._port)
        return [RedisLane(RespChannel(reactor, address), body) for _ in range(connections)]

    def stored(self) -> int:
        length = self.ask(b"XLEN", STREAM)
        assert isinstance(length, int)
        return length

    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats:
        return consume(reactor, ("127.0.0.1", self._port), connections, loops, seconds, acks)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class RespChannel(Channel):
    """Commands in a row; answers come in the same order (RESP 2)."""

    def __init__(self, reactor: Reactor, address: tuple[str, int]) -> None:
        super().__init__(reactor, address)
        self._waiting: deque[tuple[OnValue, float]] = deque()
        self._rest = b""

    def command(self, words: Sequence[bytes], then: OnValue, asked_s: float = 0.0) -> None:
        parts = [b"*%d\r\n" % len(words)]
        parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        self.raw(b"".join(parts), then, asked_s)

    def raw(self, command: bytes, then: OnValue, asked_s: float) -> None:
        self.out.append(command)
        self._waiting.append((then, asked_s))

    def received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        place = 0
        while place < len(data):
            parsed = _value(data, place)
            if parsed is None:
                break
            value, place = parsed
            then, asked_s = self._waiting.popleft()
            then(value, asked_s)
        self._rest = data[place:]


def _value(data: bytes, place: int) -> tuple[Value, int] | None:
    """The value that begins at `place`, and where the next does; None: it is not all here."""
    end = data.find(b"\r\n", place)
    if end < 0:
        return None
    kind, text, place = data[place], data[place + 1 : end], end + 2
    if kind == 0x2B:  # +
        return text, place
    if kind == 0x2D:  # -
        return LoadError(f"Redis refused: {text.decode()}"), place
    size = int(text)
    if kind == 0x3A:  # :
        return size, place
    if size < 0:
        return None, place
    if kind == 0x24:  # $
        stop = place + size
        return (data[place:stop], stop + 2) if len(data) >= stop + 2 else None
    items: list[Value] = []
    for _ in range(size):
        value = _value(data, place)
        if value is None:
            return None
        item, place = value
        items.append(item)
    return items, place


class RedisLane:
    def __init__(self, channel: RespChannel, body: int) -> None:
        self._channel = channel
        self._body = body
        self.flush = channel.flush
        head = b"*5\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$1\r\n*\r\n$1\r\nb\r\n$%d\r\n"
        self._head = head % (len(STREAM), STREAM, body)

    def put(self, asked_s: float, on_sent: OnSent) -> None:
        def on_reply(value: Value, asked_s: float) -> None:
            # The answer to XADD is the new entry's id, a bulk string.
            on_sent(self, asked_s, "" if isinstance(value, bytes) else repr(value))

        command = b"%b%b\r\n" % (self._head, stamped(self._body, asked_s))
        self._channel.raw(command, on_reply, asked_s)


def consume(
    reactor: Reactor,
    address: tuple[str, int],
    connections: int,
    loops: int,
    seconds: float,
    acks: str,
) -> ConsumeStats:
    """XREADGROUP COUNT 32, then an XACK for each (or one for all), then again."""
    result = ConsumeStats()
    stop_at = time.perf_counter() + seconds
    running = 0
    for tally in (result.receives, result.acks, result.arrivals):
        tally.begin()

    def loop(channel: RespChannel, name: bytes) -> None:
        read = (b"XREADGROUP", b"GROUP", GROUP, name, b"COUNT", b"%d" % BATCH)
        unacked = 0

        def ask() -> None:
            nonlocal running
            if time.perf_counter() < stop_at:
                words = (*read, b"STREAMS", STREAM, b">")
                channel.command(words, came, time.perf_counter())
            else:
                running -= 1

        def came(value: Value, asked_s: float) -> None:
            nonlocal running, unacked
            if isinstance(value, Exception):
                raise value
            if not value:
                result.empty += 1
                running -= 1
                return
            ids = _entries(value, result)
            result.receives.ok(asked_s)
            now = time.perf_counter()
            unacked = len(ids)
            for group in [ids] if acks == "batch" else [[data] for data in ids]:
                channel.command((b"XACK", STREAM, GROUP, *group), acked, now)

        def acked(value: Value, asked_s: float) -> None:
            nonlocal unacked
            if not isinstance(value, int):
                raise LoadError(f"XACK: {value!r}")
            for _ in range(value):
                result.acks.ok(asked_s)
            unacked -= value
            if unacked == 0:
                ask()

        ask()

    for number in range(connections):
        channel = RespChannel(reactor, address)
        for turn in range(loops):
            running += 1
            loop(channel, b"c%d-%d" % (number, turn))
        channel.flush()
    reactor.run(lambda: running == 0, limit_s=seconds + 60, what="XREADGROUP and XACK")
    return result


def _entries(value: Value, result: ConsumeStats) -> list[bytes]:
    """The ids of one answer: [[stream, [[id, [field, value]], ...]]]."""
    assert isinstance(value, list)
    (stream,) = value
    assert isinstance(stream, list)
    entries = stream[1]
    assert isinstance(entries, list)
    ids = []
    for entry in entries:
        assert isinstance(entry, list)
        identity, fields = entry
        assert isinstance(identity, bytes)
        assert isinstance(fields, list)
        body = fields[1]
        assert isinstance(body, bytes)
        result.twice += identity.decode() in result.seen
        result.seen.add(identity.decode())
        result.arrivals.ok(stamp_of(body))
        ids.append(identity)
    return ids
