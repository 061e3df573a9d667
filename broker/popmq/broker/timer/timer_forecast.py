"""TimerForecast: how many pending timers are due within how long, from the slots' counts.

A wheel may have 604,800 slots in use, so the metrics' page never counts them itself: a count in
bounded steps, at most once a minute and only when somebody asked for it, is what it shows.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_scan import TimerScan
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.common.disk import ColdRead
from popmq.common.errors import Refused
from popmq.common.settings.settings import TimerSettings

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000
BUCKETS_MS = (
    *(5 * SECOND, MINUTE, 5 * MINUTE, 15 * MINUTE),
    *(HOUR, 4 * HOUR, 8 * HOUR, 24 * HOUR),
)
_APART_MS = MINUTE
_CANCELLED_A_PIECE = 8_192


class DueCounts:
    """Timers by how far ahead they are due; the last bucket has no end.

    What was recalled, or left for another broker group, has a unit in the wheel until its slot is
    over: slots where one of these is due are counted unit by unit.
    """

    def __init__(self, now_ms: int, settings: TimerSettings, state: TimerState) -> None:
        self._now_ms = now_ms
        self._slot_ms = settings.slot_ms
        self._slots = settings.wheel_slots
        self._state = state
        self._cancelled = state.cancelled_by_due.copy()  # not looked at yet
        self._mixed = bytearray((self._slots + 7) // 8)  # a bit for each slot of those
        self._open: list[TimerScan] = []  # mixed slots that are to be counted
        self.counts = [0] * (len(BUCKETS_MS) + 1)

    def add_slots(self, scan: TimerScan) -> bool:
        """The next piece of the wheel; False at the end. Raises as `TimerScan.slots`."""
        if not self._state.pending_total:
            return False
        if self._cancelled:
            self._mark(self._cancelled[-_CANCELLED_A_PIECE:], scan.at_ms)
            del self._cancelled[-_CANCELLED_A_PIECE:]
            return True
        if self._open:
            self._add_units(self._open[-1])
            return True
        slots = scan.slots()
        for slot in slots:
            if self._is_mixed(slot.time_ms):
                self._open.append(scan.of_slot(slot.time_ms))
            else:
                self._add(slot.time_ms + self._slot_ms - 1, slot.num)
        return bool(slots)

    def add_timers(self, timers: Sequence[Timer]) -> None:
        for timer in timers:
            if not self._state.is_cancelled(timer.identity):
                self._add(timer.due_ms, 1)

    def _mark(self, cancelled: Sequence[tuple[int, int]], begin_ms: int) -> None:
        for due_ms, _ in cancelled:
            if due_ms >= begin_ms:
                index = due_ms // self._slot_ms % self._slots
                self._mixed[index >> 3] |= 1 << (index & 7)

    def _is_mixed(self, slot_ms: int) -> bool:
        index = slot_ms // self._slot_ms % self._slots
        return bool(self._mixed[index >> 3] >> (index & 7) & 1)

    def _add_units(self, slot: TimerScan) -> None:
        units = slot.units()
        if not units:
            self._open.pop()
        for unit in units:
            if not self._state.is_cancelled(unit.identity):
                self._add(unit.slot_time_ms + self._slot_ms - 1, 1)

    def _add(self, due_ms: int, count: int) -> None:
        self.counts[bisect_left(BUCKETS_MS, due_ms - self._now_ms)] += count


class TimerForecast:
    def __init__(
        self,
        store: MessageStore,
        state: TimerState,
        scan: Callable[[], TimerScan],
        beside: Callable[[], list[Timer]],
        settings: TimerSettings,
        *,
        wall_ms: Callable[[], int],
        boot_ms: Callable[[], int],
    ) -> None:
        """`scan` begins a look at the whole wheel; `beside` are timers not in it yet."""
        self._store = store
        self._state = state
        self._scan = scan
        self._beside = beside
        self._settings = settings
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._next_ms = 0  # since boot
        self._wanted = False
        self._running: tuple[DueCounts, TimerScan] | None = None
        self._cold = ColdReadRetry(store.readers)
        self._known: Sequence[int] | None = None

    def counts(self) -> Sequence[int] | None:
        """As counted last, None before that; asking for it makes the next count begin."""
        self._wanted = True
        return self._known

    def step(self) -> int:
        """A bounded piece of a count. Returns 1 for work done."""
        if self._cold.waiting or (self._running is None and not self._is_due()):
            return 0
        if self._running is None:
            counts = DueCounts(self._wall_ms(), self._settings, self._state)
            self._running = counts, self._scan()
        due_counts, scan = self._running
        try:
            if not due_counts.add_slots(scan):
                due_counts.add_timers(self._beside())
                self._known, self._running = due_counts.counts, None
        except ColdRead as cold:
            self._cold.warm(cold)
            return 0
        except Refused:  # the wheel is being made anew
            self._running = None
        return 1

    def _is_due(self) -> bool:
        if not self._wanted or self._boot_ms() < self._next_ms:
            return False
        self._wanted = False
        self._next_ms = self._boot_ms() + _APART_MS
        return True
