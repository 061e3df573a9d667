"""What the log holds about one delivery place: check points, acks, changes, resets.

Memory forgets ended deliveries after ten minutes; the revive topic's records stay as long as the
message does.  A scan reads them forward from the message on, in bounded pieces, up to a bound.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from popmq.broker.deliveries.pop_check_point import (
    MEMBER_LIMIT,
    RECORD_SIZE,
    UNCOUNTED,
    ReviveKind,
    UnparkAction,
)
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.operations.resumable_reads import ResumableRead, read
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    RecordKind,
    check_record,
    decode_header,
)

RECORDS_A_STEP = 512
RECORDS_LIMIT = 1_000_000  # of the revive topic, for one place
OFFSETS_LIMIT = 200_000
OFFSETS_A_STEP = 64
# The record header, and behind it the body of pop_check_point.py.
_RECORD = struct.Struct(">IIBBHIQQQIIQBBHIQQQIIIIQQQ")
_LOG_MS_AT = 24
_POSITION_AT = 16
assert _RECORD.size == RECORD_SIZE

Key = tuple[int, int]  # epoch, sequence of a check point


@dataclass(frozen=True, slots=True)
class GroupQueueOffset:
    """One message of one queue, to one group."""

    group_id: int
    topic_id: int
    queue_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """A check point, or a change of one, that holds the place."""

    key: Key
    member: int
    changed: bool
    position: int
    wall_ms: int
    log_ms: int
    revive_at_ms: int
    client: int


@dataclass(frozen=True, slots=True)
class DeliveryEnd:
    """A record that says what became of a member: an ack, or another kind."""

    kind: int
    position: int
    wall_ms: int
    kept: bool = False  # a dead letter, which stays where it is

    @property
    def name(self) -> str:
        try:
            return ReviveKind(self.kind).name.lower().replace("_", " ")
        except ValueError:
            return f"revive record of kind {self.kind}"


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """An OFFSET record of the place's queue."""

    offset: int
    reason: OffsetReason
    position: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class ParkedKeySkip:
    """An operator's command that passed over a parked message group; the place is within its range.

    The range holds messages of other message groups too: `key_offset` is that of one which it
    is about.
    """

    key_offset: int
    position: int
    wall_ms: int


@dataclass(slots=True)
class Evidence:
    deliveries: list[DeliveryRecord] = field(default_factory=list)  # in log order
    delivery_ends: dict[Key, DeliveryEnd] = field(default_factory=dict)
    offset_changes: list[OffsetChange] = field(default_factory=list)  # in log order
    skips: list[ParkedKeySkip] = field(default_factory=list)  # in log order
    passed_at_ms: int = 0  # of the first check point behind the place
    scanned: int = 0
    complete: bool = True

    def after_last_rewind(self, offset: int) -> "Evidence":
        """Without what was before the last OFFSET record that made the group read `offset`
        (again)."""
        rewinds = [
            change.position
            for change in self.offset_changes
            if change.offset <= offset and change.reason is not OffsetReason.COMMITTED
        ]
        if not rewinds:
            return self
        handed = [delivery for delivery in self.deliveries if delivery.position > rewinds[-1]]
        sets = [change for change in self.offset_changes if change.position > rewinds[-1]]
        return replace(self, deliveries=handed, offset_changes=sets)

    def skipped(self, offset: int) -> OffsetChange | None:
        """The last OFFSET record by which somebody passed over `offset`."""
        skips = (s for s in reversed(self.offset_changes) if s.reason is not OffsetReason.COMMITTED)
        return next((skip for skip in skips if skip.offset > offset), None)

    def committed(self, offset: int) -> OffsetChange | None:
        """The first one that says that `offset` is over, of a group with buffered check points."""
        commits = (s for s in self.offset_changes if s.reason is OffsetReason.COMMITTED)
        return next((commit for commit in commits if commit.offset > offset), None)

    @property
    def last(self) -> DeliveryRecord | None:
        return self.deliveries[-1] if self.deliveries else None


def gather(
    store: MessageStore, place: GroupQueueOffset, *, position: int, popped_ms: int | None = None
) -> ResumableRead[Evidence]:
    """All records about the place behind log position `position`.

    `popped_ms` is the log time of its check point, when memory knows that: the scan begins
    there.
    """
    evidence = Evidence()
    for queue_id in range(topics.REVIVE_QUEUES):
        queue = store.queue(topics.REVIVE_TOPIC_ID, queue_id)
        if popped_ms is None:
            at = yield from read(partial(first_record, queue, position))
        else:
            at = yield from read(partial(_first, queue, _LOG_MS_AT, popped_ms))
        end = queue.count
        while at < end:
            if evidence.scanned >= RECORDS_LIMIT:
                evidence.complete = False
                break
            size = min(RECORDS_A_STEP, end - at)
            data = yield from read(partial(queue.raw, at, size, wait=False))
            _take(evidence, place, data)
            evidence.scanned += size
            at += size
    evidence.deliveries.sort(key=lambda delivery: delivery.position)
    evidence.skips.sort(key=lambda skip: skip.position)
    yield from _gather_sets(store, place, position, evidence)
    return evidence


