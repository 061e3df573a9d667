"""NATS JetStream: a file stream whose every write is synced, double acks."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.peers.bodies import stamp_of, stamped
from bench.peers.cache import NATS, nats_server
from bench.peers.processes import Process, free_port, wait_for_port
from popmq.cli.load.consuming import ConsumeStats
from popmq.cli.load.reactor import Channel, LoadError, Reactor
from popmq.cli.load.requests import BATCH
from popmq.cli.load.sending import OnSent

STREAM = CONSUMER = "bench"
CONFIG = """listen: "127.0.0.1:{port}"
jetstream {{
  store_dir: "{folder}"
  max_mem: 256MB
  max_file: 64GB
  sync_interval: always
}}
"""

# (subject of the answer's reply, payload, when it was asked)
OnMessage = Callable[[bytes, bytes, float], None]


class Nats:
    def __init__(self) -> None:
        self.name = "NATS JetStream"
        self.settings = f"{NATS}; file storage, sync_interval: always, 1 replica; double acks"
        self.warm_up = 20_000
        self._server: Process | None = None
        self._port = 0

    def start(self, folder: Path) -> None:
        program = nats_server()
        self._port = free_port()
        (folder / "nats.conf").write_text(CONFIG.format(port=self._port, folder=folder))
        argv = [str(program), "-c", str(folder / "nats.conf")]
        self._server = Process("nats", argv, folder, {})
        wait_for_port(self._server, self._port)
        self._api(
            f"STREAM.CREATE.{STREAM}",
            {"name": STREAM, "subjects": [STREAM], "storage": "file", "num_replicas": 1},
        )
        config = {
            "durable_name": CONSUMER,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "ack_wait": 300_000_000_000,
            "max_ack_pending": -1,
        }
        self._api(
            f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}",
            {"stream_name": STREAM, "config": config},
        )

    def processes(self) -> Sequence[Process]:
        assert self._server is not None
        return [self._server]

    def _api(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        reactor = Reactor()
        try:
            channel = NatsChannel(reactor, ("127.0.0.1", self._port))
            answers: list[bytes] = []
            channel.request(
                f"$JS.API.{subject}".encode(),
                json.dumps(request).encode(),
                lambda reply, payload, asked_s: answers.append(payload),
                0.0,
            )
            channel.flush()
            reactor.run(lambda: bool(answers), limit_s=10, what=subject)
        finally:
            reactor.close()
        answer: dict[str, Any] = json.loads(answers[0])
        if "error" in answer:
            raise LoadError(f"NATS refused {subject}: {answer['error']}")
        return answer

    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence["NatsLane"]:
        address = ("127.0.0.1", self._port)
        return [NatsLane(NatsChannel(reactor, address), body) for _ in range(connections)]

    def stored(self) -> int:
        return int(self._api(f"STREAM.INFO.{STREAM}", {})["state"]["messages"])

    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats | None:
        if acks != "each":
            return None
        loop = _Consume(reactor, time.perf_counter() + seconds)
        for _ in range(connections):
            channel = NatsChannel(reactor, ("127.0.0.1", self._port))
            for _ in range(loops):
                loop.start(channel)
            channel.flush()
        reactor.run(lambda: loop.running == 0, limit_s=seconds + 60, what="pulls and acks")
        return loop.result

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


class NatsChannel(Channel):
    """Requests with an inbox of their own number; each subscription is one of `_INBOX.>`."""

    def __init__(self, reactor: Reactor, address: tuple[str, int]) -> None:
        super().__init__(reactor, address)
        self._inbox = b"_INBOX.%d" % id(self)
        self._number = 1
        self._pulls: dict[bytes, OnMessage] = {}
        self._waiting: dict[int, tuple[OnMessage, float]] = {}
        self._rest = b""
        options = {"verbose": False, "pedantic": False, "lang": "bench", "headers": True}
        self.out.append(b"CONNECT %b\r\n" % json.dumps(options | {"no_responders": True}).encode())
        self.out.append(b"SUB %b.* 1\r\n" % self._inbox)
        self.flush()

    def request(self, subject: bytes, payload: bytes, then: OnMessage, asked_s: float) -> None:
        self._number += 1
        self._waiting[self._number] = (then, asked_s)
        head = b"PUB %b %b.%d %d\r\n" % (subject, self._inbox, self._number, len(payload))
        self.out.append(head + payload + b"\r\n")

    def subscribe(self, then: OnMessage) -> bytes:
        """An inbox of its own for what a pull brings: such messages keep their first subject."""
        self._number += 1
        inbox = b"%b.pull.%d" % (self._inbox, self._number)
        self._pulls[b"%d" % self._number] = then
        self.out.append(b"SUB %b %d\r\n" % (inbox, self._number))
        return inbox

    def received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        place = 0
        while (end := data.find(b"\r\n", place)) >= 0:
            line = data[place:end]
            if line[:3] == b"MSG" or line[:4] == b"HMSG":
                words = line.split(b" ")
                stop = end + 2 + int(words[-1])
                if stop + 2 > len(data):
                    break
                self._message(words, data[end + 2 : stop])
                place = stop + 2
                continue
            place = end + 2
            if line == b"PING":
                self.out.append(b"PONG\r\n")
            elif line[:4] == b"-ERR":
                raise LoadError(f"NATS refused: {line.decode()}")
        self._rest = data[place:]

    def _message(self, words: list[bytes], payload: bytes) -> None:
        """`MSG subject sid [reply] size`, or HMSG with the size of the headers before the last."""
        headed = words[0] == b"HMSG"
        reply = words[3] if len(words) == (6 if headed else 5) else b""
        pull = self._pulls.get(words[2])
        if pull is not None:
            pull(reply, payload, 0.0)
            return
        then, asked_s = self._waiting.pop(int(words[1].rpartition(b".")[2]))
        then(reply, payload, asked_s)


class NatsLane:
    def __init__(self, channel: NatsChannel, body: int) -> None:
        self._channel = channel
        self._body = body
        self.flush = channel.flush

    def put(self, asked_s: float, on_sent: OnSent) -> None:
        def on_reply(reply: bytes, payload: bytes, asked_s: float) -> None:
            """{"stream":"bench","seq":1}, or an error."""
            good = payload.startswith(b'{"stream":') and b'"seq":' in payload
            on_sent(self, asked_s, "" if good and b"error" not in payload else payload.decode())

        body = stamped(self._body, asked_s)
        self._channel.request(STREAM.encode(), body, on_reply, asked_s)


class _Consume:
    """Pulls of 32 that do not wait; each message's ack is a request whose answer is waited for."""

    def __init__(self, reactor: Reactor, stop_at: float) -> None:
        self.result = ConsumeStats()
        self.running = 0
        self.stop_at = stop_at
        for tally in (self.result.receives, self.result.acks, self.result.arrivals):
            tally.begin()

    def start(self, channel: NatsChannel) -> None:
        self.running += 1
        _Pulling(self, channel).next()


