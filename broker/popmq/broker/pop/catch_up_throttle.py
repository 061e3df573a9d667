"""CatchUpThrottle: consumers that read far behind take a bounded share of a loop that others need.

A consumer that starts at the oldest of gigabytes asks again as soon as it is served, and each
of its receives is a full batch of work in one piece: beside it everybody's latency grows,
whether its pages come from the disk or from memory (docs/benchmarks.md).  So while others send
or receive, the receives of such a group run within a token bucket of loop time; on a loop that
nobody else uses they run at once.  Nothing here reads a clock.
"""

from collections.abc import Callable
from typing import TypeVar

from popmq.common.errors import TooManyRequests
from popmq.common.topics import GroupTopic

Result = TypeVar("Result")

QUIET_MS = 5  # after which the loop counts as nobody else's
BURST_MS = 2  # of loop time that can be saved up
DEBT_MS = 20  # and that can be owed, so that a quiet time is not paid for later
HELD_LIMIT = 1_024


class CatchUpThrottle:
    """Who catches up, and when its next receive may run."""

    def __init__(self, *, percent: int, behind_bytes: int, now_ms: Callable[[], int]) -> None:
        self._percent = percent
        self._behind_bytes = behind_bytes
        self._now_ms = now_ms
        self._behind: set[GroupTopic] = set()
        self._held: dict[int, Callable[[], None]] = {}
        self._credit_ms = 0.0
        self._earned_at_ms = now_ms()
        self._others_at_ms = -QUIET_MS
        self.throttled = 0

    def on_fresh_traffic(self) -> None:
        """Somebody stored messages, or got some that are not old."""
        self._others_at_ms = self._now_ms()

    def delivered(self, place: GroupTopic, position: int, end: int) -> None:
        """The group got a message of this position in a log of this end."""
        if end - position > self._behind_bytes:
            self._behind.add(place)
        else:
            self._behind.discard(place)
            self.on_fresh_traffic()

    def on_queue_end(self, place: GroupTopic) -> None:
        """The group is at the end of the topic, however old its last message is."""
        self._behind.discard(place)

    def is_behind(self, place: GroupTopic) -> bool:
        return place in self._behind and self._percent < 100

    def forget_topic(self, topic: str) -> None:
        self._behind = {place for place in self._behind if place[1] != topic}

    def run(self, number: int, serve: Callable[[], None]) -> None:
        """Serve the receive of a group that is behind, now or when there is time for it.

        Raises TooManyRequests when too many wait already.
        """
        if not self._held and self._may_run():
            self.charge(serve)
            return
        if len(self._held) >= HELD_LIMIT:
            raise TooManyRequests(
                f"{HELD_LIMIT} receives of old messages wait for their turn: try again"
            )
        self.throttled += 1
        self._held[number] = serve

    def cancel(self, number: int) -> bool:
        """Its client is gone; whether it was held."""
        return self._held.pop(number, None) is not None

    def step(self) -> int:
        """Let in whom the share allows; returns how many."""
        served = 0
        while self._held and self._may_run():
            self.charge(self._held.pop(next(iter(self._held))))
            served += 1
        return served

    @property
    def is_throttling(self) -> bool:
        """Whether receives wait for their share."""
        return bool(self._held)

    def release_all(self) -> None:
        """The broker stops: nobody is left without an answer."""
        while self._held:
            self._held.pop(next(iter(self._held)))()

    def _may_run(self) -> bool:
        now_ms = self._now_ms()
        earned = (now_ms - self._earned_at_ms) * self._percent / 100
        self._credit_ms = min(self._credit_ms + earned, BURST_MS)
        self._earned_at_ms = now_ms
        return self._credit_ms > 0 or now_ms - self._others_at_ms >= QUIET_MS

    def charge(self, work: Callable[[], Result]) -> Result:
        """Do work for a group that is behind: its receives wait the longer for it."""
        began_ms = self._now_ms()
        try:
            return work()
        finally:
            # Whole milliseconds: most pieces take none, some take one, and the mean is right.
            self._credit_ms = max(self._credit_ms - (self._now_ms() - began_ms), -DEBT_MS)
