"""The doctor's look at the index: every unit against the record it should point at.

`IndexCheck.take` sees each intact record once and compares the unit as it lies in the file.
Whether a start mends what is wrong is not decided here but rehearsed (`doctor.py`).
"""

import os
import re
from dataclasses import dataclass, field

from popmq.broker.doctor.log_walk import Record
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.queue_unit import (
    POSITION_LIMIT,
    UNIT,
    UNIT_SIZE,
    index_unit,
    queue_seed,
    with_check,
)
from popmq.common import topics
from popmq.common.disk import Disk, DiskFile
from popmq.common.record.message import RecordKind, peek_message

_READ_UNITS = 4096
_RECORD_POSITION_AT = 16  # in a record's header (message.py)
_SYSTEM_IDS = {
    topics.META_TOPIC: topics.META_TOPIC_ID,
    topics.OFFSETS_TOPIC: topics.OFFSETS_TOPIC_ID,
}
_WITH_ID = re.compile(r"(.+)@(\d+)")  # <topic>@<id>

QueueKey = tuple[int, int]  # topic id, queue id


@dataclass(slots=True)
class QueueIndexCheck:
    """The unit files of one queue, and what the comparison with the log said."""

    folder: str  # below the data folder
    unit_size: int
    files: list[tuple[int, int, DiskFile]] = field(default_factory=list)  # start, size, file
    paths: list[str] = field(default_factory=list)
    structure: str = ""  # what is wrong with names and sizes
    odd_bytes: int = 0
    wrong: int = 0
    missing: int = 0
    extra: int = 0
    first_bad: int = -1
    following: int = -1  # offset behind the newest record that the log has; -1: none
    _buffer: bytes = b""
    _buffer_at: int = -1

    @property
    def count(self) -> int:
        """Units up to the files' end."""
        return (self.files[-1][0] + self.files[-1][1]) // self.unit_size if self.files else 0

    def finish(self, log_start: int, damaged: list[range]) -> None:
        """Count the units behind the newest record that point neither below the log's start (their
        segments were deleted) nor into `damaged` places (their records were)."""
        if self.following < 0 and self.count and self.position_of(self.count - 1) < log_start:
            self.following = self.count
        for offset in range(max(self.following, 0), self.count):
            position = self.position_of(offset)
            self.extra += not any(position in place for place in damaged)

    def position_of(self, offset: int) -> int:
        return unit_position(self.unit(offset), self.unit_size)

    @property
    def only_short(self) -> bool:
        """What a kill leaves: the newest units were still in memory."""
        at_end = self.missing == self.following - self.count
        return at_end and not (self.wrong or self.extra or self.odd_bytes or self.structure)

    @property
    def healthy(self) -> bool:
        return not (self.wrong or self.missing or self.extra or self.odd_bytes or self.structure)

    def unit(self, offset: int) -> bytes:
        """The unit's bytes; fewer or none where the files have none."""
        at = offset * self.unit_size
        inside = at - self._buffer_at
        if self._buffer_at < 0 or inside < 0 or inside + self.unit_size > len(self._buffer):
            self._buffer = self._read(at)
            self._buffer_at = at
            inside = 0
        return self._buffer[inside : inside + self.unit_size]

    def compare(self, offset: int, expected: bytes) -> None:
        unit = self.unit(offset)
        self.following = max(self.following, offset + 1)
        if self.unit_size == UNIT_SIZE and self.folder:
            expected = with_check(expected, queue_seed(self.folder), offset)
        if unit == expected:
            return
        if len(unit) < self.unit_size:
            self.missing += 1
        else:
            self.wrong += 1
        if self.first_bad < 0:
            self.first_bad = offset

    def describe(self) -> str:
        parts = [
            f"{number} {what}"
            for number, what in (
                (self.wrong, "wrong units"),
                (self.missing, "missing units"),
                (self.extra, "units of no record"),
                (self.odd_bytes, "bytes of half a unit"),
            )
            if number
        ]
        if self.structure:
            parts.append(self.structure)
        return ", ".join(parts)

    def _read(self, at: int) -> bytes:
        for start, size, file in self.files:
            if start <= at < start + size:
                return file.read(self.unit_size * _READ_UNITS, at - start)
        return b""


