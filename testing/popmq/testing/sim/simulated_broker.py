"""One broker process on a simulated computer, taken apart into its smallest moves.

The loop's callbacks, the operations of the flusher and of the housekeeper, and the news of
their ends are separate events; the scheduler decides which comes next.  What the product keeps
in order stays in order: callbacks are first come, first served, and so are the jobs of a thread.
"""

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.handlers.server import BrokerServer
from popmq.broker.index.key_index import ENTRIES_PER_FILE, KeyIndex
from popmq.broker.meta.topic_expiry import TopicExpiry
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore, StoreThreads
from popmq.common.errors import StoreDamaged
from popmq.common.settings.settings import Settings
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.clock import ManualClock, MovingClock
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.sim.sim_thread import SimThread


@dataclass(slots=True)
class LogEnds:
    """What the last process knew of its log: a start has to find the end between the two."""

    confirmed: int = 0
    appended: int = 0


class SimulatedBroker:
    has_slave = False  # which may run on, and know the log time, while this process is down

    def __init__(self, settings: Settings, rng: random.Random, tally: StateCounts) -> None:
        self.clock = ManualClock()
        self.process_clock = MovingClock(self.clock, self.advance, rng)
        self.disk = SimDisk(rng)
        self.settings = settings
        self.failed: OSError | None = None
        self._broken: BaseException | None = None
        self.sync_ms: Callable[[], int] = lambda: 0
        self.broker: Broker
        self.server: BrokerServer
        self.ends = LogEnds()
        self.index_entries = ENTRIES_PER_FILE
        self.busy_limit = 10_000  # steps in a row that find work
        self.clock_went_back = False
        self.recovered = 0  # where the log ended for the last start
        # Called when tables and log are recovered; with the seed of the broker's dice.
        self.on_recovered: Callable[[int], None] = lambda seed: None
        self.on_step: Callable[[], None] = lambda: None
        self.mixes = False  # whether the threads take turns while everything settles
        self._rng = rng
        self._tally = tally
        self._soon: deque[Callable[[], None]] = deque()
        self.flusher, self.housekeeper = self._lane(), self._lane()
        self._stepped_ms = 0
        self._log_ms = 0
        self._epoch_starts: list[int] = []
        self._running = False
        self.ran_ms = 0  # time that passed while a process ran, whatever clocks say
        self._up = False  # recovered, at least
        self.lived_log_ms = 0  # log time of brokers: as far as any of them came
        self._revivals: tuple[int, int] = (0, 0)  # number, and end of the log behind the last

    @property
    def log_ms(self) -> int:
        """An upper bound of how far log time moved since the run began."""
        return self._log_ms

    # -- time

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self._log_ms += ms
        self.ran_ms += ms * (self._running or self.has_slave)

    def step_wall(self, ms: int) -> None:
        self.clock.step_wall(ms)
        self.clock_went_back |= ms < 0
        self._stepped_ms += max(0, ms)

    # -- life of the process

    def start(self) -> None:
        """Recover and confirm everything; PowerCut, OSError or StoreDamaged end the attempt."""
        self._up, self._running = False, True
        self._forget_jobs()
        self.failed = None
        seed = self._rng.getrandbits(32)
        self.broker = Broker(
            self.settings,
            disk=self.disk,
            clock=self.process_clock,
            threads=StoreThreads(
                self.flusher,
                self.housekeeper,
                readers=self.flusher,
                call_soon=self._soon.append,
                on_failure=self._on_failure,
            ),
            rng=random.Random(seed),
        )
        store = self.broker.store
        self._shrink_index()
        self._keep_epochs(store)
        self.server = BrokerServer(self.broker)
        self.begin()
        self._begun(seed)

    def _keep_epochs(self, store: MessageStore) -> None:
        """In place of a node's EpochFile: where the epochs of the log begin."""

        def begin_epoch(epoch: int, position: int) -> int:
            kept = [start for start in self._epoch_starts if start < position]
            self._epoch_starts = [*kept, position]
            return epoch

        store.open_epoch = begin_epoch
        store.log_time.epoch_starts = lambda: self._epoch_starts

    def begin(self) -> None:
        """The start of the process itself; the log is then recovered to its end."""
        self.broker.start()

    def lead(self) -> None:
        """What is left until it serves, where `begin` was not all."""

    def _begun(self, seed: int) -> None:
        self._up = True
        self.recovered = self.broker.store.confirmed
        self.on_recovered(seed)
        self.lead()
        self.run_until_idle()
        if self.failed is not None:
            raise self.failed
        self._log_ms += self._stepped_ms
        self._stepped_ms = 0
        self._revivals = (0, 0)

    def stop(self) -> None:
        """A clean stop. PowerCut or OSError may end it early."""
        self.lived_log_ms = max(self.lived_log_ms, self.broker.store.log_ms())
        self.broker.stop()
        store, deaf = self.broker.store, self._rng.random() < 0.5
        self.run_until_idle(until=lambda: deaf and store.confirmed == store.end)
        # The threads finish what they have; nobody hears of it when the loop is over already.
        while busy := self._busy_lanes:
            self._wait(busy)
        if self.failed is not None:
            raise self.failed
        if store.durable < store.end:  # no clean stop: the process ends without a word
            raise OSError(errno.ENOSPC, "a batch waits for room")
        self.broker.close()
        self._running = False
        self.ends = LogEnds(self.broker.store.confirmed, self.broker.store.end)

    def take_disk(self, disk: SimDisk) -> None:
        """The next process runs on another computer's disk."""
        self.disk = disk
        self.flusher, self.housekeeper = self._lane(), self._lane()

    def crash(self, loss: Loss) -> None:
        store = self.broker.store
        if store.confirmed:
            self.ends = LogEnds(store.confirmed, store.end)
        if self._up:
            self.lived_log_ms = max(self.lived_log_ms, store.log_ms())
        number, end = self._revivals
        self._tally.hit(Sometimes.REVIVE_CUT, int(number > 0 and store.confirmed < end))
        self._tally.hit(
            Sometimes.PROCESS_CRASH if loss is Loss.NOTHING else Sometimes.POWER_CUT,
            int(self.disk.unsynced),
        )
        self._forget_jobs()
        self.failed = None
        self._running = False
        self.disk.crash(loss)

    def try_start(self) -> str:
        """Start; what ended the attempt: "", "cut", "full", "error" or "damaged: ..."."""
        try:
            self.start()
        except PowerCut:
            return "cut"
        except OSError as error:
            return "full" if error.errno == errno.ENOSPC else "error"
        except StoreDamaged as error:
            return f"damaged: {error}"
        return ""

    # -- events

    @property
    def loop_ready(self) -> bool:
        return bool(self._soon)

    @property
    def ready_lanes(self) -> list[SimThread]:
        """The threads that can go on now."""
        return [lane for lane in self._busy_lanes if lane.due_ms <= self.clock.boot_ms()]

    @property
    def at_rest(self) -> bool:
        return not self._soon and not self._busy_lanes and self.failed is None

    def loop(self) -> None:
        """One callback of the event loop."""
        work = self._soon.popleft()
        self._between()
        try:
            work()
        except OSError as error:  # what reaches the loop ends the process
            self.failed = self.failed or error
        self._check()

    def work(self, lane: SimThread, operations: int | None) -> None:
        """One job of a thread, or so many operations of it."""
        other = self.housekeeper if lane is self.flusher else self.flusher
        self._tally.hit(Sometimes.LANES_MIXED, int(lane.busy and other.stopped))
        lane.run(operations)
        self._check()

    def step(self) -> int:
        """One step of the broker, as its loop calls it."""
        revive = self.broker.pop.revive
        self._between()
        done = 0
        try:
            done = self.broker.step()
        except OSError as error:
            self.failed = self.failed or error
        self._check()
        self.on_step()
        number = revive.retried + revive.dead_lettered
        if number != self._revivals[0]:
            self._revivals = (number, self.broker.store.end)
        return done

    def later(self, act: Callable[[], None]) -> None:
        """In another turn of the loop: what a client does about an answer comes behind everything
        that is answered together with it."""
        self._soon.append(act)

    def run_until_idle(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Let loop and threads run until nothing is left to do, or for long enough."""
        while not until():
            if self._soon:
                self.loop()
            elif busy := self._busy_lanes:
                self._wait(busy)
            else:
                return

    def run_steps(self) -> None:
        """Step until there is nothing to do; a step that always finds work is a mistake.

        Steps count anew when the timer's wheel has turned on, up to now: it turns no further than
        the clock, and with a timer a step there is much to do in a wheel that was left behind for
        hours.
        """
        busy, turned_ms, now_ms = 0, 0, self.clock.wall_ms()
        while self.step():
            self.run_until_idle()
            busy += 1
            base_ms = self.broker.timers.service.enqueue.base_ms
            if turned_ms < base_ms <= now_ms:
                busy, turned_ms = 0, base_ms
            if busy >= self.busy_limit:
                raise AssertionError(f"the broker has been busy {busy} times in a row")
        self.run_until_idle()

    @property
    def nothing_in_flight(self) -> bool:
        return not len(self.broker.table)

    @property
    def nothing_parked(self) -> bool:
        return not any(True for _ in self.broker.table.parked.parked_queues())

    def parked(self, group: str) -> list[bytes]:
        """The message groups that are parked for it, in the order of parking."""
        found_group = self.broker.registry.find_group(group)
        keys = self.broker.table.parked.of_group(found_group.id) if found_group is not None else []
        return [key.name for key in keys]

    @property
    def blocked(self) -> int:
        """Messages of FIFO groups that wait for one of their key."""
        lines = (progress for _, progress in self.broker.table.progress_items())
        return sum(line.blocked for line in lines if isinstance(line, FifoProgress))

    # -- inside

    def _shrink_index(self) -> None:
        """Files of a few messages, where the run wants them."""
        if self.index_entries == ENTRIES_PER_FILE:
            return
        store, folder = self.broker.store, f"{self.settings.broker.data}/index"
        store.index = KeyIndex(self.disk, folder, entries_per_file=self.index_entries)
        self.broker.lookup = Lookup(store, store.index)
        expiry = TopicExpiry(store, self.broker.registry, self.broker.lookup)
        self.broker.expiries = replace(self.broker.expiries, topics=expiry)

    def _lane(self) -> SimThread:
        def takes_ms() -> int:
            takes = self.sync_ms()
            self._tally.hit(Sometimes.SLOW_SYNC, int(takes > 0))
            return takes

        return SimThread(self.disk, self.clock.boot_ms, takes_ms, self._soon.append)

    @property
    def _busy_lanes(self) -> list[SimThread]:
        return [lane for lane in (self.flusher, self.housekeeper) if lane.busy]

    def _wait(self, busy: list[SimThread]) -> None:
        """Nothing is left for the loop: the next of the threads goes on."""
        lane, operations = min(busy, key=lambda lane: lane.due_ms), None
        if self.mixes and len(busy) > 1:
            lane, operations = self._rng.choice(busy), self._rng.choice((None, 1, 2, 5))
        self.advance(max(0, lane.due_ms - self.clock.boot_ms()))
        self.work(lane, operations)

    def _between(self) -> None:
        """The loop runs now, whatever the threads are at."""
        stopped = self.flusher.stopped or self.housekeeper.stopped
        self._tally.hit(Sometimes.JOB_STOPPED, int(stopped))

    def _forget_jobs(self) -> None:
        self._soon.clear()
        for lane in (self.flusher, self.housekeeper):
            self._tally.hit(Sometimes.CRASH_IN_JOB, int(lane.stopped))
            lane.kill()

    def _on_failure(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            self.failed = self.failed or error
        elif not isinstance(error, PowerCut):
            self._broken = self._broken or error

    def _check(self) -> None:
        """What the product caught on its way out ends the life all the same."""
        if self.disk.faults.off:
            raise PowerCut
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
