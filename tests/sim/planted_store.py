"""Mistakes planted into log, index files, flusher and key index."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from popmq.broker.index import index_tail, key_index
from popmq.broker.index.index_tail import IndexTail
from popmq.broker.index.message_keys import name_hash
from popmq.broker.log import commit_log, consume_queue, message_reader
from popmq.broker.log.commit_log import CommitLog, FlushBatch
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.group_commit import GroupCommit
from popmq.broker.log.queue_unit import POSITION_LIMIT, UNIT, QueueUnit
from popmq.broker.log.segment_file import SegmentFile, SegmentFiles
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.index_flusher import IndexFlusher
from popmq.broker.persistence.log_time import RecoveryResult
from popmq.broker.persistence.recovery import ApplyRecord, Recovery
from popmq.broker.persistence.snapshot import SnapshotHeader
from popmq.broker.store import lookup
from popmq.broker.store.message_store import MessageStore
from popmq.common.record.message import BadRecord, Header, decode_header

Patch = pytest.MonkeyPatch


def reply_before_fsync(patch: Patch) -> None:
    def wrong(self: MessageStore, *callbacks: Callable[[], None]) -> None:
        for callback in callbacks:
            callback()

    patch.setattr(MessageStore, "when_log_confirmed", wrong)


def batch_handed_over_by_the_flusher(patch: Patch) -> None:
    """What a swap of lists in the flusher comes to: more is confirmed than was synced."""
    flushed = GroupCommit._flushed

    def wrong(self: GroupCommit, batch: FlushBatch, error: BaseException | None) -> None:
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
    patch.setattr(message_reader, "intact_message", lambda data, at, position, size: None)
    patch.setattr(message_reader, "intact_contents", lambda data, start, units: [None] * len(units))


def torn_tail_not_cut(patch: Patch) -> None:
    patch.setattr(CommitLog, "truncate_torn_tail", lambda self: 0)


def fsync_error_ignored(patch: Patch) -> None:
    flushed = GroupCommit._flushed
    patch.setattr(GroupCommit, "_flushed", lambda self, batch, error: flushed(self, batch, None))


def fsync_retried(patch: Patch) -> None:
    sync = SegmentFile.sync

    def wrong(self: SegmentFile) -> None:
        try:
            sync(self)
        except OSError:
            sync(self)

    patch.setattr(SegmentFile, "sync", wrong)


def index_trusted_beyond_the_checkpoint(patch: Patch) -> None:
    """Units have a check since then, and what it finds is mended: both have to be missing."""

    def wrong(data: bytes, at: int, seed: int, offset: int) -> QueueUnit:
        position, size, tag_hash = UNIT.unpack_from(data, at)
        return QueueUnit(position % POSITION_LIMIT, size, tag_hash)

    patch.setattr(consume_queue, "intact_unit", wrong)
    patch.setattr(ConsumeQueue, "_is_trusted", lambda self, offset, position: True)


def queues_not_synced(patch: Patch) -> None:
    patch.setattr(ConsumeQueue, "files", lambda self: [])


def checkpoint_ahead_of_the_confirmed_position(patch: Patch) -> None:
    checkpoint, opened = IndexFlusher._checkpoint, MessageStore.open

    def wrong(self: MessageStore) -> None:
        opened(self)
        keeper = self._index_keeper

        def ahead() -> Any:
            return replace(checkpoint(keeper), position=self.end)

        patch.setattr(keeper, "_checkpoint", ahead)

    patch.setattr(MessageStore, "open", wrong)


def snapshot_without_its_tail(patch: Patch) -> None:
    """A start takes the tables of a snapshot for those of the log's end."""
    replay = Recovery.replay

    def wrong(self: Recovery, apply: ApplyRecord, trusted: StoreCheckpoint) -> RecoveryResult:
        load, used = self._load_snapshot, False

        def noted() -> SnapshotHeader | None:
            nonlocal used
            snapshot_header = load()
            used = snapshot_header is not None
            return snapshot_header

        patch.setattr(self, "_load_snapshot", noted)
        return replay(self, lambda record: None if used else apply(record), trusted)

    patch.setattr(Recovery, "replay", wrong)


def recovery_does_not_sync(patch: Patch) -> None:
    patch.setattr(CommitLog, "sync", lambda self: None)


def recovery_syncs_no_names(patch: Patch) -> None:
    def wrong(self: SegmentFiles) -> None:
        for file in self:
            file.sync()

    patch.setattr(SegmentFiles, "sync", wrong)


