"""The check-point table in snapshots: bounded pieces, pre-images, and back.

A check point or a queue's progress that is about to change while a snapshot runs is encoded
first, as it was, and so is one that is about to be removed; `number` on the object says for
which snapshot that was done already.  An object made after the begin has that number at once.  So
the lists of objects need not be made at the begin, where they would cost 10 ms at a hundred
thousand queues and groups; each is made in a step of its own.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, ValuesView

from popmq.broker.deliveries.ended_check_points import EndedCheckPoints, Key, MemberMasks
from popmq.broker.deliveries.pop_check_point import FIFO, PopCheckPoint, member_bits
from popmq.broker.deliveries.queue_progress import FifoProgress, GroupQueue, QueueProgress
from popmq.broker.deliveries.relocated_bodies import RelocatedBodies
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.log.snapshot_table import Row, entry_hash
from popmq.broker.persistence.retention import LiveBody

_PER_PIECE = 256
_CHECK_POINT, _PROGRESS, _OUTCOME, _MOVED, _FIFO = b"c", b"p", b"o", b"m", b"f"
_ACKED_IN_MEMORY = b"a"
# epoch, root epoch (without a root: the receive's attempt id), flags, topic, group, queue |
# sequence, root sequence, members, start, next, popped, revive at, client, acked, revived, moved
_LIVE = struct.Struct(">IIIIIIQQQQQQQQQQQ")
# group, topic, queue, open | committed, cursor, logged
_QUEUE = struct.Struct(">IIIIQQQ")
_OPEN = struct.Struct(">IQQ?")  # epoch, sequence, next offset, finished
# Of a FIFO group: group, topic, queue | ranges that are over, attempts | committed, cursor, logged
_FIFO_QUEUE = struct.Struct(">IIIIIQQQ")
_RANGE = struct.Struct(">QQ")
_ATTEMPTS = struct.Struct(">QI")  # offset, deliveries that ended
_BODY = struct.Struct(">IIQQIQ")  # topic, queue, offset, position, size, tag hash
_ENDED = struct.Struct(">QIQQQQ")  # log_ms, epoch, sequence, acked, revived, moved


def encode_check_point(ck: PopCheckPoint) -> bytes:
    root = ck.first_check_point
    return _LIVE.pack(
        ck.epoch,
        root.epoch if root else ck.attempt_id,
        ck.flags,
        ck.topic_id,
        ck.group_id,
        ck.queue_id,
        ck.sequence,
        root.sequence if root else 0,
        ck.members,
        ck.start_offset,
        ck.next_offset,
        ck.popped_at_ms,
        ck.revive_at_ms,
        ck.client,
        ck.acked,
        ck.revived,
        ck.superseded,
    )


def encode_progress(place: GroupQueue, progress: QueueProgress) -> bytes:
    head = _QUEUE.pack(
        *place, len(progress.open), progress.committed, progress.cursor, progress.is_logged
    )
    return head + b"".join(
        _OPEN.pack(ck.epoch, ck.sequence, ck.next_offset, ck.finished) for ck in progress.open
    )


def encode_fifo_progress(place: GroupQueue, progress: FifoProgress) -> bytes:
    attempts = sorted(progress.attempts.items())
    head = _FIFO_QUEUE.pack(
        *place,
        len(progress.finished),
        len(attempts),
        progress.committed,
        progress.cursor,
        progress.is_logged,
    )
    ranges = b"".join(_RANGE.pack(*offset_range) for offset_range in progress.finished)
    return head + ranges + b"".join(_ATTEMPTS.pack(*attempt) for attempt in attempts)


class TableSnapshot:
    """One snapshot of the table while it runs."""

    def __init__(
        self,
        number: int,
        check_points: ValuesView[PopCheckPoint],
        progress: ValuesView[QueueProgress],
        moved: RelocatedBodies,
        outcomes: EndedCheckPoints,
        acked_in_memory: EndedCheckPoints,
    ) -> None:
        self.number = number
        self._check_points = check_points
        self._progress = progress
        self._moved = moved.items()
        self._ended = [
            (_OUTCOME, outcomes, outcomes.added),
            (_ACKED_IN_MEMORY, acked_in_memory, acked_in_memory.added),
        ]
        self._kept_check_points: list[bytes] = []
        self._kept_progress: list[bytes] = []
        self._kept_fifo: list[bytes] = []

    def keep(self, ck: PopCheckPoint) -> None:
        """Called before a check point changes."""
        if ck.snapshot < self.number:
            ck.snapshot = self.number
            self._kept_check_points.append(encode_check_point(ck))

    def keep_progress(self, place: GroupQueue, progress: QueueProgress) -> None:
        """Called before a queue's progress changes, or one of its open check points ends."""
        if progress.snapshot < self.number:
            progress.snapshot = self.number
            if isinstance(progress, FifoProgress):
                self._kept_fifo.append(encode_fifo_progress(place, progress))
            else:
                self._kept_progress.append(encode_progress(place, progress))

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        check_points = list(self._check_points)
        for at in range(0, len(check_points), _PER_PIECE):
            for ck in check_points[at : at + _PER_PIECE]:
                self.keep(ck)
            yield self._live_piece()
        all_progress = list(self._progress)
        for at in range(0, len(all_progress), _PER_PIECE):
            for progress in all_progress[at : at + _PER_PIECE]:
                self.keep_progress(progress.place, progress)
            yield self._progress_piece()
            yield from self._fifo_pieces()
        if self._kept_check_points:
            yield self._live_piece()
        if self._kept_progress:
            yield self._progress_piece()
        yield from self._fifo_pieces()
        for at in range(0, len(self._moved), _PER_PIECE):
            bodies = [
                _BODY.pack(*identity, *unit) for identity, unit in self._moved[at : at + _PER_PIECE]
            ]
            yield _MOVED + b"".join(bodies), 0  # forgotten in rounds, so no part of the hash
        for kind, ended, end in self._ended:
            for some in ended.added_until(end, 4 * _PER_PIECE):
                # They fade with time, so they are no part of the state hash.
                yield kind + _ended_entries(some, ended.get), 0

    def _live_piece(self) -> tuple[bytes, int]:
        entries, self._kept_check_points = self._kept_check_points, []
        return _CHECK_POINT + b"".join(entries), sum(map(entry_hash, entries))

    def _progress_piece(self) -> tuple[bytes, int]:
        entries, self._kept_progress = self._kept_progress, []
        return _PROGRESS + b"".join(entries), sum(map(_progress_hash, entries))

    def _fifo_pieces(self) -> Iterator[tuple[bytes, int]]:
        """One queue a piece: what is over and what came back is a list of its own."""
        while self._kept_fifo:
            entry = self._kept_fifo.pop()
            yield _FIFO + entry, _fifo_hash(entry)


