"""OrderInfo: which messages of a queue a FIFO group may have now (docs/concepts/pop.md).

Remembers the message group of every open message that was looked at, so that a receive reads
the queue once and not again.  Soft and pure: a function of the queue's content and of the
check points, made anew after a start.  The rule: a key (message group) is available while
none of its messages is in flight, and its messages leave in the order of their offsets.
"""

import heapq
from collections import defaultdict

from popmq.broker.log.queue_unit import QueueUnit


class KeyBacklog:
    """The open messages of one key."""

    __slots__ = ("held", "oldest", "since_ms", "waiting")

    def __init__(self) -> None:
        self.waiting: list[int] = []  # a heap
        self.held: set[int] = set()
        self.oldest = -1  # in flight or back from it, for as long as it is not over
        self.since_ms = 0  # when `oldest` was delivered first

    def is_head(self, offset: int) -> bool:
        return not self.held and bool(self.waiting) and self.waiting[0] == offset


class OrderInfo:
    def __init__(self, start: int) -> None:
        self.scanned = start  # everything below was looked at
        self.open: dict[int, tuple[bytes, QueueUnit]] = {}  # in flight ones included
        self._lines: defaultdict[bytes, KeyBacklog] = defaultdict(KeyBacklog)
        # Heads of available keys.  An entry counts only while it is its line's head and the
        # line has nothing in flight: changes leave old entries behind.
        self._ready: list[tuple[int, bytes]] = []
        # Keys that are parked: nothing of them leaves here; what waits follows to the parking
        # topic (`followers` are those with something to follow).
        self._parked: set[bytes] = set()
        self.followers: dict[bytes, None] = {}

    def add_message(self, offset: int, key: bytes, unit: QueueUnit, *, held: bool) -> None:
        """A message that is not over was read; `held` when it is in flight."""
        self.open[offset] = (key, unit)
        line = self._lines[key]
        if held:
            line.held.add(offset)
            return
        heapq.heappush(line.waiting, offset)
        if line.waiting[0] == offset:
            self._offer(key, line)

    def has_ready(self) -> bool:
        while self._ready:
            offset, key = self._ready[0]
            line = self._lines.get(key)
            if line and key not in self._parked and line.is_head(offset):
                return True
            heapq.heappop(self._ready)
        return False

    def next_ready(self) -> tuple[int, QueueUnit] | None:
        """The first message that may leave now, taken out of its line.

        The caller holds it (its check point was written), gives it back, or passes over it;
        the next of its line may follow it in the same receive.
        """
        if not self.has_ready():
            return None
        offset, key = heapq.heappop(self._ready)
        line = self._lines[key]
        heapq.heappop(line.waiting)
        self._offer(key, line)
        return offset, self.open[offset][1]

    def mark_in_flight(self, offset: int, log_ms: int) -> None:
        """In flight from now on."""
        line = self._lines[self.open[offset][0]]
        line.held.add(offset)
        if line.oldest < 0 or offset < line.oldest:
            line.oldest, line.since_ms = offset, log_ms

    def finish(self, offset: int, log_ms: int) -> None:
        """In flight no more, and never again."""
        opened = self.open.pop(offset, None)
        if opened is None:
            return
        key = opened[0]
        line = self._lines[key]
        line.held.discard(offset)
        if offset == line.oldest:
            line.oldest, line.since_ms = min(line.held, default=-1), log_ms
        self._settle(key, line)

    def returned(self, offset: int) -> None:
        """Neither in flight nor taken by `next_ready` any more: it waits for its next attempt,
        before what comes after it."""
        opened = self.open.get(offset)
        if opened is None:
            return
        line = self._lines[opened[0]]
        line.held.discard(offset)
        heapq.heappush(line.waiting, offset)
        self._offer(opened[0], line)

    def skip(self, offset: int) -> None:
        """Nobody gets it; it was taken by `next_ready` or is not in flight."""
        key, _ = self.open.pop(offset)
        line = self._lines[key]
        if offset in line.waiting:
            line.waiting.remove(offset)
            heapq.heapify(line.waiting)
        if offset == line.oldest:
            line.oldest = min(line.held, default=-1)
        self._settle(key, line)

    def waiting_between(self, start: int, end: int) -> list[int]:
        """Open messages from `start` to below `end` that are not in flight."""
        return [
            offset
            for offset, (key, _) in self.open.items()
            if start <= offset < end and offset not in self._lines[key].held
        ]

    def is_blocked(self, offset: int) -> bool:
        """Whether the message was looked at and waits for others of its key."""
        opened = self.open.get(offset)
        if opened is None:
            return False
        line = self._lines[opened[0]]
        return opened[0] in self._parked or bool(line.held) or line.waiting[:1] != [offset]

    def blocked(self, start: int = 0, end: int = 1 << 64) -> list[int]:
        """Which messages of these wait for one of their key that is in flight."""
        lines = [line.waiting for line in self._lines.values() if line.held]
        return [offset for waiting in lines for offset in waiting if start <= offset < end]

    # -- parked keys

    def park(self, key: bytes) -> None:
        self._parked.add(key)
        if key in self._lines and self._lines[key].waiting:
            self.followers[key] = None

    def unpark(self, key: bytes) -> None:
        self._parked.discard(key)
        self.followers.pop(key, None)
        if key in self._lines:
            self._offer(key, self._lines[key])

    def next_follower(self, key: bytes) -> tuple[int, QueueUnit] | None:
        """The first waiting message of a parked key, taken out of its line; None: no more."""
        line = self._lines.get(key)
        if line is None or not line.waiting or key not in self._parked:
            self.followers.pop(key, None)
            return None
        offset = heapq.heappop(line.waiting)
        return offset, self.open[offset][1]

    def stuck_keys(self, before_ms: int) -> list[tuple[int, bytes, int]]:
        """(since, key, waiting messages) of keys whose oldest message was delivered first at or
        before `before_ms`, longest first, if anything of them waits."""
        backlogs = [
            (line.since_ms, key, len(line.waiting))
            for key, line in self._lines.items()
            if line.oldest >= 0 and line.since_ms <= before_ms and line.waiting
        ]
        return sorted(backlog for backlog in backlogs if backlog[1] not in self._parked)

    def has_open_below(self, key: bytes, offset: int) -> bool:
        """Whether a message of the key from before `offset` is open, or may be."""
        line = self._lines.get(key)
        if self.scanned < offset or line is None:
            return self.scanned < offset
        return any(earlier < offset for earlier in (*line.held, *line.waiting[:1]))

    def check_invariants(self) -> None:
        """Each open message is in its key's line once, and each key that may go on is offered."""
        for key, line in self._lines.items():
            members = [*line.waiting, *line.held]
            assert len(members) == len(set(members)), f"{key!r}: {members} has one twice"
            assert all(self.open[offset][0] == key for offset in members)
            if line.waiting and not line.held and key not in self._parked:
                assert (min(line.waiting), key) in self._ready, f"{key!r} is never offered"
            if line.waiting and key in self._parked:
                assert key in self.followers, f"{key!r} has followers that stay behind"
        lost = self.open.keys() - {
            offset for line in self._lines.values() for offset in (*line.waiting, *line.held)
        }
        assert not lost, f"{sorted(lost)[:20]} are open and in no line"

    def _settle(self, key: bytes, line: KeyBacklog) -> None:
        if line.waiting:
            self._offer(key, line)
        elif not line.held:
            del self._lines[key]

    def _offer(self, key: bytes, line: KeyBacklog) -> None:
        if key in self._parked:
            if line.waiting:
                self.followers[key] = None
        elif line.waiting and not line.held:
            heapq.heappush(self._ready, (line.waiting[0], key))
