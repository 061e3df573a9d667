"""TimerActions: what a run of the timer's world does next, one small move at a time."""

from collections.abc import Callable

from popmq.broker.timer.timer_service import TimerService
from popmq.common.record.timer_token import TimerRecount
from popmq.testing.oracle.client_history import ResourceIncarnation
from popmq.testing.sim.lives import Lives
from popmq.testing.timer_world.clients import TimerClients
from popmq.testing.timer_world.oracle import DelayedMessage, TimerOracle
from popmq.testing.timer_world.sometimes_states import TimerSometimes as States

_HOUR_MS = 3_600_000
_NEAR_MS = 540_000  # the wheel stays; an hour turns it back with the clock


class TimerActions(Lives):
    """The parts of one run, and the moves that the scheduler picks from."""

    oracle: TimerOracle
    clients: TimerClients
    _counted = 0

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        moves: list[tuple[Callable[[], object], int]] = [
            (self._send, 14),
            (self._burst, 3),
            (self._again, 2),
            (self._recall, 7),
            (self._reschedule, 5),
            (self._race, 3),
            (self._overtake, 3),
            (self._topic, 1),
            (self._noise, 3),
            (self._loop, 16),
            (self._flush, 16),
            (self.machine.step, 14),
            (self._time, 12),
            (self._to_the_next, 6),
            (self._clock, 2),
            (self._wobble, 1),
            (self._sleep, 1),
            (self.machine.run_until_idle, 5),
            (self._work, 5),
            (self._harm_live, 2),
            (self._recount, 2),
        ]
        if self.retains:
            moves += [(self._grow, 5), (self._hours, 2)]
        return moves

    @property
    def slot_ms(self) -> int:
        return self.machine.settings.timer.slot_ms

    @property
    def lap_ms(self) -> int:
        timer = self.machine.settings.timer
        return timer.slot_ms * timer.wheel_slots

    # -- clients

    def _send(self) -> None:
        topic = self.clients.topics.get("d")
        if topic is not None:
            count = self.rng.choice((1, 1, 1, 2, 4))
            self.clients.send_delayed(topic, [self._due() for _ in range(count)])

    def _burst(self) -> None:
        """Many in the same millisecond, or about it."""
        topic = self.clients.topics.get("d")
        if topic is None:
            return
        due_ms, apart = self._due()[0], self.rng.choice((0, 0, 1, self.slot_ms // 2))
        if due_ms < 0:
            due_ms = self.machine.clock.wall_ms() - due_ms
        for _ in range(self.rng.choice((2, 4))):
            dues = [due_ms + apart * self.rng.randrange(3) for _ in range(self.rng.choice((2, 5)))]
            self.clients.send_delayed(topic, [(due_ms, 0) for due_ms in dues])

    def _again(self) -> None:
        """A message id twice: a client sends again what it did not hear of."""
        story, topic = self._some(), self.clients.topics.get("d")
        if story is not None and topic is not None and topic is story.topic:
            self.clients.send_delayed(topic, [self._due()], again=story)
            self.tally.hit(States.SENT_AGAIN)

    def _due(self) -> tuple[int, int]:
        """A due time and a spread: near, at the edges of slots and laps, or far."""
        rng, slot, lap = self.rng, self.slot_ms, self.lap_ms
        now_ms = self.machine.clock.wall_ms()
        ahead = rng.choice(
            (-slot, 0, 1, slot // 3, slot, 3 * slot, 10 * slot, 30 * slot)
            if rng.random() < 0.6
            else (lap - slot, lap, lap + 1, 2 * lap, 5 * lap)
        )
        ahead += rng.choice((0, 0, 1, rng.randrange(slot)))
        if rng.random() < 0.01:
            ahead = 8 * _HOUR_MS + 1
        spread = rng.choice((0, 0, 0, slot // 2, 3 * slot))
        if ahead > 0 and rng.random() < 0.4:
            return -ahead, spread
        due_ms = now_ms + ahead
        if rng.random() < 0.3:
            due_ms -= due_ms % slot
        return due_ms, spread

    def _some(self) -> DelayedMessage | None:
        """Mostly one that waits still."""
        stories = self.oracle.delayed
        if not stories:
            return None
        waiting = sorted(self.oracle.model.pending.values(), key=lambda history: history.key)
        if waiting and self.rng.random() < 0.7:
            nearest = min(int(self.rng.expovariate(0.3)), len(waiting) - 1)
            return stories[waiting[nearest].number]
        return stories[self.rng.randrange(len(stories))]

    def _recall(self) -> None:
        story = self._some()
        if story is not None:
            for _ in range(self.rng.choice((1, 1, 2))):
                self._recall_one(story)

    def _recall_one(self, story: DelayedMessage) -> None:
        if self.clients.topics.get(story.topic.name) is story.topic:
            late = any(
                history.late for history in self.oracle.model.of(story.number) if not history.ends
            )
            self.tally.hit(States.CANCEL_LATE, int(late))
            self.clients.recall(story)

    def _reschedule(self) -> None:
        story = self._some()
        if story is not None and self.clients.topics.get(story.topic.name) is story.topic:
            self.clients.reschedule(story, self._due()[0])

    def _race(self) -> None:
        """Right when a timer is due: it fires, and is recalled before anything is confirmed."""
        waiting = sorted(self.oracle.model.pending.values(), key=lambda history: history.key)
        if waiting and self._advance_to(waiting[0].due_ms):
            for _ in range(self.rng.choice((1, 2))):
                self.machine.step()
            self._recall_one(self.oracle.delayed[waiting[0].number])

    def _overtake(self) -> None:
        """The timer's files are flushed while what fired waits for the log; then the power goes."""
        machine = self.machine
        for _ in range(self.rng.choice((1, 2))):
            self._to_the_next()
        machine.advance(machine.settings.timer.flush_ms)
        for _ in range(self.rng.choice((1, 3))):
            machine.step()
            if machine.housekeeper in machine.ready_lanes:
                machine.work(machine.housekeeper, None)
        if self.rng.random() < 0.3:
            machine.disk.faults.cut_at(self.rng.choice((0, 0, 2)))

    def _topic(self) -> None:
        """The topic goes, with the timers that wait; and comes again."""
        if self.clients.topics.get("d") is not None:
            self.clients.drop_topic("d")
        elif "d" not in self.clients.topics:
            self.clients.make_topic("d", self.rng.choice((1, 2)), fifo=True)
        self.machine.run_until_idle()
        if "d" not in self.clients.topics and self.rng.random() < 0.8:
            self.clients.make_topic("d", self.rng.choice((1, 2)), fifo=True)
            self.machine.run_until_idle()

    def _noise(self) -> None:
        topic = self.clients.topics.get("noise")
        if isinstance(topic, ResourceIncarnation):
            self.clients.send_noise(topic, self.rng.choice((100, 1_500)))

    def _grow(self) -> None:
        for _ in range(self.rng.choice((3, 8))):
            self._noise()
        self._work()

    # -- the machine

    def _loop(self) -> None:
        if self.machine.loop_ready:
            self.machine.loop()

    def _work(self) -> None:
        """All that can be done now; then nothing that is due still waits."""
        before_ms = self.machine.clock.wall_ms()
        self.work_it_off()
        if self.machine.broker.store.guard.copies_allowed and self.machine.at_rest:
            self.oracle.look()
            self.check_overdue(before_ms)

    def work_it_off(self) -> None:
        """What a step left to be confirmed is work for the next one."""
        self.machine.run_until_idle()
        end = -1
        while end != self.machine.broker.store.end and self.machine.failed is None:
            end = self.machine.broker.store.end
            self.machine.run_steps()

    def check_overdue(self, before_ms: int) -> None:
        """Nothing waits that was due before the broker worked until there was nothing to do."""
        for timer in self.oracle.overdue(before_ms)[:1]:
            self.oracle.complain_of("I2 no-limbo", f"{timer} is due and waits", timer.number)

    def _time(self) -> None:
        self.machine.advance(self.rng.choice((1, 20, 200, self.slot_ms, 4 * self.slot_ms, 1_100)))
        faults = self.machine.disk.faults
        if faults.budget is not None:
            self.tally.hit(States.BLOCKED, int(self.machine.broker.timers.files.blocked))
            if self.rng.random() < 0.2:
                faults.budget = None
                self.trace_line("space was freed")

    def _to_the_next(self) -> None:
        waiting = self.oracle.model.pending.values()
        if waiting:
            due_ms = min(history.due_ms for history in waiting)
            self._advance_to(due_ms - self.rng.choice((0, 0, 1)))
            self.machine.step()

    def _advance_to(self, wall_ms: int) -> bool:
        """Not over hours: the wall clock may have been set back."""
        left_ms = wall_ms - self.machine.clock.wall_ms()
        if 0 < left_ms <= 2 * self.lap_ms:
            self.machine.advance(left_ms)
        return left_ms <= 2 * self.lap_ms

    def _sleep(self) -> None:
        """A suspend, a machine that stood still: both clocks jump."""
        self.machine.advance(self.lap_ms * self.rng.choice((1, 1, 3)) + self.rng.randrange(5_000))
        self.tally.hit(States.SLEPT, int(bool(self.oracle.model.pending)))
        self.trace_line("slept")

    def _hours(self) -> None:
        self.machine.advance(self.rng.choice((600_000, 1_800_000, 4_000_000)))
        self._work()

    def _clock(self) -> None:
        """Somebody sets the wall clock, or NTP does."""
        small = (-3 * self.slot_ms, -5, 40, 2 * self.slot_ms)
        # With slots of 0.1 s an hour has too many steps.
        far_ms = _HOUR_MS if self.slot_ms >= 1_000 else _HOUR_MS // 4
        step_ms = self.rng.choice((-far_ms, far_ms, -_NEAR_MS, _NEAR_MS, *small))
        waits = bool(self.oracle.model.pending)
        self.tally.hit(States.CLOCK_BACK, int(step_ms < 0 and waits))
        self.tally.hit(States.CLOCK_FORWARD, int(step_ms > 0 and waits))
        self.machine.step_wall(step_ms)
        self.trace_line(f"wall clock {step_ms:+}")

    def _wobble(self) -> None:
        """It is ahead for a moment: slots are over whose time comes again."""
        step_ms = self.rng.choice((_NEAR_MS, 3 * self.slot_ms, 12 * self.slot_ms))
        self.machine.step_wall(step_ms)
        self._work()
        self.machine.step_wall(-step_ms)
        self.trace_line(f"wall clock was {step_ms:+}")
        for _ in range(self.rng.choice((1, 3))):
            self._send()

    def _harm_live(self) -> None:
        """A sector of the timer's files goes bad while the broker runs."""
        if self.rng.random() < 0.5:
            data = self.machine.settings.broker.data
            name = self.rng.choice(("timerlog", "timerwheel"))
            where = self.machine.disk.flip_bit(f"{data}/{name}")
            self.trace_line(f"bit flipped at {where.removeprefix(data)}, running")

    def _recount(self) -> None:
        """A record gets a count wrong, or the daily count mends what is wrong by its own."""
        check, broker = self.machine.broker.timers.check, self.machine.broker
        topic = self.clients.topics.get("d")
        if self.rng.random() < 0.5:
            check.start()
        elif topic is not None and broker.store.guard.copies_allowed:
            topic_id = broker.registry.topic(topic.name).id
            pending = broker.timers.state.pending.get(topic_id, 0) + self.rng.choice((1, 1, 5))
            check.mend(TimerRecount(topic_id, pending))
            self.trace_line(f"miscounted: {pending} of topic {topic_id}")

    def while_down(self) -> None:
        rng, machine = self.rng, self.machine
        down_ms = rng.choice((0, 5, 2_000, 3 * self.slot_ms, 2 * self.lap_ms))
        machine.advance(down_ms)
        self.tally.hit(States.DOWN_FOR_A_LAP, int(down_ms > self.lap_ms))
        if rng.random() < 0.3:
            self._clock()

    # -- counters

    def count_fired(self) -> None:
        before = None
        for timer, token, _, _ in self.oracle.model.fired[self._counted :]:
            self.tally.hit(States.FIRED)
            self.tally.hit(States.LATE, int(token.late))
            self.tally.hit(States.DEAD, int(timer.ends == ["dead"]))
            self.tally.hit(States.MOVED_FIRED, int(timer.moves > 0))
            self.tally.hit(States.MOVED_TWICE, int(timer.moves > 1))
            waited_ms = timer.due_ms - timer.stored_wall_ms
            self.tally.hit(States.WRAPPED, int(waited_ms > self.lap_ms))
            self.tally.hit(States.SAME_MS, int(before == timer.due_ms))
            before = timer.due_ms
        self._counted = len(self.oracle.model.fired)

    def _count(self, service: TimerService) -> None:
        """What this process did."""
        self.count_fired()
        self.tally.hit(States.ROLLED, service.enqueue.rolled)
        self.tally.hit(States.REBUILT, service.rebuilds)
        self.tally.hit(States.TURNED_BACK, service.turned_back)
        self.tally.hit(States.RECOUNTED, self.machine.broker.timers.check.mismatches)
        pending = sum(self.machine.broker.timers.state.pending.values())
        unconfirmed = self.machine.broker.store.confirmed < self.machine.broker.store.end
        firing = unconfirmed and pending < len(self.oracle.model.pending)
        self.tally.hit(States.CRASH_IN_FIRING, int(firing))
        names = self.machine.disk.names(f"{self.machine.settings.broker.data}/timerlog")
        self.tally.hit(States.LOG_CUT, int(bool(names) and names[0].strip("0") != ""))