def _ended_entries(
    some: Iterable[tuple[int, Key, MemberMasks]], masks_of: Callable[[Key], MemberMasks | None]
) -> bytes:
    """Without those that became too old meanwhile."""
    known = ((log_ms, key, masks_of(key)) for log_ms, key, _ in some)
    return b"".join(
        _ENDED.pack(log_ms, *key, *masks) for log_ms, key, masks in known if masks is not None
    )


def _progress_hash(entry: bytes) -> int:
    """Where a queue was read up to, without what was only passed over: that is no record.
    Nor is a first look."""
    group_id, topic_id, queue_id, _, _, _, logged = _QUEUE.unpack_from(entry)
    header = _QUEUE.pack(group_id, topic_id, queue_id, 0, 0, 0, logged)
    return entry_hash(header) if logged else 0


def _fifo_hash(entry: bytes) -> int:
    """As far as records say: not what filters passed over, nor what follows from that."""
    group_id, topic_id, queue_id, ranges, attempts, _, _, logged = _FIFO_QUEUE.unpack_from(entry)
    head = _FIFO_QUEUE.pack(group_id, topic_id, queue_id, 0, attempts, 0, 0, logged)
    reported_head = head + entry[_FIFO_QUEUE.size + ranges * _RANGE.size :]
    return entry_hash(reported_head) if logged or attempts else 0


