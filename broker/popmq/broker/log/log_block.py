"""LogBlock: whole records of the log on their way from one replica to another.

The bytes are the log's own, so a slave's log equals its master's byte by byte.  A block never
crosses a segment's end; of a PADDING record it holds the header, and zeros are behind it on both.
"""

from dataclasses import dataclass

from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    RecordKind,
    check_record,
    decode_header,
)


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Records that were checked: intact, and of the positions where they stand."""

    position: int
    data: bytes
    end: int  # of the last record; behind a PADDING record the segment's
    last_position: int  # of the last record
    records: int

    @property
    def log_ms(self) -> int:
        """Log time of the last record."""
        return decode_header(self.data, self.last_position - self.position).log_ms


def checked_block(position: int, data: bytes, *, segment_end: int) -> LogBlock:
    """The block that `data` is. BadRecord when anything but whole, intact records is in it."""
    at, size, records, last = 0, len(data), 0, position
    while at < size:
        header = check_record(data, at, position + at)
        records += 1
        last = header.position
        if header.kind == RecordKind.PADDING:
            if at + HEADER_SIZE != size or header.end != segment_end:
                raise BadRecord(f"padding at {last} is not the end of its block or segment")
            return LogBlock(position, data, header.end, last, records)
        at += header.size
    if not records or position + at > segment_end:
        raise BadRecord(f"{size} bytes at {position} are no records of one segment")
    return LogBlock(position, data, position + at, last, records)


def whole_records(data: bytes | memoryview, limit: int) -> int:
    """How many bytes of `data`, which begins with a record, are whole records.

    At most `limit`, but at least the first record; 0 when not even that is whole.
    """
    at = 0
    while at + HEADER_SIZE <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size < HEADER_SIZE:
            break  # nothing was written behind here
        if data[at + 9] == RecordKind.PADDING:
            size = HEADER_SIZE
        if at + size > len(data) or (at and at + size > limit):
            break
        at += size
    return at
