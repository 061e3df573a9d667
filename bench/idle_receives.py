"""IdlePolls: receives that wait, for what waiting costs."""

import time
from collections.abc import Sequence

from popmq.cli.load.http2 import Http2Channel
from popmq.cli.load.reactor import Reactor
from popmq.cli.load.requests import RECEIVE, ReceiveTemplate, received


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
