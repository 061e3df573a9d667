"""Mistakes planted into FIFO groups: their order, attempts, repeated receives and parked keys."""

from typing import Any

import pytest

from popmq.broker.deliveries import check_point_snapshot
from popmq.broker.deliveries.check_point_snapshot import TableRestorer
from popmq.broker.deliveries.offset_ranges import OffsetRanges
from popmq.broker.deliveries.order_info import OrderInfo
from popmq.broker.deliveries.parked_keys import ParkedKey, ParkedKeys
from popmq.broker.deliveries.parking_records import ParkingRecords
from popmq.broker.deliveries.pop_check_point import FIFO
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.fifo.parking_service import ParkingService
from popmq.broker.pop.revive_service import ReviveService

Patch = pytest.MonkeyPatch


def next_while_one_is_in_flight(patch: Patch) -> None:
    """A message in flight does not make its key busy."""
    hold = OrderInfo.mark_in_flight

    def held(self: OrderInfo, offset: int, log_ms: int) -> None:
        hold(self, offset, log_ms)
        self._lines[self.open[offset][0]].held.discard(offset)

    patch.setattr(OrderInfo, "mark_in_flight", held)


def ended_message_keeps_its_attempts(patch: Patch) -> None:
    """It is over, and counts as one that waits for its next attempt."""
    finish = FifoProgress.finish_delivery

    def wrong(self: FifoProgress, offsets: list[int], *, over: bool, **more: Any) -> None:
        attempts = {offset: self.attempts[offset] for offset in offsets if offset in self.attempts}
        finish(self, offsets, over=over, **more)
        if over:
            self.attempts.update(attempts)

    patch.setattr(FifoProgress, "finish_delivery", wrong)


def order_lost_after_a_start(patch: Patch) -> None:
    """What is in flight is not looked at, so its key is free."""
    look = OrderInfo.add_message

    def wrong(self: OrderInfo, offset: int, key: bytes, unit: Any, *, held: bool) -> None:
        if not held:
            look(self, offset, key, unit, held=False)

    patch.setattr(OrderInfo, "add_message", wrong)


def attempt_not_counted(patch: Patch) -> None:
    ended = FifoProgress.finish_delivery

    def wrong(self: FifoProgress, offsets: Any, *, over: bool, log_ms: int) -> None:
        ended(self, offsets, over=over, log_ms=log_ms)
        for offset in offsets:
            self.attempts.pop(offset, None)

    patch.setattr(FifoProgress, "finish_delivery", wrong)


def retried_through_the_retry_topic(patch: Patch) -> None:
    revive = ReviveService._revive_one

    def wrong(self: ReviveService, ck: Any, *more: Any) -> None:
        flags, ck.flags = ck.flags, ck.flags & ~FIFO
        revive(self, ck, *more)
        ck.flags = flags

    patch.setattr(ReviveService, "_revive_one", wrong)


def returned_message_goes_to_the_end(patch: Patch) -> None:
    """What comes back waits behind the later messages of its key."""

    def wrong(self: OrderInfo, offset: int) -> None:
        result = self.open.get(offset)
        if result is not None:
            line = self._lines[result[0]]
            line.held.discard(offset)
            self._offer(result[0], line)
            if not line.waiting:
                line.waiting.append(offset)
                self._offer(result[0], line)
            else:
                line.waiting.append(offset)

    patch.setattr(OrderInfo, "returned", wrong)


def _snapshot_without(patch: Patch, name: str, empty: Any) -> None:
    encode = check_point_snapshot.encode_fifo_progress

    def wrong(place: Any, progress: FifoProgress) -> bytes:
        kept = getattr(progress, name)
        setattr(progress, name, empty())
        try:
            return encode(place, progress)
        finally:
            setattr(progress, name, kept)

    patch.setattr(check_point_snapshot, "encode_fifo_progress", wrong)


def snapshot_forgets_what_is_over(patch: Patch) -> None:
    _snapshot_without(patch, "finished", OffsetRanges)


def snapshot_forgets_attempts(patch: Patch) -> None:
    _snapshot_without(patch, "attempts", dict)


def repeated_receive_is_a_new_one(patch: Patch) -> None:
    patch.setattr(FifoService, "received", lambda self, params: [])


def repeated_receive_is_a_new_one_after_a_start(patch: Patch) -> None:
    """The attempt ids of check points in a snapshot are not entered."""

    def wrong(self: TableRestorer) -> Any:
        for ck in self._check_points.values():
            ck.attempt_id = 0
        return finish(self)

    finish = TableRestorer.finish
    patch.setattr(TableRestorer, "finish", wrong)


def parked_messages_in_the_order_of_parking(patch: Patch) -> None:
    park = ParkedKeys.park

    def wrong(self: ParkedKeys, place: Any, parking_id: int, name: bytes, **more: int) -> None:
        park(self, place, parking_id, name, **more)
        self._owner[(parking_id, more["offset"])].messages.sort(key=lambda entry: entry[1])

    patch.setattr(ParkedKeys, "park", wrong)


def resumed_key_does_not_wait(patch: Patch) -> None:
    """A message of it may still be in flight where it came from."""
    patch.setattr(OrderInfo, "has_open_below", lambda self, key, offset: False)


def snapshot_forgets_what_was_said(patch: Patch) -> None:
    encode = ParkedKey.encode

    def wrong(self: ParkedKey) -> bytes:
        unpark_action, self.state = self.state, None
        try:
            return encode(self)
        finally:
            self.state = unpark_action

    patch.setattr(ParkedKey, "encode", wrong)


def given_up_snapshot_is_mixed_in(patch: Patch) -> None:
    begin = ParkedKeys.begin_snapshot

    def wrong(self: ParkedKeys) -> Any:
        kept = self._kept
        pieces = begin(self)
        self._kept = kept
        return pieces

    patch.setattr(ParkedKeys, "begin_snapshot", wrong)


def reset_leaves_what_is_parked(patch: Patch) -> None:
    """It is read again, and comes out of the parking queue as well."""
    patch.setattr(ParkingRecords, "reset", lambda self, place, offset, log_ms: None)


def reset_leaves_parked_messages_in_flight(patch: Patch) -> None:
    patch.setattr(ParkingRecords, "_take_back", lambda self, parking, offsets, log_ms: None)


def parking_time_read_after_the_append(patch: Patch) -> None:
    """A key is parked later than the record of its first message says."""
    copy, park = ParkingService._copy, ParkingRecords.park
    later_ms: list[int] = []

    def copied(self: ParkingService, *arguments: Any) -> int:
        at = copy(self, *arguments)
        later_ms[:] = [self._store.log_ms()]
        return at

    def parked(self: ParkingRecords, *arguments: Any, log_ms: int, **more: Any) -> None:
        park(self, *arguments, log_ms=later_ms.pop() if later_ms else log_ms, **more)

    patch.setattr(ParkingService, "_copy", copied)
    patch.setattr(ParkingRecords, "park", parked)
