"""When checkpoints are made: each 10 s if a queue grew, and when a snapshot waits for one.

Each says where the log starts, and before the log's first segments are deleted that is durable.
"""

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from popmq.broker.log.segment_file import Syncable
from popmq.broker.log.store_checkpoint import (
    UNKNOWN,
    StoreCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from popmq.common.disk import Disk, is_shortage
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

CHECKPOINT_MS = 10_000
RETRY_MS = 1_000

# Writes the index files in pieces, and returns those that have to be synced.
IndexPieces = Generator[None, None, Sequence[Syncable]]
FlushIndex = Callable[[], IndexPieces]


class CheckpointScheduler:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        flusher: Flusher,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._disk = disk
        self._path = f"{folder}/checkpoint"
        self._flusher = flusher
        self._on_failure = on_failure
        self._running = False
        self._flushing: tuple[IndexPieces, StoreCheckpoint] | None = None
        self._failed: OSError | None = None  # set on the flusher's thread
        self._unsynced: Sequence[Syncable] = ()  # written by a checkpoint that met a shortage
        self._due_ms = 0
        self._retry_ms = 0
        self._found = self._written = StoreCheckpoint()
        self.log_start = UNKNOWN
        # A slave lowers its checkpoint on the loop while retention says where the log starts: each
        # writes what the other one wrote before.
        self._writing = threading.Lock()
        self.position = 0  # index files are synced up to here
        self.made = 0

    def read(self) -> StoreCheckpoint:
        """What the last run left; position 0 when there is none."""
        checkpoint = read_checkpoint(self._disk, self._path) or StoreCheckpoint()
        self.position = checkpoint.position
        self._found = self._written = checkpoint
        return checkpoint

    @property
    def note(self) -> tuple[int, int]:
        """Log time and wall clock of the newest checkpoint that was made."""
        return self._written.log_ms, self._written.wall_ms

    def lower(self) -> None:
        """Vouch for no index any more, durably; the next checkpoint vouches again."""
        self._flushing = None
        with self._writing:
            self._put(replace(self._found, position=0, durable=self._found.vouched))
        self.position = 0

    def log_starts_at(self, position: int) -> None:
        """What is below is about to be deleted; runs on the flusher.  Where there is no room for a
        checkpoint the old one goes: without any a start trusts less and misses nothing.
        """
        with self._writing:
            self.log_start = position
            try:
                self._put(self._written)
            except OSError as error:
                if not is_shortage(error):
                    raise
                if self._disk.exists(self._path):
                    self._disk.remove(self._path)
                    self._disk.sync_folder(self._path.rpartition("/")[0])

    def write_now(self, flush: FlushIndex, checkpoint: StoreCheckpoint) -> None:
        """On this thread, at a clean stop with an idle flusher.

        Raises the OSError of the last job, of which a stop may not have heard: what was not
        synced then may be neither on the disk nor dirty, so nothing may be vouched for.
        """
        if self._failed is not None and not is_shortage(self._failed):
            raise self._failed
        for file in (*self._unsynced, *_all_of(flush())):
            file.sync()
        with self._writing:
            self._put(checkpoint)
        self.position = checkpoint.position

    def step(
        self,
        flush: FlushIndex,
        checkpoint: Callable[[], StoreCheckpoint],
        *,
        now_ms: int,
        requested: bool,
    ) -> int:
        """Start a checkpoint when one is due, or `requested`; or go on with the files of one that
        was started. OSError when units do not fit.

        It vouches for what was confirmed when it was started.
        """
        if self._running:
            return 0
        if self._flushing is None:
            if now_ms < (self._retry_ms if requested else self._due_ms):
                return 0
            self._due_ms = now_ms + CHECKPOINT_MS
            self._retry_ms = now_ms + RETRY_MS  # unless it succeeds
            self._flushing = (flush(), checkpoint())
        pieces, new_checkpoint = self._flushing
        dirty: Sequence[Syncable] = ()
        try:
            next(pieces)
        except StopIteration as end:
            dirty = end.value
        except OSError:
            self._flushing = None
            raise
        else:
            return 1
        self._flushing = None
        self._unsynced = unsynced = [*self._unsynced, *dirty]
        if not unsynced and not requested:
            return 0
        self._running = True

        def work() -> None:
            try:
                for file in unsynced:
                    file.sync()
                self._unsynced = ()
                with self._writing:
                    self._put(new_checkpoint)
            except OSError as error:
                self._failed = error
                raise

        self._flusher.submit(work, lambda error: self._done(new_checkpoint, error))
        return 1

    def _put(self, checkpoint: StoreCheckpoint) -> None:
        self._written = replace(checkpoint, log_start=self.log_start)
        write_checkpoint(self._disk, self._path, self._written)

    def _done(self, checkpoint: StoreCheckpoint, error: BaseException | None) -> None:
        if error is not None and not is_shortage(error):
            # Still "running": after a failed fsync, of a full disk too, nothing may be vouched
            # for any more.
            self._on_failure(error)
            return
        self._running = False
        self._failed = None
        if error is not None:
            logger.warning("checkpoint not written", extra={"reason": str(error)})
        else:
            self._retry_ms = 0
            self.position = checkpoint.position
            self.made += 1


def _all_of(pieces: IndexPieces) -> Sequence[Syncable]:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            files: Sequence[Syncable] = end.value
            return files
