"""TimerFiles: wheel, log and checkpoint of the timers, as one thing (docs/concepts/timer.md).

Nothing of it is needed: what is missing or damaged is begun anew, and the timer queue tells the
rest.  The checkpoint vouches only for what was synced before it was written.
"""

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from popmq.broker.store.mapped_file import MappedFile
from popmq.broker.timer.timer_checkpoint import (
    TimerCheckPoint,
)
from popmq.broker.timer.timer_log import Chain, TimerLog
from popmq.broker.timer.timer_unit import TimerUnit
from popmq.broker.timer.timer_wheel import Slot, TimerWheel
from popmq.common.config import TimerSettings
from popmq.common.disk import Disk
from popmq.common.steps import Flusher

logger = logging.getLogger(__name__)

_SPILL_BYTES = 64 << 10
_TAIL_LIMIT_BYTES = 64 << 20
_DIRTY_LIMIT_SLOTS = 200_000


class Cursors(NamedTuple):
    """What the checkpoint vouches for beside the TimerLog, at the moment a flush begins."""

    last_read_ms: int = 0
    queue_offset: int = 0
    master_offset: int = 0
    epoch: int = 0
    wall_ms: int = 0


class TimerFiles:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        settings: TimerSettings,
        flusher: Flusher,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`folder` is the broker's data folder; `on_failure` hears of a disk error (D2)."""
        self._disk = disk
        self._settings = settings
        self._path = f"{folder}/timercheckpoint"
        self._flusher = flusher
        self._on_failure = on_failure
        self._wheel = TimerWheel(
            disk, f"{folder}/timerwheel", slots=settings.wheel_slots, slot_ms=settings.slot_ms
        )
        self._log = TimerLog(
            disk,
            f"{folder}/timerlog",
            segment_bytes=settings.log_segment_bytes,
            slot_ms=settings.slot_ms,
        )
        self._running = False
        self._failed: BaseException | None = None
        self._anew: list[MappedFile] | None = None  # a reset that the disk does not know of yet
        self._counter = 0  # of the newest copy of the checkpoint, written or tried
        self._flush_due_ms = self._clean_due_ms = self._idle_due_ms = 0
        self.checkpoint = TimerCheckPoint()  # the newest durable one
        self.last_unit: TimerUnit | None = None  # that `open` found
        self.rebuilt = False  # begun anew: the queue is enqueued from its start
        self.blocked = False  # the disk is full; everything waits in memory
        self.flushes = 0

    def open(self) -> None:
        """Steps 1 to 3 of a start; may wait. What it found is durable when it returns.

        Sets `rebuilt`, `last_unit` and `checkpoint`.  OSError when the disk fails.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Begin both files anew, now or after the flush that is under way."""
        raise NotImplementedError

    @property
    def full(self) -> bool:
        """Too much waits to be written: add nothing until a flush went through."""
        raise NotImplementedError

    def add(
        self,
        *,
        slot_time_ms: int,
        due_ms: int,
        position: int,
        size: int,
        identity: int,
        topic_id: int,
        roll: bool,
        now_ms: int,
        wait: bool = True,
    ) -> None:
        """Put a timer into the slot of `slot_time_ms`, a multiple of slot_ms.

        The record at `position` is `identity`, or was moved from there.  Slots stay within one
        lap of the wheel.  Raises TimerDamaged, and with `wait` off ColdRead; then nothing was
        added.
        """
        raise NotImplementedError

    def slot(self, time_ms: int, *, wait: bool = True) -> Slot:
        raise NotImplementedError

    def next_occupied(self, from_ms: int, to_ms: int, *, wait: bool = True) -> int | None:
        """The time of the first slot of [from_ms, to_ms) that is not empty."""
        raise NotImplementedError

    def occupied(self, from_ms: int, to_ms: int, *, wait: bool = True) -> Iterator[Slot]:
        """The slots of [from_ms, to_ms) that are not empty, by time."""
        raise NotImplementedError

    def read_slot(self, time_ms: int, *, wait: bool = True) -> Chain:
        """Bounded lists of a slot's units, newest first.

        Raises TimerDamaged; and with `wait` off ColdRead, after which `next` goes on.
        """
        raise NotImplementedError

    def clear_slot(self, time_ms: int) -> None:
        """The slot is over: all its timers fired or moved on, and that is confirmed."""
        raise NotImplementedError

    def step(self, now_ms: int, cursors: Callable[[], Cursors]) -> int:
        """Start a flush, or a deletion of old segments, when one is due (`now_ms` since boot)."""
        raise NotImplementedError

    def flush_now(self, cursors: Cursors) -> None:
        """On this thread, at a clean stop with an idle flusher.

        Raises the OSError of a flush that failed: then nothing may be vouched for.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
