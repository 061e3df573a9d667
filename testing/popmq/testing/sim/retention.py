"""Retention in a run: what may be missing, whether a cut was legal, whether the disk is bounded.

Looks into the broker at the moment of each cut, when the old records can still be read.
"""

from collections.abc import Callable
from dataclasses import dataclass

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.queue_progress import FifoProgress, QueueProgress
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.operations.offset_reset import OffsetReset, QueueReset
from popmq.broker.persistence.retention import HOUR_MS, LiveBody
from popmq.common import topics
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.client_history import GroupReader, MessageHistory, SentMessageHistory
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.simulated_broker import SimulatedBroker

_Copy = tuple[int, int, int]  # topic id, queue, offset
_Place = tuple[int, int, int]  # group id, topic id, queue


@dataclass(slots=True)
class _Gone:
    """A copy of a message below a cut, and the groups that had popped it before."""

    number: int
    attempt: int
    popped: set[int]


class RetentionChecks:
    def __init__(self, machine: SimulatedBroker, oracle: Oracle, tally: StateCounts) -> None:
        self._machine = machine
        self._oracle = oracle
        self._tally = tally
        store = machine.settings.store
        self.on = store.retention_hours == 1 or store.retention_bytes > 0
        self.cut_power_in: int | None = None  # operations of the disk behind the next cut
        self.index_lost = False
        self._folder = f"{machine.settings.broker.data}/commitlog"
        self.gone: dict[_Copy, _Gone] = {}
        self._skipped: dict[_Copy, set[int]] = {}
        self._letters: set[tuple[str, int]] = set()  # group and number of expired dead letters
        self._numbers: dict[_Copy, int] = {}
        self._moved: dict[tuple[int, int], tuple[MessageHistory, int]] = {}
        machine.on_step = self._check_deletes
        self._deleted = 0
        self._cut = 0  # of this process; 0: none
        self._moves_end = 0  # of the log behind the newest moved body
        self._moved_before = 0
        self._owed: dict[_Place, int] = {}  # up to which minimum a gap was counted
        self._gaps = 0
        # Queues of which something had expired, though a crash may have taken that back.
        self.raised: set[tuple[int, int]] = set()

    @property
    def starts_at(self) -> int:
        """Where the log on the disk begins."""
        return int((self._machine.disk.names(self._folder) or ["0"])[0])

    # -- lives

    def on_start(self) -> bool:
        """After a good start; returns whether what was passed over may come again."""
        broker, old_cut = self._machine.broker, self._cut
        store = broker.store
        cut, store.retention.on_truncated = store.retention.on_truncated, self._on_cut
        self._product_cut = cut
        moved = broker.on_relocated
        broker.on_relocated = self._on_moved  # type: ignore[method-assign]
        self._product_moved = moved
        self._cut = self._moves_end = self._moved_before = self._gaps = self._deleted = 0
        watched = _WatchedReset(broker, self._before_reset, self._after_reset)
        broker.operations.offset_reset = watched
        self._owed.clear()
        for place, _ in broker.table.progress_items():
            self._after_reset(place)
        for copy in [copy for copy in self.gone if broker.registry.topic_by_id(copy[0])]:
            if copy[2] >= store.queue(*copy[:2]).min_offset:
                gone = self.gone.pop(copy)  # it was not deleted, so it is in play again
                passed = self._popped(copy) - gone.popped
                self._skipped.setdefault(copy, set()).update(passed)
            else:
                self.gone[copy].popped &= self._popped(copy)  # less what the crash took back
        first = self.starts_at
        self._tally.hit(Sometimes.LATE_LOG, int(first > 0))
        self._tally.hit(Sometimes.INDEX_REBUILT, int(first > 0 and self.index_lost))
        self.index_lost = False
        return old_cut > 0 or first > 0

    def before_crash(self) -> None:
        """Count what this process did."""
        retention = self._machine.broker.store.retention
        metrics = self._machine.broker.pop.service.metrics
        self._tally.hit(Sometimes.SEGMENT_DELETED, retention.deleted_segments)
        self._tally.hit(Sometimes.BODY_MOVED, retention.relocated)
        self._tally.hit(Sometimes.EXPIRED, metrics.expired)
        between = retention.relocated > self._moved_before and self.starts_at < self._cut
        self._tally.hit(Sometimes.CRASH_IN_CUT, int(between))

    def _check_deletes(self) -> None:
        """Where a step let segments go, the moved bodies are on the disk."""
        store = self._machine.broker.store
        deleted, before = store.retention.deleted_segments, self._deleted
        self._deleted = deleted
        if deleted > before and store.confirmed < self._moves_end:
            self._oracle.report_violation(
                "retention",
                f"segments below {self._cut} go when {store.confirmed} is confirmed, the bodies "
                f"were moved to below {self._moves_end}",
            )

    def _on_moved(self, body: LiveBody) -> None:
        self._product_moved(body)
        self._moves_end = self._machine.broker.store.end
        number = self._numbers.get(body[:3], -1)
        for reader in self._oracle.readers:
            life = reader.lives.get(number)
            if life is not None and not life.acked:
                self._moved[(id(reader), number)] = (life, life.attempt)

    # -- a cut

    def _on_cut(self, position: int) -> None:
        """No pop reads below `position` from now on; moves come next, then the delete."""
        self._product_cut(position)
        store = self._machine.broker.store
        if not self._oracle.log_lost:
            self._check_snapshots(position)
            for config in list(self._machine.broker.registry.topics()):
                for queue_id in range(config.queues):
                    self._expire(config, queue_id, position)
        self.count_gaps()
        self._cut, self._moved_before = position, store.retention.relocated
        if self.cut_power_in is not None:
            self._machine.disk.faults.cut_at(self.cut_power_in)
            self.cut_power_in = None

    def count_gaps(self) -> None:
        """Minimum offsets were raised: what each group will pass over is EXPIRED."""
        store = self._machine.broker.store
        for place, progress in self._machine.broker.table.progress_items():
            if self._is_parking(place):
                continue
            low = store.queue(*place[1:]).min_offset
            self._gaps += _unread(progress, self._owed.get(place, 0), low)
            self._owed[place] = low
            if low:
                self.raised.add(place[1:])

    def _before_reset(self, place: _Place) -> None:
        """What the group would have been told to have missed is passed over by the operator."""
        self._gaps -= self._missed(place)

    def _after_reset(self, place: _Place) -> None:
        self._gaps += self._missed(place)
        self._owed[place] = self._machine.broker.store.queue(*place[1:]).min_offset

    def _missed(self, place: _Place) -> int:
        """Messages that expired before the group came to them, and that it was not told of."""
        broker = self._machine.broker
        progress = broker.table.progress(*place)
        if self._is_parking(place):
            return 0
        low = broker.store.queue(*place[1:]).min_offset
        return _unread(progress, 0, low) if progress is not None else 0

    def _is_parking(self, place: _Place) -> bool:
        """Nothing expires in a parking queue: what stands there is parked, or was given."""
        topic = self._machine.broker.registry.topic_by_id(place[1])
        return topic is not None and topics.is_parked_topic(topic.name)

    def _check_snapshots(self, position: int) -> None:
        folder = f"{self._machine.settings.broker.data}/snapshot"
        names = [name for name in self._machine.disk.names(folder) if name.isdigit()]
        older = int(names[-2]) if len(names) > 1 else 0
        if position > older:
            self._oracle.report_violation(
                "retention", f"the log is cut at {position}, the older snapshot is at {older}"
            )

    def _expire(self, config: TopicConfig, queue_id: int, position: int) -> None:
        store = self._machine.broker.store
        queue = store.queue(config.id, queue_id)
        first = self.starts_at
        for offset, unit in enumerate(queue.units(0, queue.count)):
            copy = (config.id, queue_id, offset)
            if not first <= unit.position < position or copy in self.gone:
                continue
            sent = self.expire(config, copy, unit)
            if sent is not None:
                self._check_due(sent, unit.position)

    def expire(
        self, config: TopicConfig, copy: _Copy, unit: QueueUnit
    ) -> SentMessageHistory | None:
        """From now on a group that did not pop this copy may miss it; the message, if known."""
        (message,) = self._machine.broker.store.reader.read([unit])
        if isinstance(message, DamagedMessage) or not message.head[:6].isdigit():
            return None  # the index check tells
        number = int(message.head[:6])
        if number >= len(self._oracle.messages):
            return None
        sent = self._oracle.messages[number]
        popped = self._popped(copy) - self._skipped.get(copy, set())
        self.gone[copy] = _Gone(number, message.attempt, popped)
        self._numbers[copy] = number
        if group := topics.group_of_dead_letters(config.name):
            self._letters.add((group, number))
        elif not topics.is_retry_topic(config.name) and not topics.is_parked_topic(config.name):
            sent.expired = True
        return sent

    def _check_due(self, sent: SentMessageHistory, position: int) -> None:
        """Retention may take it: it is old, or the log was too large with its segment."""
        settings, end = self._machine.settings.store, self._machine.broker.store.end
        start = position - position % settings.segment_bytes
        too_large = 0 < settings.retention_bytes < end - start
        age = self._machine.ran_ms - sent.asked_ran_ms
        if not too_large and age < settings.retention_hours * HOUR_MS:
            self._oracle.report_violation(
                "retention",
                f"message {sent.number} at {position} goes at an age of {age} ms, {end - start} "
                "bytes of log from its segment on",
            )

    def _popped(self, copy: _Copy) -> set[int]:
        """Groups that the copy was given to, or that passed over it."""
        return {
            place[0]
            for place, progress in self._machine.broker.table.progress_items()
            if place[1:] == copy[:2] and not _unread(progress, copy[2], copy[2] + 1)
        }

    # -- the end

    def excused(
        self, reader: GroupReader, sent: SentMessageHistory, life: MessageHistory | None
    ) -> bool:
        """Whether a message may be missing: the copy that was next for the group was unread
        when its segment went."""
        group = self._machine.broker.registry.group(reader.group.name)
        # Of an answer that a reset overtook nobody knows whether it was from before it: then the
        # first copy was unread again.
        attempt = life.attempt if life and not life.loose else 0
        # A delivery that a crash forgot is unread again, and so it was when its copy went.
        held = life.held if life else None
        forgotten = held is not None and self._oracle.may_be_forgotten(held)
        attempt -= forgotten
        if (reader.group.name, sent.number) in self._letters:
            return True
        retry = topics.retry_topic(reader.group.name, reader.topic.name)
        for copy, gone in self.gone.items():
            if gone.number != sent.number or gone.attempt <= attempt:
                continue
            if group.id in gone.popped and not forgotten:
                continue
            config = self._machine.broker.registry.topic_by_id(copy[0])
            if config is not None and config.name in (reader.topic.name, retry):
                return True
        return False

    def at_end(self) -> None:
        """After the drain: the counter of expired messages says what groups passed over."""
        if not self.on or self._oracle.log_lost:
            return
        broker = self._machine.broker
        waiting = sum(self._missed(place) for place, _ in broker.table.progress_items())
        counted = broker.pop.service.metrics.expired
        if counted != self._gaps - waiting:
            self._oracle.report_violation(
                "I16 counts-true",
                f"{counted} messages counted as expired, {self._gaps - waiting} were passed over",
            )
        back = sum(life.attempt > before for life, before in self._moved.values())
        self._tally.hit(Sometimes.MOVED_REVIVED, back)

    def check_bound(self, young: int) -> None:
        """`young` bytes of the log are newer than two hours."""
        if not self.on or self._oracle.log_lost:
            return
        settings = self._machine.settings.store
        kept = max(young, settings.retention_bytes) + 2 * settings.snapshot_bytes
        bound = -(-kept // settings.segment_bytes) + settings.reserved_segments + 3
        count = len(self._machine.disk.names(self._folder))
        if count > bound:
            self._oracle.report_violation("retention", f"{count} segments, the bound is {bound}")


def _unread(progress: QueueProgress, start: int, end: int) -> int:
    """How many of the offsets [start, end) were not given to the group, nor passed over."""
    if not isinstance(progress, FifoProgress):
        return max(0, end - max(progress.cursor, start))
    start = max(start, progress.committed, progress.expired_until)
    offsets = range(start, max(start, end))
    return sum(
        progress.is_waiting(offset) and offset not in progress.attempts for offset in offsets
    )


class _WatchedReset(OffsetReset):
    """The broker's resets, looked at before and after each queue's."""

    def __init__(
        self, broker: Broker, before: Callable[[_Place], None], after: Callable[[_Place], None]
    ) -> None:
        super().__init__(
            broker.store,
            broker.registry,
            broker.deliveries,
            broker.pop.service,
            broker.lookup,
        )
        self._before, self._after = before, after

    def apply(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, offset: int
    ) -> QueueReset:
        place = (group.id, topic.id, queue_id)
        self._before(place)
        done = super().apply(group, topic, queue_id, offset)
        self._after(place)
        return done