class TableRestorer:
    """What an empty table gets from the pieces of a snapshot."""

    def __init__(
        self,
        moved: RelocatedBodies,
        outcomes: EndedCheckPoints,
        acked_in_memory: EndedCheckPoints,
    ) -> None:
        self._moved = moved
        self._outcomes = outcomes
        self._acked_in_memory = acked_in_memory
        self._check_points: dict[Key, PopCheckPoint] = {}
        self._queues: dict[GroupQueue, QueueProgress] = {}
        self._roots: dict[Key, Key] = {}
        self._places: list[tuple[GroupQueue, int, int, int, list[tuple[int, int, int, bool]]]] = []

    def take(self, content: bytes) -> None:
        kind, data = content[:1], content[1:]
        if kind == _CHECK_POINT:
            for fields in _LIVE.iter_unpack(data):
                self._live(fields)
        elif kind == _PROGRESS:
            self._progress(data)
        elif kind == _FIFO:
            self._fifo(data)
        elif kind == _MOVED:
            for topic_id, queue_id, offset, *unit in _BODY.iter_unpack(data):
                self._moved.apply(LiveBody(topic_id, queue_id, offset, QueueUnit(*unit)))
        else:
            ended = self._acked_in_memory if kind == _ACKED_IN_MEMORY else self._outcomes
            for log_ms, epoch, sequence, *masks in _ENDED.iter_unpack(data):
                acked, revived, moved = masks
                ended.add(log_ms, (epoch, sequence), (acked, revived, moved))

    def finish(self) -> tuple[dict[Key, PopCheckPoint], dict[GroupQueue, QueueProgress], int]:
        """Live check points in the order in which they were made, as if the log had been replayed,
        progress of queues, and how many deliveries are in flight."""
        live, in_flight = dict(sorted(self._check_points.items())), 0
        for ck in live.values():
            progress = self._queues.get(ck.place)
            if ck.flags & FIFO and isinstance(progress, FifoProgress):
                progress.in_flight_offsets.update(
                    ck.offset_of(member) for member in member_bits(ck.waiting)
                )
                progress.in_flight = len(progress.in_flight_offsets)
                in_flight += ck.waiting.bit_count()
        for key, root in self._roots.items():
            live[key].first_check_point = live[root]
        for place, committed, cursor, logged, opened in self._places:
            progress = self._queues[place] = QueueProgress(committed, place)
            progress.cursor, progress.is_logged = cursor, logged
            for epoch, sequence, next_offset, finished in opened:
                ck = _ended(next_offset) if finished else live[epoch, sequence]
                ck.place = progress.place
                progress.open.append(ck)
                count = (ck.members & ~(ck.acked | ck.revived)).bit_count()
                progress.in_flight += count
                in_flight += count
        return live, self._queues, in_flight

    def _live(self, fields: tuple[int, ...]) -> None:
        epoch, root_epoch, flags, topic_id, group_id, queue_id, sequence, root_sequence = fields[:8]
        members, start, following, popped, revive_at, client, acked, revived, moved = fields[8:]
        ck = PopCheckPoint(
            (epoch, sequence),
            (group_id, topic_id, queue_id),
            members,
            start,
            following - start,
            popped,
            revive_at,
            client,
            flags,
            acked,
            revived,
            moved,
        )
        self._check_points[ck.key] = ck
        if root_sequence:
            self._roots[ck.key] = (root_epoch, root_sequence)
        else:
            ck.attempt_id = root_epoch

    def _fifo(self, data: bytes) -> None:
        *place, ranges, attempts, committed, cursor, logged = _FIFO_QUEUE.unpack_from(data)
        group_id, topic_id, queue_id = place
        at = (group_id, topic_id, queue_id)
        progress = self._queues[at] = FifoProgress(committed, at)
        progress.cursor, progress.is_logged = cursor, logged
        middle = _FIFO_QUEUE.size + ranges * _RANGE.size
        for start, end in _RANGE.iter_unpack(data[_FIFO_QUEUE.size : middle]):
            progress.finished.add(start, end)
        progress.attempts.update(_ATTEMPTS.iter_unpack(data[middle:]))
        assert len(progress.attempts) == attempts

    def _progress(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            group_id, topic_id, queue_id, count, committed, cursor, logged = _QUEUE.unpack_from(
                data, at
            )
            at += _QUEUE.size
            end = at + count * _OPEN.size
            opened = list(_OPEN.iter_unpack(data[at:end]))
            at = end
            place = (group_id, topic_id, queue_id)
            self._places.append((place, committed, cursor, logged, opened))


def _ended(next_offset: int) -> PopCheckPoint:
    """Stands in a queue's line for a check point that ended; only where it led to counts."""
    return PopCheckPoint((0, 0), (0, 0, 0), 0, 0, next_offset, 0, 0, 0, 0)


def snapshot_rows(content: bytes) -> Iterator[Row]:
    """What counts in one piece: live check points, and how far records say that groups are."""
    kind, data = content[:1], content[1:]
    if kind == _CHECK_POINT:
        for epoch, root_epoch, flags, topic, group, queue, *more in _LIVE.iter_unpack(data):
            sequence, root_sequence, members, start, following, popped, *rest = more
            revive_at, client, acked, revived, moved = rest
            yield Row(
                f"check point {epoch}/{sequence}",
                {
                    "group": group,
                    "topic": topic,
                    "queue": queue,
                    "start_offset": start,
                    "next_offset": following,
                    "members": f"{members:b}",
                    "acked": f"{acked:b}",
                    "revived": f"{revived:b}",
                    "moved": f"{moved:b}",
                    "popped_at_ms": popped,
                    "revive_at_ms": revive_at,
                    "flags": flags,
                    "client": f"{client:x}",
                    "root": (root_epoch, root_sequence),
                },
            )
    elif kind == _PROGRESS:
        at = 0
        while at < len(data):
            group, topic, queue, count, _, _, logged = _QUEUE.unpack_from(data, at)
            at += _QUEUE.size + count * _OPEN.size
            if logged:
                yield Row(_queue_name(group, topic, queue), {"read_up_to": logged})
    elif kind == _FIFO:
        group, topic, queue, ranges, _, _, _, logged = _FIFO_QUEUE.unpack_from(data)
        attempts = dict(_ATTEMPTS.iter_unpack(data[_FIFO_QUEUE.size + ranges * _RANGE.size :]))
        if logged or attempts:
            fields = {"read_up_to": logged, "attempts": attempts}
            yield Row(_queue_name(group, topic, queue), fields)


def _queue_name(group_id: int, topic_id: int, queue_id: int) -> str:
    return f"group {group_id}, topic {topic_id}, queue {queue_id}"