def clean_pages_trusted(patch: Patch) -> None:
    """After a failed fsync, what the page cache shows is taken for what the disk has."""
    patch.setattr(CommitLog, "rewrite_from", lambda self, position: None)


def torn_unit_trusted(patch: Patch) -> None:
    def wrong(data: bytes, at: int, seed: int, offset: int) -> QueueUnit | None:
        position, size, tag_hash = UNIT.unpack_from(data, at)
        return QueueUnit(position % POSITION_LIMIT, size, tag_hash) if size else None

    patch.setattr(consume_queue, "intact_unit", wrong)


def segments_cut_from_the_front(patch: Patch) -> None:
    cut = SegmentFiles.truncate

    def wrong(self: SegmentFiles, position: int) -> None:
        for start in [start for start in self._files if start > position]:
            self._files.pop(start).delete()
        cut(self, position)

    patch.setattr(SegmentFiles, "truncate", wrong)


def segment_name_not_synced(patch: Patch) -> None:
    segment_for_write = SegmentFiles.segment_for_write

    def wrong(self: Any, position: int) -> SegmentFile:
        disk: Any = self._disk
        try:
            self._disk = _WithoutFolderSync(disk)
            return segment_for_write(self, position)
        finally:
            self._disk = disk

    patch.setattr(SegmentFiles, "segment_for_write", wrong)
    patch.setattr(SegmentFiles, "reserve", lambda self, position, segments: None)


def flush_of_the_live_list(patch: Patch) -> None:
    """The flusher takes what the loop goes on appending to, and empties it at its end.

    Right as long as the loop appends nothing between two operations of the job.
    """
    write = CommitLog.write

    def take_live(self: CommitLog) -> FlushBatch | None:
        return FlushBatch(self.end, self._runs) if self._runs else None

    def write_live(self: CommitLog, batch: FlushBatch) -> None:
        batch.end = self.end
        write(self, replace(batch, runs=[(at, list(parts)) for at, parts in self._runs]))
        self._runs, self._run_end, self.pending_bytes = [], -1, 0

    patch.setattr(CommitLog, "take_batch", take_live)
    patch.setattr(CommitLog, "write", write_live)


def position_confirmed_by_the_flusher(patch: Patch) -> None:
    """The flusher moves the confirmed position itself, between its write and its fdatasync."""
    opened = MessageStore.open

    def wrong(self: MessageStore) -> None:
        opened(self)
        log = self._log

        def write(batch: FlushBatch) -> None:
            touched = {}
            for position, parts in batch.runs:
                file = log._files.segment_for_write(position)
                file.write(position, parts)
                touched[file.start] = file
            self._commit.confirmed = batch.end
            for file in touched.values():
                file.sync()

        patch.setattr(log, "write", write)

    patch.setattr(MessageStore, "open", wrong)


def key_index_torn_chunk_trusted(patch: Patch) -> None:
    """What its file says it covers is taken for true, though it was not synced."""
    patch.setattr(index_tail, "crc32c", lambda data, value=0: 0)


def key_index_vouches_for_the_tail(patch: Patch) -> None:
    """Its checkpoint says the log's end, though it holds confirmed messages only."""
    flush, opened = IndexFlusher._flush, MessageStore.open

    def wrong(self: MessageStore) -> None:
        opened(self)
        keeper = self._index_keeper
        patch.setattr(keeper, "_flush", lambda: [*self.index.flush(self.end), *flush(keeper)])

    patch.setattr(MessageStore, "open", wrong)


def key_index_chunk_lost(patch: Patch) -> None:
    """A start leaves out the last chunk of the tail's file, and its span stays."""
    load_chunk = IndexTail._load_chunk

    def wrong(self: IndexTail, data: bytes, at: int) -> int:
        size = load_chunk(self, data, at)
        if size and at + size == len(data):
            self.buckets = [[] for _ in self.buckets]
        return size

    patch.setattr(IndexTail, "_load_chunk", wrong)


def key_index_of_all_topics(patch: Patch) -> None:
    """Names are not compared, and the topic is not hashed."""
    patch.setattr(key_index, "name_hash", lambda topic_id, kind, name: name_hash(0, kind, name[:3]))
    patch.setattr(lookup, "names_in", lambda properties: _Everything())


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


class _WithoutFolderSync:
    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_folder(self, path: str) -> None:
        return
