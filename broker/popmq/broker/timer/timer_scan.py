"""TimerScan: the wheel's timers by time, in bounded pieces, while the wheel turns.

For people who ask what waits.  Nothing here waits or changes anything; a timer that rolls
meanwhile may come twice, since it only moves to later slots.
"""

from collections.abc import Callable
from itertools import islice

from popmq.broker.timer.timer_files import TimerFiles
from popmq.broker.timer.timer_log import SlotChain
from popmq.broker.timer.timer_unit import TimerDamaged, TimerUnit
from popmq.broker.timer.timer_wheel import Slot
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, Refused

_SLOTS_A_PIECE = 256
_UNITS_A_PIECE = 1_024


class TimerScan:
    """Slots of [from_ms, to_ms), by time; use either `slots` or `units`."""

    def __init__(
        self,
        files: TimerFiles,
        from_ms: int,
        to_ms: int,
        *,
        slot_ms: int,
        on_damage: Callable[[TimerDamaged], None],
    ) -> None:
        """`on_damage` hears of a wheel that has to be made anew."""
        self._files = files
        self._on_damage = on_damage
        self._slot_ms = slot_ms
        self._to_ms = to_ms
        self._chain: SlotChain | None = None
        self.at_ms = from_ms  # slots before it were given out

    def of_slot(self, slot_ms: int) -> "TimerScan":
        """A scan of that slot alone."""
        end_ms = slot_ms + self._slot_ms
        return TimerScan(
            self._files, slot_ms, end_ms, slot_ms=self._slot_ms, on_damage=self._on_damage
        )

    def slots(self) -> list[Slot]:
        """The next slots that hold something; none at the end.

        Raises ColdRead: call again.  Refused where the wheel is damaged: it is made anew then.
        """
        slots: list[Slot] = []
        try:
            every = self._files.wheel.occupied(self.at_ms, self._to_ms, wait=False)
            for slot in islice(every, _SLOTS_A_PIECE):
                slots.append(slot)
                self.at_ms = slot.time_ms + self._slot_ms
        except ColdRead:
            if not slots:
                raise
        except TimerDamaged as damage:
            raise self._refusal(damage) from damage
        return slots

    def units(self) -> list[TimerUnit]:
        """The next units, in no order within their slot; none at the end. Raises as `slots`."""
        units: list[TimerUnit] = []
        try:
            while len(units) < _UNITS_A_PIECE:
                if self._chain is None and not self._open_next():
                    break
                assert self._chain is not None, "a slot was opened"
                piece = next(self._chain, None)
                if piece is None:
                    self._chain = None
                else:
                    units += piece
        except ColdRead:
            if not units:
                raise
        except TimerDamaged as damage:
            raise self._refusal(damage) from damage
        return units

    def _open_next(self) -> bool:
        slot_ms = self._files.wheel.next_occupied(self.at_ms, self._to_ms, wait=False)
        if slot_ms is None:
            return False
        slot = self._files.wheel.get(slot_ms, wait=False)
        self._chain = self._files.log.chain(slot, wait=False)
        self.at_ms = slot_ms + self._slot_ms
        return True

    def _refusal(self, damage: TimerDamaged) -> Refused:
        self._on_damage(damage)
        return Refused(
            Code.INTERNAL_ERROR,
            "the timer wheel is damaged, and is made anew from the timer queue: ask again "
            f"({damage})",
        )
