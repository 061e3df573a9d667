"""ParkingRecords: what the records about parked keys do to the tables.

A parking record ends a message in its first place and lists it in ParkedKeys; an unparked record
says what is to become of a key; a dead letter out of a parking topic ends one message there.
Part of the check-point table's `apply`: a function of the log.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from popmq.broker.deliveries.parked_keys import ParkedKey, ParkedKeys
from popmq.broker.deliveries.pop_check_point import (
    PopCheckPoint,
    UnparkAction,
    UnparkRecord,
    member_bits,
)
from popmq.broker.deliveries.queue_progress import FifoProgress, GroupQueue, QueueProgress


class DeliveryTable(Protocol):
    """What of the check-point table these records change."""

    on_unblocked: Callable[[int, int, int], None]

    def __iter__(self) -> Iterator[PopCheckPoint]: ...

    def progress(self, group_id: int, topic_id: int, queue_id: int) -> QueueProgress | None: ...

    def progress_for_update(self, place: GroupQueue) -> FifoProgress: ...

    def end(self, ck: PopCheckPoint, bits: int, *, log_ms: int) -> None: ...


class ParkingRecords:
    def __init__(self, table: DeliveryTable, parked: ParkedKeys) -> None:
        self._table = table
        self._parked = parked

    def park(
        self,
        place: GroupQueue,
        parking_id: int,
        name: bytes,
        *,
        origin: int,
        offset: int,
        log_ms: int,
    ) -> None:
        """A message of key `name` left its place for the parking topic: it is over there."""
        self._table.progress_for_update(place).finish_delivery([origin], over=True, log_ms=log_ms)
        self._table.progress_for_update((place[0], parking_id, 0))  # there when deliveries begin
        self._parked.park(place, parking_id, name, origin=origin, offset=offset, log_ms=log_ms)
        self._table.on_unblocked(place[1], place[0], place[2])

    def unpark(self, record: UnparkRecord, log_ms: int) -> None:
        """Written by an operator's action, or for a damaged message."""
        key = self._parked.owner(record.parking_id, record.key_offset)
        if key is None:
            return
        if record.action is not UnparkAction.SKIP:
            self._parked.set_action(key, record.action, record.end)
        else:
            held = self._table.progress_for_update(
                (key.group_id, key.parking_id, 0)
            ).in_flight_offsets
            begin, end = record.begin, record.end
            skipped = {offset for _, offset in key.messages if begin <= offset < end} - held
            self.over(key.parking_id, skipped, log_ms)
        self._table.on_unblocked(key.topic_id, key.group_id, key.queue_id)

    def over(self, parking_id: int, offsets: set[int], log_ms: int) -> None:
        """Messages of one key in the parking queue that are not in flight are over."""
        key = self._parked.owner(parking_id, min(offsets)) if offsets else None
        if key is None:
            return
        progress = self._table.progress_for_update((key.group_id, parking_id, 0))
        for offset in sorted(offsets):
            if progress.order is not None and offset in progress.order.open:
                progress.order.skip(offset)  # over without ever leaving
            progress.finish_delivery([offset], over=True, log_ms=log_ms)
        self._skip(key, offsets)

    def reset(self, place: GroupQueue, offset: int, log_ms: int) -> None:
        """The group reads the queue on from `offset`: it finds there again what was parked of it
        from there on.  Or the queue is a parking queue: what stands there below it is over."""
        group_id, topic_id, queue_id = place
        for key in self._parked.of_group(group_id):
            if key.parking_id == topic_id:
                if gone := {at for _, at in key.messages if at < offset}:
                    self._skip(key, gone)  # its deliveries have ended with the reset
            elif (key.topic_id, key.queue_id) == (topic_id, queue_id):
                self._drop(key, {at for origin, at in key.messages if origin >= offset}, log_ms)

    def _drop(self, key: ParkedKey, offsets: set[int], log_ms: int) -> None:
        parking = (key.group_id, key.parking_id, 0)
        held = self._table.progress_for_update(parking).in_flight_offsets & offsets
        self.over(key.parking_id, offsets - held, log_ms)
        if held:
            self._take_back(parking, held, log_ms)

    def _take_back(self, parking: GroupQueue, offsets: set[int], log_ms: int) -> None:
        """End these deliveries, and their messages with them."""
        for ck in [ck for ck in self._table if ck.place == parking]:
            members = [
                member_bit
                for member_bit in member_bits(ck.waiting)
                if ck.offset_of(member_bit) in offsets
            ]
            bits = sum(1 << member for member in members)
            self._table.end(ck, bits & ck.waiting, log_ms=log_ms)

    def _skip(self, key: ParkedKey, offsets: set[int]) -> None:
        if self._parked.skip(key, offsets):
            self.on_unparked(key)

    def on_unparked(self, key: ParkedKey) -> None:
        progress = self._table.progress(key.group_id, key.topic_id, key.queue_id)
        if isinstance(progress, FifoProgress) and progress.order is not None:
            progress.order.unpark(key.name)
        self._table.on_unblocked(key.topic_id, key.group_id, key.queue_id)
