"""Sends and a consumer at the same time: how long a message takes from its due time to a consumer.

Two group commits are in it: the message's, and its check point's before it is handed out.  Delayed
messages are sent ahead and measured from the time at which they should be delivered.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from popmq.cli.load.consuming import Consumer, ConsumerSession, ConsumeStats
from popmq.cli.load.figures import LoadStats
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import AckTemplate, SendTemplate
from popmq.cli.load.sending import DRAIN_S, OpenLoad, RocketMqSender
from popmq.cli.load.target import Target


@dataclass(frozen=True, slots=True)
class EndToEnd:
    sends: LoadStats
    consumed: ConsumeStats


class WaitingConsumer:
    """A consumer whose receives wait, so that what is sent comes at once."""

    def __init__(
        self, reactor: Reactor, target: Target, *, connections: int, loops: int, wait_ms: int
    ) -> None:
        self._reactor = reactor
        channels = target.connect(reactor, connections)
        self._session = ConsumerSession(reactor, channels[0], target.group, [target.topic])
        self._consumer = Consumer(
            reactor,
            channels,
            target.receives(wait_ms=wait_ms),
            AckTemplate(target.topic, target.group),
            loops=loops,
            stop_when_empty=False,
        )
        self._wait_s = wait_ms / 1000
        self.consumed = self._consumer.result

    def begin(self) -> None:
        self._consumer.begin(1e9)

    def end(self) -> ConsumeStats:
        """After what is under way; receives that wait are waited for."""
        self._consumer.stop()
        limit_s = self._wait_s + DRAIN_S
        self._reactor.run(self._consumer.over, limit_s=limit_s, what="the last receives")
        self._session.close()
        return self.consumed


def send_and_receive(
    reactor: Reactor,
    target: Target,
    *,
    rate: float,
    seconds: float,
    body: int,
    connections: int = 4,
    loops: int = 2,
    wait_ms: int = 2_000,
) -> EndToEnd:
    """Everything that was answered OK has come when this returns, else LoadError."""
    template = SendTemplate(target.topic, body)
    lanes = [RocketMqSender(channel, template) for channel in target.connect(reactor, connections)]
    waiting = WaitingConsumer(
        reactor, target, connections=connections, loops=loops, wait_ms=wait_ms
    )
    waiting.begin()
    load = OpenLoad(reactor, lanes, rate)
    load.begin(seconds)
    consumed = waiting.consumed
    reactor.run(
        lambda: load.over() and consumed.arrivals.done - consumed.twice >= load.tally.done,
        limit_s=seconds + DRAIN_S,
        what="messages to come",
    )
    return EndToEnd(load.tally, waiting.end())


def lateness(
    reactor: Reactor,
    target: Target,
    *,
    due: Sequence[float],
    ahead_s: float,
    body: int,
    wait_ms: int = 5_000,
) -> EndToEnd:
    """Send a delayed message for each of `due`, seconds after `ahead_s` from now.

    The arrivals' times are how late they were; one that was early is a LoadError.
    """
    template = SendTemplate(target.topic, body)
    lanes = [RocketMqSender(channel, template) for channel in target.connect(reactor, 4)]
    sends = LoadStats()
    sends.begin()

    def sent(_: object, asked_s: float, why: str) -> None:
        if why:
            raise LoadError(f"a delayed message was refused: {why}")
        sends.ok(asked_s)
        lane = lanes[sends.done % len(lanes)]
        put(lane)
        lane.flush()

    zero_s = time.perf_counter() + ahead_s
    wall_zero_ms = (time.time() + ahead_s) * 1000
    left = iter(due)

    def put(lane: RocketMqSender) -> None:
        after_s = next(left, None)
        if after_s is None:
            return
        sends.asked += 1
        # The wire has milliseconds, so both clocks get the same rounding.
        deliver_at_ms = round(wall_zero_ms + after_s * 1000)
        due_s = zero_s + (deliver_at_ms - wall_zero_ms) / 1000
        lane.put_delayed(time.perf_counter(), due_s, deliver_at_ms, sent)

    for lane in lanes:
        for _ in range(32):
            put(lane)
        lane.flush()
    reactor.run(
        lambda: sends.done == len(due), limit_s=ahead_s + DRAIN_S, what="delayed messages to send"
    )
    if time.perf_counter() > zero_s:
        raise LoadError(f"{len(due)} sends took longer than the {ahead_s:g} s ahead")
    waiting = WaitingConsumer(reactor, target, connections=8, loops=2, wait_ms=wait_ms)
    waiting.begin()
    consumed = waiting.consumed
    limit_s = zero_s - time.perf_counter() + max(due) + DRAIN_S
    reactor.run(
        lambda: consumed.arrivals.done >= len(due), limit_s=limit_s, what="delayed messages to come"
    )
    if min(consumed.arrivals.seconds) < 0:
        early_ms = -min(consumed.arrivals.seconds) * 1000
        raise LoadError(f"a delayed message came {early_ms:.1f} ms before its time")
    return EndToEnd(sends, waiting.end())
