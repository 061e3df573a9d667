"""LogTime: how log time goes on when a broker begins to lead, and how old a record is.

The invariant: log time never goes back, and only one thing lets it jump forward: a cold start, of
a process that knows no log time yet, counts the time for which its store was down.  It reads that
from this machine's wall clock, which may be wrong: `store.max_downtime_ms` bounds what it counts,
and no record gets older by it (docs/concepts/store.md, "Log time").
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.abort_file import NO_EPOCH
from popmq.broker.persistence.snapshot import SnapshotHeader
from popmq.common.clock import Clock, LogClock
from popmq.common.record.message import Header, RecordKind
from popmq.common.settings.settings import StoreSettings

logger = logging.getLogger(__name__)


class Note(NamedTuple):
    """Log time at a moment when this machine's wall clock showed `wall_ms`; 0: not known."""

    log_ms: int
    wall_ms: int


class _Epoch(NamedTuple):
    log_ms: int  # when it began
    downtime_ms: int  # that its master counted before


@dataclass(slots=True)
class RecoveryResult:
    """What the log and the snapshot said."""

    epoch: int = 0
    log_ms: int = 0
    wall_ms: int = 0
    records: int = 0
    snapshot_position: int = 0
    rebuilt_index: bool = False
    own_from: int = NO_EPOCH  # records from this epoch on were written on this machine

    def begin(self, head: SnapshotHeader) -> None:
        self.epoch, self.log_ms, self.wall_ms = head.epoch, head.log_ms, head.wall_ms
        self.snapshot_position = head.position

    def passed(self, header: Header) -> None:
        """A moved body keeps the wall time at which it was stored first; here it counts as
        written when log time says so."""
        if header.kind == RecordKind.MOVED:
            self.wall_ms += header.log_ms - self.log_ms if self.wall_ms else 0
        else:
            self.wall_ms = header.wall_ms
        self.epoch, self.log_ms = header.epoch, header.log_ms


class LogTime:
    def __init__(
        self,
        log: CommitLog,
        clock: Clock,
        log_clock: LogClock,
        settings: StoreSettings,
        epoch_starts: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._log = log
        self._clock = clock
        self._max_downtime_ms = settings.max_downtime_ms
        self.clock = log_clock
        self.leads = False
        self._own = _Epoch(0, 0)
        self._own_position = -1
        self._older: dict[int, _Epoch] = {}  # by the position of its first record
        # Where the epochs of the log begin, oldest first.
        self.epoch_starts = epoch_starts

    @property
    def downtime_ms(self) -> int:
        """What this start counted."""
        return self._own.downtime_ms

    def note(self) -> Note | None:
        """For the next start; None while the log time is not known."""
        known = self.clock.known
        return Note(self.clock.now_ms(), self._clock.wall_ms()) if known else None

    def go_on(self, newest: RecoveryResult, checkpoint: StoreCheckpoint, *, epoch: int) -> None:
        """This broker leads `epoch`; `newest` is of the newest record, `checkpoint` is the
        checkpoint that the start found."""
        self.leads, downtime_ms = True, 0
        if self.clock.known:
            log_ms = self.clock.now_ms()
        elif newest.log_ms:
            log_ms, downtime_ms = self._after_downtime(newest, checkpoint)
        else:
            log_ms = self._clock.wall_ms()
        log_ms = max(newest.log_ms, log_ms)
        # The newest record may be younger than the note: the group was up until then at least.
        self._own = _Epoch(log_ms, min(downtime_ms, log_ms - newest.log_ms))
        self.clock.start(self._own.log_ms, epoch=epoch)

    def epoch_began(self, position: int) -> None:
        """The epoch that `go_on` began begins at that position of the log."""
        self._own_position = position

    def oldest_ms(self, age_ms: int) -> int:
        """Log time of a record of that age: downtime that starts counted since then is no age."""
        oldest_ms = self.clock.now_ms() - age_ms
        for epoch in self._epochs():
            if epoch.log_ms <= oldest_ms:
                break
            oldest_ms -= epoch.downtime_ms
        return oldest_ms

    # -- inside

    def _after_downtime(
        self, newest: RecoveryResult, checkpoint: StoreCheckpoint
    ) -> tuple[int, int]:
        """Log time, and how much of it is downtime.

        Of two notes the newer counts.  The newest record is one if this machine wrote it.  The wall
        clock of another machine never makes the downtime longer.  It may make it shorter: this
        machine's clock may have been set since its own note was made."""
        note = Note(checkpoint.log_ms, checkpoint.wall_ms)
        is_own = newest.epoch >= newest.own_from
        if is_own:
            note = max(note, Note(newest.log_ms, newest.wall_ms))
        if not note.log_ms:
            return newest.log_ms, 0
        passed_ms = self._clock.wall_ms() - note.wall_ms
        counted_ms = min(max(0, passed_ms), self._max_downtime_ms)
        if passed_ms != counted_ms:
            logger.warning(
                "downtime not counted in full",
                extra={"wall_clock_ms": passed_ms, "counted_ms": counted_ms},
            )
        log_ms = note.log_ms + counted_ms
        if not is_own:
            since_newest_ms = max(0, self._clock.wall_ms() - newest.wall_ms)
            log_ms = min(log_ms, newest.log_ms + since_newest_ms)
        return log_ms, counted_ms

    def _epochs(self) -> Iterator[_Epoch]:
        """The newest first, as far as the log has their first records."""
        yield self._own
        for position in reversed(self.epoch_starts()):
            if position < self._log.start:
                return
            if position != self._own_position:
                if position not in self._older:
                    self._older[position] = self._read(position)
                yield self._older[position]

    def _read(self, position: int) -> _Epoch:
        header = self._log.record_at(position)
        if header is not None and header.kind == RecordKind.PADDING:
            header = self._log.record_at(header.end)
        if header is None or header.kind != RecordKind.EPOCH_START:
            return _Epoch(1 << 62, 0)  # damaged, or of a log that began before it had epochs
        return _Epoch(header.log_ms, header.queue_id)
