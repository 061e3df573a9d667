"""DueTimers: the timers whose slot is near, in memory and in the order in which they fire.

A slot is loaded ahead of its time, in slices, so that two million timers in one second do not
stop the loop.  What arrives for a slot that is loaded, or was, joins it here.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.timer.timer_files import TimerFiles
from popmq.broker.timer.timer_log import SlotChain
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.broker.timer.timer_unit import TimerUnit
from popmq.common.settings.settings import TimerSettings

LOOK_MS = 60_000
UNITS_PER_MS = 50  # that are loaded, beside other work
# What the kernel dropped comes from the disk in this time, bodies too; some 200 B for a timer.
EARLY_MS, EARLY_TIMERS = 5_000, 100_000
_TOUCHED = 128  # bodies fetched ahead at once
_TOUCH_LIMIT = 100_000  # and that are noted for it
# A timer as one number: due time, identity (48 bits), size and topic (32 bits each), from the top.
_new = tuple.__new__  # half of what calling a named tuple costs
_REST_BITS, _SIZE_BITS, _IDENTITY_BITS = 64, 32, 48
_32_MASK, _IDENTITY_MASK = (1 << 32) - 1, (1 << _IDENTITY_BITS) - 1


class DueTimer(NamedTuple):
    """A timer on its way out; `unit` is where its body is now."""

    due_ms: int
    identity: int
    unit: QueueUnit
    topic_id: int
    late: bool


class DueTimers:
    def __init__(self, state: TimerState, files: TimerFiles, settings: TimerSettings) -> None:
        self._state = state
        self._files = files
        self._slot_ms = settings.slot_ms
        self._look_ms = min(LOOK_MS, settings.wheel_slots * settings.slot_ms // 8)
        self._heap: list[int] = []
        self._late: list[tuple[int, int]] = []
        self._moved: dict[int, QueueUnit] = {}
        self._chain: SlotChain | None = None
        self._load_now_ms = 0  # slots before it are loaded early
        self._units: list[TimerUnit] = []  # of the slot that is loaded, not looked at yet
        self._to_touch: list[QueueUnit] = []
        self.rolled: list[TimerUnit] = []  # met before their due slot: into the wheel again
        self.loaded_until = 0  # slots before it are here, or on their way
        self.ready_until = 0  # and of those, the ones before this are complete

    def begin(self, slot_ms: int, load_now_ms: int) -> None:
        """Start, or start again, with the slot of that time; slots before `load_now_ms` are
        loaded whatever the time is, before a timer is taken."""
        self._heap.clear()
        self._moved.clear()
        self._units.clear()
        self._to_touch.clear()
        self.rolled.clear()
        self._chain = None
        self._load_now_ms = load_now_ms if load_now_ms > slot_ms else 0
        self.loaded_until = self.ready_until = slot_ms
        self._late = sorted(timer.key for timer in self._state.late.values())

    @property
    def begun(self) -> bool:
        """Whether all is here that may be due earlier than its slot says."""
        return self.ready_until >= self._load_now_ms

    # -- what comes in

    def add(self, due_ms: int, identity: int, unit: QueueUnit, topic_id: int) -> None:
        if unit.position != identity:
            known = self._moved.get(identity)
            if known is None or known.position < unit.position:
                self._moved[identity] = unit
        rest = unit.size << 32 | topic_id
        heappush(self._heap, (due_ms << _IDENTITY_BITS | identity) << _REST_BITS | rest)

    def add_late(self, timer: Timer) -> None:
        heappush(self._late, timer.key)

    def load(self, now_ms: int, limit: int, window_end_ms: int) -> int:
        """Load a slice of the slot that is next, if it is near; returns how many were read.

        Does not pass `window_end_ms`: the wheel's oldest slots are in use still.

        Raises ColdRead (call again) and TimerDamaged.
        """
        if self._chain is None:
            self._open_next(now_ms, window_end_ms)
            if self._chain is None:
                return 0
        done = 0
        while done < limit:
            if not self._units:
                units = next(self._chain, None)
                if units is None:
                    self._chain = None
                    self.ready_until = self.loaded_until
                    self._to_touch.sort(reverse=True)
                    done += 1  # the next slot may be near, too
                    break
                self._units = list(units)
            done += self._take_units(limit - done)
        return done

    def bodies_to_touch(self) -> list[QueueUnit]:
        """Some of the bodies that will be read soon; say `touched` when they are in memory."""
        return self._to_touch[: -_TOUCHED - 1 : -1]

    def touched(self, count: int) -> None:
        del self._to_touch[-count:]

    # -- what goes out

    def take(self, now_ms: int, limit: int) -> list[DueTimer]:
        """The next timers whose time has come, at most `limit`, in order.

        Late ones and those of the wheel are never in one batch: each has its own cursor.
        """
        timers: list[DueTimer] = []
        first = self._first_due(now_ms)
        while self._late and len(timers) < limit:
            due_ms, identity = self._late[0]
            timer = self._state.late.get(identity)
            if timer is None or (timers and timers[-1].identity == identity):
                heappop(self._late)
                continue
            if due_ms > now_ms or (first is not None and first < due_ms):
                break
            heappop(self._late)
            unit = QueueUnit(timer.position, timer.size, 0)
            timers.append(DueTimer(due_ms, identity, unit, timer.topic_id, True))
        return timers or self._take_of_wheel(now_ms, limit)

    def put_back(self, batch: list[DueTimer]) -> None:
        for due in batch:
            if due.late:
                heappush(self._late, (due.due_ms, due.identity))
            else:
                self.add(due.due_ms, due.identity, due.unit, due.topic_id)

    def ended(self, dues: Iterable[DueTimer]) -> None:
        if self._moved:
            for due in dues:
                self._moved.pop(due.identity, None)

    def forget_over(self) -> None:
        """Drop the first ones as far as the log says that they are over."""
        self._first_due(0)

    @property
    def next_due_ms(self) -> int | None:
        """Of the timers that are here."""
        heads = [self._heap[0] >> (_IDENTITY_BITS + _REST_BITS)] if self._heap else []
        heads += [self._late[0][0]] if self._late else []
        return min(heads, default=None)

    def over_until(self, now_ms: int) -> int:
        """Slots before this time hold nothing that waits."""
        until = min(self.ready_until, now_ms - now_ms % self._slot_ms)
        if self._heap:
            due_ms = self._heap[0] >> (_IDENTITY_BITS + _REST_BITS)
            until = min(until, due_ms - due_ms % self._slot_ms)
        return min([until, *(unit.slot_time_ms for unit in self.rolled[:1])])

    # -- inside

    def _first_due(self, now_ms: int) -> int | None:
        """When the first timer of the wheel is due, if its time has come."""
        while self._heap:
            key = self._heap[0] >> _REST_BITS
            due_ms, identity = key >> _IDENTITY_BITS, key & _IDENTITY_MASK
            over = (due_ms, identity) <= self._state.cursor
            if not over and not self._state.is_cancelled(identity):
                return due_ms if due_ms <= now_ms and due_ms < self.ready_until else None
            heappop(self._heap)
            self._moved.pop(identity, None)
        return None

    def _take_of_wheel(self, now_ms: int, limit: int) -> list[DueTimer]:
        timers: list[DueTimer] = []
        heap, moved, is_cancelled = self._heap, self._moved, self._state.is_cancelled
        over = self._state.cursor
        end = min(now_ms + 1, self.ready_until) << (_IDENTITY_BITS + _REST_BITS)
        while heap and heap[0] < end and limit > 0:
            key = heappop(heap)
            rest, topic_id = key >> _REST_BITS, key & _32_MASK
            timer = due_ms, identity = rest >> _IDENTITY_BITS, rest & _IDENTITY_MASK
            if timer > over and not is_cancelled(identity):
                over = timer
                limit -= 1
                size = key >> _SIZE_BITS & _32_MASK
                unit = moved.get(identity) or _new(QueueUnit, (identity, size, 0))
                timers.append(_new(DueTimer, (due_ms, identity, unit, topic_id, False)))
        return timers

    def _open_next(self, now_ms: int, window_end_ms: int) -> None:
        """Begin with the next slot if it is time; else what has no units needs no loading."""
        begun = max(now_ms - now_ms % self._slot_ms + self._slot_ms, self._load_now_ms)
        # Behind the window what rolls on would go over the wheel's end.
        end_ms = max(window_end_ms, self._load_now_ms)
        begun = min(begun, end_ms)
        until_ms = min(max(now_ms + self._look_ms, self._load_now_ms), end_ms)
        slot_ms = self._files.wheel.next_occupied(self.loaded_until, until_ms, wait=False)
        if slot_ms is None:
            self.loaded_until = self.ready_until = max(self.loaded_until, begun)
            return
        slot = self._files.wheel.get(slot_ms, wait=False)
        lead_ms = self._slot_ms + slot.num // UNITS_PER_MS
        if len(self._heap) + slot.num <= EARLY_TIMERS:
            lead_ms = max(lead_ms, EARLY_MS)
        lead_ms = min(self._look_ms, lead_ms)
        if slot_ms - lead_ms > now_ms and slot_ms >= self._load_now_ms:
            self.loaded_until = self.ready_until = max(self.loaded_until, min(slot_ms, begun))
            return
        self._chain = self._files.log.chain(slot, wait=False)
        self.ready_until = slot_ms
        self.loaded_until = slot_ms + self._slot_ms

    def _take_units(self, limit: int) -> int:
        taken = 0
        units, cursor, is_cancelled = self._units, self._state.cursor, self._state.is_cancelled
        room = _TOUCH_LIMIT - len(self._to_touch)
        while units and taken < limit:
            unit = units.pop()
            taken += 1
            _, roll, _, position, size, topic_id, due_ms, identity, _ = unit
            if (due_ms, identity) <= cursor:
                continue
            if roll:
                self.rolled.append(unit)
                continue
            if is_cancelled(identity):
                continue
            body = _new(QueueUnit, (position, size, 0))
            self.add(due_ms, identity, body, topic_id)
            if room > 0:
                self._to_touch.append(body)
                room -= 1
        return taken
