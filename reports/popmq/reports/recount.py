"""Recount: what groups have in flight and what became of deliveries, from raw records alone.

Plain Python and independent of the brokers' tables and of Spark: the third opinion that a report
is compared with.  Offsets set by an operator are not in the revive topic; a group whose offset was
reset is counted wrong from there on.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from popmq.common.message import RecordKind
from popmq.reports.layout import Row

CHECK_POINT, ACK, CHANGE, LOST, RETURNED = 1, 2, 3, 4, 5
UNCOUNTED = 8  # flag of a returned delivery that nobody saw
REVIVAL_TOKENS = (1, 2)  # versions
WITH_LAST = 2  # that says when the delivery was; 0 there: nobody saw it
DEAD, REDRIVEN, PARKED = 1, 2, 4  # flags of a token

Place = tuple[int, int, int]  # group, topic that was read, queue
Key = tuple[int, int]  # epoch, sequence


@dataclass(slots=True)
class Ends:
    """Of one place, in messages; `next_offset` is where its check points say a pop goes on."""

    delivered: int = 0
    acked: int = 0
    retried: int = 0
    undone: int = 0  # of `delivered`: nobody took the reply, so the same attempt comes again
    returned: int = 0
    dead: int = 0
    lost: int = 0
    in_flight: int = 0
    next_offset: int = 0


@dataclass(slots=True)
class Recount:
    """Of one broker group; feed it whole partitions, the revive queues in any order, heads last.

    Records at or above `end_position` are left out, so that the result is of that moment.
    """

    end_position: int
    places: dict[Place, Ends] = field(default_factory=lambda: defaultdict(Ends))
    _open: dict[Key, tuple[Place, int, int]] = field(default_factory=dict)  # start, open members
    _moved: list[tuple[Key, int]] = field(default_factory=list)
    unknown_ends: int = 0  # of check points that are not there: before the first record kept

    def take_revive(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row["record_kind"] == RecordKind.REVIVE and row["position"] < self.end_position:
                self._take(row)

    def _take(self, row: Row) -> None:
        kind, key, members = row["kind"], (row["epoch"], row["sequence"]), row["members"]
        if kind in (CHECK_POINT, CHANGE):
            place = row["group_id"], row["topic_id"], row["queue_id"]
            self._open[key] = (place, row["start_offset"], members)
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

    def finish(self) -> dict[Place, Ends]:
        self._move()
        for ends in self.places.values():
            ends.in_flight = 0
        for place, _, members in self._open.values():
            self.places[place].in_flight += members.bit_count()
        return dict(self.places)

    def _move(self) -> None:
        for key, offset in self._moved:
            found = self._open.get(key)
            if found is not None:
                self._end(key, 1 << (offset - found[1]))
        self._moved.clear()

    def _end(self, key: Key, members: int) -> tuple[Place, int] | None:
        """Close members; whose they were and how many were open, None if nobody knows."""
        found = self._open.get(key)
        if found is None:
            self.unknown_ends += 1
            return None
        place, start, left = found
        ended = left & members
        if left & ~members:
            self._open[key] = (place, start, left & ~members)
        else:
            del self._open[key]
        return place, ended.bit_count()
