"""OvertakenTimers: a timer's world in which its files are ahead of the log again and again.

What fired waits for a slow log while the housekeeper flushes wheel and checkpoint; then the power
goes.  The everyday world comes there once in hundreds of seeds.
"""

from collections.abc import Callable

from popmq.testing.timer_world.run import TimerSimulator

_SHARE = 60
_ROUNDS = 4  # in which a slot comes to its end, is cleared, and that is flushed


class OvertakenTimers(TimerSimulator):
    option = "--overtaken-timers"
    harms = False

    def weighted(self) -> list[tuple[Callable[[], None], int]]:
        """Mostly that; no damage, and no clock that steps: they have the wheel made anew."""
        left_out = ("_harm_live", "_clock", "_wobble", "_sleep")
        moves = [one for one in super().weighted() if one[0].__name__ not in left_out]
        return [*moves, (self._outrun, _SHARE)]

    def _outrun(self) -> None:
        machine = self.machine
        machine.run_until_idle()
        self._to_the_next()
        for _ in range(_ROUNDS):
            machine.advance(max(machine.settings.timer.flush_ms, self.slot_ms))
            machine.step()
            self._all_but_the_log()
        if machine.broker.store.confirmed < machine.broker.store.end and self.rng.random() < 0.5:
            machine.disk.faults.cut_at(0)

    def _all_but_the_log(self) -> None:
        machine = self.machine
        while machine.loop_ready or machine.housekeeper in machine.ready_lanes:
            if machine.loop_ready:
                machine.loop()
            else:
                machine.work(machine.housekeeper, None)

    def _restart(self) -> None:
        self._soft = False
        super()._restart()
