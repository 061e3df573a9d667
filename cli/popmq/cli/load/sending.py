"""Loads that send: closed (a fixed number in flight) and open (a fixed rate).

A lane is one connection that can have messages stored, whatever it speaks; the same loads drive
popmq, RocketMQ and the brokers of bench/peers.  In an open load the clock of a message starts when
it was due, so a server that stalls is seen in every message that had to wait.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from popmq.cli.load.figures import LoadStats
from popmq.cli.load.http2 import Http2Channel
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import SEND, SendTemplate, send_refusal

# (lane, when it was asked, why not or an empty text)
OnSent = Callable[["Sender", float, str], None]

DRAIN_S = 60.0
_TICK_S = 0.001


class Sender(Protocol):
    @abstractmethod
    def put(self, asked_s: float, on_sent: OnSent) -> None:
        """Ask for one message to be stored; it goes out with the next `flush`."""

    @abstractmethod
    def flush(self) -> None: ...


class RocketMqSender:
    """Sends one message a call, as the official clients do."""

    def __init__(self, channel: Http2Channel, template: SendTemplate) -> None:
        self._channel = channel
        self._template = template
        self.flush = channel.flush

    def put(self, asked_s: float, on_sent: OnSent) -> None:
        self._call(self._template.request(int(asked_s * 1e9)), asked_s, on_sent)

    def put_delayed(
        self, asked_s: float, due_s: float, deliver_at_ms: int, on_sent: OnSent
    ) -> None:
        """The stamp in the body is `due_s`, from which the receiver computes how late it is."""
        self._call(self._template.delayed(int(due_s * 1e9), deliver_at_ms), asked_s, on_sent)

    def _call(self, request: bytes, asked_s: float, on_sent: OnSent) -> None:
        def on_end(asked_s: float, status: str, data: bytes) -> None:
            on_sent(self, asked_s, send_refusal(status, data))

        self._channel.call(SEND, request, on_end, asked_s)


class ClosedLoad:
    """Keeps `in_flight` messages going on each lane until the time or the count is over."""

    def __init__(self, reactor: Reactor, lanes: Sequence[Sender], in_flight: int) -> None:
        self._reactor = reactor
        self._lanes = lanes
        self._in_flight = in_flight
        self._stop_at = 0.0
        self._limit = 0
        self.tally = LoadStats()

    def run(self, seconds: float, *, limit: int = 1 << 62) -> LoadStats:
        """At most `limit` messages are asked for; then whatever is in flight is waited for."""
        self._limit = limit
        self.begin(seconds)
        self._reactor.run(self.over, limit_s=seconds + DRAIN_S, what="sends")
        return self.tally

    def begin(self, seconds: float) -> None:
        self.tally.begin()
        self._stop_at = self.tally.began + seconds
        for lane in self._lanes:
            for _ in range(min(self._in_flight, self._limit - self.tally.asked)):
                self.tally.asked += 1
                lane.put(time.perf_counter(), self._sent)
            lane.flush()

    def over(self) -> bool:
        return self.tally.answered == self.tally.asked

    def _sent(self, lane: Sender, asked_s: float, why: str) -> None:
        tally = self.tally
        if why:
            tally.refused(why)
        else:
            tally.ok(asked_s)
        if tally.ended < self._stop_at and tally.asked < self._limit:
            tally.asked += 1
            lane.put(tally.ended, self._sent)


class OpenLoad:
    """Sends `rate` messages a second, however fast the answers come, spread over the lanes."""

    def __init__(
        self, reactor: Reactor, lanes: Sequence[Sender], rate: float, *, max_open: int = 20_000
    ) -> None:
        self._reactor = reactor
        self._lanes = lanes
        self._rate = rate
        self._max_open = max_open
        self._stop_at = 0.0
        self.tally = LoadStats()

    def run(self, seconds: float) -> LoadStats:
        self.begin(seconds)
        self._reactor.run(self.over, limit_s=seconds + DRAIN_S, what="sends")
        return self.tally

    def begin(self, seconds: float) -> None:
        self.tally.begin()
        self._stop_at = self.tally.began + seconds
        self._tick()

    def over(self) -> bool:
        return time.perf_counter() >= self._stop_at and self.tally.answered == self.tally.asked

    def _tick(self) -> None:
        now = time.perf_counter()
        tally = self.tally
        until = min(now, self._stop_at)
        while (due := tally.began + tally.asked / self._rate) < until:
            if tally.asked - tally.answered >= self._max_open:
                raise LoadError(
                    f"{self._max_open} sends are unanswered: {self._rate:g} a second is too much"
                )
            self._lanes[tally.asked % len(self._lanes)].put(due, self._sent)
            tally.asked += 1
        for lane in self._lanes:
            lane.flush()
        if now < self._stop_at:
            self._reactor.at(now + _TICK_S, self._tick)

    def _sent(self, lane: Sender, asked_s: float, why: str) -> None:
        if why:
            self.tally.refused(why)
        else:
            self.tally.ok(asked_s)
