"""TimerState: which timers are over, as a function of the log (docs/concepts/timer.md).

No set of what has fired is kept: a cursor says it for the wheel, and a small index for timers
that came when the cursor was past them.  Everybody who applies the same records in the order
of the log, classifying what was enqueued when it was, has the same state.
"""

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple, Protocol

from popmq.broker.log.snapshot_table import Row, SnapshotTable, entry_hash, snapshot_pieces
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.common.record.timer_token import FiringToken, TimerEnd, TimerRecount

KEEP_CANCELLED_MS = 600_000  # behind their due time, for a true answer to a late question
_DEPARTED = 1 << 63  # of a due time: the timer was not recalled, another broker group has it
_HEAD = struct.Struct(">BQQQQ")  # 1, cursor's due time and identity, classified, its position
_PENDING = struct.Struct(">BIQ")  # 2, topic, count
_LATE = struct.Struct(">BQQQIIQ")  # 3, due, identity, position, size, topic, offset
_CANCELLED = struct.Struct(">BQQ")  # 4, due, identity
_LAYOUTS = {1: _HEAD, 2: _PENDING, 3: _LATE, 4: _CANCELLED}


class Timer(NamedTuple):
    """A timer as its newest record has it. Sorts as it fires: (due time, identity).

    `identity` is the position of the timer's first record in the log, `position` that of the newest
    one: retention and rolling append the message again.
    """

    due_ms: int
    identity: int
    position: int
    size: int
    topic_id: int
    offset: int

    @property
    def key(self) -> tuple[int, int]:
        return self.due_ms, self.identity


class FiredTimer(Protocol):
    """What the state has to know of a timer that fired."""

    @property
    def due_ms(self) -> int: ...
    @property
    def identity(self) -> int: ...
    @property
    def topic_id(self) -> int: ...
    @property
    def late(self) -> bool: ...


class PendingTimersListener(Protocol):
    """Hears what changes the counts of pending timers."""

    def stored(self, topic_id: int) -> None: ...
    def ended(self, identity: int, topic_id: int) -> None: ...
    def lost(self) -> None: ...


