"""The doctor's walk through the log: further than a start goes, past every damaged place.

A start stops at the first bytes that are no intact record.  The walk looks for the next
record behind them whose header says its own position and whose crc matches, and goes on.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from popmq.broker.doctor.finding import Finding, MoveFiles, RequiredAction
from popmq.broker.log.segment_file import SegmentFile
from popmq.common.disk import Disk
from popmq.common.record.message import HEADER_SIZE, BadRecord, Header, RecordKind, check_record

_READ_BYTES = 4 << 20
# Version and kind, as they stand in every header; `(?=` finds overlapping ones too.
_VERSION_AND_KIND = re.compile(rb"\x01(?=[\x01-\x20])")
_VERSION_AT = 8
_REVIVE_NAMES = {1: "check points", 2: "acks", 3: "changes"}
_KIND_NAMES = {
    RecordKind.MESSAGE: "messages",
    RecordKind.META: "topics and groups",
    RecordKind.OFFSET: "offsets",
    RecordKind.EPOCH_START: "epoch starts",
    RecordKind.TRANSACTION: "ends and checks of transactions",
    RecordKind.MOVED: "moved messages",
    RecordKind.TIMER: "ends of timers",
    RecordKind.SNAPSHOT_MARK: "marks of snapshots",
    RecordKind.STATE_HASH: "state hashes",
    RecordKind.LOG_START: "starts of the log",
    RecordKind.LITE_TOPIC: "lite topics made and removed",
}
# A copy that retention makes of a body keeps its old identity and gets no unit.
_WITH_UNIT = (
    RecordKind.MESSAGE,
    RecordKind.META,
    RecordKind.REVIVE,
    RecordKind.OFFSET,
    RecordKind.TRANSACTION,
    RecordKind.LITE_TOPIC,
)


@dataclass(frozen=True, slots=True)
class Record:
    header: Header
    data: bytes

    @property
    def name(self) -> str:
        """What an operator calls it, in the plural."""
        if self.header.kind == RecordKind.REVIVE:
            return _REVIVE_NAMES.get(self.data[HEADER_SIZE + 1], "other records")
        kind = RecordKind(self.header.kind)
        return _KIND_NAMES.get(kind, f"records of kind {kind.name.lower()}")

    @property
    def has_unit(self) -> bool:
        """Whether a queue has a unit for it, under the offset that the header says."""
        return self.header.topic_id > 0 and self.header.kind in _WITH_UNIT


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """No intact record from `position` on, but again from `end`."""

    position: int
    end: int
    reason: str
    counted: Counter[str]  # what lies before it
    messages: Counter[int]  # the messages of these, by topic id


@dataclass(frozen=True, slots=True)
class Padding:
    """A padding record whose size is wrong; nothing else of it is."""

    path: str
    at: int
    size: int
    wrong_size: int


class LogWalk:
    """After `records` is exhausted: `end`, `holes`, `counted` and what stands behind the end."""

    def __init__(self, disk: Disk, data: str, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.segments: list[SegmentFile] = []
        self.findings: list[Finding] = []
        self.counted: Counter[str] = Counter()
        self.messages: Counter[int] = Counter()
        self.holes: list[DamagedRange] = []
        self.paddings: list[Padding] = []
        self.end_reason = "zeros"
        self._buffer = b""
        self._buffer_at = -1
        for name in disk.names(f"{data}/commitlog"):
            self._add(disk, data, name)
        self.start = self.end = self.segments[0].start if self.segments else 0

    def records(self) -> Iterator[Record]:
        """Every intact record, in order, with the holes noted on the way."""
        broken: tuple[int, str] | None = None  # where and why the intact bytes end
        expected = self.start
        for segment in self.segments:
            if segment.start != expected:
                broken = broken or (expected, "a segment file is missing")
            position = segment.start
            expected = segment.end
            while segment.end - position >= HEADER_SIZE:
                record = self._intact(segment, position)
                if isinstance(record, str):
                    broken = broken or (position, record)
                    position_after = self._next_intact(segment, position + 1)
                    if position_after is None:
                        break
                    position = position_after
                    continue
                if broken:
                    before = Counter(self.counted), Counter(self.messages)
                    self.holes.append(DamagedRange(broken[0], position, broken[1], *before))
                    broken = None
                self.end = position = record.header.end
                if record.header.kind != RecordKind.PADDING:
                    self.counted[record.name] += 1
                    if record.header.kind == RecordKind.MESSAGE:
                        self.messages[record.header.topic_id] += 1
                    yield record
        self.end_reason = broken[1] if broken else "zeros"

    def filled_behind(self, position: int) -> tuple[int, int]:
        """How many bytes from `position` are not zero, and where the first of them is (-1)."""
        count, first = 0, -1
        for segment in self.segments:
            at = max(position, segment.start)
            while at < segment.end:
                data = segment.read(at, _READ_BYTES)
                if not data:
                    break
                filled = len(data) - data.count(0)
                if filled and first < 0:
                    first = at + len(data) - len(data.lstrip(b"\0"))
                count += filled
                at += len(data)
        return count, first

    def segment_of(self, position: int) -> SegmentFile | None:
        return next(
            (segment for segment in self.segments if segment.start <= position < segment.end), None
        )

    def file_of(self, position: int) -> str:
        segment = self.segment_of(position)
        return f"commitlog/{segment.start:020d}" if segment else "commitlog"

    # -- inside

    def _add(self, disk: Disk, data: str, name: str) -> None:
        path = f"commitlog/{name}"
        if len(name) != 20 or not name.isdigit():
            self.findings.append(
                Finding(
                    "foreign file",
                    path,
                    0,
                    "a segment is named by 20 digits",
                    "the broker refuses to start",
                    "move it away",
                    RequiredAction.REPAIR,
                    (MoveFiles((path,)),),
                )
            )
            return
        start = int(name)
        if start % self.segment_bytes:
            self.findings.append(
                Finding(
                    "misplaced segment",
                    path,
                    start,
                    f"does not start at a multiple of {self.segment_bytes} bytes",
                    "the broker refuses to start",
                    "set store.segment_bytes back to what it was, or name it (--segment-bytes)",
                    RequiredAction.HUMAN,
                )
            )
            return
        segment = SegmentFile(
            disk, f"{data}/{path}", start=start, size=self.segment_bytes, create=False
        )
        self.segments.append(segment)
        file = disk.open(f"{data}/{path}")
        surplus = file.size() - self.segment_bytes
        file.close()
        if surplus > 0:
            self.findings.append(
                Finding(
                    "trailing garbage",
                    path,
                    segment.end,
                    f"{surplus} bytes behind the segment's end",
                    "they are never read",
                    "leave them",
                    RequiredAction.NOTHING,
                )
            )

    def _intact(self, segment: SegmentFile, position: int) -> Record | str:
        """The record at `position`, or why there is none."""
        front = self._window(segment, position, HEADER_SIZE)
        if not front.strip(b"\0"):
            return "zeros" if front else "the file ends"
        if len(front) == HEADER_SIZE and front[9] == RecordKind.PADDING:
            return self._padding(segment, position, front)
        size = int.from_bytes(front[:4], "big")
        if not HEADER_SIZE <= size <= segment.end - position:
            return f"record size {size} is impossible"
        data = self._window(segment, position, size)
        try:
            header = check_record(data, 0, position)
        except BadRecord as error:
            return str(error)
        known = header.kind in RecordKind._value2member_map_
        return Record(header, data) if known else f"record kind {header.kind} is unknown"

    def _padding(self, segment: SegmentFile, position: int, front: bytes) -> Record | str:
        """A padding fills its segment: its size can only be one, and no crc covers it."""
        right = segment.end - position
        whole = right.to_bytes(4, "big") + front[4:]
        try:
            header = check_record(whole, 0, position)
        except BadRecord as error:
            return str(error)
        size = int.from_bytes(front[:4], "big")
        if size != right:
            at = position - segment.start
            mend = Padding(f"commitlog/{segment.start:020d}", at, right, size)
            if mend not in self.paddings:
                self.paddings.append(mend)
        return Record(header, whole)

    def _next_intact(self, segment: SegmentFile, at: int) -> int | None:
        while segment.end - at >= HEADER_SIZE:
            block = segment.read(at, _READ_BYTES)
            for match in _VERSION_AND_KIND.finditer(block, _VERSION_AT):
                first = match.start() - _VERSION_AT
                recorded = int.from_bytes(block[first + 16 : first + 24], "big")
                if recorded == at + first and isinstance(self._intact(segment, recorded), Record):
                    return recorded
            if len(block) < HEADER_SIZE:
                return None
            # A header that the block's end cut is seen whole in the next one.
            at += max(len(block) - HEADER_SIZE + 1, 1)
        return None

    def _window(self, segment: SegmentFile, position: int, size: int) -> bytes:
        at = position - self._buffer_at
        if self._buffer_at < 0 or at < 0 or at + size > len(self._buffer):
            self._buffer = segment.read(position, max(size, _READ_BYTES))
            self._buffer_at = position
            at = 0
        return self._buffer[at : at + size]
