"""Timers: builds the parts of the timer and starts them in order."""

from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.persistence.retention import EVERYTHING
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.incoming_timers import IncomingTimers
from popmq.broker.timer.outgoing_timers import OutgoingTimers
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.broker.timer.timer_bodies import TimerBodies
from popmq.broker.timer.timer_count_audit import TimerCountAudit
from popmq.broker.timer.timer_files import TimerFiles
from popmq.broker.timer.timer_forecast import TimerForecast
from popmq.broker.timer.timer_recall import TimerRecall
from popmq.broker.timer.timer_scan import TimerScan
from popmq.broker.timer.timer_service import TimerService
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.common import topics
from popmq.common.clock import Clock
from popmq.common.disk import Disk
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import Flusher


class Timers:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        lookup: Lookup,
        sends: SendDeduplication,
        all_settings: Settings,
        disk: Disk,
        clock: Clock,
        flusher: Flusher,
    ) -> None:
        settings, folder = all_settings.timer, all_settings.broker.data
        self._store = store
        self.state = TimerState(sends)
        self.files = TimerFiles(
            disk, folder, settings, flusher, lambda error: store.on_failure(error)
        )
        self.service = TimerService(
            store,
            registry,
            self.state,
            self.files,
            settings,
            wall_ms=clock.wall_ms,
            boot_ms=clock.boot_ms,
        )
        queue = self.service.queue
        self.admission = TimerAdmission(
            store,
            queue,
            self.state,
            self.files,
            self.service.enqueue,
            settings,
            wall_ms=clock.wall_ms,
            on_damage=self.service.rebuild,
        )
        self.outgoing_timers = OutgoingTimers(store, self.state)
        self.incoming_timers = IncomingTimers(self.admission)
        self.tables = (
            self.state,
            self.outgoing_timers,
            self.incoming_timers,
        )  # that are in snapshots
        self.recall = TimerRecall(
            store,
            queue,
            self.state,
            self.admission,
            lookup,
            settings,
            clock.wall_ms,
            self.service.is_firing,
            self.outgoing_timers,
        )
        self.bodies = TimerBodies(store, queue, self.state, self.outgoing_timers)
        self._settings = settings
        self._wall_ms = clock.wall_ms
        self.forecast = TimerForecast(
            store,
            self.state,
            self.scan,
            queue.not_enqueued,
            settings,
            wall_ms=clock.wall_ms,
            boot_ms=clock.boot_ms,
        )
        self.check = TimerCountAudit(
            store, queue, self.state, settings, wall_ms=clock.wall_ms, boot_ms=clock.boot_ms
        )

    def add_topic(self) -> None:
        """Call it before the log is replayed."""
        self._store.add_topic(topics.TIMER_TOPIC_ID, topics.TIMER_TOPIC)

    def recover(self) -> None:
        """Call it after the log was replayed."""
        self.service.open_files()
        self.service.recover()
        self.bodies.begin()

    def scan(self, end_ms: int = 1 << 62) -> TimerScan:
        """Scans all slots that may hold a timer due before `end_ms`, in its slot or rolled.

        A timer that was enqueued after its slot had passed is in the oldest slot.
        """
        settings, begin_ms = self._settings, self.service.enqueue.base_ms
        lap_ms = settings.wheel_slots * settings.slot_ms
        end_ms = max(end_ms, self._wall_ms() + settings.slot_ms)
        to_ms = min(begin_ms + lap_ms, end_ms)
        return TimerScan(
            self.files,
            begin_ms,
            to_ms,
            slot_ms=settings.slot_ms,
            on_damage=self.service.rebuild,
        )

    def timers_outside_wheel(self) -> list[Timer]:
        """Late timers, and timers that are stored but not enqueued yet."""
        return [*self.state.late.values(), *self.service.queue.not_enqueued()]

    def step(self) -> int:
        """One round of the background work; returns how much was done.

        A slave counts no timers: it applies the result in the master's record.
        """
        done = self.service.step() + self.forecast.step()
        return done + self.check.step() if self.service.firing else done

    @property
    def busy(self) -> bool:
        """Whether there is work now, whatever `next_ms` returns."""
        service = self.service
        beginning = service.firing and self.state.pending_total > 0 and not service.due.begun
        return (
            beginning
            or bool(service.due.rolled)
            or service.cold.waiting
            or not service.enqueue.caught_up
        )

    def next_ms(self, at_most_ms: int) -> int:
        """Milliseconds until a timer may be due, at most `at_most_ms`.  That must be less than the
        time by which slots are loaded ahead."""
        next_due_ms = self.service.due.next_due_ms if self.service.firing else None
        return at_most_ms if next_due_ms is None else min(at_most_ms, next_due_ms - self._wall_ms())

    # -- on a slave

    def open_files(self) -> int:
        """Call it before the slave follows the log. Returns the position of the newest record that
        has a unit in the files, or -1."""
        self.service.run_as_slave()
        return self.service.open_files()

    def run_as_slave(self) -> None:
        """Call it when the tables have all records that the files have."""
        self.service.recover()

    def step_slave(self) -> int:
        """Enqueue confirmed timers; a slave fires none."""
        return self.service.step() + self.forecast.step()

    def promote(self) -> None:
        """Fire from now on; call it when everything is applied and confirmed."""
        self.service.promote()
        self.bodies.begin()

    def slave_keep_position(self) -> int:
        """The position of the first timer record that is not enqueued or not classified yet."""
        queue, enqueue = self.service.queue.queue, self.service.enqueue
        offset = max(min(enqueue.curr_queue_offset, self.state.classified), queue.min_offset)
        unread = queue.units(offset, 1)
        return unread[0].position if unread else EVERYTHING
