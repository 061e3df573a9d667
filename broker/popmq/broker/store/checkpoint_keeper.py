"""When checkpoints are made: each 10 s if a queue grew, and when a snapshot waits for one."""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from popmq.broker.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from popmq.common.disk import Disk
from popmq.common.steps import Flusher

logger = logging.getLogger(__name__)

CHECKPOINT_MS = 10_000
RETRY_MS = 1_000


class SyncedFile(Protocol):
    def sync(self) -> None: ...


FlushIndex = Callable[[], Sequence[SyncedFile]]


class CheckpointKeeper:
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
        self._failed: OSError | None = None  # set on the flusher's thread
        self._due_ms = 0
        self._retry_ms = 0
        self._found = Checkpoint()
        self.position = 0  # index files are synced up to here
        self.made = 0

    def read(self) -> Checkpoint:
        """What the last run left; position 0 when there is none."""
        found = read_checkpoint(self._disk, self._path) or Checkpoint()
        self.position = found.position
        self._found = found
        return found

    def lower(self) -> None:
        """Vouch for no index any more, durably; the next checkpoint vouches again."""
        lowered = replace(self._found, position=0, durable=self._found.vouched)
        write_checkpoint(self._disk, self._path, lowered)
        self.position = 0

    def write_now(self, flush: FlushIndex, checkpoint: Checkpoint) -> None:
        """On this thread, at a clean stop with an idle flusher.

        Raises the OSError of the last job, of which a stop may not have heard: what was not
        synced then may be neither on the disk nor dirty, so nothing may be vouched for.
        """
        if self._failed is not None:
            raise self._failed
        for file in flush():
            file.sync()
        write_checkpoint(self._disk, self._path, checkpoint)
        self.position = checkpoint.position

    def step(
        self,
        flush: FlushIndex,
        checkpoint: Callable[[], Checkpoint],
        *,
        now_ms: int,
        wanted: bool,
    ) -> int:
        """Start a checkpoint when one is due, or `wanted`. OSError when units do not fit."""
        if self._running or now_ms < (self._retry_ms if wanted else self._due_ms):
            return 0
        self._due_ms = now_ms + CHECKPOINT_MS
        self._retry_ms = now_ms + RETRY_MS  # unless it succeeds
        dirty = flush()
        if not dirty and not wanted:
            return 0
        self._running = True
        made = checkpoint()

        def work() -> None:
            try:
                for file in dirty:
                    file.sync()
                write_checkpoint(self._disk, self._path, made)
            except OSError as error:
                self._failed = error
                raise

        self._flusher.submit(work, lambda error: self._done(made, error))
        return 1

    def _done(self, made: Checkpoint, error: BaseException | None) -> None:
        if error is not None and not _is_full(error):
            # Still "running": after a failed fsync nothing may be vouched for any more.
            self._on_failure(error)
            return
        self._running = False
        self._failed = None
        if error is not None:
            logger.warning("checkpoint not written", extra={"reason": str(error)})
        else:
            self._retry_ms = 0
            self.position = made.position
            self.made += 1


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
