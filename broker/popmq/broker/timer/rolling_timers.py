"""RollingTimers: the timers that are due in a slot while their units roll, and so stand in another
one.

A slot's own units say who is due in it, but for those beyond the wheel's window.  They are noted as
their units come and roll; after a start, and when the wheel is made anew, from the TimerLog, while
the others go on.  Only `timer.slot_limit` asks: without it nothing is kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from popmq.broker.timer.timer_files import TimerFiles
from popmq.common.settings.settings import TimerSettings

_NONE: Mapping[int, int] = {}
_UNITS_A_STEP = 1_024
# Timers, some 150 B each; beyond it those of the slots that changed longest ago are forgotten.
_LIMIT = 500_000


class RollingTimers:
    def __init__(
        self, files: TimerFiles, settings: TimerSettings, base_ms: Callable[[], int]
    ) -> None:
        """`base_ms` is the oldest slot that may hold something."""
        self._files = files
        self._slot_ms = settings.slot_ms
        self._on = settings.slot_limit > 0
        self._base_ms = base_ms
        self._slots: OrderedDict[int, dict[int, int]] = OrderedDict()  # identity -> topic
        self._count = 0
        self._position: int | None = None  # units from here on were looked at
        self.complete = not self._on
        self.forgotten = 0  # since the process started

    @property
    def held(self) -> int:
        return self._count

    def begin(self) -> None:
        """The units in the files are others, or not all there yet."""
        self._slots.clear()
        self._count = 0
        self._position = None
        self.complete = not self._on

    def due_in(self, slot_ms: int) -> Mapping[int, int]:
        """The topics of those that are due in that slot, by identity."""
        return self._slots.get(slot_ms // self._slot_ms, _NONE)

    def add(self, due_ms: int, identity: int, topic_id: int) -> None:
        """The timer has a unit that rolls; it may be known."""
        if not self._on:
            return
        slot = due_ms // self._slot_ms
        timers = self._slots.setdefault(slot, {})
        self._slots.move_to_end(slot)
        self._count += identity not in timers
        timers[identity] = topic_id
        while self._count > _LIMIT:
            _, oldest = self._slots.popitem(last=False)
            self._count -= len(oldest)
            self.forgotten += len(oldest)

    def remove(self, due_ms: int, identity: int) -> None:
        """It rolls no more: its unit stands in its slot now, or was dropped."""
        slot = due_ms // self._slot_ms
        timers = self._slots.get(slot)
        if timers is not None and timers.pop(identity, None) is not None:
            self._count -= 1
            if not timers:
                del self._slots[slot]

    def step(self) -> int:
        """Look at some of the units; call it when all that the files lacked is enqueued.

        Raises ColdRead (call again).
        """
        if self.complete:
            return 0
        if self._position is None:
            self._position = self._files.log.end
        units, self._position = self._files.log.units_before(self._position, _UNITS_A_STEP)
        for unit in units:
            if unit.roll and unit.slot_time_ms >= self._base_ms():
                self.add(unit.due_ms, unit.identity, unit.topic_id)
        self.complete = self._position <= self._files.log.start
        return 1
