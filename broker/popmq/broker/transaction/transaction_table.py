"""TransactionTable: which half messages are pending, as a function of the log.

A half message is stored, then checked any number of times, then ended once; each is one record.
Times are log time.  What ended is remembered for ten minutes, for a true answer to a late or a
repeated question (docs/concepts/transactions.md).
"""

import struct
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.log.snapshot_table import Row, SnapshotTable, snapshot_pieces
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.persistence.retention import LiveBody
from popmq.common.record.transaction_token import HalfToken, TransactionEnd, TransactionEndToken

KEEP_ENDED_MS = 600_000
ENDED_LIMIT = 200_000
_PER_PIECE = 512
_SLACK = 1_000  # entries of the heap that stand for nothing any more
# 1, offset, topic, queue, position, size, tag hash, first, due, checks
_PENDING = struct.Struct(">BQIIQIQQQH")
_ENDED = struct.Struct(">BQQB")  # 2, log time, offset, ending


class HalfMessage(NamedTuple):
    """A pending half message: where its body is now, and when to ask about it next.

    A value, so that a snapshot keeps what was there when it began.
    """

    offset: int  # its name: where its first record is in the half queue
    topic_id: int
    queue_id: int
    unit: QueueUnit
    first_ms: int
    due_ms: int
    checks: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Topic and queue that it is to come into."""
        return self.topic_id, self.queue_id


class TransactionTable(SnapshotTable):
    table_number = 8

    def __init__(self, check_interval_ms: int, sends: SendDeduplication | None = None) -> None:
        """`sends` forgets the sends of half messages that will not be delivered."""
        self._sends = sends
        # For checks that an older popmq wrote: their records do not name the interval.
        self._interval_ms = check_interval_ms
        self.pending: dict[int, HalfMessage] = {}
        self._due: list[tuple[int, int]] = []  # a heap; what changed since is skipped
        self._order: deque[tuple[int, int]] = deque()  # of all since the oldest pending one
        self._endings: dict[int, TransactionEnd] = {}
        self._ended: deque[tuple[int, int]] = deque()  # log time, offset
        self.counts = dict.fromkeys(TransactionEnd, 0)  # since the start

    # -- look up

    def ending(self, offset: int) -> TransactionEnd | None:
        """How that half message ended, if it is remembered."""
        return self._endings.get(offset)

    def endings(self) -> Iterator[tuple[int, int, TransactionEnd]]:
        """Log time, offset and ending of all that are remembered."""
        return ((log_ms, offset, self._endings[offset]) for log_ms, offset in self._ended)

    def take_due(self, log_ms: int, limit: int) -> list[HalfMessage]:
        """Pending ones whose time to ask has come; each is given once, until it is checked."""
        half_messages: list[HalfMessage] = []
        while self._due and len(half_messages) < limit and self._due[0][0] <= log_ms:
            due_ms, offset = heappop(self._due)
            half = self.pending.get(offset)
            if half is not None and _is_due(half, due_ms):
                half_messages.append(half)
        return half_messages

    def older_than(self, log_ms: int) -> HalfMessage | None:
        """The oldest pending one, if it was stored before that."""
        order = self._order
        self._forget_order()
        return self.pending[order[0][1]] if order and order[0][0] < log_ms else None

    def schedule_check(self, half: HalfMessage) -> None:
        """It was given by `take_due`, and nothing came of it."""
        heappush(self._due, (half.due_ms, half.offset))

    def check_invariants(self) -> None:
        """A half message is pending or ended; the oldest pending one can be found."""
        assert [*self._endings] == [offset for _, offset in self._ended]
        both = self.pending.keys() & self._endings.keys()
        assert not both, f"half messages {sorted(both)[:20]} are pending and ended"
        unordered = self.pending.keys() - {offset for _, offset in self._order}
        assert not unordered, f"half messages {sorted(unordered)[:20]} have no place by age"

    # -- apply, in the order of the log

    def stored(self, token: HalfToken, offset: int, unit: QueueUnit, log_ms: int) -> None:
        due_ms = log_ms + token.check_after_ms
        half = HalfMessage(offset, token.topic_id, token.queue_id, unit, log_ms, due_ms)
        self.pending[offset] = half
        self._forget_order()
        self._order.append((log_ms, offset))
        self._push(due_ms, offset)

    def moved(self, body: LiveBody) -> None:
        """Retention appended its body again."""
        half = self.pending.get(body.queue_offset)
        if half is not None:
            self.pending[half.offset] = half._replace(unit=body.unit)

    def apply(self, token: TransactionEndToken, log_ms: int) -> None:
        self.counts[token.ending] += 1
        half = self.pending.get(token.half_offset)
        if half is None:
            return
        if token.ending is TransactionEnd.CHECKED:
            due_ms = log_ms + (token.next_check_ms or self._interval_ms)
            self.pending[half.offset] = half._replace(checks=token.checks, due_ms=due_ms)
            self._push(due_ms, half.offset)
            return
        del self.pending[token.half_offset]
        if self._sends is not None and token.ending is not TransactionEnd.COMMITTED:
            self._sends.forget_half(token.half_offset)
        self._remember(token.half_offset, token.ending, log_ms)

    def drop_topic(self, topic_id: int) -> None:
        """The topic is gone, and with it what was to come into it."""
        gone = [
            half_message.offset
            for half_message in self.pending.values()
            if half_message.topic_id == topic_id
        ]
        for offset in gone:
            del self.pending[offset]

    def forget(self, log_ms: int) -> None:
        """Endings that are too old."""
        ended = self._ended
        while ended and ended[0][0] + KEEP_ENDED_MS < log_ms:
            del self._endings[ended.popleft()[1]]

    # A slave never asks for what is due or oldest, so these are kept short as they grow.

    def _forget_order(self) -> None:
        while self._order and self._order[0][1] not in self.pending:
            self._order.popleft()

    def _push(self, due_ms: int, offset: int) -> None:
        if len(self._due) > 2 * len(self.pending) + _SLACK:
            pending = self.pending
            self._due = [due for due in self._due if _is_due(pending.get(due[1]), due[0])]
            heapify(self._due)
        heappush(self._due, (due_ms, offset))

    def _remember(self, offset: int, ending: TransactionEnd, log_ms: int) -> None:
        self._endings[offset] = ending
        self._ended.append((log_ms, offset))
        if len(self._ended) > ENDED_LIMIT:
            del self._endings[self._ended.popleft()[1]]

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        return self._pieces(list(self.pending.values()), list(self.endings()))

    def _pieces(
        self, pending: list[HalfMessage], ended: list[tuple[int, int, TransactionEnd]]
    ) -> Iterator[tuple[bytes, int]]:
        yield from snapshot_pieces(pending, _packed)
        for at in range(0, len(ended), _PER_PIECE):
            # When they are forgotten depends on when somebody looked: no state.
            yield b"".join(_ENDED.pack(2, *end) for end in ended[at : at + _PER_PIECE]), 0

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            if content[at] == 1:
                _, offset, topic, queue, position, size, tag_hash, first_ms, due_ms, checks = (
                    _PENDING.unpack_from(content, at)
                )
                unit = QueueUnit(position, size, tag_hash)
                half = HalfMessage(offset, topic, queue, unit, first_ms, due_ms, checks)
                self.pending[offset] = half
                self._order.append((first_ms, offset))
                at += _PENDING.size
            else:
                _, log_ms, offset, ending = _ENDED.unpack_from(content, at)
                self._remember(offset, TransactionEnd(ending), log_ms)
                at += _ENDED.size

    def restored(self) -> None:
        self._due = [(half.due_ms, half.offset) for half in self.pending.values()]
        heapify(self._due)


def _is_due(half: HalfMessage | None, due_ms: int) -> bool:
    return half is not None and half.due_ms == due_ms


def _packed(half: HalfMessage) -> bytes:
    times = (half.first_ms, half.due_ms, half.checks)
    return _PENDING.pack(1, half.offset, *half.place, *half.unit, *times)


def snapshot_rows(content: bytes) -> Iterator[Row]:
    """Pending transactions; how others ended fades, and counts for nothing."""
    if content[:1] != b"\x01":
        return
    names = ("topic", "queue", "position", "size", "tag_hash", "first_ms", "due_ms", "checks")
    for _, offset, *values in _PENDING.iter_unpack(content):
        yield Row(f"half message {offset}", dict(zip(names, values, strict=True)))
