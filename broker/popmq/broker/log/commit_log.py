"""The CommitLog: the one sequence of bytes that everything else is a function of (D1).

Records are appended in memory on the event loop and handed to the flusher as one batch.
No file is read before it was written, so there is no cache to keep true.  A record never
crosses a segment's end: a PADDING record, or fewer than 56 zero bytes, fills what is left.
`end` is where the next record would begin, so logs of the same records end at the same position.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from popmq.broker.log.log_block import LogBlock
from popmq.broker.log.log_tail import LogTail
from popmq.broker.log.segment_file import SegmentFile, SegmentFiles
from popmq.common.disk import Disk
from popmq.common.errors import Code, Refused, StoreDamaged
from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    Header,
    RecordKind,
    Stamp,
    check_record,
    decode_header,
    encode_record,
    unconfirmed_bytes,
)

_SCAN_BYTES = 4 << 20
# Version and kind (MESSAGE, MOVED) at byte 8 of the records that say what was confirmed.  The kind
# is only looked at: a match must not consume the version behind a checksum that ends in byte 01.
_VERSION_AND_KIND = re.compile(rb"\x01(?=[\x01\x07])")


@dataclass(slots=True)
class FlushBatch:
    """Bytes on their way to the disk: runs of adjacent records, each inside one segment."""

    end: int
    runs: list[tuple[int, list[bytes]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    header: Header
    data: bytes  # the whole record


class CommitLog:
    def __init__(self, disk: Disk, folder: str, *, segment_bytes: int, tail_bytes: int = 0) -> None:
        """The newest `tail_bytes` are kept in memory too; 0 keeps none."""
        self._files = SegmentFiles(disk, folder, segment_bytes=segment_bytes, preallocate=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._runs: list[tuple[int, list[bytes]]] = []
        self._run_end = -1
        self._buffer = b""
        self._buffer_at = -1
        self.tail = LogTail(tail_bytes) if tail_bytes else None
        self.pending_bytes = 0
        self.end = 0
        self.last_position = 0  # of the newest record

    def load(self, known_start: int | None = None) -> int:
        """Open what is there; returns the log's start.  `known_start` is where the checkpoint says
        that it is, or before.

        Raises StoreDamaged when a segment is missing that retention did not delete.
        """
        self._files.load()
        self.end = self.start
        if known_start is not None and self.start > known_start:
            raise StoreDamaged(
                f"{self.path_of(known_start)} is missing: the log began at position {known_start}, "
                f"and its first segment begins at {self.start}. Bring it back from a copy, or let "
                f"`popmq doctor --data {self._folder.rpartition('/')[0]}` say what goes on without"
            )
        return self.start

    @property
    def start(self) -> int:
        """Position of the oldest byte that is kept."""
        first = self._files.first
        return first.start if first else 0

    def make_room(self, size: int, stamp: Stamp) -> int:
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
        self.last_position = self.end
        self.end = self.position_after(self.end + len(record))

    def append_all(self, records: list[bytes]) -> None:
        """Take adjacent records of one segment, the first of them encoded for this log's end."""
        if not records:
            return
        sizes = sum(map(len, records))
        if self._run_end != self.end or self.end % self._segment_bytes == 0:
            self._runs.append((self.end, []))
        self._runs[-1][1].extend(records)
        self.pending_bytes += sizes
        if self.tail is not None:
            self.tail.add_all(self.end, records)
        self._run_end = self.end + sizes
        self.last_position = self._run_end - len(records[-1])
        self.end = self.position_after(self._run_end)

    def append_block(self, block: LogBlock) -> None:
        """Take whole records that another log has at this one's end."""
        assert block.position == self.end, f"a block of {block.position} at {self.end}"
        self._append(block.data)
        self.last_position = block.last_position
        self.end = self.position_after(block.end)

    def position_after(self, position: int) -> int:
        """Where a record goes that follows one which ends at `position`."""
        left = self._segment_bytes - position % self._segment_bytes
        return position + left if left < HEADER_SIZE else position

    def take_batch(self) -> FlushBatch | None:
        """Everything appended since the last call; hand it to the flusher whole (D2)."""
        if not self._runs:
            return None
        batch = FlushBatch(self.end, self._runs)
        self._runs = []
        self._run_end = -1
        self.pending_bytes = 0
        return batch

    def write(self, batch: FlushBatch) -> None:
        """Write and fdatasync a batch; runs on the flusher. OSError means: stop the process."""
        touched = {}
        for position, parts in batch.runs:
            file = self._files.segment_for_write(position)
            file.write(position, parts)
            touched[file.start] = file
        for file in touched.values():
            file.sync()

    def segment_end(self, position: int) -> int:
        return position + self._segment_bytes - position % self._segment_bytes

    def segment_start(self, position: int) -> int:
        return position - position % self._segment_bytes

    def path_of(self, position: int) -> str:
        """The segment that holds `position`, or that has to: for whoever reads an error."""
        return f"{self._folder}/{self.segment_start(position):020d}"

    def restart_at(self, start: int) -> None:
        """The first segment of an empty log begins at `start`. On the flusher, after `ends_at`."""
        self._files.delete_all()
        self._files.segment_for_write(start)

    def reserve(self, position: int, segments: int) -> None:
        """Allocate the segments behind that of `position`; runs on the flusher."""
        self._files.reserve(position, segments)

    @property
    def room(self) -> int:
        """Bytes that can be appended without a new segment."""
        last = self._files.last
        return max(0, last.end - self.end) if last else 0

    @property
    def reserved(self) -> int:
        """Whole segments that are allocated behind the current one."""
        return self._files.reserved_after(self.end)

    def closed_segments(self) -> list[tuple[int, int]]:
        """Start and end of each segment that the log's end has left, oldest first."""
        return [(file.start, file.end) for file in self._files if file.end <= self.end]

    def drop_before(self, position: int) -> list[SegmentFile]:
        """The log starts at `position` from now on; returns the files to delete."""
        if self.tail is not None:
            self.tail.forget_before(position)
        return self._files.detach_before(position)

    def record_at(self, position: int) -> Header | None:
        """The header of the intact record at `position`, if there is one."""
        front = self.read_up_to(position, HEADER_SIZE)
        try:
            size = decode_header(front).size
            return check_record(self.read_up_to(position, size), 0, position)
        except BadRecord:
            return None

    def durable_beyond(self, position: int, *, from_epoch: int = 0) -> int | None:
        """A record behind `position` that was written when `position` was confirmed already.

        It proves that the bytes at `position` were durable once: damage, not a torn tail.  Only
        records from `from_epoch` on were written here and can prove that.
        """
        seam = b""
        for start, piece in self._filled_from(position):
            data, first = seam + piece, start - len(seam)
            seam = data[-HEADER_SIZE:]
            for match in _VERSION_AND_KIND.finditer(data):
                at = first + match.start() - 8
                named = data[match.start() + 8 : match.start() + 16]
                if at <= position or int.from_bytes(named, "big") != at:
                    continue
                header = self.record_at(at)
                if header is None or header.epoch < from_epoch:
                    continue
                if self._confirmed_at(header) > position:
                    return at
        return None

    def _confirmed_at(self, header: Header) -> int:
        if header.kind not in (RecordKind.MESSAGE, RecordKind.MOVED):
            return 0
        return header.position - unconfirmed_bytes(self.read_up_to(header.position, 80))

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
                self.last_position = self.end
                self.end += record.header.size
                if record.header.kind != RecordKind.PADDING:
                    yield record
            if file.end - self.end >= HEADER_SIZE:
                return
            self.end = file.end

    def truncate_torn_tail(self) -> int:
        """Remove whatever stands behind `end`; returns how many non-zero bytes that were.

        The bytes go physically: a record that was cut can never be found again behind a
        later tail.
        """
        last = self._files.last
        if last is None:
            return 0
        torn = sum(len(data) - data.count(0) for _, data in self._filled_from(self.end))
        if torn or last.bytes_present() < last.size:
            self._files.truncate(self.end)
        return torn

    def reallocate(self) -> None:
        """After `cut_tail`: the current segment and those reserved behind it have all their blocks,
        so that no write in them ends in ENOSPC (D10).

        A crash between the two steps of a cut leaves a segment short, and a copy of the folder may
        have holes where the segments have nothing yet. OSError when the disk has no room for it.
        """
        self._files.allocate_again(self.end)

    def truncate(self, position: int, known: int) -> None:
        """Remove the bytes from `position` on, durably. Runs on the flusher; `ends_at` follows.

        A record begins, or the log ends, at both; `known` lies at or below.  StoreDamaged, with
        nothing removed, when a record in between is not intact.
        """
        at = known
        while at < position:
            header = self.record_at(at)
            if header is None:
                raise StoreDamaged(
                    f"{self.path_of(at)}: the log is to be cut at {position} to its master's, but "
                    f"the record at {at} is damaged: run `popmq doctor`"
                )
            at = self.position_after(header.end)
        assert at == position, f"a cut at {position}, inside the record before {at}"
        self._files.truncate(position)

    def set_end(self, position: int) -> None:
        """On the loop, after a cut; whoever appends next says where the newest record is."""
        self.end = position
        self._run_end = self._buffer_at = -1
        if self.tail is not None:
            self.tail.cut(position)

    def _filled_from(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Position and bytes of the pieces from `position` that may be more than zeros."""
        for file in self._files:
            at: int | None = max(position, file.start)
            while at is not None and at < file.end and (at := file.written_from(at)) is not None:
                # Up to the end of a page, or `written_from` finds the rest of it.
                data = file.read(at, min(_SCAN_BYTES - at % _SCAN_BYTES, file.end - at))
                if not data:
                    break
                yield at, data
                at += len(data)

    def read_up_to(self, position: int, size: int) -> bytes:
        """`size` bytes that a finished batch wrote; fewer where the file or segment ends."""
        file = self._files.at(position)
        return file.read(position, size) if file else b""

    def read_warm(self, position: int, size: int) -> bytes:
        """Like `read_up_to`, but raises ColdRead instead of waiting for the disk (D3)."""
        file = self._files.at(position)
        return file.read_warm(position, size) if file else b""

    def view_warm(self, position: int, size: int) -> bytes | memoryview:
        """Like `read_warm`, without a copy: the view is good until this thread reads again."""
        file = self._files.at(position)
        return file.view_warm(position, size) if file else b""

    def sync(self) -> None:
        self._files.sync()

    def rewrite_from(self, position: int) -> None:
        """Everything from `position` to the end will be written by the next `sync`."""
        self._files.write_again(position, self.end)

    def close(self) -> None:
        self._files.close()

    def _append(self, record: bytes) -> None:
        if self._run_end != self.end or self.end % self._segment_bytes == 0:
            self._runs.append((self.end, []))
        self._runs[-1][1].append(record)
        self._run_end = self.end + len(record)
        self.pending_bytes += len(record)
        if self.tail is not None:
            self.tail.add(self.end, record)

    def _scan_one(self, segment_start: int, segment_end: int) -> ScannedRecord | None:
        if segment_end - self.end < HEADER_SIZE:
            return None
        front = self._window(HEADER_SIZE)
        if len(front) < HEADER_SIZE:  # the file itself ends inside a header
            return None
        size = int.from_bytes(front[:4], "big")
        if size < HEADER_SIZE or self.end + size > segment_end:
            return None
        padding = front[9] == RecordKind.PADDING
        if padding and self.end + size != segment_end:
            return None  # its size is not under the checksum, but there is only one right one
        needed = HEADER_SIZE if padding else size
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
