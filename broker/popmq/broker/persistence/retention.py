"""Retention: moves what lives, then deletes the oldest segments (D1).

A segment is due when its newest record is older than `store.retention_hours` (log_time.py says how
old it is), or while the log is larger than `store.retention_bytes`.  It goes only when nothing
needs it: it lies below the older snapshot, and every live body in it (messages in flight today)
was appended again at the tail.  Unread messages in it expire; a pop that starts below the minimum
goes on at it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.dispatch import Dispatch
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.log.segment_file import SegmentFile
from popmq.broker.persistence.log_time import LogTime
from popmq.common.disk import ColdRead, is_shortage
from popmq.common.record.message import HEADER_SIZE, BadRecord, decode_header
from popmq.common.settings.settings import StoreSettings
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

LOOK_MS = 10_000
EVERYTHING = 1 << 62  # as a position: behind every log's end
HOUR_MS = 3_600_000
_MOVES_PER_STEP = 64


class LiveBody(NamedTuple):
    """A message that lives: its identity (where it was first queued) and where it is now."""

    topic_id: int
    queue_id: int
    queue_offset: int
    unit: QueueUnit


class LiveBodies(Protocol):
    """What a part of the broker must find again, however old it is."""

    @property
    def keeps_from(self) -> int:
        """Nothing from this position on may be moved or deleted yet."""
        ...

    def bodies_below(self, position: int) -> Iterator[Sequence[LiveBody]]:
        """All live bodies whose record starts below `position`, in bounded pieces."""
        ...

    def move(self, body: LiveBody) -> None:
        """Append the body again at the log's end, under its identity, if it still lives.

        ColdRead, with nothing changed, when it has to come from the disk first.
        """
        ...


class Retention:
    def __init__(
        self,
        log: CommitLog,
        dispatch: Dispatch,
        settings: StoreSettings,
        flusher: Flusher,
        log_time: LogTime,
        *,
        on_delete: Callable[[int], object],
        on_start: Callable[[int], None],
        log_starts_at: Callable[[int], None],
    ) -> None:
        """`on_start` hears where the log begins from now on, in the step in which it does.

        `log_starts_at` makes that durable, on the flusher, before the segments go: a start takes a
        first segment that is missing otherwise for damage.
        """
        self._log = log
        self._dispatch = dispatch
        self._settings = settings
        self._flusher = flusher
        self._log_time = log_time
        self._look_due_ms = self._slave_look_due_ms = 0
        self._grown_to = (0, 0)  # segments that were begun, and snapshot, at the last look for size
        self._followed_to = 0  # where the log of the master began at the last look
        # Queues learn in pieces where the log begins; then the second goes on.
        self._raising: tuple[Iterator[None], Callable[[], None]] | None = None
        self._pieces: Iterator[tuple[LiveBodies, Sequence[LiveBody]]] | None = None
        self._bodies: list[tuple[LiveBodies, LiveBody]] = []  # of a piece, the last first
        self._cut = 0
        self._wait_until = 0
        self._deleting = False
        self._cold = ColdReadRetry(flusher)
        # Forgotten, and on the disk still: what could not be deleted goes first the next time, or
        # a start would find a gap behind it.
        self._leaving: list[SegmentFile] = []
        self.live: Sequence[LiveBodies] = ()
        self.exact: Sequence[LiveBodies] = ()  # of those, the ones that say what lives and no more
        self._on_start = on_start
        self._on_delete = on_delete
        self._log_starts_at = log_starts_at
        # Queues begin there from now on; what waits to be moved is found by its id until the
        # segments are deleted.
        self.on_truncated: Callable[[int], object] = lambda position: None
        self.relocated = 0
        self.deleted_segments = 0
        self.error: BaseException | None = None

    def step(self, *, now_ms: int, confirmed: int, keep_from: int) -> int:
        """One bounded piece of work. `keep_from` is the position of the older snapshot.

        Look, move in pieces, wait until the moves are confirmed, delete.
        """
        if self._deleting or self._cold.waiting:
            return 0
        if self._raising is not None:
            return self._raise_some(*self._raising)
        if self._pieces is not None:
            return self._move_some(self._pieces)
        if self._wait_until:
            if confirmed < self._wait_until:
                return 0
            self._delete()
            return 1
        if now_ms < self._look_due_ms and not self._has_grown(keep_from):
            return 0
        self._look_due_ms = now_ms + LOOK_MS
        cut = self._due(min([keep_from, *(live.keeps_from for live in self.live)]))
        if cut <= self._log.start:
            return 0
        self._cut = cut

        def raised() -> None:
            # No pop reads below the cut from now on, so nothing there comes to life again.
            self._pieces = self._all_pieces(cut, self.live)

        return self._raise_some(self._dispatch.log_starts_at(cut), raised)

    def _has_grown(self, keep_from: int) -> bool:
        """Whether the log is over `store.retention_bytes` with another segment or snapshot."""
        grown_to = self._log.end // self._settings.segment_bytes, keep_from
        if grown_to == self._grown_to:
            return False
        self._grown_to = grown_to
        return 0 < self._settings.retention_bytes < self._log.end - self._log.start

    def _raise_some(self, queues: Iterator[None], then: Callable[[], None]) -> int:
        self._raising = (queues, then)
        try:
            over = next(queues, self) is self
        except OSError as error:
            if not is_shortage(error):
                raise
            self._raising = (self._dispatch.log_starts_at(self._cut), then)
            return 0
        if over:
            self._raising = None
            self.on_truncated(self._cut)
            then()
        return 1

    def run_as_slave(self, *, now_ms: int, starts_at: int, keep_from: int) -> int:
        """On a slave: delete what the master deleted, `starts_at` is where its log begins.

        The master had moved all that lived there before it said so, and those records were
        applied before.  Should a table still know of a body there, the segment stays.
        """
        if self._deleting:
            return 0
        if self._raising is not None:
            return self._raise_some(*self._raising)
        if self._pieces is not None:
            return self._look_for_life(self._pieces)
        if now_ms < self._slave_look_due_ms and starts_at == self._followed_to:
            return 0
        self._slave_look_due_ms, self._followed_to = now_ms + LOOK_MS, starts_at
        bound = min(starts_at, keep_from)
        ends = [end for _, end in self._log.closed_segments() if end <= bound]
        if not ends:
            return 0
        self._cut = ends[-1]
        self._pieces = self._all_pieces(self._cut, self.exact)
        return 1

    def _look_for_life(self, pieces: Iterator[tuple[LiveBodies, Sequence[LiveBody]]]) -> int:
        live, bodies = next(pieces, (None, ()))
        if live is not None and not bodies:
            return 1
        self._pieces = None
        if bodies:
            logger.error(
                "a segment that the master deleted is needed here",
                extra={"position": bodies[0].unit.position, "log_starts_at": self._cut},
            )
            return 0
        return self._raise_some(self._dispatch.log_starts_at(self._cut), self._delete)

    @property
    def is_relocating(self) -> bool:
        """Whether live bodies below the cut wait to be appended again."""
        return self._raising is not None or self._pieces is not None

    def _all_pieces(
        self, cut: int, among: Sequence[LiveBodies]
    ) -> Iterator[tuple[LiveBodies, Sequence[LiveBody]]]:
        for live in among:
            for bodies in live.bodies_below(cut):
                yield live, bodies

    def _move_some(self, pieces: Iterator[tuple[LiveBodies, Sequence[LiveBody]]]) -> int:
        if not self._bodies:
            live, bodies = next(pieces, (None, ()))
            if live is None:
                self._pieces = None
                self._wait_until = max(self._log.end, 1)
                return 1
            self._bodies = [(live, body) for body in reversed(bodies)]
        for _ in range(min(_MOVES_PER_STEP, len(self._bodies))):
            live, body = self._bodies[-1]
            try:
                live.move(body)
            except ColdRead as cold:
                self._cold.warm(cold)
                return 1
            self._bodies.pop()
            self.relocated += 1
        return 1

    def _due(self, keep_from: int) -> int:
        """Position up to which whole segments may go."""
        cut = self._log.start
        oldest_ms = self._log_time.oldest_ms(self._settings.retention_hours * HOUR_MS)
        size = self._log.end - cut
        for start, end in self._log.closed_segments():
            if end > keep_from:
                break
            too_large = 0 < self._settings.retention_bytes < size
            if not too_large and self._newest_ms(end) >= oldest_ms:
                break
            cut = end
            size -= end - start
        return cut

    def _newest_ms(self, position: int) -> int:
        """Log time of the first record behind the segment: not older than any in it."""
        try:
            return decode_header(self._log.read_up_to(position, HEADER_SIZE)).log_ms
        except BadRecord:
            return 1 << 62

    def _delete(self) -> None:
        cut, self._wait_until = self._cut, 0
        self._deleting = True
        self._on_delete(cut)
        gone = self._log.drop_before(cut)
        self._on_start(cut)
        self._leaving += (*gone, *self._dispatch.queue_files_below_minimum())

        def work() -> None:
            self._log_starts_at(cut)
            while self._leaving:
                self._leaving[0].delete()
                del self._leaving[0]

        self._flusher.submit(work, self._deleted)
        self.deleted_segments += len(gone)
        logger.info(
            "segments deleted",
            extra={"count": len(gone), "log_starts_at": cut, "moved_bodies": self.relocated},
        )

    def _deleted(self, error: BaseException | None) -> None:
        self._deleting = False
        self.error = error  # what stays is tried again with the next ones, or seen by a start
        if error is not None:
            logger.warning("segments not deleted", extra={"reason": str(error)})
