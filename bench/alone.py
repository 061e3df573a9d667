"""popmq alone: what idles, how fast it starts, how late delays are, how it grows.

Each part runs in a cluster of its own (controller, broker and proxy apart), unless it says so.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Shape, send
from bench.peers.popmq import Popmq
from bench.peers.processes import cpu_s, memory_mb
from popmq.cli.load.end_to_end import lateness, send_and_receive
from popmq.cli.load.figures import LatencySummary
from popmq.cli.load.http2 import Http2Channel
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import RECEIVE, ReceiveTemplate, received
from popmq.cli.load.sending import ClosedLoad, OpenLoad
from popmq.cli.load.target import PopmqTopic, check_stored
from popmq.common.errors import PopmqError

SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Row:
    """`aim` is empty where there is none."""

    what: str
    figure: str
    aim: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """How long and how much; `store_mb` is the store of the start, `grow` messages of growth."""

    seconds: float = 10.0
    body: int = 1024
    polls: int = 10_000
    rate: float = 1_000.0
    store_mb: int = 1_024
    grow: int = 1_000_000


class IdlePolls:
    """Receives that find nothing, `polls` on each channel, asked again whenever they come back."""

    def __init__(
        self, reactor: Reactor, channels: Sequence[Http2Channel], template: ReceiveTemplate
    ) -> None:
        self._reactor = reactor
        self._channels = channels
        self._template = template
        self.came_back = 0
        self.refused = 0

    def begin(self, polls: int) -> None:
        for channel in self._channels:
            for _ in range(polls):
                self._ask(channel)
            channel.flush()

    def wait(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        self._reactor.at(until, lambda: None)
        self._reactor.run(
            lambda: time.perf_counter() >= until, limit_s=seconds + 30, what="idle receives"
        )

    def _ask(self, channel: Http2Channel) -> None:
        def ended(asked_s: float, status: str, data: bytes) -> None:
            delivered, refusal = received(status, data)
            self.came_back += 1
            self.refused += bool(refusal or delivered)
            self._ask(channel)

        channel.call(RECEIVE, self._template.message, ended, 0.0)


Part = Callable[[Asked, Path], Iterator[Row]]


@contextmanager
def running(folder: Path, *, more: Mapping[str, str] | None = None) -> Iterator[Popmq]:
    peer = Popmq(more=more)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        peer.start(folder)
        yield peer
    finally:
        peer.stop()


@contextmanager
def loading() -> Iterator[Reactor]:
    reactor = Reactor()
    try:
        yield reactor
    finally:
        reactor.close()


def idle(asked: Asked, folder: Path) -> Iterator[Row]:
    """CPU of each role without a client, and its memory."""
    with running(folder) as peer:
        time.sleep(SETTLE_S)
        yield from _roles(peer, "0 clients", asked.seconds, lambda: time.sleep(asked.seconds))


def polls(asked: Asked, folder: Path) -> Iterator[Row]:
    """Receives that wait 20 s and find nothing, 100 on a connection."""
    with running(folder) as peer, loading() as reactor:
        target = peer.topic.target()
        connections = max(1, asked.polls // 100)
        channels = target.connect(reactor, connections)
        waiting = IdlePolls(reactor, channels, target.receives(wait_ms=20_000)[0])
        waiting.begin(asked.polls // connections)
        waiting.wait(SETTLE_S)
        # One whole turn: every one of them comes back once and is asked again.
        seconds = max(asked.seconds, 20.0)
        before = waiting.came_back
        yield from _roles(
            peer, f"{asked.polls} idle receives", seconds, lambda: waiting.wait(seconds)
        )
        yield Row("receives that came back meanwhile", str(waiting.came_back - before))
        if waiting.refused:
            raise LoadError(f"{waiting.refused} idle receives were refused")


def _roles(peer: Popmq, what: str, seconds: float, wait: Callable[[], None]) -> Iterator[Row]:
    before = [cpu_s([process]) for process in peer.processes()]
    wait()
    aim = "0.5" if what.startswith("0") else "5"
    for process, then in zip(peer.processes(), before, strict=True):
        percent = (cpu_s([process]) - then) / seconds * 100
        yield Row(f"{what}: {process.name}, % of a core", f"{percent:.2f}", f"below {aim}")
        limit = "at most 150" if what.startswith("0") else ""
        yield Row(f"{what}: {process.name}, MB", f"{memory_mb([process]):.0f}", limit)


def start(asked: Asked, folder: Path) -> Iterator[Row]:
    """From starting the processes to the first message that is stored, on a store of some size."""
    with running(folder) as peer:
        body = max(asked.body, 1024)
        with loading() as reactor:
            lanes = peer.lanes(reactor, 4, body)
            messages = (asked.store_mb << 20) // (body + 250)
            tally = ClosedLoad(reactor, lanes, 64).run(3_600, limit=messages)
            check_stored("filling", tally.done, 0, peer.stored())
        for how, end in (("after SIGTERM", peer.stop), ("after kill -9", peer.kill)):
            end()
            began = time.perf_counter()
            peer.start_again()
            ready = time.perf_counter() - began
            _first_send(peer, body)
            took = time.perf_counter() - began
            size = f"{asked.store_mb} MB, {tally.done} messages"
            text = f"{took:.2f} (ready {ready:.2f})"
            yield Row(f"s to the first stored message, {how}, {size}", text, "below 2")


def _first_send(peer: Popmq, body: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            with loading() as reactor:
                if ClosedLoad(reactor, peer.lanes(reactor, 1, body), 1).run(5, limit=1).done:
                    return
        except PopmqError:
            if time.monotonic() > until:
                raise
        if time.monotonic() > until:
            raise LoadError("no message was stored for a minute")


def unary(asked: Asked, folder: Path) -> Iterator[Row]:
    """What a send costs the proxy and the broker, by how much is in flight."""
    with running(folder) as peer:
        for shape, aim in ((Shape(64, 1), ""), (Shape(4, 64), ""), (Shape(1, 1), "")):
            measure = send(
                peer, shape, body=asked.body, seconds=asked.seconds, number=0, folder=folder
            )
            parts = ", ".join(f"{name} {us:.1f}" for name, us in measure.by_process_us.items())
            yield Row(f"send {shape}: messages/s", f"{measure.per_second:.0f}")
            yield Row(f"send {shape}: CPU us a message", f"{measure.cpu_us:.1f} ({parts})", aim)
            yield Row(f"send {shape}: p50, p99, p99.9 ms", _times(measure.ms))


def open_loop(asked: Asked, folder: Path) -> Iterator[Row]:
    """Sends at a fixed rate: the time of each from when it was due."""
    with running(folder) as peer, loading() as reactor:
        before = peer.stored()
        tally = OpenLoad(reactor, peer.lanes(reactor, 16, asked.body), asked.rate).run(
            asked.seconds
        )
        check_stored("sends at a rate", tally.done, before, peer.stored())
        yield Row(f"{asked.rate:g}/s: p50, p99, p99.9 ms", _times(tally.spread()))


def mixed(asked: Asked, folder: Path) -> Iterator[Row]:
    """Sends at a fixed rate and a consumer that acks each: from the due time to the delivery."""
    with running(folder) as peer, loading() as reactor:
        began = cpu_s(peer.processes())
        both = send_and_receive(
            reactor,
            peer.topic.target(),
            rate=asked.rate,
            seconds=asked.seconds,
            body=asked.body,
        )
        used = (cpu_s(peer.processes()) - began) / both.sends.done * 1e6
        check_stored("sends", both.sends.done, 0, peer.stored())
        yield Row(f"{asked.rate:g}/s: send, p50, p99, p99.9 ms", _times(both.sends.spread()))
        yield Row("send to delivery", _times(both.consumed.arrivals.spread()))
        yield Row("CPU us for send, receive and ack of a message", f"{used:.1f}")


def delays(asked: Asked, folder: Path) -> Iterator[Row]:
    """How late delayed messages reach a consumer that waits for them."""
    with running(folder) as peer:
        count = int(asked.rate * asked.seconds)
        for name, due in (
            (f"{asked.rate:g} due each second", [n / asked.rate for n in range(count)]),
            (f"{count} due in one millisecond", [0.0] * count),
        ):
            topic = PopmqTopic(peer.endpoint, f"late-{len(name)}", f"late-{len(name)}")
            with loading() as reactor:
                both = lateness(
                    reactor,
                    topic.target(),
                    due=due,
                    ahead_s=max(5.0, count / 1_000),
                    body=100,
                )
            if len(both.consumed.seen) != count:
                raise LoadError(f"{len(both.consumed.seen)} of {count} delayed messages came")
            aim = "p99 at most 20" if due[-1] else ""
            yield Row(
                f"late, {name}: p50, p99, p99.9 ms", _times(both.consumed.arrivals.spread()), aim
            )


def growth(asked: Asked, folder: Path) -> Iterator[Row]:
    """The same load again and again: does the tenth tenth cost what the first did?"""
    with running(folder) as peer, loading() as reactor:
        lanes = peer.lanes(reactor, 4, asked.body)
        for tenth in range(10):
            before = [cpu_s([process]) for process in peer.processes()]
            stored = peer.stored()
            tally = ClosedLoad(reactor, lanes, 64).run(3_600, limit=asked.grow // 10)
            check_stored(f"tenth {tenth}", tally.done, stored, peer.stored())
            cpu = ", ".join(
                f"{process.name} {(cpu_s([process]) - then) / tally.done * 1e6:.1f} us, "
                f"{memory_mb([process]):.0f} MB"
                for process, then in zip(peer.processes(), before, strict=True)
                if process.name != "controller"
            )
            messages = (tenth + 1) * (asked.grow // 10)
            yield Row(f"up to {messages} messages", f"{tally.per_second:.0f}/s, {cpu}")


def _times(spread: LatencySummary) -> str:
    return f"{spread.p50:.2f}, {spread.p99:.2f}, {spread.p999:.2f}"


PARTS: dict[str, Part] = {
    "unary": unary,
    "open": open_loop,
    "mixed": mixed,
    "delays": delays,
    "idle": idle,
    "polls": polls,
    "start": start,
    "growth": growth,
}


def page(rows: dict[str, list[Row]], failures: dict[str, str], facts: dict[str, str]) -> str:
    lines = ["# popmq alone", "", ", ".join(f"{k} {v}" for k, v in facts.items()) + ".", ""]
    lines += ["| part | what | figure | aim |", "|---|---|---|---|"]
    for part, found_rows in rows.items():
        lines += [f"| {part} | {row.what} | {row.figure} | {row.aim} |" for row in found_rows]
    lines += ["", *(f"- **{part}** failed: {why}" for part, why in failures.items())]
    return "\n".join(lines) + "\n"
