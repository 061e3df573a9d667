"""Mistakes planted into tables, time, pop and revive."""

from dataclasses import replace
from typing import Any

import pytest

from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.deliveries import check_point_buffer
from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.deliveries.check_point_snapshot import TableRestorer, TableSnapshot
from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.pop_check_point import EndRecord, ReviveKind
from popmq.broker.handlers.receive import Receives
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.persistence.log_time import LogTime
from popmq.broker.pop.long_polling import LongPolling, Waiter, WaiterResult
from popmq.broker.pop.revive_service import ReviveService
from popmq.broker.store.message_store import MessageStore
from popmq.common.record.message import RecordKind

Patch = pytest.MonkeyPatch


def token_of_a_retry_ignored_at_recovery(patch: Patch) -> None:
    apply = RecordApplier.apply

    def wrong(self: RecordApplier, record: Any) -> None:
        if record.header.kind != RecordKind.MESSAGE:
            apply(self, record)

    patch.setattr(RecordApplier, "apply", wrong)


def ack_applied_but_not_logged(patch: Patch) -> None:
    def wrong(self: CheckPointBuffer) -> None:
        for key, bits in self._unwritten.items():
            self._table.apply(EndRecord(ReviveKind.ACK, *key, bits), self._store.log_ms())
        self._unwritten.clear()

    patch.setattr(CheckPointBuffer, "flush_acks", wrong)


def change_keeps_the_old_handle(patch: Patch) -> None:
    take_over = CheckPointTable._take_over

    def wrong(self: CheckPointTable, record: Any, log_ms: int) -> None:
        old = self.find(record.old_epoch, record.old_sequence)
        moved = old.superseded if old else 0
        take_over(self, record, log_ms)
        if old is not None:
            old.superseded = moved

    patch.setattr(CheckPointTable, "_take_over", wrong)


def queue_offset_reused_after_a_start(patch: Patch) -> None:
    recover = MessageStore.recover

    def wrong(self: MessageStore, apply: Any) -> None:
        recover(self, apply)
        known = self.dispatch._next_offset
        for key in known:
            known[key] = max(0, known[key] - 1)

    patch.setattr(MessageStore, "recover", wrong)


def epoch_not_advanced(patch: Patch) -> None:
    def wrong(self: MessageStore, start: bytes) -> None:
        self.put_record(RecordKind.EPOCH_START, topic_id=0, queue_id=0, body=start)

    patch.setattr(MessageStore, "start_epoch", wrong)


def log_time_goes_back(patch: Patch) -> None:
    go_on = LogTime.go_on

    def wrong(self: LogTime, newest: Any, created: Any, *, epoch: int) -> None:
        go_on(self, newest, created, epoch=epoch)
        if newest.log_ms:
            self.clock.start(self._clock.wall_ms(), epoch=epoch)

    patch.setattr(LogTime, "go_on", wrong)


def receive_answered_before_its_check_point(patch: Patch) -> None:
    def wrong(
        self: Receives, on_reply: Any, params: Any, deliveries: Any, rest: int, number: int
    ) -> None:
        on_reply(deliveries.encode_reply(rest, 0))

    patch.setattr(Receives, "reply", wrong)


def waiter_not_woken(patch: Patch) -> None:
    patch.setattr(LongPolling, "wake", lambda self, topic_id, group_id=None: None)


def waiter_looks_at_the_end_only(patch: Patch) -> None:
    """It gets what is there, and only when its time is over: I13 is kept."""
    waiter_not_woken(patch)
    park = LongPolling.add_waiter

    def wrong(self: LongPolling, waiter: Waiter) -> None:
        give_up = waiter.give_up

        def last_look() -> None:
            if waiter.attempt() is not WaiterResult.ANSWERED:
                give_up()

        waiter.give_up = last_look
        park(self, waiter)

    patch.setattr(LongPolling, "add_waiter", wrong)


def last_attempt_counted_wrongly(patch: Patch) -> None:
    revive = ReviveService._revive_one

    def wrong(
        self: ReviveService, ck: Any, member: int, topic: Any, group: Any, message: Any
    ) -> None:
        more = replace(group, max_attempts=group.max_attempts + 1)
        revive(self, ck, member, topic, more, message)

    patch.setattr(ReviveService, "_revive_one", wrong)


def revival_written_twice(patch: Patch) -> None:
    """The record is written, and its check point stays due."""
    applied = CheckPointTable.apply_revival
    seen: set[tuple[int, ...]] = set()

    def wrong(self: CheckPointTable, token: Any, log_ms: int) -> None:
        key = tuple(token.ends)
        ck = self.find(*key[:2])
        if key in seen or ck is None or token.dead:
            applied(self, token, log_ms)
        else:
            seen.add(key)
            self.due_times.add(ck)

    patch.setattr(CheckPointTable, "apply_revival", wrong)


def snapshot_keeps_no_pre_images(patch: Patch) -> None:
    patch.setattr(TableSnapshot, "keep", lambda self, ck: None)
    patch.setattr(TableSnapshot, "keep_progress", lambda self, place, progress: None)


def offset_commits_over_a_hole(patch: Patch) -> None:
    def wrong(self: CheckPointTable, progress: Any) -> None:
        progress.open = type(progress.open)(ck for ck in progress.open if not ck.finished)
        if not progress.open:
            progress.committed = progress.cursor
        else:
            progress.committed = progress.open[-1].start_offset

    patch.setattr(CheckPointTable, "_commit", wrong)


def outcomes_not_restored(patch: Patch) -> None:
    take = TableRestorer.take

    def wrong(self: TableRestorer, content: bytes) -> None:
        if content[:1] != b"o":
            take(self, content)

    patch.setattr(TableRestorer, "take", wrong)


def replayed_by_the_wall_clock(patch: Patch) -> None:
    """Records are applied with the wall time at which they were written."""
    apply = RecordApplier.apply

    def wrong(self: RecordApplier, record: Any) -> None:
        header = record.header._replace(log_ms=record.header.wall_ms)
        apply(self, replace(record, header=header))

    patch.setattr(RecordApplier, "apply", wrong)


def receipts_not_entered_at_recovery(patch: Patch) -> None:
    patch.setattr(RecordApplier, "_apply_sent", lambda *_: None)


def receipts_not_restored(patch: Patch) -> None:
    patch.setattr(SendDeduplication, "restore", lambda *_: None)


def resend_stored_again(patch: Patch) -> None:
    patch.setattr(SendDeduplication, "find", lambda *_: None)


def log_time_read_after_the_append(patch: Patch) -> None:
    """A check point that leaves the buffer is applied later than its record says."""
    append = check_point_buffer.append_revive

    def wrong(store: Any, record: Any) -> int:
        append(store, record)
        log_ms: int = store.log_ms()
        return log_ms

    patch.setattr(check_point_buffer, "append_revive", wrong)
