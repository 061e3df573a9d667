"""IndexFlusher: queues and key index reach their files, and checkpoints say how far.

All of it is rebuilt from the log, so a disk that has no room for it stops sends and no more.
"""

from collections.abc import Callable

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.dispatch import Dispatch
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler, IndexPieces
from popmq.broker.persistence.log_time import LogTime
from popmq.common.disk import is_shortage


class IndexFlusher:
    def __init__(
        self,
        dispatch: Dispatch,
        index: Callable[[], KeyIndex],
        checkpoints: CheckpointScheduler,
        log_time: LogTime,
        epoch: Callable[[], int],
    ) -> None:
        self._dispatch = dispatch
        self._index = index
        self._checkpoints = checkpoints
        self._log_time = log_time
        self._epoch = epoch
        self.blocked = False  # the disk is full: units wait in memory

    def step(self, *, now_ms: int, requested: int) -> int:
        """A piece of the index files; a checkpoint when one is due, or wanted for a position."""
        try:
            self._dispatch.flush_large_tails()
            done = self._index().step()
            done += self._checkpoints.step(
                self._flush,
                self._checkpoint,
                now_ms=now_ms,
                requested=self._checkpoints.position < requested <= self._dispatch.position,
            )
            self.blocked = False
        except OSError as error:
            if not is_shortage(error):
                raise
            self.blocked = True
            return 0
        return done

    def write_now(self) -> None:
        """Everything, and a checkpoint, on this thread: at a clean stop with an idle flusher."""
        self._checkpoints.write_now(self._flush, self._checkpoint())

    def _flush(self) -> IndexPieces:
        """Write all index files; returns those that have to be synced. OSError when full."""
        files = yield from self._dispatch.flush()
        files += self._index().flush(self._dispatch.position)
        self._dispatch.flushed()
        return files

    def _checkpoint(self) -> StoreCheckpoint:
        """Where the log time is not known yet, the note of the checkpoint before stays true."""
        log_ms, wall_ms = self._log_time.note() or self._checkpoints.note
        return StoreCheckpoint(self._dispatch.position, self._epoch(), wall_ms, log_ms=log_ms)
