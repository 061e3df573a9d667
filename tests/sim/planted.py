"""Mistakes planted into the broker, one at a time: the simulator has to find every one.

Each is a patch that lives here only.  `seeds` is the promise: it is found within so many.
A `rare` one is looked for in the heavy tests; test_sim_disk.py shows it directly, each day.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from popmq.broker.broker import Broker
from popmq.broker.pop import ack_service
from popmq.broker.pop.check_point_snapshot import TableSnapshot
from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.long_polling import LongPolling
from popmq.broker.pop.pop_check_point import ReviveKind
from popmq.broker.pop.pop_service import put_revive
from popmq.broker.pop.revive_service import ReviveService
from popmq.broker.server import BrokerServer
from popmq.broker.store import commit_log, consume_queue, message_reader, message_store, retention
from popmq.broker.store.commit_log import Batch, CommitLog
from popmq.broker.store.consume_queue import ConsumeQueue
from popmq.broker.store.dispatch import Dispatch
from popmq.broker.store.group_commit import GroupCommit
from popmq.broker.store.mapped_file import MappedFile, MappedFileQueue
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.retention import Retention
from popmq.broker.store.snapshot_keeper import SnapshotKeeper
from popmq.broker.store.unit_check import POSITION_LIMIT, UNIT, Unit
from popmq.common import hop
from popmq.common.clock import LogClock
from popmq.common.hop import PopReply
from popmq.common.message import BadRecord, Header, RecordKind, decode_header

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Planted:
    name: str
    plant: Callable[[Patch], None]
    seeds: int = 40
    rare: bool = False
    retains: bool = False  # only seeds with retention are counted

    def numbers(self, seeds: int) -> list[int]:
        """Those of the first seeds in which it can show; with retention a run takes long."""
        if self.retains:
            return list(range(3, 3 * seeds + 1, 3))
        return [seed for seed in range(1, seeds + 1) if seed % 3]


def reply_before_fsync(patch: Patch) -> None:
    patch.setattr(MessageStore, "when_confirmed", lambda self, callback: callback())


def batch_handed_over_by_the_flusher(patch: Patch) -> None:
    """What a swap of lists in the flusher comes to: more is confirmed than was synced."""
    flushed = GroupCommit._flushed

    def wrong(self: GroupCommit, batch: Batch, error: BaseException | None) -> None:
        flushed(self, replace(batch, end=self._log.end), error)

    patch.setattr(GroupCommit, "_flushed", wrong)


def dispatch_past_the_confirmed_position(patch: Patch) -> None:
    appended = MessageStore._appended

    def wrong(self: MessageStore, size: int) -> None:
        appended(self, size)
        self.dispatch.advance(self.end)

    patch.setattr(MessageStore, "_appended", wrong)


def crc_not_checked(patch: Patch) -> None:
    def wrong(data: bytes, offset: int, position: int) -> Header:
        header = decode_header(data, offset)
        if header.position != position:
            raise BadRecord("another position")
        return header

    patch.setattr(commit_log, "check_record", wrong)
    patch.setattr(message_reader, "check_record", wrong)


def torn_tail_not_cut(patch: Patch) -> None:
    patch.setattr(CommitLog, "cut_tail", lambda self: 0)


def fsync_error_ignored(patch: Patch) -> None:
    flushed = GroupCommit._flushed
    patch.setattr(GroupCommit, "_flushed", lambda self, batch, error: flushed(self, batch, None))


def fsync_retried(patch: Patch) -> None:
    sync = MappedFile.sync

    def wrong(self: MappedFile) -> None:
        try:
            sync(self)
        except OSError:
            sync(self)

    patch.setattr(MappedFile, "sync", wrong)


def index_trusted_beyond_the_checkpoint(patch: Patch) -> None:
    """Units have a check since then, and what it finds is mended: both have to be missing."""

    def wrong(data: bytes, at: int, seed: int, offset: int) -> Unit:
        position, size, tag_hash = UNIT.unpack_from(data, at)
        return Unit(position % POSITION_LIMIT, size, tag_hash)

    patch.setattr(consume_queue, "intact_unit", wrong)
    patch.setattr(ConsumeQueue, "_is_trusted", lambda self, offset, position: True)


def queues_not_synced(patch: Patch) -> None:
    patch.setattr(ConsumeQueue, "files", lambda self: [])


def checkpoint_ahead_of_the_confirmed_position(patch: Patch) -> None:
    checkpoint = MessageStore._checkpoint_now

    def wrong(self: MessageStore) -> Any:
        return replace(checkpoint(self), position=self.end)

    patch.setattr(MessageStore, "_checkpoint_now", wrong)


def recovery_does_not_sync(patch: Patch) -> None:
    patch.setattr(CommitLog, "sync", lambda self: None)


def recovery_syncs_no_names(patch: Patch) -> None:
    def wrong(self: MappedFileQueue) -> None:
        for file in self:
            file.sync()

    patch.setattr(MappedFileQueue, "sync", wrong)


def clean_pages_trusted(patch: Patch) -> None:
    """After a failed fsync, what the page cache shows is taken for what the disk has."""
    patch.setattr(CommitLog, "write_again", lambda self, position: None)


def torn_unit_trusted(patch: Patch) -> None:
    def wrong(data: bytes, at: int, seed: int, offset: int) -> Unit | None:
        position, size, tag_hash = UNIT.unpack_from(data, at)
        return Unit(position % POSITION_LIMIT, size, tag_hash) if size else None

    patch.setattr(consume_queue, "intact_unit", wrong)


def segments_cut_from_the_front(patch: Patch) -> None:
    cut = MappedFileQueue.cut

    def wrong(self: MappedFileQueue, position: int) -> None:
        for start in [start for start in self._files if start > position]:
            self._remove(start)
        cut(self, position)

    patch.setattr(MappedFileQueue, "cut", wrong)


def token_of_a_retry_ignored_at_recovery(patch: Patch) -> None:
    apply = Broker._apply

    def wrong(self: Broker, record: Any) -> None:
        if record.header.kind != RecordKind.MESSAGE:
            apply(self, record)

    patch.setattr(Broker, "_apply", wrong)


def ack_applied_but_not_logged(patch: Patch) -> None:
    put = put_revive

    def wrong(store: Any, table: Any, record: Any) -> None:
        if record.kind is ReviveKind.ACK:
            table.apply(record, store.log_ms())
        else:
            put(store, table, record)

    patch.setattr(ack_service, "put_revive", wrong)


def change_keeps_the_old_handle(patch: Patch) -> None:
    take_over = CheckPointTable._take_over

    def wrong(self: CheckPointTable, ck: Any, old_key: tuple[int, int], log_ms: int) -> None:
        old = self.find(*old_key)
        moved = old.moved if old else 0
        take_over(self, ck, old_key, log_ms)
        if old is not None:
            old.moved = moved

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
    def wrong(self: MessageStore) -> None:
        self.put_record(RecordKind.EPOCH_START, topic_id=0, queue_id=0, body=b"")

    patch.setattr(MessageStore, "start_epoch", wrong)


def log_time_goes_back(patch: Patch) -> None:
    class Wrong(LogClock):
        def __init__(self, clock: Any, *, last_log_ms: int, last_wall_ms: int) -> None:
            super().__init__(clock, last_log_ms=last_log_ms, last_wall_ms=last_wall_ms)
            if last_log_ms:
                self._ahead_ms = clock.wall_ms() - clock.boot_ms()

    patch.setattr(message_store, "LogClock", Wrong)


def receive_answered_before_its_check_point(patch: Patch) -> None:
    def wrong(self: BrokerServer, on_reply: Any, deliveries: Any, rest: int) -> None:
        on_reply(hop.encode_pop_reply(PopReply(deliveries, rest)))

    patch.setattr(BrokerServer, "_reply_pop", wrong)


def segment_name_not_synced(patch: Patch) -> None:
    made = MappedFileQueue.at_or_new

    def wrong(self: Any, position: int) -> MappedFile:
        disk: Any = self._disk
        try:
            self._disk = _WithoutFolderSync(disk)
            return made(self, position)
        finally:
            self._disk = disk

    patch.setattr(MappedFileQueue, "at_or_new", wrong)
    patch.setattr(MappedFileQueue, "reserve", lambda self, position, segments: None)


def waiter_not_woken(patch: Patch) -> None:
    patch.setattr(LongPolling, "arrived", lambda self, topic_id, group_id=None: None)


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
    seen: set[tuple[int, int, int]] = set()

    def wrong(self: CheckPointTable, token: Any, log_ms: int) -> None:
        key = (token.check_point_epoch, token.check_point_sequence, token.member)
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


def live_body_not_moved(patch: Patch) -> None:
    patch.setattr(MessageStore, "_move", lambda self, body: None)


def deleted_above_the_older_snapshot(patch: Patch) -> None:
    patch.setattr(SnapshotKeeper, "older_position", property(lambda self: self.position))


def minimum_not_raised_before_the_moves(patch: Patch) -> None:
    patch.setattr(Dispatch, "log_starts_at", lambda self, position: None)


def deleted_before_the_moves_are_confirmed(patch: Patch) -> None:
    move_some = Retention._move_some

    def wrong(self: Retention, pieces: Any) -> int:
        done = move_some(self, pieces)
        self._wait_until = min(self._wait_until, 1)
        return done

    patch.setattr(Retention, "_move_some", wrong)


def moved_record_ignored_at_recovery(patch: Patch) -> None:
    apply = Broker._apply

    def wrong(self: Broker, record: Any) -> None:
        if record.header.kind != RecordKind.MOVED:
            apply(self, record)

    patch.setattr(Broker, "_apply", wrong)


def numbers_begin_at_0_in_a_rebuilt_index(patch: Patch) -> None:
    def wrong(self: Dispatch) -> None:
        self.rebuilding = False
        self._next_offset = {key: self.queue(*key).count for key in self._next_offset}

    patch.setattr(Dispatch, "rebuilt", wrong)


def messages_expire_too_early(patch: Patch) -> None:
    patch.setattr(retention, "HOUR_MS", 2_000_000)


class _WithoutFolderSync:
    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_folder(self, path: str) -> None:
        return


PLANTED = [
    Planted("reply before fsync", reply_before_fsync),
    Planted("batch handed over by the flusher", batch_handed_over_by_the_flusher),
    Planted("dispatch past the confirmed position", dispatch_past_the_confirmed_position),
    Planted("crc not checked", crc_not_checked, seeds=150),
    Planted("torn tail not cut", torn_tail_not_cut),
    Planted("fsync error ignored", fsync_error_ignored),
    Planted("fsync retried", fsync_retried, seeds=120),
    Planted("index trusted beyond the checkpoint", index_trusted_beyond_the_checkpoint, seeds=80),
    Planted("queues not synced before the checkpoint", queues_not_synced, seeds=80),
    Planted("checkpoint ahead", checkpoint_ahead_of_the_confirmed_position, seeds=80),
    Planted("recovery does not sync", recovery_does_not_sync, seeds=300),
    Planted("recovery syncs no names", recovery_syncs_no_names, 4000, rare=True),
    Planted("clean pages trusted", clean_pages_trusted, seeds=120),
    Planted("torn unit trusted", torn_unit_trusted, 1000, rare=True, retains=True),
    Planted("segments cut from the front", segments_cut_from_the_front, 4000, rare=True),
    Planted("retry token ignored at recovery", token_of_a_retry_ignored_at_recovery),
    Planted("ack not logged", ack_applied_but_not_logged),
    Planted("change keeps the old handle", change_keeps_the_old_handle),
    Planted("queue offset reused", queue_offset_reused_after_a_start),
    Planted("epoch not advanced", epoch_not_advanced),
    Planted("log time goes back", log_time_goes_back, seeds=80),
    Planted("receive before its check point", receive_answered_before_its_check_point),
    Planted("segment name not synced", segment_name_not_synced),
    Planted("waiter not woken", waiter_not_woken, seeds=120),
    Planted("one attempt too many", last_attempt_counted_wrongly),
    Planted("revival written twice", revival_written_twice),
    Planted("snapshot without pre-images", snapshot_keeps_no_pre_images),
    Planted("offset commits over a hole", offset_commits_over_a_hole, seeds=200),
    Planted("live body not moved", live_body_not_moved, retains=True),
    Planted("deleted above the older snapshot", deleted_above_the_older_snapshot, retains=True),
    Planted("minimum not raised", minimum_not_raised_before_the_moves, retains=True),
    Planted("deleted before moves", deleted_before_the_moves_are_confirmed, 80, retains=True),
    Planted("moved record ignored", moved_record_ignored_at_recovery, 80, retains=True),
    Planted("rebuilt from 0", numbers_begin_at_0_in_a_rebuilt_index, 80, retains=True),
    Planted("too early", messages_expire_too_early, retains=True),
]
