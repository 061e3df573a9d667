"""TimerEnqueue: from the timer queue into the wheel, and over the wheel's window by rolling.

RocketMQ's TimerEnqueueGet and TimerEnqueuePut services as one bounded step. Three offsets of the
timer queue: below `TimerState.classified` a record of the log says which timers came in time;
below `commit_queue_offset` records are in the files of the wheel; `curr_queue_offset` is the next
record to enqueue, which is behind both after a start.  `base_ms` is the oldest slot that may hold
a timer.
"""

from collections.abc import Callable

from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.timer.due_timers import DueTimers
from popmq.broker.timer.rolling_timers import RollingTimers
from popmq.broker.timer.timer_files import TimerFiles
from popmq.broker.timer.timer_queue import TimerQueue, TimerQueueEntry
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.broker.timer.timer_wheel import window
from popmq.common.settings.settings import TimerSettings

_BATCH = 64


class TimerEnqueue:
    def __init__(
        self,
        queue: TimerQueue,
        state: TimerState,
        files: TimerFiles,
        due: DueTimers,
        settings: TimerSettings,
        wall_ms: Callable[[], int],
    ) -> None:
        self._queue = queue
        self._state = state
        self._files = files
        self._due = due
        self._slot_ms = settings.slot_ms
        self._window = window(settings.wheel_slots)
        self._wall_ms = wall_ms
        self.classifying = True  # off on a slave: records say what the master did
        self.far = RollingTimers(files, settings, lambda: self.base_ms)
        self.curr_queue_offset = 0
        self.commit_queue_offset = 0  # records below it are in the files
        self.base_ms = 0
        self._closing_ms = 0
        self._fire_from = 0  # offset up to which the moved bodies of what is gone stand
        self.caught_up_ms = 0  # wall time at which nothing was behind
        self.enqueued = 0
        self.rolled = 0
        self.lost = 0  # records that could not be read

    def begin(self, offset: int, in_files: int, base_ms: int) -> None:
        """Go on at `offset`; what is below `in_files` is in the wheel already."""
        self.curr_queue_offset = offset
        self.commit_queue_offset = in_files
        self.base_ms = self._closing_ms = base_ms
        self._fire_from = self._queue.count
        self.caught_up_ms = self._wall_ms()
        self.far.begin()

    @property
    def caught_up(self) -> bool:
        """Everything that a firing could pass over is enqueued."""
        return not self.going_back and self.curr_queue_offset >= self._fire_from

    @property
    def going_back(self) -> bool:
        """Whether it reads what was enqueued before: the files did not have all of it."""
        return self.curr_queue_offset < max(self._state.classified, self.commit_queue_offset)

    @property
    def behind(self) -> int:
        return self._queue.count - self.curr_queue_offset

    @property
    def window_end_ms(self) -> int:
        """Slots from here on may not be used yet, nor passed by."""
        return self.base_ms + self._window * self._slot_ms

    def over(self, until_ms: int, *, closing_ms: int) -> None:
        """Slots before `until_ms` are over; those before `closing_ms` will be, without a look at
        what comes into them now."""
        self.base_ms = max(self.base_ms, until_ms)
        self._closing_ms = max(self._closing_ms, closing_ms)

    def step(self, limit: int) -> int:
        """Enqueue at most `limit` records. Raises ColdRead (call again) and TimerDamaged."""
        done = self._roll(limit)
        while done < limit and not self._files.full:
            size = min(_BATCH, limit - done)
            entries = self._queue.read(self.curr_queue_offset, size, wait=False)
            if not entries:
                self.caught_up_ms = self._wall_ms()
                break
            for entry in entries:
                self._enqueue(entry)
                self.curr_queue_offset = entry.offset + 1
                self.commit_queue_offset = max(self.commit_queue_offset, entry.offset + 1)
            done += len(entries)
            self.enqueued += len(entries)
        return done

    def classify_until(self, offset: int) -> None:
        """At recovery: a firing says that the records below `offset` were enqueued before it."""
        state = self._state
        self.skip_gone(offset)
        while state.classified < offset:
            entries = self._queue.read(state.classified, min(_BATCH, offset - state.classified))
            if not entries:
                break  # below an index that is built anew: retention has had them
            for entry in entries:
                self._classify(entry)

    def skip_gone(self, offset: int) -> None:
        """Of the records below `offset` retention took some: they were classified before that."""
        gone = min(offset, self._queue.queue.min_offset)
        self._state.skip(gone, log_start=self._queue.log_start)

    def _enqueue(self, entry: TimerQueueEntry) -> None:
        timer, state = entry.timer, self._state
        if timer is None:
            self.lost += 1
            self._fire_from = self._queue.count
            if self.classifying:
                state.skip(entry.offset + 1)
            return
        if entry.offset >= self.commit_queue_offset:
            # Over or not: what ended it may not be confirmed, and a crash may take that back.
            self._place(timer, known=entry.moved)
        if self.classifying and entry.offset >= state.classified:
            known = timer.identity in state.late
            self._classify(entry)
            if not known and timer.identity in state.late:
                self._due.add_late(timer)

    def _classify(self, entry: TimerQueueEntry) -> None:
        if entry.timer is None:
            self._state.skip(entry.offset + 1)
        else:
            self._state.classify(entry.timer, moved=entry.moved)

    def _place(self, timer: Timer, *, known: bool) -> None:
        """Into its slot; one that is loaded already takes it at once, too.

        A timer that is `known` may have had a unit that rolls.
        """
        slot_ms = timer.due_ms - timer.due_ms % self._slot_ms
        ahead = (slot_ms - self.base_ms) // self._slot_ms
        roll = ahead >= self._window
        if roll:
            hop = self._window
            if ahead - hop < hop // 3:  # RocketMQ's rule: no last hop that is hardly one
                hop = hop // 2
            slot_ms = max(self.base_ms + hop * self._slot_ms, self._due.loaded_until)
        self._files.add(
            slot_time_ms=max(slot_ms, self._closing_ms),
            due_ms=timer.due_ms,
            position=timer.position,
            size=timer.size,
            identity=timer.identity,
            topic_id=timer.topic_id,
            roll=roll,
            now_ms=self._wall_ms(),
            wait=False,
        )
        if not roll and slot_ms < self._due.loaded_until:
            unit = QueueUnit(timer.position, timer.size, 0)
            self._due.add(timer.due_ms, timer.identity, unit, timer.topic_id)
        if roll:
            self.far.add(timer.due_ms, timer.identity, timer.topic_id)
        elif known:
            self.far.remove(timer.due_ms, timer.identity)

    def _roll(self, limit: int) -> int:
        """Units that were met before their due slot go on; the record stays where it is."""
        done = 0
        while self._due.rolled and done < limit and not self._files.full:
            unit = self._due.rolled[-1]
            if unit.position < self._queue.log_start:
                # Its body moved, and has another unit, or is about to get it.
                self._fire_from = self._queue.count
            elif self._state.is_cancelled(unit.identity):
                self.far.remove(unit.due_ms, unit.identity)
            else:
                self._place(
                    Timer(unit.due_ms, unit.identity, unit.position, unit.size, unit.topic_id, 0),
                    known=True,
                )
            self._due.rolled.pop()
            self.rolled += 1
            done += 1
        return done
