"""The CommitLog: the one sequence of bytes that everything else is a function of (D1).

Records are appended in memory on the event loop and handed to the flusher as one batch.
Nothing is read before it was written, so there is no cache to keep true.  A record never
crosses a segment's end: a PADDING record, or fewer than 56 zero bytes, fills what is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from popmq.broker.store.mapped_file import MappedFileQueue
from popmq.common.disk import Disk
from popmq.common.errors import Code, Refused
from popmq.common.message import (
    HEADER_SIZE,
    BadRecord,
    Header,
    RecordKind,
    Stamp,
    check_record,
    encode_record,
)

_SCAN_BYTES = 4 << 20


@dataclass(slots=True)
class Batch:
    """Bytes on their way to the disk: runs of adjacent records, each inside one segment."""

    end: int
    runs: list[tuple[int, list[bytes]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    header: Header
    data: bytes  # the whole record


class CommitLog:
    def __init__(self, disk: Disk, folder: str, *, segment_bytes: int) -> None:
        self._files = MappedFileQueue(disk, folder, segment_bytes=segment_bytes, preallocate=True)
        self._segment_bytes = segment_bytes
        self._runs: list[tuple[int, list[bytes]]] = []
        self._run_end = -1
        self._buffer = b""
        self._buffer_at = -1
        self.pending_bytes = 0
        self.end = 0

    def load(self) -> None:
        self._files.load()
        self.end = self.start

    @property
    def start(self) -> int:
        """Position of the oldest byte that is kept."""
        first = self._files.first
        return first.start if first else 0

    def place(self, size: int, stamp: Stamp) -> int:
        """Position at which a record of `size` bytes goes; pads the segment when it must.

        Raises PAYLOAD_TOO_LARGE when no segment can hold it.
        """
        left = self._segment_bytes - self.end % self._segment_bytes
        if size <= left:
            return self.end
        if size > self._segment_bytes:
            raise Refused(
                Code.PAYLOAD_TOO_LARGE,
                f"a record of {size} bytes does not fit a segment of {self._segment_bytes} bytes "
                "(store.segment_bytes)",
            )
        if left >= HEADER_SIZE:
            self._append(
                encode_record(
                    kind=RecordKind.PADDING,
                    stamp=stamp,
                    position=self.end,
                    topic_id=0,
                    queue_id=0,
                    queue_offset=0,
                    size=left,
                )
            )
        self.end += self._segment_bytes - self.end % self._segment_bytes
        return self.end

    def append(self, record: bytes) -> None:
        """Take a record that was encoded for the position that `place` gave."""
        self._append(record)
        self.end += len(record)

    def take_batch(self) -> Batch | None:
        """Everything appended since the last call; hand it to the flusher whole (D2)."""
        if not self._runs:
            return None
        batch = Batch(self.end, self._runs)
        self._runs = []
        self._run_end = -1
        self.pending_bytes = 0
        return batch

    def write(self, batch: Batch) -> None:
        """Write and fdatasync a batch; runs on the flusher. OSError means: stop the process."""
        touched = {}
        for position, parts in batch.runs:
            file = self._files.at_or_new(position)
            file.write(position, parts)
            touched[file.start] = file
        for file in touched.values():
            file.sync()

    def reserve(self, position: int, segments: int) -> None:
        """Allocate the segments behind that of `position`; runs on the flusher."""
        self._files.reserve(position, segments)

    @property
    def room(self) -> int:
        """Bytes that can be appended without a new segment."""
        left = self._segment_bytes - self.end % self._segment_bytes
        return left + self.reserved * self._segment_bytes

    @property
    def reserved(self) -> int:
        """Whole segments that are allocated behind the current one."""
        return self._files.reserved_behind(self.end)

    def covers(self, position: int) -> bool:
        """Whether the files reach from before `position` to it."""
        last = self._files.last
        return self.start <= position <= (last.end if last else 0)

    def scan(self, position: int) -> Iterator[ScannedRecord]:
        """Every intact record from `position`, in order; leaves `end` behind the last one.

        The scan ends where no intact record stands: a torn tail, or damage.  Which of the
        two it is, the caller knows from the checkpoint.
        """
        self.end = position
        for file in list(self._files):
            if file.end <= position:
                continue
            self.end = max(position, file.start)
            while True:
                record = self._scan_one(file.start, file.end)
                if record is None:
                    break
                self.end += record.header.size
                if record.header.kind != RecordKind.PADDING:
                    yield record
            if file.end - self.end >= HEADER_SIZE:
                return

    def cut_tail(self) -> int:
        """Remove whatever stands behind `end`; returns how many non-zero bytes that were.

        The bytes go physically: a record that was cut can never be found again behind a
        later tail.
        """
        last = self._files.last
        if last is None:
            return 0
        torn = 0
        position = self.end
        while position < last.end:
            data = self.read_up_to(position, min(_SCAN_BYTES, last.end - position))
            torn += len(data) - data.count(0)
            position += max(len(data), 1) if data else last.end - position
        if torn or last.bytes_present() < last.size:
            self._files.cut(self.end)
        return torn

    def read_up_to(self, position: int, size: int) -> bytes:
        """`size` bytes that a finished batch wrote; fewer where the file or segment ends."""
        file = self._files.at(position)
        return file.read(position, size) if file else b""

    def sync(self) -> None:
        self._files.sync()

    def close(self) -> None:
        self._files.close()

    def _append(self, record: bytes) -> None:
        if self._run_end != self.end or self.end % self._segment_bytes == 0:
            self._runs.append((self.end, []))
        self._runs[-1][1].append(record)
        self._run_end = self.end + len(record)
        self.pending_bytes += len(record)

    def _scan_one(self, segment_start: int, segment_end: int) -> ScannedRecord | None:
        if segment_end - self.end < HEADER_SIZE:
            return None
        front = self._window(HEADER_SIZE)
        size = int.from_bytes(front[:4], "big")
        if size < HEADER_SIZE or self.end + size > segment_end:
            return None
        needed = HEADER_SIZE if front[9] == RecordKind.PADDING else size
        data = self._window(needed)
        try:
            header = check_record(data, 0, self.end)
        except BadRecord:
            return None
        return ScannedRecord(header, data)

    def _window(self, size: int) -> bytes:
        """`size` bytes at `end` through a read-ahead buffer that only scans use."""
        at = self.end - self._buffer_at
        if self._buffer_at < 0 or at < 0 or at + size > len(self._buffer):
            self._buffer = self.read_up_to(self.end, max(size, _SCAN_BYTES))
            self._buffer_at = self.end
            at = 0
        return self._buffer[at : at + size]
