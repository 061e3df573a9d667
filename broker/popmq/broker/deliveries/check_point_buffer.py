"""CheckPointBuffer: what of pop waits in memory for the next group commit.

Acks of check points that are records wait as bits, so that those of one check point which come
in requests of their own are one record.  They are applied when that is appended, not before:
whatever decides by what is acked asks the buffer for the `table`, which writes them first.  Two
gates do that for the rest: `RequestRunner` before each handler and each step, and
`ClientRequests` before a receive in order.

Check points of groups that chose `buffered` wait here before they are records.  A pop of such
a group writes nothing, so its reply does not wait for the disk.  Its acks do: they leave as one
commit of the queue's offset for all acks of one group commit, when they are the head of the
line, else as the check point with its acks.  An ack that finds its check point in memory is not
written; the commit names it, so that its acks can be repeated.  A crash brings unacked messages
back early, and nothing that was acked (docs/concepts/pop.md).

The order rule: when a check point becomes a record, those made before it in its queue are
records already, or over.  A start reads on behind the newest that it finds.
"""

import heapq
from collections import deque
from collections.abc import Callable
from operator import attrgetter

from popmq.broker.deliveries.check_point_table import CheckPointTable, DeliveryStatus
from popmq.broker.deliveries.ended_check_points import Key
from popmq.broker.deliveries.pop_check_point import (
    CheckPointRecord,
    EndRecord,
    PopCheckPoint,
    ReviveKind,
    ReviveRecord,
)
from popmq.broker.deliveries.queue_progress import GroupQueue
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.record.message import RecordKind
from popmq.common.settings.settings import PopSettings

NAMES_PER_RECORD = 1_024
_start_offset = attrgetter("start_offset")


