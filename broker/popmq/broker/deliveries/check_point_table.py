"""The live index of check points, and each queue's progress (docs/concepts/pop.md).

A function of the log: every change comes through one of the `apply` methods, in log order,
on the master at append and at recovery from the scan.  Nothing here reads a clock: each `log_ms`
is the log time of the record that is applied, never another reading of the clock.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from popmq.broker.deliveries.check_point_snapshot import TableRestorer, TableSnapshot
from popmq.broker.deliveries.ended_check_points import EndedCheckPoints, Key
from popmq.broker.deliveries.parked_keys import ParkedKeys
from popmq.broker.deliveries.parking_records import ParkingRecords
from popmq.broker.deliveries.pop_check_point import (
    AUTO_RENEW,
    FIFO,
    MEMBER_LIMIT,
    ChangeRecord,
    CheckPointRecord,
    EndRecord,
    PopCheckPoint,
    ReviveKind,
    ReviveRecord,
)
from popmq.broker.deliveries.queue_progress import FifoProgress, GroupQueue, QueueProgress
from popmq.broker.deliveries.receive_attempt_index import ReceiveAttemptIndex
from popmq.broker.deliveries.relocated_bodies import RelocatedBodies
from popmq.broker.deliveries.revive_buckets import STEP_MS, ReviveBuckets
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.common.record.message import BadRecord, EndedDelivery, ParkedMessage, RevivalToken

# Looked up once: a member of an enum is slow to reach, and this is the path of every ack.
_ACK, _RETURNED = ReviveKind.ACK, ReviveKind.RETURNED


class DeliveryStatus(Enum):
    """What became of one delivery."""

    WAITING = "waiting"
    ACKED = "acked"
    REVIVED = "revived"
    DEAD_LETTERED = "dead-lettered"
    MOVED = "moved"  # the visibility was changed: a newer handle stands for it
    RESET = "reset"  # an operator set the group's offset: it counts for nothing any more
    UNKNOWN = "unknown"


def _taken_over(ck: PopCheckPoint) -> tuple[int, int]:
    """Of a check point that a change made (`ChangeRecord.check_point`)."""
    return ck.next_offset, ck.start_offset


class CheckPointTable(SnapshotTable):
    table_number = 2

    def __init__(
        self,
        revive_step_ms: int = STEP_MS,
        on_unblocked: Callable[[int, int, int], None] = lambda topic_id, group_id, queue_id: None,
    ) -> None:
        """`on_unblocked` hears that messages of a FIFO group (topic, group, queue) may be
        available again."""
        self._live: dict[Key, PopCheckPoint] = {}
        # Those that changes made, by the sequence that each took over and its message's offset.
        self._changed: dict[tuple[int, int], PopCheckPoint] = {}
        self._progress: dict[GroupQueue, QueueProgress] = {}
        self.due_times = ReviveBuckets(revive_step_ms)
        self.outcomes = EndedCheckPoints()
        self.acked_in_memory = EndedCheckPoints()  # of check points that are no records
        self._saving: TableSnapshot | None = None
        self._snapshots = 0
        self._restorer: TableRestorer | None = None
        self.moved = RelocatedBodies()
        self.receives = ReceiveAttemptIndex()
        self.in_flight = 0
        self.parked = ParkedKeys()
        self.parking = ParkingRecords(self, self.parked)
        self.on_unblocked = on_unblocked

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[PopCheckPoint]:
        return iter(self._live.values())

    # -- look up

    def progress(self, group_id: int, topic_id: int, queue_id: int) -> QueueProgress | None:
        return self._progress.get((group_id, topic_id, queue_id))

    def progress_for_update(self, place: GroupQueue) -> FifoProgress:
        """A FIFO group's progress, made if need be, kept for a snapshot before it changes."""
        progress = self._progress.get(place) or self.start(*place, 0, fifo=True)
        assert isinstance(progress, FifoProgress), f"group {place[0]} keeps no order"
        if self._saving is not None:
            self._saving.keep_progress(place, progress)
        return progress

    def places(self) -> list[GroupQueue]:
        """Where a group has progress; good while others come and go."""
        return list(self._progress)

    def fifo_places(self) -> list[tuple[GroupQueue, FifoProgress]]:
        """Written for speed: there may be a hundred thousand places, of one moment."""
        progress = self._progress
        return [(place, fifo) for place, fifo in progress.items() if type(fifo) is FifoProgress]

    def progress_items(self) -> Iterator[tuple[GroupQueue, QueueProgress]]:
        return iter(self._progress.items())

    def find(self, epoch: int, sequence: int) -> PopCheckPoint | None:
        return self._live.get((epoch, sequence))

    def attempts_before(self, ck: PopCheckPoint, member: int) -> int:
        """Deliveries from this place that ended before this one; retry copies carry their own."""
        progress = self._progress.get(ck.place)
        if not isinstance(progress, FifoProgress):
            return 0
        return progress.attempts.get(ck.offset_of(member), 0)

    def fate(self, epoch: int, sequence: int, member: int) -> DeliveryStatus:
        ck = self._live.get((epoch, sequence))
        masks = (
            (ck.acked, ck.revived, ck.superseded) if ck else self.outcomes.get((epoch, sequence))
        )
        bit = 1 << member
        if masks is None:
            masks = self.acked_in_memory.get((epoch, sequence))
            known = masks is not None and masks[0] & bit
            return DeliveryStatus.ACKED if known else DeliveryStatus.UNKNOWN
        acked, revived, moved = masks
        if moved & bit:
            return DeliveryStatus.MOVED
        if ck is not None and not ck.members & bit:
            return DeliveryStatus.RESET
        if acked & revived & bit:
            return DeliveryStatus.DEAD_LETTERED
        if acked & bit:
            return DeliveryStatus.ACKED
        if revived & bit:
            return DeliveryStatus.REVIVED
        return DeliveryStatus.WAITING if ck is not None else DeliveryStatus.RESET

    # -- apply

    def start(
        self,
        group_id: int,
        topic_id: int,
        queue_id: int,
        offset: int,
        *,
        fifo: bool = False,
        logged: bool = False,
    ) -> QueueProgress:
        """The group's first look at the queue; `logged` when a record says where it begins."""
        place = (group_id, topic_id, queue_id)
        progress = FifoProgress(offset, place) if fifo else QueueProgress(offset, place)
        progress.is_logged = offset if logged else 0
        self._progress[progress.place] = progress
        if self._saving is not None:
            progress.snapshot = self._saving.number
        return progress

    def apply(self, record: ReviveRecord, log_ms: int) -> None:
        """One record of the revive topic; `log_ms` is when it was written.

        BadRecord, with nothing changed, for one that cannot be true.
        """
        if isinstance(record, EndRecord):
            ended = self._live.get((record.epoch, record.sequence))
            if ended is not None:
                kind = record.kind
                self.end(
                    ended,
                    record.members & ended.waiting,
                    acked=kind is _ACK,
                    revived=kind is not _ACK,
                    over=kind is not _RETURNED,
                    counted=record.counted,
                    log_ms=log_ms,
                )
        elif isinstance(record, CheckPointRecord):
            ck = record.check_point(log_ms)
            self.open(ck, log_ms)
            if not record.flags & FIFO:
                self._logged(ck)
        elif isinstance(record, ChangeRecord):
            self._take_over(record, log_ms)
        else:
            self.parking.unpark(record, log_ms)

    def commit(
        self,
        group_id: int,
        topic_id: int,
        queue_id: int,
        offset: int,
        *,
        acked: Iterable[tuple[int, int, int]],
        log_ms: int,
    ) -> None:
        """Everything below `offset` is over, says a record (check_point_buffer.py), and `acked`
        are the check points that ended by it: epoch, sequence and members."""
        place = (group_id, topic_id, queue_id)
        progress = self._progress.get(place) or self.start(*place, offset)
        if self._saving is not None:
            self._saving.keep_progress(place, progress)
        progress.committed = max(progress.committed, offset)
        progress.cursor = max(progress.cursor, offset)
        progress.is_logged = max(progress.is_logged, offset)
        for epoch, sequence, members in acked:
            self.acked_in_memory.add(log_ms, (epoch, sequence), (members, 0, 0))

    def forget_ended(self, now_ms: int) -> None:
        """Of check points that ended long ago nothing is known any more."""
        self.outcomes.forget(now_ms)
        self.acked_in_memory.forget(now_ms)

    def mark_logged(self, ck: PopCheckPoint, written_ms: int, ended_ms: int) -> None:
        """It is a record now, with its acks: the log times of the two records."""
        if self._saving is not None:
            self._saving.keep_progress(ck.place, self._progress[ck.place])
        ck.buffered = False
        ck.popped_at_ms = written_ms  # as a start or a slave sees it
        self._logged(ck)
        if ck.finished:
            self.outcomes.add(ended_ms, ck.key, (ck.acked, ck.revived, ck.superseded))

    def apply_revival(self, token: RevivalToken, log_ms: int) -> None:
        """A retry or dead-letter record was written: that member of its check point is over."""
        ends = token.ends
        if isinstance(ends, ParkedMessage):
            self.parking.over(ends.topic_id, {ends.offset}, log_ms)
            return
        assert isinstance(ends, EndedDelivery), "a token that ends no delivery"
        ck = self._live.get(ends[:2])
        if ck is not None:
            bits = ck.waiting & 1 << ends.member
            # Both bits say that it became a dead letter.
            self.end(ck, bits, acked=token.dead, revived=True, log_ms=log_ms)

    def reset(
        self,
        group_id: int,
        topic_id: int,
        queue_id: int,
        offset: int,
        log_ms: int,
        *,
        fifo: bool = False,
    ) -> int:
        """The group reads on at `offset`, and its deliveries of this queue are over: no ack of
        them counts and none comes back.  Returns how many were in flight.
        """
        place = (group_id, topic_id, queue_id)
        progress = self._progress.get(place)
        if progress is None:
            self.start(*place, offset, fifo=fifo, logged=True)
            return 0
        if self._saving is not None:
            self._saving.keep_progress(place, progress)
        for ck in self._open_at(place, progress):
            if self._saving is not None:
                self._saving.keep(ck)
            self.due_times.remove(ck)
            self._forget(ck, log_ms)
        ended = progress.in_flight
        self.in_flight -= ended
        progress.reset_to(offset)
        if fifo:
            self.parking.reset(place, offset, log_ms)
        return ended

    def start_epoch(self, epoch: int, unanswered_from_ms: int) -> None:
        """Another epoch begins. What was popped from that log time on may never have reached its
        consumer, who would keep it for hours while it lives: it is renewed no more."""
        for ck in self._live.values():
            younger = ck.popped_at_ms >= unanswered_from_ms
            if younger and ck.flags & AUTO_RENEW and ck.epoch < epoch:
                if self._saving is not None:
                    self._saving.keep(ck)
                ck.flags &= ~AUTO_RENEW

    def _open_at(self, place: GroupQueue, progress: QueueProgress) -> list[PopCheckPoint]:
        """The live check points of one queue, those that changes made included."""
        if isinstance(progress, FifoProgress):
            return [ck for ck in self._live.values() if ck.place == place]
        roots = {ck.key for ck in progress.open if ck.key in self._live}
        if any(self._live[key].superseded for key in roots):
            after = [
                ck
                for ck in self._live.values()
                if ck.first_check_point and ck.first_check_point.key in roots
            ]
        else:
            after = []
        return [*(self._live[key] for key in roots), *after]

    def successor(
        self, place: GroupQueue, epoch: int, sequence: int, offset: int
    ) -> PopCheckPoint | None:
        """What a change made of that delivery, if its handle was not used yet."""
        ck = self._changed.get((sequence, offset))
        if ck is None or ck.place != place or ck.epoch < epoch or not ck.waiting:
            return None
        return ck

    def _leave(self, ck: PopCheckPoint) -> None:
        del self._live[ck.key]
        if ck.first_check_point is not None and self._changed.get(_taken_over(ck)) is ck:
            del self._changed[_taken_over(ck)]

    def drop_topic(self, topic_id: int) -> None:
        self.parked.drop(lambda key: topic_id in (key.topic_id, key.parking_id))
        self._drop(lambda ck: ck.topic_id == topic_id, lambda key: key[1] == topic_id)

    def drop_queue(self, topic_id: int, queue_id: int, groups: Iterable[int]) -> None:
        """A lite topic is gone, of which nothing is in flight: nobody has a place in it."""
        for group_id in groups:
            self._remove_progress((group_id, topic_id, queue_id))

    def drop_group(self, group_id: int) -> None:
        self.parked.drop(lambda key: key.group_id == group_id)
        self._drop(lambda ck: ck.group_id == group_id, lambda key: key[0] == group_id)

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        self._snapshots += 1
        self._saving = TableSnapshot(
            self._snapshots,
            self._live.values(),
            self._progress.values(),
            self.moved,
            self.outcomes,
            self.acked_in_memory,
        )
        return self._pieces(self._saving)

    def _pieces(self, saving: TableSnapshot) -> Iterator[tuple[bytes, int]]:
        yield from saving.pieces()
        self._saving = None

    def restore(self, content: bytes) -> None:
        if self._restorer is None:
            self._restorer = TableRestorer(self.moved, self.outcomes, self.acked_in_memory)
        self._restorer.take(content)

    def restored(self) -> None:
        if self._restorer is not None:
            self._live, self._progress, self.in_flight = self._restorer.finish()
            changed = [ck for ck in self._live.values() if ck.first_check_point is not None]
            self._changed = {_taken_over(ck): ck for ck in changed}
            self._restorer = None
            for ck in self._live.values():
                if ck.waiting:  # else it is there for those that changes made of it
                    self.due_times.add(ck)
                self.receives.add(ck)

    def check_invariants(self) -> None:
        """What is in flight is what live check points wait for, by queue and in all.

        Raises AssertionError, also for what the tables below say of themselves.
        """
        in_flight: Counter[GroupQueue] = Counter()
        for ck in self._live.values():
            assert not ck.finished, f"check point {ck.key} is finished and still live"
            first = ck.first_check_point
            assert first is None or self._live.get(first.key) is first, f"{ck.key} lost its first"
            in_flight[ck.place] += ck.waiting.bit_count()
        for place, progress in self._progress.items():
            assert progress.place == place
            assert progress.in_flight == in_flight[place], (
                f"{place}: {progress.in_flight} in flight, but {in_flight[place]} wait"
            )
            progress.check_invariants()
        assert self.in_flight == in_flight.total(), f"{self.in_flight} in all"
        self.due_times.check_invariants()
        self.parked.check_invariants()

    # -- inside

    def open(self, ck: PopCheckPoint, log_ms: int) -> None:
        """It was handed out; one of the buffer's is no record yet."""
        place = ck.place
        fifo = bool(ck.flags & FIFO)
        start = ck.next_offset if fifo else ck.start_offset
        progress = self._progress.get(place) or self.start(*place, start, fifo=fifo)
        ck.place = progress.place
        if self._saving is not None:
            self._saving.keep_progress(place, progress)
            ck.snapshot = self._saving.number
        count = ck.members.bit_count()
        if isinstance(progress, FifoProgress):
            progress.opened(ck.offsets(ck.members), ck.next_offset, log_ms)
            self.receives.add(ck)
        else:
            if not progress.open:  # what was passed over before it is over
                progress.committed = max(progress.committed, ck.start_offset)
            progress.open.append(ck)
            progress.cursor = max(progress.cursor, ck.next_offset)
            progress.in_flight += count
        self.in_flight += count
        self._live[ck.key] = ck
        self.due_times.add(ck)

    def _logged(self, ck: PopCheckPoint) -> None:
        progress = self._progress[ck.place]
        progress.is_logged = max(progress.is_logged, ck.next_offset)

    def _take_over(self, record: ChangeRecord, log_ms: int) -> None:
        old = self._live.get((record.old_epoch, record.old_sequence))
        if old is None:
            return
        member = record.offset - old.start_offset
        if not 0 <= member < MEMBER_LIMIT:
            # Brokers that believed a made-up offset in a handle wrote such a record.
            raise BadRecord(f"a change of message {record.offset}, not one of {old.key}")
        ck = record.check_point(log_ms)
        if self._saving is not None:
            self._saving.keep(old)
            ck.snapshot = self._saving.number
        old.superseded |= 1 << member
        if not old.waiting:
            self.due_times.remove(old)
        ck.first_check_point = old.first_check_point or old
        self._live[ck.key] = ck
        self._changed[_taken_over(ck)] = ck
        self.due_times.add(ck)
        if old.first_check_point is not None:
            self._forget(old, log_ms)

    def end(
        self,
        ck: PopCheckPoint,
        bits: int,
        *,
        acked: bool = False,
        revived: bool = False,
        log_ms: int,
        over: bool = True,
        counted: bool = True,
    ) -> None:
        """These members' deliveries ended; not `over` when the message itself waits in place, for
        its next attempt or, if not `counted`, for the same one.  Neither `acked` nor `revived`:
        they are members no more, which is how a reset leaves them."""
        if not bits:
            return
        root = ck.first_check_point or ck
        place = ck.place
        progress = self._progress[place]
        if self._saving is not None:
            self._saving.keep(ck)
            self._saving.keep(root)
            self._saving.keep_progress(place, progress)
        for check_point in (ck, root) if root is not ck else (ck,):
            ended = bits << (ck.start_offset - check_point.start_offset)
            if acked:
                check_point.acked |= ended
            if revived:
                check_point.revived |= ended
            if not acked and not revived:
                check_point.members &= ~ended
        if not ck.waiting:
            self.due_times.remove(ck)
        count = bits.bit_count()
        self.in_flight -= count
        if ck is not root:
            self._forget(ck, log_ms)
        if root.finished:
            self._forget(root, log_ms)
        if isinstance(progress, FifoProgress):
            offsets = ck.offsets(bits)
            progress.finish_delivery(offsets, over=over, counted=counted, log_ms=log_ms)
            if over:
                for offset in offsets:
                    unparked = self.parked.finish_message(ck.topic_id, offset)
                    if unparked is not None:
                        self.parking.on_unparked(unparked)
            self.on_unblocked(ck.topic_id, ck.group_id, ck.queue_id)
            return
        progress.in_flight -= count
        if root.finished:
            self._commit(progress)

    def _commit(self, progress: QueueProgress) -> None:
        """Head of line: the offset passes a check point once all its members have ended."""
        while progress.open and progress.open[0].finished:
            progress.committed = progress.open.popleft().next_offset
        to = progress.open[0].start_offset if progress.open else progress.cursor
        progress.committed = max(progress.committed, to)

    def _forget(self, ck: PopCheckPoint, log_ms: int) -> None:
        self._leave(ck)
        self.receives.remove(ck)
        if not ck.buffered:
            self.outcomes.add(log_ms, ck.key, (ck.acked, ck.revived, ck.superseded))

    def _drop(
        self,
        of_check_point: Callable[[PopCheckPoint], bool],
        of_progress: Callable[[GroupQueue], bool],
    ) -> None:
        for ck in [ck for ck in self._live.values() if of_check_point(ck)]:
            if self._saving is not None:
                self._saving.keep(ck)
            self._leave(ck)
            self.receives.remove(ck)
            self.due_times.remove(ck)
        for place in [place for place in self._progress if of_progress(place)]:
            self._remove_progress(place)

    def _remove_progress(self, place: GroupQueue) -> None:
        progress = self._progress.get(place)
        if progress is None:
            return
        if self._saving is not None:
            self._saving.keep_progress(place, progress)
        self.in_flight -= progress.in_flight
        del self._progress[place]
