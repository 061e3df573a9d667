"""AuditLedger: what became of deliveries, by the records of the log alone.

Fed by `audit.py` with the records of the revive topic, resets, retries and dead letters up to one
position of the log, and then compared with what the tables say of that moment.  Shares no code
with those tables but the layout of the records.
"""

import struct
from dataclasses import dataclass, field

from popmq.broker.deliveries.ended_check_points import Key
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE, UNCOUNTED, ReviveKind
from popmq.broker.deliveries.queue_progress import GroupQueue
from popmq.common.record.message import EndedDelivery, RecordKind, RevivalToken

# The record header, and behind it the body of pop_check_point.py.
_RECORD = struct.Struct(">IIBBHIQQQIIQBBHIQQQIIIIQQQ")
assert _RECORD.size == RECORD_SIZE
_OPENS = (ReviveKind.CHECK_POINT, ReviveKind.CHANGE)


@dataclass(slots=True)
class OpenDelivery:
    """A check point, or what a change made of one; `bits` are members that have not ended."""

    place: GroupQueue
    start_offset: int
    bits: int
    position: int


@dataclass(slots=True)
class DeliveryEndCounts:
    """How deliveries of one place ended, in messages."""

    acked: int = 0
    dead: int = 0
    revived: int = 0
    lost: int = 0
    resets: int = 0

    def copy(self) -> "DeliveryEndCounts":
        return DeliveryEndCounts(self.acked, self.dead, self.revived, self.lost, self.resets)


@dataclass(slots=True)
class AuditLedger:
    open: dict[Key, OpenDelivery] = field(default_factory=dict)
    ends: dict[GroupQueue, DeliveryEndCounts] = field(default_factory=dict)
    in_flight: dict[GroupQueue, int] = field(default_factory=dict)  # where there are any
    _reset_at: dict[GroupQueue, int] = field(default_factory=dict)
    _moved: list[tuple[Key, int]] = field(default_factory=list)  # old key, offset

    def take_over(self, key: Key, place: GroupQueue, start_offset: int, bits: int) -> None:
        """A delivery that was open when the audit began: older than every record that it reads."""
        self.open[key] = OpenDelivery(place, start_offset, bits, position=0)
        self._add(place, bits.bit_count())

    def take(self, data: bytes, before: int) -> int:
        """Enter the revive records that stand below log position `before`; returns how many of
        `data` those are."""
        taken = 0
        for record in _RECORD.iter_unpack(data):
            position = record[6]
            if position >= before:
                break
            taken += 1
            if record[3] != RecordKind.REVIVE:
                continue  # a blank
            kind, key, bits = record[13], (record[15], record[16]), record[17]
            if kind in _OPENS:
                place = record[20], record[19], record[21]
                if position > self._reset_at.get(place, -1):
                    self.open[key] = OpenDelivery(place, record[18], bits, position)
                    self._add(place, bits.bit_count())
                if kind == ReviveKind.CHANGE:
                    # Its check point may stand in another queue, which is read later.
                    self._moved.append(((record[22], record[23]), record[18]))
            elif kind != ReviveKind.UNPARKED:
                self._ended(key, bits, kind, kept=bool(record[14] & UNCOUNTED))
        return taken

    def reset(self, place: GroupQueue, position: int) -> None:
        """An operator or a pull consumer set the group's offset: what it had open before counts no
        more."""
        self._reset_at[place] = position
        self.ends.setdefault(place, DeliveryEndCounts()).resets += 1
        for key in [
            key
            for key, delivery in self.open.items()
            if delivery.place == place and delivery.position < position
        ]:
            self._close(key, self.open[key], self.open[key].bits)

    def moves_end(self) -> None:
        """All queues are read: what changes took over is open under its new name only."""
        for key, offset in self._moved:
            old = self.open.get(key)
            if old is not None:
                self._close(key, old, 1 << (offset - old.start_offset))
        self._moved.clear()

    def revived(self, token: RevivalToken) -> None:
        """A retry or dead-letter record: it is the end of the delivery that it names."""
        if not isinstance(token.ends, EndedDelivery):
            return
        key = token.ends[:2]
        ended = self.open.get(key)
        bit = 1 << token.ends.member
        if ended is None or not ended.bits & bit:
            return
        ends = self.ends.setdefault(ended.place, DeliveryEndCounts())
        if token.dead:
            ends.dead += 1
        else:
            ends.revived += 1
        self._close(key, ended, bit)

    def drop(self, place: GroupQueue) -> None:
        """Its topic or its group was deleted."""
        self.ends.pop(place, None)
        self._reset_at.pop(place, None)
        for key in [key for key, delivery in self.open.items() if delivery.place == place]:
            self._close(key, self.open[key], self.open[key].bits)

    def _ended(self, key: Key, bits: int, kind: int, *, kept: bool) -> None:
        """`kept`, of LOST: a dead letter that stays where it is."""
        ended = self.open.get(key)
        if ended is None:
            return
        bits &= ended.bits
        ends = self.ends.setdefault(ended.place, DeliveryEndCounts())
        if kind == ReviveKind.ACK:
            ends.acked += bits.bit_count()
        elif kind == ReviveKind.LOST and kept:
            ends.dead += bits.bit_count()
        elif kind == ReviveKind.LOST:
            ends.lost += bits.bit_count()
        self._close(key, ended, bits)

    def _close(self, key: Key, delivery: OpenDelivery, bits: int) -> None:
        self._add(delivery.place, -(delivery.bits & bits).bit_count())
        delivery.bits &= ~bits
        if not delivery.bits:
            del self.open[key]

    def _add(self, place: GroupQueue, count: int) -> None:
        now = self.in_flight.get(place, 0) + count
        if now:
            self.in_flight[place] = now
        else:
            self.in_flight.pop(place, None)
