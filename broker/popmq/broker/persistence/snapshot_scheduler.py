"""When snapshots are made: each `store.snapshot_bytes` of log, in steps, and at a clean stop."""

import logging
from collections.abc import Callable, Sequence

from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.broker.persistence.snapshot import (
    KEPT,
    SnapshotHeader,
    SnapshotWriter,
    snapshot_names,
)
from popmq.common.disk import Disk
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)


class SnapshotScheduler:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        flusher: Flusher,
        *,
        every_bytes: int,
        before: Callable[[], None] = lambda: None,
        on_finished: Callable[[int, int], None] = lambda position, state_hash: None,
        log_starts_at: Callable[[int], None] = lambda position: None,
    ) -> None:
        """`before` makes records of what is none yet; `on_finished` hears position and state hash
        of each snapshot that was made while the broker runs; `log_starts_at` makes durable where
        the log will start, before it is begun anew with another's snapshot."""
        self.disk = disk
        self.folder = f"{folder}/snapshot"
        self.flusher = flusher
        self._every_bytes = every_bytes
        self._writer: SnapshotWriter | None = None
        self.tables: Sequence[SnapshotTable] = ()
        self._before = before
        self._on_finished = on_finished
        self.log_starts_at = log_starts_at
        self.wanted = False  # make one now, however little was appended since the last one
        self.position = 0  # of the newest finished snapshot
        self._skipped_to = 0
        self._kept: list[int] = []
        self.made = 0
        self.abandoned_count = 0
        self.state_hash = 0

    @property
    def wanted_checkpoint(self) -> int:
        """A snapshot waits for index files that are synced up to here; 0 when none waits."""
        return self._writer.head.position if self._writer else 0

    def step(self, head: Callable[[], SnapshotHeader], *, safe_position: int) -> int:
        """One piece of work, if there is any. `safe_position` is confirmed and checkpointed."""
        if self._writer is None:
            now = head()
            grown = now.position - max(self.position, self._skipped_to)
            if grown < self._every_bytes and not self.wanted:
                return 0
            self.wanted = False
            self._before()
            self._writer = self._begin(head())
            return 1
        return self.write_chunk(safe_position=safe_position)

    def start_at(self, head: SnapshotHeader) -> None:
        """Begin one now, where another broker began its own; not while one is being written."""
        if self._writer is None and head.position > self.position:
            self._writer = self._begin(head)

    def write_chunk(self, *, safe_position: int) -> int:
        """A piece of the snapshot that was begun, if there is one."""
        if self._writer is None:
            return 0
        done = self._writer.step(safe_position >= self._writer.head.position)
        if self._writer.error is not None:
            self._abandon(self._writer)
        elif self._writer.finished:
            self._note(self._writer)
            self._on_finished(self.position, self.state_hash)
        return done

    def load(self) -> None:
        """Note which snapshots are there, and make sure that they stay.

        A crash may have left the name of one that was not synced, and the log is going to be
        deleted up to the older one.
        """
        self._kept = [int(name) for name in snapshot_names(self.disk, self.folder)]
        if self._kept:
            self.disk.sync_folder(self.folder)

    @property
    def older_position(self) -> int:
        """Of the older of the two kept snapshots; 0 while there are not two."""
        return self._kept[-KEPT] if len(self._kept) >= KEPT else 0

    def make_now(self, head: SnapshotHeader) -> None:
        """A whole snapshot on this thread, at a clean stop."""
        writer = self._begin(head)
        writer.run_to_end()
        self._note(writer)

    def _begin(self, head: SnapshotHeader) -> SnapshotWriter:
        return SnapshotWriter(self.disk, self.folder, head, self.tables, self.flusher)

    def _abandon(self, writer: SnapshotWriter) -> None:
        """A snapshot is never needed: the log has everything. Try again a step of log later."""
        logger.warning(
            "snapshot not written", extra={"path": writer.path, "reason": str(writer.error)}
        )
        self.abandoned_count += 1
        self._skipped_to = writer.head.position
        self._writer = None

    def _note(self, writer: SnapshotWriter) -> None:
        self._writer = None
        self.position = writer.head.position
        self._kept = [*self._kept[1 - KEPT :], self.position]
        self.state_hash = writer.state_hash
        self.made += 1
