"""TimerSimulator: one seed, one run of a broker whose clients send delayed messages.

As `sim/run.py`: a few lives, each ended by a crash, a disk error or a clean stop, then healing
and a drain; with a small wheel, clocks that step and sleep, and files of the timer that are
damaged or gone.  The log says what came of each timer (docs/concepts/simulator.md).
"""

import errno
from collections.abc import Callable
from enum import Enum

from popmq.common.settings.send_settings import DedupSettings
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.oracle.client_history import GroupReader
from popmq.testing.sim.equal_ids import EqualIds
from popmq.testing.sim.replay import ReplayCheck
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks
from popmq.testing.timer_world.actions import TimerActions
from popmq.testing.timer_world.clients import TimerClients
from popmq.testing.timer_world.oracle import TimerOracle
from popmq.testing.timer_world.sometimes_states import TimerSometimes as States

_HOUR_MS = 3_600_000
_FILES = ("timerwheel", "timerlog", "timercheckpoint")
_SLEEPS = 80  # how often the clock is set to the next timer in the drain


class TimerSimulator(TimerActions):
    option = "--timers"
    states: type[Enum] = States
    states_of_lives = States
    fault_weights = (7, 5, 2, 3, 4, 4)
    roll_folders = ("/timerlog/", "/timerwheel", "/timercheckpoint", "/commitlog/", "/snapshot/")
    sync_folders = ("", "/timer")
    disk_budgets = (0, 100, 2_000, 20_000)
    harms = True  # files of the timer, while the broker is down

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.oracle = TimerOracle()
        self.machine = self._machine(self._settings())
        self.oracle.watch(self.machine)
        self.clients = TimerClients(
            self.machine, self.oracle, self.rng, self.tally, self.trace_line
        )
        self.clients.ids = EqualIds(seed)
        self.checks = StoreChecks(self.machine, self.oracle)
        self.replay = ReplayCheck(self.machine.settings, self.machine.clock, self.oracle, set())
        self.machine.on_step = self.oracle.model.read_on  # before retention deletes it
        self._watch_disk()
        # With slots of 0.1 s there are too many steps in a day.
        small = self.slot_ms >= 1_000
        self._most = self.rng.choice((1, 3, 256)) if small else 256  # of one step
        self._harmed = ""

    def _machine(self, settings: Settings) -> SimulatedBroker:
        return SimulatedBroker(settings, self.rng, self.tally)

    def _settings(self) -> Settings:
        rng = self.rng
        hours, size = rng.choice(((1, 0), (1000, 20_000), (1, 40_000))) if self.retains else (72, 0)
        bound = rng.choice((0, 0, 0, 3))
        return Settings(
            store=StoreSettings(
                segment_bytes=rng.choice((11, 16)) << 10,
                snapshot_bytes=rng.choice((6, 12) if self.retains else (6, 12, 4096)) << 10,
                reserved_segments=1,
                retention_hours=hours,
                retention_bytes=size,
            ),
            message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
            group=GroupSettings(auto_create=False),
            dedup=DedupSettings(window_ms=rng.choice((0, 0, 60_000, 3_600_000))),
            timer=TimerSettings(
                max_delay_ms=8 * _HOUR_MS,
                wheel_slots=rng.choice((60, 61, 100)),
                slot_ms=rng.choice((100, 1_000, 1_000, 60_000)),
                log_segment_bytes=4 << 10,
                slot_limit=bound and 4,
                late_limit=bound or 1_000,
                cancelled_limit=bound * 2 or 1_000,
            ),
        )

    def _set_up(self) -> None:
        self._first_start()
        self.clients.make_topic("d", self.rng.choice((1, 3)), fifo=True)
        self.clients.make_topic("noise", 1)
        self.clients.make_group("audit", 40)
        self.machine.run_until_idle()

    def _acted(self) -> None:
        self.oracle.look()

    def _at_rest(self) -> None:
        self.oracle.at_rest()

    def _disk_failed(self, failed: OSError) -> None:
        super()._disk_failed(failed)
        self.tally.hit(States.DISK_FAILED, int(failed.errno != errno.ENOSPC))

    def _before_crash(self) -> None:
        self._count(self.machine.broker.timers.service)

    def _crash_with(self, loss: Loss, attempt: int) -> None:
        self.tally.hit(States.POWER_CUT, int(loss is not Loss.NOTHING))
        super()._crash_with(loss, attempt)

    def _while_crashed(self, attempt: int) -> None:
        self.while_down()
        if self.harms and attempt == 0:
            self._harm()

    def _harm(self) -> None:
        """Files that the broker says it does not need are gone, or a bit of them flipped."""
        rng, disk, data = self.rng, self.machine.disk, self.machine.settings.broker.data
        self._harmed = rng.choices(("", "lost", "bit", "index"), (7, 2, 3, 1 + self.retains))[0]
        if self._harmed == "lost":
            for name in rng.choice((_FILES, *((file,) for file in _FILES))):
                disk.lose_folder(f"{data}/{name}")
        elif self._harmed == "bit":
            where = disk.flip_bit(f"{data}/{rng.choice(('timer', *_FILES))}")
            self.trace_line(f"bit flipped at {where.removeprefix(data)}")
        elif self._harmed == "index":
            self._lose_index()
        self.trace_line(f"harmed: {self._harmed}")

    def _recovered(self, seed: int) -> None:
        super()._recovered(seed)
        self._limit()

    def _limit(self) -> None:
        service, most = self.machine.broker.timers.service, self._most
        service.enqueue_limit = service.load_limit = service.fire_limit = most

    def _started(self) -> None:
        self.checks.after_start()
        self.oracle.at_rest()
        timers, store = self.machine.broker.timers, self.machine.broker.store
        late_log = self.oracle.model.log_start > 0
        snapshot = store.snapshots.position > 0
        self.tally.hit(States.FILES_KEPT, int(not timers.files.rebuilt))
        self.tally.hit(States.BEGUN_ANEW, int(timers.files.rebuilt))
        self.tally.hit(States.FILES_LOST, int(self._harmed == "lost"))
        self.tally.hit(States.FILES_DAMAGED, int(self._harmed == "bit"))
        self.tally.hit(States.INDEX_REBUILT, int(self._harmed == "index"))
        self.tally.hit(States.LATE_LOG, int(late_log))
        self.tally.hit(States.SNAPSHOT_START, int(snapshot and timers.state.pending_total > 0))
        self.tally.hit(States.SNAPSHOT_LATE, int(snapshot and len(timers.state.late) > 0))
        self.tally.hit(States.SNAPSHOT_CANCELLED, int(snapshot and len(timers.state.cancelled)))
        self._harmed = ""

    # -- the end

    def _drain(self) -> None:
        """No more faults: time passes until each timer came to its end, and to the right one."""
        machine, oracle = self.machine, self.oracle
        self._quiet_disk()
        self._most, self.harms = 256, False
        self._restart()
        self.work_to_the_end()
        oracle.finish()
        self.count_fired()
        self._count(machine.broker.timers.service)
        if not oracle.violations and not self.retains:
            self._read_all("d")
        self.trace_line(f"drained {len(oracle.delayed)} messages")

    def work_to_the_end(self) -> None:
        """Until nothing waits; at the end everything is counted anew."""
        machine, oracle = self.machine, self.oracle
        before_ms = machine.clock.wall_ms()  # time passes while the broker works
        self.work_it_off()
        for _ in range(_SLEEPS):
            oracle.at_rest()
            self.check_overdue(before_ms)
            if oracle.violations or not oracle.model.pending:
                break
            times = sorted(history.due_ms for history in oracle.model.pending.values())
            until_ms = times[len(times) // 2 if len(times) > 6 else 0]
            left_ms = until_ms - machine.clock.wall_ms()
            machine.advance(max(0, min(left_ms, 300 * self.lap_ms)))
            before_ms = machine.clock.wall_ms()
            self.work_it_off()
        machine.broker.timers.check.start()
        self.work_it_off()

    def _read_all(self, name: str) -> None:
        """What consumers get is what the log says."""
        topic = self.clients.topics.get(name)
        if topic is None:
            return
        audit = self.clients.groups["audit"]
        assert audit is not None
        heads = self.clients.read_all(GroupReader(audit, topic), self.machine.run_until_idle)
        for number, story in self.oracle.delayed.items():
            here = story.topic is topic and self.oracle.model.copies[number] > 0
            times = heads.count(story.head)
            if times != int(here):
                self.oracle.complain_of("I4 exactly-once", f"read {times} times", number)


_SHARE = 60
_ROUNDS = 4  # in which a slot comes to its end, is cleared, and that is flushed


class OvertakenTimers(TimerSimulator):
    """A timer's world in which its files are ahead of the log again and again.

    What fired waits for a slow log while the housekeeper flushes wheel and checkpoint; then the
    power goes.  The everyday world comes there once in hundreds of seeds.
    """

    option = "--overtaken-timers"
    harms = False

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        """Mostly that; no damage, and no clock that steps: they have the wheel made anew."""
        left_out = ("_harm_live", "_clock", "_wobble", "_sleep")
        moves = [move for move in super().weighted() if move[0].__name__ not in left_out]
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