class _Pulling:
    def __init__(self, owner: _Consume, channel: NatsChannel) -> None:
        self._owner = owner
        self._channel = channel
        self._inbox = channel.subscribe(self._came)
        self._got: list[bytes] = []
        self._asked_s = 0.0
        self._unacked = 0

    def next(self) -> None:
        self._asked_s = time.perf_counter()
        if self._asked_s >= self._owner.stop_at:
            self._owner.running -= 1
            return
        request = b'{"batch":%d,"no_wait":true}' % BATCH
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}".encode()
        self._channel.out.append(
            b"PUB %b %b %d\r\n%b\r\n" % (subject, self._inbox, len(request), request)
        )

    def _came(self, reply: bytes, payload: bytes, asked_s: float) -> None:
        if reply:
            self._got.append(reply)
            self._arrived(reply, payload)
            if len(self._got) == BATCH:
                self._ack()
        elif self._got:  # 404: no more than that is there
            self._ack()
        elif not self._unacked:
            self._owner.result.empty += 1
            self._owner.running -= 1

    def _arrived(self, reply: bytes, payload: bytes) -> None:
        result = self._owner.result
        # The sequence in the stream is a word of the ack's subject.
        identity = reply.split(b".")[5].decode()
        result.twice += identity in result.seen
        result.seen.add(identity)
        result.arrivals.ok(stamp_of(payload))

    def _ack(self) -> None:
        self._owner.result.receives.ok(self._asked_s)
        now = time.perf_counter()
        replies, self._got = self._got, []
        self._unacked = len(replies)
        for reply in replies:
            self._channel.request(reply, b"+ACK", self._acked, now)

    def _acked(self, reply: bytes, payload: bytes, asked_s: float) -> None:
        self._owner.result.acks.ok(asked_s)
        self._unacked -= 1
        if self._unacked == 0:
            self.next()
