"""Recount: what groups have in flight and what became of deliveries, from raw records alone.

Plain Python and independent of the brokers' tables and of Spark: the third opinion that a report
is compared with.  That a topic or a group was deleted is in no record that reports read; whoever
compares leaves out their places.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from popmq.common.record.message import RecordKind
from popmq.common.record.report_layouts import WIDTHS
from popmq.reports.records.record_layout import (
    DEAD,
    PARKED,
    REDRIVEN,
    RESETS,
    UNCOUNTED,
    WITH_LAST,
    Column,
    RecordLayout,
)

CHECK_POINT, ACK, CHANGE, LOST, RETURNED = 1, 2, 3, 4, 5
REVIVAL_TOKENS = (1, 2)  # versions

_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}

Row = dict[str, int]
Place = tuple[int, int, int]  # group, topic that was read, queue
Key = tuple[int, int]  # epoch, sequence


@dataclass(slots=True)
class DeliveryCounts:
    """Of one place, in messages; `next_offset` is where its check points say a pop goes on."""

    delivered: int = 0
    acked: int = 0
    retried: int = 0
    undone: int = 0  # of `delivered`: nobody took the reply, so the same attempt comes again
    returned: int = 0
    dead: int = 0
    lost: int = 0
    in_flight: int = 0
    reset: int = 0  # ended because the group's offset was set
    next_offset: int = 0


@dataclass(slots=True)
class _Open:
    place: Place
    start: int
    members: int  # those that have not ended
    position: int


@dataclass(slots=True)
class Recount:
    """Of one broker group; feed it whole partitions, the revive queues in any order, then heads,
    offset records last.

    Records at or above `end_position` are left out, so that the result is of that moment.
    """

    end_position: int
    places: dict[Place, DeliveryCounts] = field(default_factory=lambda: defaultdict(DeliveryCounts))
    _open: dict[Key, _Open] = field(default_factory=dict)
    _moved: list[tuple[Key, int]] = field(default_factory=list)
    # Topic, queue, offset -> parking topic, offset there, position; by the place it came from.
    _parked: list[tuple[Place, Place, int]] = field(default_factory=list)
    unknown_ends: int = 0  # of check points that are not there: before the first record kept

    def take_revive(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row["record_kind"] == RecordKind.REVIVE and row["position"] < self.end_position:
                self._take(row)

    def _take(self, row: Row) -> None:
        kind, key, members = row["kind"], (row["epoch"], row["sequence"]), row["members"]
        if kind in (CHECK_POINT, CHANGE):
            place = row["group_id"], row["topic_id"], row["queue_id"]
            self._open[key] = _Open(place, row["start_offset"], members, row["position"])
            ends = self.places[place]
            if kind == CHECK_POINT:
                ends.delivered += members.bit_count()
                ends.next_offset = max(ends.next_offset, row["link"])
            else:  # ends a member of a check point in another queue, which may come later
                self._moved.append(((row["old_epoch"], row["link"]), row["start_offset"]))
        elif kind in (ACK, LOST, RETURNED):
            ended = self._end(key, members)
            if ended is None:
                return
            place, count = ended
            ends = self.places[place]
            ends.acked += count if kind == ACK else 0
            ends.lost += count if kind == LOST else 0
            undone = kind == RETURNED and row["flags"] & UNCOUNTED
            ends.undone += count if undone else 0
            ends.returned += count if kind == RETURNED and not undone else 0

    def take_heads(self, rows: Iterable[Row]) -> None:
        """Retries and dead letters, each the end of the delivery that its token names."""
        self._move()
        for row in rows:
            if row["record_kind"] != RecordKind.MESSAGE or row["position"] >= self.end_position:
                continue
            if row["token"] not in REVIVAL_TOKENS or not row["token_size"]:
                continue
            if row["token_flags"] & PARKED and not row["token_flags"] & DEAD:
                came = row["first_topic_id"], row["first_queue_id"], row["first_offset"]
                went = row["log_topic_id"], row["log_queue_id"], row["log_offset"]
                self._parked.append((came, went, row["position"]))
            if row["token_flags"] & (REDRIVEN | PARKED):
                continue
            ended = self._end((row["epoch"], row["sequence"]), 1 << row["member"])
            if ended is None:
                continue
            place, count = ended
            if row["token_flags"] & DEAD:
                self.places[place].dead += count
            elif row["token"] == WITH_LAST and not row["last_log_ms"]:
                self.places[place].undone += count
            else:
                self.places[place].retried += count

    def take_offsets(self, rows: Iterable[Row]) -> None:
        """What set a group's offset ends its deliveries of that queue, and of what was parked out
        of it and is read again there."""
        self._move()
        for row in rows:
            if row["record_kind"] != RecordKind.OFFSET or row["position"] >= self.end_position:
                continue
            if row["reason"] in RESETS:
                place = row["group_id"], row["topic_id"], row["queue_id"]
                self._reset(place, row["queue_offset"], row["position"])

    def finish(self) -> dict[Place, DeliveryCounts]:
        self._move()
        for ends in self.places.values():
            ends.in_flight = 0
        for item in self._open.values():
            self.places[item.place].in_flight += item.members.bit_count()
        return dict(self.places)

    def _reset(self, place: Place, offset: int, position: int) -> None:
        back = {
            (place[0], *went)
            for came, went, at in self._parked
            if came[:2] == place[1:] and came[2] >= offset and at < position
        }
        for key, item in list(self._open.items()):
            if item.position > position:
                continue
            members = item.members if item.place == place else 0
            for member in range(item.members.bit_length()):
                if (*item.place, item.start + member) in back:
                    members |= 1 << member & item.members
            if members:
                self.places[item.place].reset += members.bit_count()
                self._end(key, members)

    def _move(self) -> None:
        for key, offset in self._moved:
            result = self._open.get(key)
            if result is not None:
                self._end(key, 1 << (offset - result.start))
        self._moved.clear()

    def _end(self, key: Key, members: int) -> tuple[Place, int] | None:
        """Close members; whose they were and how many were open, None if nobody knows."""
        result = self._open.get(key)
        if result is None:
            self.unknown_ends += 1
            return None
        ended = result.members & members
        result.members &= ~members
        if not result.members:
            del self._open[key]
        return result.place, ended.bit_count()


def rows_of(layout: RecordLayout, data: bytes) -> Iterator[Row]:
    """Every record; blanks and what cannot be read any more have zeros."""
    passes = [(_struct(some, layout.size), some) for some in _apart(layout.columns)]
    size = layout.size
    at = 0
    while at < len(data):
        end = at + (size or int.from_bytes(data[at : at + 4], "big"))
        row: Row = {}
        for unpacker, columns in passes:
            piece = data[at:end][: unpacker.size].ljust(unpacker.size, b"\0")
            row.update(
                zip((column.name for column in columns), unpacker.unpack(piece), strict=True)
            )
        yield row
        at = end


def _apart(columns: Sequence[Column]) -> list[list[Column]]:
    """Columns that lie over each other (two readings of the same bytes) in lists of their own."""
    lists: list[list[Column]] = []
    for column in sorted(columns, key=lambda item: item.offset):
        for some in lists:
            if some[-1].offset + WIDTHS[some[-1].type] <= column.offset:
                some.append(column)
                break
        else:
            lists.append([column])
    return lists


def _struct(columns: Sequence[Column], size: int) -> struct.Struct:
    parts, at = [">"], 0
    for column in columns:
        parts.append(f"{column.offset - at}x{_CODES[column.type]}")
        at = column.offset + WIDTHS[column.type]
    return struct.Struct("".join(parts) + f"{max(0, size - at)}x")
