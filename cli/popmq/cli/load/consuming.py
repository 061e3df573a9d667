"""Loads that receive and ack.

A loop of a consumer is what a client does: receive up to 32, ack them, receive again.  What comes
twice is counted: every id is remembered.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from popmq.cli.load.figures import LoadStats
from popmq.cli.load.http2 import Http2Channel
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import (
    ACK,
    HEARTBEAT,
    RECEIVE,
    TELEMETRY,
    AckTemplate,
    LoadMessage,
    ReceiveTemplate,
    ack_refusals,
    heartbeat,
    received,
    settings_command,
)

HEARTBEAT_S = 10.0
SETTINGS_S = 10.0


class ConsumerSession:
    """A consumer's settings and heartbeats, on one channel for all of the same client id.

    popmq serves a consumer without; RocketMQ's proxy needs them.
    """

    def __init__(
        self, reactor: Reactor, channel: Http2Channel, group: str, topics: Sequence[str]
    ) -> None:
        self._reactor = reactor
        self._channel = channel
        self._heartbeat = heartbeat(group)
        self._settled = False
        self._over = False
        settings = settings_command(group, topics)
        channel.open_stream(TELEMETRY, settings, self._part, self._ended)
        channel.flush()
        reactor.run(lambda: self._settled, limit_s=SETTINGS_S, what="the settings' answer")
        self._beat()

    def close(self) -> None:
        self._over = True

    def _part(self, data: bytes) -> None:
        self._settled = True

    def _ended(self, token: float, status: str, data: bytes) -> None:
        if not self._over:
            raise LoadError(f"the Telemetry stream ended: grpc-status {status}")

    def _beat(self) -> None:
        if not self._over:
            self._channel.call(HEARTBEAT, self._heartbeat, _ignore, 0.0)
            self._channel.flush()
            self._reactor.at(time.perf_counter() + HEARTBEAT_S, self._beat)


def _ignore(token: float, status: str, data: bytes) -> None:
    pass


@dataclass(slots=True)
class ConsumeStats:
    """`receives` that brought something, `acks` by message, `arrivals` from the stamp to here."""

    receives: LoadStats = field(default_factory=LoadStats)
    acks: LoadStats = field(default_factory=LoadStats)
    arrivals: LoadStats = field(default_factory=LoadStats)
    empty: int = 0
    twice: int = 0
    seen: set[str] = field(default_factory=set)


class Consumer:
    """`loops` loops on each channel until the time is over, `limit` came, or a receive is empty.

    `acks` is "each" (a call for each message), "batch" (one for all of a receive) or "none".
    """

    def __init__(
        self,
        reactor: Reactor,
        channels: Sequence[Http2Channel],
        receive: Sequence[ReceiveTemplate],
        ack: AckTemplate,
        *,
        loops: int = 1,
        acks: str = "each",
        stop_when_empty: bool = True,
    ) -> None:
        self._reactor = reactor
        self._channels = channels
        self._receive = receive
        self._ack = ack
        self._loops = loops
        self._acks = acks
        self._stop_when_empty = stop_when_empty
        self._stop_at = 0.0
        self._limit = 0
        self._running = 0
        self.result = ConsumeStats()

    def run(self, seconds: float, *, limit: int = 1 << 62) -> ConsumeStats:
        self.begin(seconds, limit=limit)
        self._reactor.run(self.over, limit_s=seconds + 90, what="receives and acks")
        return self.result

    def begin(self, seconds: float, *, limit: int = 1 << 62) -> None:
        self._limit = limit
        result = self.result
        for tally in (result.receives, result.acks, result.arrivals):
            tally.begin()
        self._stop_at = result.receives.began + seconds
        for channel in self._channels:
            for number in range(self._loops):
                self._running += 1
                _Loop(self, channel, self._receive[number % len(self._receive)]).next()
            channel.flush()

    def stop(self) -> None:
        """No loop begins another receive."""
        self._stop_at = 0.0

    def over(self) -> bool:
        return self._running == 0

    # -- for the loops

    def wants_more(self, came: int) -> bool:
        more = (
            time.perf_counter() < self._stop_at
            and self.result.arrivals.done < self._limit
            and (came > 0 or not self._stop_when_empty)
        )
        if not more:
            self._running -= 1
        return more

    def arrived(self, delivered: Sequence[LoadMessage]) -> None:
        result = self.result
        for message in delivered:
            if message.message_id in result.seen:
                result.twice += 1
            result.seen.add(message.message_id)
            result.arrivals.ok(message.stamp / 1e9)

    def requests(self, delivered: Sequence[LoadMessage]) -> list[tuple[bytes, int]]:
        """What acks them, and how many each request is about."""
        if self._acks == "none":
            return []
        if self._acks == "batch":
            return [(self._ack.request(delivered), len(delivered))]
        return [(self._ack.request((message,)), 1) for message in delivered]


class _Loop:
    """Receive, ack, receive."""

    def __init__(self, owner: Consumer, channel: Http2Channel, template: ReceiveTemplate) -> None:
        self._owner = owner
        self._channel = channel
        self._template = template
        self._unacked = 0

    def next(self) -> None:
        self._channel.call(RECEIVE, self._template.message, self._received, time.perf_counter())

    def _received(self, asked_s: float, status: str, data: bytes) -> None:
        result = self._owner.result
        delivered, refusal = received(status, data)
        if refusal:
            result.receives.refused(refusal)
        if not delivered:
            result.empty += not refusal
            self._again(0)
            return
        result.receives.ok(asked_s)
        self._owner.arrived(delivered)
        requests = self._owner.requests(delivered)
        now = time.perf_counter()
        for request, messages in requests:
            self._unacked += messages
            self._channel.call(ACK, request, self._acked_by(messages), now)
        if not requests:
            self._again(len(delivered))

    def _acked_by(self, messages: int) -> Callable[[float, str, bytes], None]:
        def acked(asked_s: float, status: str, data: bytes) -> None:
            tally = self._owner.result.acks
            refusals = ack_refusals(status, data, messages)
            for why in refusals:
                tally.refused(why)
            for _ in range(messages - len(refusals)):
                tally.ok(asked_s)
            self._unacked -= messages
            if self._unacked == 0:
                self._again(messages)

        return acked

    def _again(self, came: int) -> None:
        if self._owner.wants_more(came):
            self.next()