class IndexCheck:
    """All queues of one data folder."""

    def __init__(self, disk: Disk, data: str, revive_unit_bytes: int, cluster: str) -> None:
        """`cluster` may be empty: each revive topic is taken for this store's then."""
        self._disk = disk
        self._data = data
        self.queues: dict[QueueKey, QueueIndexCheck] = {}
        self.strangers: list[tuple[str, list[str]]] = []  # folders that belong to no topic id
        self.clusters: list[str] = []  # named by the folders of revive topics
        for room in ("consumequeue", "system"):
            for name in disk.names(f"{data}/{room}"):
                match = _WITH_ID.fullmatch(name)
                topic_id = int(match[2]) if match else _SYSTEM_IDS.get(name, 0)
                plain = match[1] if match else name
                if room == "system" and plain.startswith(topics.REVIVE_PREFIX):
                    named = plain[len(topics.REVIVE_PREFIX) :]
                    self.clusters.append(named)
                    # One from before the store was taken over by another cluster is nobody's.
                    topic_id = topics.REVIVE_TOPIC_ID if named == (cluster or named) else 0
                is_revive = topic_id == topics.REVIVE_TOPIC_ID
                unit_bytes = revive_unit_bytes if is_revive else UNIT_SIZE
                self._add_topic(f"{room}/{name}", topic_id, unit_bytes)

    def take(self, record: Record) -> None:
        header = record.header
        if not record.has_unit:
            return
        queue = self.queues.get((header.topic_id, header.queue_id))
        if queue is None:
            queue = self.queues[(header.topic_id, header.queue_id)] = QueueIndexCheck("", UNIT_SIZE)
        queue.compare(header.queue_offset, expected_unit(record))

    def finish(self, log_start: int, damaged: list[range]) -> None:
        for queue in self.queues.values():
            queue.finish(log_start, damaged)

    def _add_topic(self, folder: str, topic_id: int, unit_size: int) -> None:
        for name in self._disk.names(f"{self._data}/{folder}"):
            path = f"{folder}/{name}"
            if not name.isdigit() or not topic_id:
                files = [f"{path}/{file}" for file in self._disk.names(f"{self._data}/{path}")]
                if os.path.isfile(f"{self._data}/{path}"):
                    files = [path]
                if files:
                    self.strangers.append((path, files))
                continue
            self.queues[(topic_id, int(name))] = self._open(path, unit_size)

    def _open(self, folder: str, unit_size: int) -> QueueIndexCheck:
        queue = QueueIndexCheck(folder, unit_size)
        for name in self._disk.names(f"{self._data}/{folder}"):
            path = f"{folder}/{name}"
            queue.paths.append(path)
            if len(name) != 20 or not name.isdigit():
                queue.structure = f"{name} is no unit file"
                continue
            file = self._disk.open(f"{self._data}/{path}")
            start, size = int(name), file.size()
            if queue.files and queue.files[-1][0] + queue.files[-1][1] != start:
                queue.structure = f"the units before file {name} are missing"
            queue.odd_bytes = size % unit_size
            queue.files.append((start, size, file))
        return queue


def unit_position(unit: bytes, unit_size: int) -> int:
    """Where the unit says its record is."""
    if unit_size == UNIT_SIZE:
        return int.from_bytes(unit[:8], "big") % POSITION_LIMIT
    return int.from_bytes(unit[_RECORD_POSITION_AT : _RECORD_POSITION_AT + 8], "big")


def stored_unit(queue: ConsumeQueue, record: Record) -> bytes:
    """What the queue hands out for the record; mended if it has to be."""
    offset = record.header.queue_offset
    if record.header.kind == RecordKind.REVIVE:
        return queue.raw(offset, 1)
    units = queue.units(offset, 1)
    return UNIT.pack(*units[0]) if units else b""


def expected_unit(record: Record) -> bytes:
    """What the record's queue holds for it."""
    header = record.header
    if header.kind == RecordKind.REVIVE:
        return record.data
    is_message = header.kind == RecordKind.MESSAGE
    tag_hash = peek_message(record.data)[0] if is_message else 0
    return index_unit(header.position, header.size, tag_hash)