def _take(evidence: Evidence, place: GroupQueueOffset, data: bytes) -> None:
    """The records of one piece of one queue; a check point's acks stand in its own queue."""
    offset = place.offset
    where = (place.topic_id, place.group_id, place.queue_id)
    keys = {(delivery.key): delivery.member for delivery in evidence.deliveries}
    for number, record in enumerate(_RECORD.iter_unpack(data)):
        if record[3] != RecordKind.REVIVE:
            continue  # a blank
        kind, key = record[13], (record[15], record[16])
        if kind in (ReviveKind.CHECK_POINT, ReviveKind.CHANGE):
            if record[19:22] != where:
                continue
            start = record[18]
            member = offset - start
            if 0 <= member < MEMBER_LIMIT and record[17] >> member & 1:
                if not _is_intact(data, number, record[6]):
                    evidence.complete = False
                    continue
                keys[key] = member
                evidence.deliveries.append(
                    DeliveryRecord(
                        key,
                        member,
                        kind == ReviveKind.CHANGE,
                        record[6],
                        record[8],
                        record[7],
                        record[24],
                        record[25],
                    )
                )
            elif start > offset:
                wall_ms = record[8]
                evidence.passed_at_ms = min(evidence.passed_at_ms or wall_ms, wall_ms)
        elif kind == ReviveKind.UNPARKED:
            if record[19:22] != where or record[14] != UnparkAction.SKIP:
                continue
            if record[17] <= offset < record[23]:
                if not _is_intact(data, number, record[6]):
                    evidence.complete = False
                    continue
                evidence.skips.append(ParkedKeySkip(record[18], record[6], record[8]))
        elif key in keys and record[17] >> keys[key] & 1:
            if not _is_intact(data, number, record[6]):
                evidence.complete = False
                continue
            kept = kind == ReviveKind.LOST and bool(record[14] & UNCOUNTED)
            evidence.delivery_ends[key] = DeliveryEnd(kind, record[6], record[8], kept)


def _is_intact(data: bytes, number: int, position: int) -> bool:
    """Only records that count are checked: a scan passes over very many."""
    try:
        check_record(data, number * RECORD_SIZE, position)
    except BadRecord:
        return False
    return True


def _first(queue: ConsumeQueue, at: int, value: int) -> int:
    """The first unit whose header has at least `value` in the u64 at byte `at`: both the log's
    positions and its times only grow."""
    low, high = queue.min_offset, queue.count
    while low < high:
        middle = (low + high) // 2
        data = queue.raw(middle, 1, wait=False)
        if int.from_bytes(data[at : at + 8], "big") < value:
            low = middle + 1
        else:
            high = middle
    return low


def first_record(queue: ConsumeQueue, position: int) -> int:
    """The first revive record at log position `position` or behind it; may raise ColdRead."""
    return _first(queue, _POSITION_AT, position)


def first_unit(queue: ConsumeQueue, position: int) -> int:
    """The first unit whose record stands at log position `position` or behind it."""
    low, high = queue.min_offset, queue.count
    while low < high:
        middle = (low + high) // 2
        (unit,) = queue.units(middle, 1, wait=False)
        if unit.position < position:
            low = middle + 1
        else:
            high = middle
    return low


def _gather_sets(
    store: MessageStore, place: GroupQueueOffset, position: int, evidence: Evidence
) -> ResumableRead[None]:
    queue = store.queue(topics.OFFSETS_TOPIC_ID, 0)
    first = yield from read(partial(first_unit, queue, position))
    end = queue.count
    if end - first > OFFSETS_LIMIT:
        first = end - OFFSETS_LIMIT
        evidence.complete = False
    for at in range(first, end, OFFSETS_A_STEP):
        for data in (yield from read(_offset_reader(store, queue, at))):
            record = OffsetRecord.decode(data[HEADER_SIZE:])
            where = (record.group_id, record.topic_id, record.queue_id)
            if where == (place.group_id, place.topic_id, place.queue_id):
                header = decode_header(data)
                evidence.offset_changes.append(
                    OffsetChange(
                        record.queue_offset, record.reason, header.position, header.wall_ms
                    )
                )


def _offset_reader(store: MessageStore, queue: ConsumeQueue, at: int) -> Callable[[], list[bytes]]:
    def look() -> list[bytes]:
        units = queue.units(at, OFFSETS_A_STEP, wait=False)
        return [store.reader.record(unit, wait=False) for unit in units]

    return look