class CheckPointBuffer:
    """Follows RocketMQ's PopBufferMergeService.

    A check point becomes a record `check_point_write_ahead_ms` before it is due, so that its
    revival finds the record.  One that would stay for less than `check_point_min_stay_ms` until
    then is not buffered.  None stays for longer than `check_point_stay_ms`, which bounds what a
    crash brings back early.
    """

    def __init__(self, store: MessageStore, table: CheckPointTable, settings: PopSettings) -> None:
        self._store = store
        self._table = table
        self._size = settings.check_point_buffer_size
        self._stay_ms = settings.check_point_stay_ms
        self._write_ahead_ms = settings.check_point_write_ahead_ms
        self._min_invisible_ms = self._write_ahead_ms + settings.check_point_min_stay_ms
        # Of each queue in the order in which they were made.
        self._lines: dict[GroupQueue, deque[PopCheckPoint]] = {}
        self._deadlines: list[tuple[int, Key]] = []
        self._acked: dict[Key, PopCheckPoint] = {}  # since the last group commit
        self._unwritten: dict[Key, int] = {}  # acks of check points that are records
        self._replies: list[Callable[[], None]] = []
        self.held = 0
        self.opened = 0
        self.written = 0
        self.commits = 0

    def accepts(self, invisible_ms: int) -> bool:
        return invisible_ms >= self._min_invisible_ms and self.held < self._size

    def open(self, record: CheckPointRecord) -> None:
        """Hold the check point in memory."""
        now_ms = self._store.log_ms()
        ck = record.check_point(now_ms)
        ck.buffered = True
        self._table.open(ck, now_ms)
        line = self._lines.setdefault(ck.place, deque())
        self._prune(ck.place, line)
        line.append(ck)
        self.held += 1
        self.opened += 1
        deadline_ms = min(now_ms + self._stay_ms, ck.revive_at_ms - self._write_ahead_ms)
        heapq.heappush(self._deadlines, (deadline_ms, ck.key))

    def ack(self, ck: PopCheckPoint, bits: int) -> None:
        """Acked in memory; tell the client when `when_acks_confirmed` says so."""
        if not ck.buffered:
            key = ck.key
            self._unwritten[key] = self._unwritten.get(key, 0) | bits
            self._store.schedule_commit()
            return
        self._table.end(ck, bits & ck.waiting, acked=True, log_ms=self._store.log_ms())
        self._acked[ck.key] = ck
        self._store.schedule_commit()

    def unwritten_bits(self, key: Key) -> int:
        """The members whose acks wait for their record."""
        return self._unwritten.get(key, 0)

    @property
    def table(self) -> CheckPointTable:
        """The check points as of now: no ack waits for its record when this returns."""
        self.flush_acks()
        return self._table

    def flush_acks(self) -> None:
        """Append a record for each check point that was acked since the last one, and apply it."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, {}
            for key, bits in unwritten.items():
                ck = self._table.find(*key)
                if ck is not None:
                    record = ck.end_record(ReviveKind.ACK, bits)
                else:  # its group or topic was deleted
                    record = EndRecord(ReviveKind.ACK, *key, bits)
                put_revive(self._store, self._table, record)

    def fate(self, epoch: int, sequence: int, member: int) -> DeliveryStatus:
        """Of a delivery that the table does not know: its ack may wait for the group commit."""
        ck = self._acked.get((epoch, sequence))
        acked = ck is not None and ck.acked >> member & 1
        return DeliveryStatus.ACKED if acked else DeliveryStatus.UNKNOWN

    def when_acks_confirmed(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything that was appended or acked so far is confirmed."""
        if self._acked or self._unwritten:
            self._replies.append(callback)
        else:
            self._store.when_log_confirmed(callback)

    def before_batch(self) -> None:
        """A group commit begins: the acks since the last one go with it."""
        # Taken first: a commit may write check points, and comes back here.
        replies, self._replies = self._replies, []
        self.flush_acks()
        if self._acked:
            acked, self._acked = self._acked, {}
            by_place: dict[GroupQueue, list[PopCheckPoint]] = {}
            for ck in acked.values():
                by_place.setdefault(ck.place, []).append(ck)
            for place, check_points in by_place.items():
                self._commit(place, check_points)
        if replies:
            self._store.when_log_confirmed(*replies)

    def write(self, ck: PopCheckPoint) -> None:
        """Make it a record, and those before it in its queue that are not over."""
        self.before_batch()  # what is over is committed first
        if not ck.buffered:
            return
        line = self._lines.get(ck.place)
        self._prune(ck.place, line)
        while line:
            first = line.popleft()
            self.held -= 1
            if first.buffered:
                self._write_one(first)
            if first is ck:
                return

    def write_queue(self, place: GroupQueue) -> None:
        """A check point of this queue is about to be a record: those before it first."""
        line = self._lines.get(place)
        if line:
            self.write(line[-1])

    def write_all(self) -> None:
        """Nothing is held any more: before a snapshot, which knows records only, and a stop."""
        self.before_batch()
        for place in list(self._lines):
            self.write_queue(place)

    def forget(self, place: GroupQueue) -> None:
        """The queue's check points are over for another reason than acks."""
        line = self._lines.pop(place, None)
        self.held -= len(line or ())

    def forget_deleted(self) -> None:
        """A topic or a group was deleted."""
        for place in [place for place in self._lines if self._table.progress(*place) is None]:
            self.forget(place)

    def step(self, limit: int = 256) -> int:
        """Write check points that were held for long enough; returns how many."""
        now_ms = self._store.log_ms()
        done = 0
        while self._deadlines and self._deadlines[0][0] <= now_ms and done < limit:
            _, key = heapq.heappop(self._deadlines)
            ck = self._table.find(*key)
            if ck is not None and ck.buffered:
                self.write(ck)
                done += 1
        return done

    def check_invariants(self) -> None:
        """Each check point that is not a record is held, in the order of its queue."""
        held = {ck.key for line in self._lines.values() for ck in line if ck.buffered}
        assert self.held == sum(map(len, self._lines.values()))
        lost = [ck.key for ck in self._table if ck.buffered and ck.key not in held]
        assert not lost, f"check points {lost[:20]} will never be records"

    def _commit(self, place: GroupQueue, acked: list[PopCheckPoint]) -> None:
        """Make acks durable: by the queue's offset where it says it all, else one by one."""
        progress = self._table.progress(*place)
        if progress is None:
            return  # topic or group are gone
        offset = progress.committed
        head = progress.open[0] if progress.open else None
        if head is not None and head.buffered:
            waiting = head.members & ~head.acked
            offset = head.offset_of((waiting & -waiting).bit_length() - 1)
        passes = any(ck.start_offset < offset for ck in acked if ck.buffered)
        # The offset comes last: a torn commit must not keep it without the acks that it counts.
        for ck in acked:
            if ck.buffered and ck.acked >> max(0, offset - ck.start_offset):
                self.write(ck)
        if passes:
            in_memory = sorted((ck for ck in acked if ck.buffered), key=_start_offset)
            while len(in_memory) > NAMES_PER_RECORD:
                some, in_memory = in_memory[:NAMES_PER_RECORD], in_memory[NAMES_PER_RECORD:]
                self._put_offset(place, in_memory[0].start_offset, some)
            self._put_offset(place, offset, in_memory)
            self.commits += 1

    def _put_offset(self, place: GroupQueue, offset: int, acked: list[PopCheckPoint]) -> None:
        names = tuple((*ck.key, ck.acked) for ck in acked)
        log_ms = self._store.put_record(
            RecordKind.OFFSET,
            topic_id=topics.OFFSETS_TOPIC_ID,
            queue_id=0,
            body=OffsetRecord(*place, offset, OffsetReason.COMMITTED, names).encode(),
        )
        self._table.commit(*place, offset, acked=names, log_ms=log_ms)

    def _write_one(self, ck: PopCheckPoint) -> None:
        self.written += 1
        written_ms = ended_ms = append_revive(
            self._store,
            CheckPointRecord(
                *ck.key,
                ck.members,
                ck.start_offset,
                ck.topic_id,
                ck.group_id,
                ck.queue_id,
                ck.attempt_id,
                ck.next_offset,
                ck.revive_at_ms,
                ck.client,
                ck.flags,
            ),
        )
        if ck.acked:
            ended_ms = append_revive(self._store, ck.end_record(ReviveKind.ACK, ck.acked))
        self._acked.pop(ck.key, None)
        self._table.mark_logged(ck, written_ms, ended_ms)

    def _prune(self, place: GroupQueue, line: deque[PopCheckPoint] | None) -> None:
        """Those that the committed offset passed are over."""
        progress = self._table.progress(*place)
        while line and (progress is None or line[0].next_offset <= progress.committed):
            line.popleft()
            self.held -= 1


def put_revive(store: MessageStore, table: CheckPointTable, record: ReviveRecord) -> int:
    """Append the record to the revive topic and apply it (D1: at append); returns its log time."""
    log_ms = append_revive(store, record)
    table.apply(record, log_ms)
    return log_ms


def append_revive(store: MessageStore, record: ReviveRecord) -> int:
    """Returns its log time."""
    return store.put_record(
        RecordKind.REVIVE,
        topic_id=topics.REVIVE_TOPIC_ID,
        queue_id=record.sequence % topics.REVIVE_QUEUES,
        body=record.encode(),
    )
