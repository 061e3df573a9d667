"""TimerService: stores timers, and delivers each at its time (docs/concepts/timer.md).

RocketMQ's five services are steps of this one: enqueue (TimerEnqueueGet and -Put), load
(TimerDequeueGet), fire (TimerDequeueGetMessage and -PutMessage).  The record of a firing is the
delivery and moves the cursor, so a timer fires once whatever crashes.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.registry import Registry
from popmq.broker.persistence.bulk_copy import MessageCopy
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.due_timers import DueTimer, DueTimers
from popmq.broker.timer.independent_reads import IndependentReads
from popmq.broker.timer.timer_enqueue import TimerEnqueue
from popmq.broker.timer.timer_files import Cursors, TimerFiles
from popmq.broker.timer.timer_queue import TimerQueue, timer_of
from popmq.broker.timer.timer_state import TimerState
from popmq.broker.timer.timer_unit import TimerDamaged
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.observability import Histogram
from popmq.common.record.message import Header, RecordKind, Stamp, StoredMessage
from popmq.common.record.message_deadline import without_deadline
from popmq.common.record.timer_body import TimerBody
from popmq.common.record.timer_token import FiringToken, TimerEnd, TimerToken, encode_fired
from popmq.common.settings.settings import TimerSettings

logger = logging.getLogger(__name__)

_new = tuple.__new__
_STEP_BYTES = 16 << 20  # firings that may wait for the disk before a step makes more
# And so many: what one group commit confirms is entered into queues and key index in one turn of
# the loop, some 4 us each.
_FIRINGS_LIMIT = 4_096
_BATCH = 256
LATENESS_MS = (5, 10, 20, 50, 100, 250, 500, 1_000, 5_000, 30_000, 300_000, 3_600_000)
_TURN_BACK_MS = 600_000  # ahead of the clock by more, the wheel is made anew where the clock is


class TimerService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        state: TimerState,
        files: TimerFiles,
        settings: TimerSettings,
        *,
        wall_ms: Callable[[], int],
        boot_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._registry = registry
        self._files = files
        self._slot_ms = settings.slot_ms
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._begun = False
        self.cold = IndependentReads(store)
        self._over = (0, 0)  # slots before this time are over, once the log is confirmed to there
        self._last_read_ms = 0
        self._look_until = (-1, 0)  # position of a body that is gone, offset in the queue
        self._firing: deque[tuple[int, int]] = deque()  # position of the record, identity
        self.state = state
        self.queue = TimerQueue(store)
        self.due = DueTimers(state, files, settings)
        self.enqueue = TimerEnqueue(self.queue, state, files, self.due, settings, wall_ms)
        self.firing = True  # off on a slave: it enqueues, and learns from the log what fired
        # Up to where the master read the wheel and the timer queue, as far as a slave was told.
        self.masters_read_ms = self.masters_offset = 0
        # Of one step: records, units, firings.
        self.enqueue_limit, self.load_limit, self.fire_limit = 512, 1_024, 512
        self.load_limit_beside = 256  # while others are due, and it is early enough
        self.fired = 0
        self.dead_lettered = 0
        self.lost = 0
        self.rebuilds = 0
        self.turned_back = 0
        self.lateness = Histogram(LATENESS_MS, divisor=1_000)

    # -- start and stop

    def open_files(self) -> int:
        """Open the timer's files; the newest record that has a unit in them, or -1."""
        self._files.open()
        newest = self._files.newest_position
        return -1 if newest is None else newest

    def recover(self) -> None:
        """After the log was replayed: go on where the files, which are open, and the log say."""
        files = self._files
        queue, count = self.queue.queue, self.queue.count
        in_files = files.checkpoint.queue_offset
        if files.newest_position is not None:
            in_files = max(in_files, self.queue.offset_behind(files.newest_position))
        if files.rebuilt:
            in_files = 0
        in_files = min(max(in_files, queue.min_offset), count)
        if self.firing:
            self.enqueue.skip_gone(count)
            self._begin(min(in_files, self.state.classified), in_files)
        else:
            self._begin(in_files, in_files)

    def promote(self) -> None:
        """From now on this broker classifies and fires, as after a start."""
        self.firing = self.enqueue.classifying = True
        in_files = self.enqueue.commit_queue_offset
        self.enqueue.skip_gone(self.queue.count)
        self._begin(min(in_files, self.state.classified), in_files)

    def run_as_slave(self) -> None:
        """Before `recover`: on a slave."""
        self.firing = self.enqueue.classifying = False

    def _begin(self, offset: int, in_files: int) -> None:
        """The wheel goes on at its oldest slot; a clock that went back does not turn it back.

        Timers that came meanwhile are in what was its oldest slot then, though they are due
        before it: up to there all is loaded before one fires.
        """
        now_ms, first_ms = self._wall_ms(), self._files.first_in_use_ms
        today_ms = now_ms - now_ms % self._slot_ms
        oldest_ms = self._files.wheel.next_occupied(first_ms, 1 << 62)
        base_ms = max(first_ms, min(today_ms, oldest_ms or today_ms))
        self.due.begin(base_ms, self._files.early_ms + self._slot_ms)
        self.enqueue.begin(offset, in_files, base_ms)
        self._last_read_ms = base_ms
        self._over = (base_ms, 0)
        self._begun = True

    def close(self) -> None:
        """At a clean stop, with an idle flusher; of a master, with everything confirmed."""
        if not self._begun:
            self._files.close()
            return
        # What is not cleared for damage, or because it has to come from the disk, is left to the
        # next start.
        with suppress(TimerDamaged, ColdRead):
            if self.firing:
                self._mark_over(self._wall_ms())
                self._mark_over(self._wall_ms())
        self._files.flush_now(self.cursors())
        self._files.close()

    def release_files(self) -> None:
        self._files.close()

    def cursors(self) -> Cursors:
        """What a checkpoint of this moment may say."""
        store, enqueued = self._store, self.enqueue.commit_queue_offset
        masters = enqueued if self.firing else self.masters_offset
        # That it lived says that it has answered, but for what waits for a disk (EpochStart).
        log_ms = store.log_ms() if store.confirmed == store.end else 0
        return Cursors(self._last_read_ms, enqueued, masters, store.epoch, log_ms)

    def on_master_check_point(self, last_read_ms: int, queue_offset: int) -> None:
        """On a slave: the master's TimerCheckPoint; an older one says nothing."""
        self.masters_read_ms = max(self.masters_read_ms, last_read_ms)
        self.masters_offset = max(self.masters_offset, queue_offset)

    # -- steps

    def step(self) -> int:
        """One round of enqueue, load and fire; returns how much was done."""
        done = self._files.step(self._boot_ms(), self.cursors)
        if self.firing and self.enqueue.base_ms - self._wall_ms() > _TURN_BACK_MS:
            self._turn_back()
        try:
            done += self.cold.run("enqueue", partial(self.enqueue.step, self.enqueue_limit))
            done += self._step_firing() if self.firing else self.cold.run("turn", self._turn)
        except TimerDamaged as damage:
            self.rebuild(damage)
            done += 1
        return done

    def apply_stored(self, token: TimerToken, header: Header, tag_hash: int) -> None:
        """A record of the timer queue, in the order of the log."""
        if token.replaces is not None:
            identity, log_ms = header.position, header.log_ms
            self.state.replace(*token.replaces, token.topic_id, identity, log_ms)
        if token.moved_from is None:
            self.state.stored(token.topic_id)
        elif token.late:
            unit = QueueUnit(header.position, header.size, tag_hash)
            self.state.is_late(timer_of(token, unit, header.queue_offset))

    def apply_classified(self, offset: int) -> None:
        """A record says that the master classified the timer queue up to `offset`."""
        self.enqueue.classify_until(offset)

    def apply_ended(self, token: FiringToken) -> None:
        """The end of a timer, at recovery."""
        self.enqueue.classify_until(token.classified)
        self.state.ended(token)

    @property
    def dequeue_lag_ms(self) -> int:
        """How long the next timer, or the slot that is to be loaded next, is overdue."""
        times = [self.due.ready_until]
        if self.due.next_due_ms is not None:
            times.append(self.due.next_due_ms)
        return max(0, self._wall_ms() - min(times)) if self.firing else 0

    def end(self, due: DueTimer, offset: int, outcome: TimerEnd) -> FiringToken:
        due_ms, identity, _, topic_id, late = due
        return FiringToken(topic_id, due_ms, identity, self.state.classified, offset, late, outcome)

    def is_firing(self, identity: int) -> bool:
        """Whether its firing waits to be confirmed: no lookup finds the message yet."""
        return any(firing == identity for _, firing in self._firing)

    def rebuild(self, damage: TimerDamaged) -> None:
        """The wheel is an index: it is made again from the timer queue, beside the traffic."""
        logger.error("timer wheel is built anew", extra={"reason": str(damage)})
        self.rebuilds += 1
        self._files.reset()
        self._begin_anew()

    # -- inside

    def _step_firing(self) -> int:
        """Of the parts only the one waits whose bytes are cold: what comes into memory ahead of its
        time holds up nothing that is due."""
        done, run = 0, self.cold.run
        if self.enqueue.caught_up and not self.due.rolled:
            done += run("load", self._load)
        if self.enqueue.caught_up and self.due.begun and not self.due.rolled:
            done += run("fire", partial(self._fire, self.fire_limit))
        if self.enqueue.caught_up:
            done += run("over", lambda: self._mark_over(self._wall_ms()))
            done += run("far", self.enqueue.far.step)
        return done + run("touch", self._touch)

    def _load(self) -> int:
        now_ms = self._wall_ms()
        return self.due.load(now_ms, self._load_slice(now_ms), self.enqueue.window_end_ms)

    def _load_slice(self, now_ms: int) -> int:
        """Timers that are due are not to wait for those of a slot that comes."""
        due_ms = self.due.next_due_ms
        early = self.due.ready_until - now_ms > self._slot_ms // 2
        beside = early and due_ms is not None and due_ms <= now_ms
        return min(self.load_limit, self.load_limit_beside) if beside else self.load_limit

    def _fire(self, limit: int) -> int:
        fired = 0
        store = self._store
        while self._firing and self._firing[0][0] < store.confirmed:
            self._firing.popleft()
        limit = min(limit, _FIRINGS_LIMIT - len(self._firing))
        while fired < limit and self._has_room:
            batch = self.due.take(self._wall_ms(), min(_BATCH, limit - fired))
            units = [timer.unit for timer in batch]
            if not batch:
                break
            if max(unit.position for unit in units) >= store.confirmed:
                self.due.put_back(batch)  # retention has just moved one: it is confirmed soon
                break
            plain = 0
            try:
                bodies = store.reader.timer_bodies(units)
                stamp = store.stamp()
                plain = self._fire_plain(batch, bodies, stamp)
                fired += plain
                messages = store.reader.read(units[plain:], wait=False)
            except ColdRead:
                self.due.put_back(batch[plain:])
                store.reader.touch(units)  # all of them in one go
                raise
            for at, message in enumerate(messages, plain):
                damaged = isinstance(message, DamagedMessage)
                waits = damaged and self._may_have_moved(batch[at].unit.position)
                if waits or not self._has_room:
                    self.due.put_back(batch[at:])
                    return fired
                if not self._fire_one(batch[at], message, stamp):
                    stamp = store.stamp()  # of other records meanwhile: log time never goes back
                fired += 1
        return fired

    def _fire_plain(
        self, batch: list[DueTimer], bodies: list[TimerBody | None], stamp: Stamp
    ) -> int:
        """Fire the first ones in one go, up to one that does not go to its topic just so."""
        if not self._store.guard.copies_unlimited:
            return 0
        room = _STEP_BYTES - self._store.pending_bytes
        copies: list[MessageCopy] = []
        topic_by_id = self._registry.topic_by_id
        classified, known = self.state.classified, -1
        for (due_ms, identity, unit, of_topic, late), body in zip(batch, bodies, strict=True):
            if body is None or room <= 0:
                break
            offset, topic_id, queue_id, tag_hash, head_size, both = body
            if topic_id != known:
                if topic_by_id(topic_id) is None:
                    break
                known = topic_id
            room -= unit[1]
            ending = encode_fired(of_topic, due_ms, identity, classified, offset, late)
            copy = (topic_id, queue_id, tag_hash, ending, head_size, both)
            copies.append(_new(MessageCopy, copy))
        if not copies:
            return 0
        units = self._store.put_copies(copies, stamp)
        fired = batch[: len(copies)]
        self._firing += [
            (unit.position, timer.identity) for unit, timer in zip(units, fired, strict=True)
        ]
        self.state.on_fired(fired)
        self.due.ended(fired)
        self.fired += len(fired)
        for due_ms, times in Counter([timer.due_ms for timer in fired]).items():
            self.lateness.observe(stamp.wall_ms - due_ms, times=times)
        return len(fired)

    def _may_have_moved(self, position: int) -> bool:
        """Retention may have taken a body whose new record waits to be enqueued.

        How far to look is of that body alone: others may move once it was found elsewhere.
        """
        if self._look_until[0] != position:
            self._look_until = position, self.queue.count
        return self.enqueue.curr_queue_offset < self._look_until[1]

    @property
    def _has_room(self) -> bool:
        """For one more firing, whatever its size."""
        return self._store.pending_bytes < _STEP_BYTES and self._store.guard.copies_allowed

    def _fire_one(
        self, due: DueTimer, message: StoredMessage | DamagedMessage, stamp: Stamp
    ) -> bool:
        """Whether it fired; a timer without a body or a topic comes to another end."""
        token = None if isinstance(message, DamagedMessage) else message.any_token
        if isinstance(message, DamagedMessage) or not isinstance(token, TimerToken):
            self._give_up(due)
            return False
        topic = self._registry.topic_by_id(token.topic_id)
        outcome, queue_id, properties = TimerEnd.FIRED, token.queue_id, message.properties
        if topic is None:
            properties = without_deadline(properties)
            outcome, queue_id = TimerEnd.DEAD_LETTERED, 0
            topic = self._registry.internal_topic(topics.TIMER_DLQ_TOPIC)
            stamp = self._store.stamp()
            self.dead_lettered += 1
        ending = self.end(due, message.header.queue_offset, outcome)
        self._store.put_message(
            topic_id=topic.id,
            queue_id=queue_id,
            head=message.head,
            properties=properties,
            tag_hash=token.tag_hash,
            token=ending.encode(),
            stamp=stamp,
        )
        self._firing.append((self._store.last_position, due.identity))
        self.state.ended(ending)
        self.due.ended([due])
        self.fired += 1
        self.lateness.observe(stamp.wall_ms - due.due_ms)
        return outcome is TimerEnd.FIRED

    def _give_up(self, due: DueTimer) -> None:
        """The body cannot be read: the log says so, and the others go on."""
        logger.error("timer lost", extra={"position": due.unit.position, "due_ms": due.due_ms})
        self.lost += 1
        ending = self.end(due, 0, TimerEnd.LOST)
        self._store.put_record(RecordKind.TIMER, topic_id=0, queue_id=0, body=ending.encode())
        self.state.ended(ending)
        self.due.ended([due])

    def _turn(self) -> int:
        """On a slave the wheel turns as far as the master's did: slots of which all fired go, and
        what rolls goes on."""
        until_ms = max(self.masters_read_ms, self.state.cursor[0])
        done = 0
        if not self.due.rolled:
            done += self.due.load(until_ms, self.load_limit, self.enqueue.window_end_ms)
        self.due.forget_over()
        return done + self._mark_over(until_ms)

    def _mark_over(self, now_ms: int) -> int:
        """Slots are over for good when the firings of their timers are confirmed.

        Returns 1 when that lets the wheel turn on by more than a slot.
        """
        over_ms, end = self._over
        before_ms = self._last_read_ms
        if self._store.confirmed < end:
            return 0
        self._clear(over_ms)
        self._last_read_ms = max(self._last_read_ms, over_ms)
        until_ms = self.due.over_until(now_ms)
        self._over = (max(over_ms, until_ms), self._store.end)
        self.enqueue.over(self._last_read_ms, closing_ms=self._over[0])
        turned_ms = max(until_ms - over_ms, self._last_read_ms - before_ms)
        return int(turned_ms > self._slot_ms)

    def _clear(self, until_ms: int) -> None:
        at_ms = self._last_read_ms
        while at_ms < until_ms:
            slot = self._files.wheel.next_occupied(at_ms, until_ms, wait=False)
            if slot is None:
                break
            self._files.wheel.clear(slot)
            at_ms = self._last_read_ms = slot + self._slot_ms

    def _touch(self) -> int:
        """Bodies that are due soon come into memory before they are."""
        units = self.due.bodies_to_touch()
        if units:
            self._store.reader.touch(units)
            self.due.touched(len(units))
        return 0

    def _turn_back(self) -> None:
        """The clock was far ahead once: what comes now would all wait in memory, and in one slot
        that is over at that time.  What waits stands in the timer queue."""
        ahead_ms = self.enqueue.base_ms - self._wall_ms()
        logger.warning("timer wheel is turned back", extra={"ahead_ms": ahead_ms})
        self.turned_back += 1
        now_ms = self._wall_ms()
        self._files.reset(turned_ms=now_ms - now_ms % self._slot_ms)
        self._begin_anew()

    def _begin_anew(self) -> None:
        start = self.queue.queue.min_offset
        self._begin(start, start)