class TimerState(SnapshotTable):
    table_number = 6

    def __init__(self, sends: SendDeduplication | None = None) -> None:
        """`sends` forgets the sends of timers that will not be delivered."""
        self._sends = sends
        self.cursor = (0, 0)  # due time and identity of the wheel's newest firing
        self.classified = 0  # records of the timer queue, from its first on
        self._classified_position = 0  # of the newest record of those
        self.late: dict[int, Timer] = {}
        self.pending: dict[int, int] = {}  # timers by topic
        self.watch: PendingTimersListener | None = None
        self.cancelled: dict[int, int] = {}  # identity -> due time, perhaps _DEPARTED
        self.cancelled_by_due: list[tuple[int, int]] = []

    # -- look up

    @property
    def pending_total(self) -> int:
        return sum(self.pending.values())

    def is_cancelled(self, identity: int) -> bool:
        """Recalled, replaced, or gone to another broker group."""
        return identity in self.cancelled

    def is_migrated(self, identity: int) -> bool:
        """Another broker group has it, or is being asked to take it."""
        return bool(self.cancelled.get(identity, 0) & _DEPARTED)

    def is_pending(self, due_ms: int, identity: int, offset: int, *, moved: bool = False) -> bool:
        """Whether that timer, whose record is in the log, still waits for its time.

        `offset` is that of its record; of a body that was `moved` it says nothing.
        """
        if identity in self.cancelled:
            return False
        if identity in self.late or (offset >= self.classified and not moved):
            return True
        return (due_ms, identity) > self.cursor

    # -- apply, in the order of the log

    def stored(self, topic_id: int) -> None:
        """A timer's first record is in the log."""
        self.pending[topic_id] = self.pending.get(topic_id, 0) + 1
        if self.watch is not None:
            self.watch.stored(topic_id)

    def classify(self, timer: Timer, *, moved: bool = False) -> bool:
        """The next record of the timer queue is enqueued; whether it belongs into the wheel.

        Late ones are taken here.  A moved body of a timer that is over belongs nowhere.
        """
        assert timer.offset == self.classified, (
            f"record {timer.offset} enqueued after {self.classified}"
        )
        self.classified += 1
        self._classified_position = timer.position
        if timer.key > self.cursor:
            return True
        if (timer.identity in self.late or not moved) and timer.identity not in self.cancelled:
            self.is_late(timer)
        return False

    def is_late(self, timer: Timer) -> None:
        """It is late, and its body is here now, unless a newer place of it is known.

        A moved body says so itself: its first record may be gone before a start classifies it.
        """
        known = self.late.get(timer.identity)
        if known is None or known.position < timer.position:
            self.late[timer.identity] = timer

    def skip(self, offset: int, *, log_start: int = 0) -> None:
        """Records below `offset` are not there any more, or their timers are over.

        Records below `log_start` are not classified again: their recalls may be gone.
        """
        if offset > self.classified:
            self.classified = offset
            self._classified_position = max(self._classified_position, log_start - 1)

    def ended(self, token: FiringToken) -> None:
        """A timer fired, or came to another end."""
        if self._sends is not None and token.outcome is not TimerEnd.FIRED:
            self._sends.forget_timer(token.identity)
        if token.outcome is TimerEnd.CANCELLED:
            self.cancel(token.due_ms, token.identity, token.topic_id)
            return
        self._count_down(token.topic_id)
        if self.watch is not None:
            self.watch.ended(token.identity, token.topic_id)
        if token.outcome is TimerEnd.LOST and self.watch is not None:
            self.watch.lost()
        if token.late:
            self.late.pop(token.identity, None)
            return
        self.cursor = (token.due_ms, token.identity)
        self._forget_cancelled(token.due_ms - KEEP_CANCELLED_MS)

    def on_fired(self, timers: Sequence[FiredTimer]) -> None:
        """`ended` of many that fired, in their order; all of the wheel, or all late."""
        for topic_id, count in Counter([timer.topic_id for timer in timers]).items():
            self._count_down(topic_id, count)
        if self.watch is not None:
            for timer in timers:
                self.watch.ended(timer.identity, timer.topic_id)
        last = timers[-1]
        if last.late:
            for timer in timers:
                self.late.pop(timer.identity, None)
            return
        self.cursor = (last.due_ms, last.identity)
        self._forget_cancelled(last.due_ms - KEEP_CANCELLED_MS)

    def migrate(self, due_ms: int, identity: int, topic_id: int) -> None:
        """It is another broker group's from now on (outgoing_timers.py)."""
        self.cancel(due_ms, identity, topic_id)
        self.cancelled[identity] |= _DEPARTED

    def replace(self, due_ms: int, before: int, topic_id: int, identity: int, log_ms: int) -> None:
        """Timer `identity` stands for the one `before`, of that due time, from now on."""
        self.cancel(due_ms, before, topic_id)
        if self._sends is not None:
            self._sends.replace_timer(before, identity, log_ms)

    def cancel(self, due_ms: int, identity: int, topic_id: int) -> None:
        """It was recalled, or another timer stands for it now."""
        self._count_down(topic_id)
        if self.watch is not None:
            self.watch.ended(identity, topic_id)
        self.late.pop(identity, None)
        self.cancelled[identity] = due_ms
        heappush(self.cancelled_by_due, (due_ms, identity))

    def apply_recount(self, record: TimerRecount) -> None:
        """The daily count found that many of a topic."""
        self.pending[record.topic_id] = record.pending
        if not record.pending:
            del self.pending[record.topic_id]

    def _forget_cancelled(self, until_ms: int) -> None:
        """But for those that are not classified: they would be taken for late ones."""
        kept, by_due = [], self.cancelled_by_due
        while by_due and by_due[0][0] < until_ms:
            earliest = heappop(by_due)
            if earliest[1] > self._classified_position:
                kept.append(earliest)
            else:
                del self.cancelled[earliest[1]]
        for earliest in kept:
            heappush(by_due, earliest)

    def _count_down(self, topic_id: int, ended: int = 1) -> None:
        left = self.pending.get(topic_id, 0) - ended
        if left > 0:
            self.pending[topic_id] = left
        else:
            self.pending.pop(topic_id, None)

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        head = [_HEAD.pack(1, *self.cursor, self.classified, self._classified_position)]
        head += [_PENDING.pack(2, *pending) for pending in self.pending.items()]
        late, cancelled = list(self.late.values()), list(self.cancelled.items())
        return chain(
            iter([(b"".join(head), sum(map(entry_hash, head)))]),
            snapshot_pieces(late, lambda timer: _LATE.pack(3, *timer)),
            snapshot_pieces(cancelled, lambda entry: _CANCELLED.pack(4, entry[1], entry[0])),
        )

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            layout = _LAYOUTS[content[at]]
            kind, *values = layout.unpack_from(content, at)
            at += layout.size
            if kind == 1:
                self.cursor = values[0], values[1]
                self.classified, self._classified_position = values[2:]
            elif kind == 2:
                self.pending[values[0]] = values[1]
            elif kind == 3:
                self.late[values[1]] = Timer(*values)
            else:
                self.cancelled[values[1]] = values[0]
                heappush(self.cancelled_by_due, (values[0] & ~_DEPARTED, values[1]))


def snapshot_rows(content: bytes) -> Iterator[Row]:
    at = 0
    while at < len(content):
        layout = _LAYOUTS[content[at]]
        kind, *values = layout.unpack_from(content, at)
        at += layout.size
        if kind == 1:
            fields = dict(zip(("due_ms", "identity", "classified", "at"), values, strict=True))
            yield Row("cursor of the wheel", fields)
        elif kind == 2:
            yield Row(f"pending timers of topic {values[0]}", {"count": values[1]})
        elif kind == 3:
            yield Row(f"late timer {values[1]}", Timer(*values)._asdict())
        else:
            yield Row(f"cancelled timer {values[1]}", {"due_ms": values[0]})
