"""Audit: is every stored message accounted for, recounted from the log while the broker serves?

    stored = ready + in flight + delayed + blocked + filtered + acked + dead + expired

At one moment the tables' counts are noted with the log's end (a cut).  Once that is confirmed, the
records up to there are read in bounded steps, and what they say is compared with the notes
(docs/concepts/monitoring.md).  It begins when somebody scrapes, takes the deliveries over that are
open then, and reads each later record once.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.queue_progress import FifoProgress, GroupQueue
from popmq.broker.diagnostics.audit_ledger import AuditLedger, DeliveryEndCounts
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import HEADER_SIZE, decode_header
from popmq.common.topics import TopicConfig

logger = logging.getLogger(__name__)

APART_MS = 10_000  # from one cut to the next
ASKED_MS = 300_000  # after a scrape it goes on for so long
STEP_MS = 5  # at most one step in so much time: it is to cost next to nothing
UNITS_A_STEP = 64
PLACES_A_STEP = 256
BEGIN_LIMIT = 20_000  # check points that are taken over, at once: about 20 ms
OPEN_LIMIT = 200_000  # and that are followed; with more it waits

Source = tuple[int, int]  # topic, queue
_MOVES_END = (0, 0)  # no source: all of the revive topic is read
_OVER = object()
_NO_ENDS = DeliveryEndCounts()  # before the ledger has said


class QueueCounts(NamedTuple):
    """What the tables say of one group in one queue, at a cut."""

    stored: int  # in the queue, since ever
    waiting: int
    in_flight: int
    filtered: int
    expired: int
    blocked: int
    ordered: bool
    ends: DeliveryEndCounts  # by the ledger, at the same cut

    @property
    def alive(self) -> int:
        return self.waiting + self.in_flight


STATES = (
    *("stored", "ready", "in_flight", "delayed", "blocked"),
    *("filtered", "acked", "dead", "expired"),
)


@dataclass(slots=True)
class Balance:
    """One group's messages since the audit began, by what became of them."""

    stored: int = 0
    ready: int = 0
    in_flight: int = 0
    delayed: int = 0  # a delayed message is stored in its topic when it fires
    blocked: int = 0
    filtered: int = 0
    acked: int = 0
    dead: int = 0
    expired: int = 0
    unaccounted: int = 0


@dataclass(slots=True)
class _Cut:
    end: int
    taken_ms: int
    places: dict[GroupQueue, QueueCounts]
    sources: list[Source] = field(default_factory=list)


class Audit:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: CheckPointTable,
        boot_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._boot_ms = boot_ms
        self._until_ms = 0
        self._next_ms = 0
        self._cut: _Cut | None = None
        self._ledger: AuditLedger | None = None
        self._at: dict[Source, int] = {}
        self._base: dict[GroupQueue, QueueCounts] = {}
        self._ordered: set[int] = set()  # groups of which only what is in flight is compared
        self._left_out: set[int] = set()  # groups whose deliveries are not all in the log
        self._missed = False  # retries or dead letters went unread, with their topic
        self._comparing: Iterator[None] | None = None
        self._warming = False
        self.passes = 0
        self.restarts = 0
        self.taken_ms = 0  # boot time of the cut that was compared last
        self.unaccounted = 0
        self.balances: dict[int, Balance] = {}  # by group

    def on_scrape(self) -> None:
        """Somebody scrapes: keep counting for a while."""
        self._until_ms = self._boot_ms() + ASKED_MS

    def step(self) -> None:
        """A bounded piece of a recount; one begins when its time has come."""
        if not self._until_ms or self._warming:
            return
        now_ms = self._boot_ms()
        if now_ms < self._next_ms:
            return
        try:
            if self._cut is not None:
                self._next_ms = now_ms + STEP_MS
                self._read_on(self._cut, now_ms)
            elif now_ms < self._until_ms:
                self._begin(now_ms)
            else:
                self._until_ms = 0
        except ColdRead as cold:
            self._warm(cold)
        except StoreDamaged:
            logger.exception("the audit begins anew")
            self._begin_anew(now_ms)

    def on_topic_deleted(self, topic: TopicConfig) -> None:
        """A topic made since the last cut may have held ends of deliveries."""
        if _holds_ends(topic) and (topic.id, 0) not in self._at:
            self._missed = True

    def age_ms(self) -> int:
        return self._boot_ms() - self.taken_ms

    def top_balances(self, limit: int) -> list[tuple[str, Balance]]:
        """So many groups by name: first those with something unaccounted for, then the largest."""
        names = [
            (group.name, self.balances[group.id])
            for group in self._registry.groups()
            if group.id in self.balances and group.id not in self._ordered
        ]
        return nlargest(
            limit, names, key=lambda balance: (balance[1].unaccounted, balance[1].stored)
        )

    # -- a cut

    def _begin(self, now_ms: int) -> None:
        if len(self._table) > (BEGIN_LIMIT if self._ledger is None else OPEN_LIMIT):
            self._begin_anew(now_ms)
            return
        if self._missed or any(self._is_deleted(topic_id) for topic_id, _ in self._at):
            self._begin_anew(now_ms)
        if self._ledger is None:
            self._ledger = self._begin_here()
        places = {
            place: noted
            for place, progress in self._table.progress_items()
            if (noted := self._noted(place)) is not None
        }
        self._cut = _Cut(self._store.end, now_ms, places)
        self._cut.sources = self._sources()

    def _begin_here(self) -> AuditLedger:
        """The deliveries that are open now are taken over; what follows is read from the log."""
        next_offset = self._store.dispatch.next_offset
        self._at = {
            source: next_offset(*source) for source in self._sources() if source != _MOVES_END
        }
        ledger = AuditLedger()
        for ck in self._table:
            if ck.buffered:
                self._left_out.add(ck.group_id)
            elif ck.waiting:
                ledger.take_over(ck.key, ck.place, ck.start_offset, ck.waiting)
        return ledger

    def _noted(self, place: GroupQueue) -> QueueCounts | None:
        """None for what is not audited: deliveries that are in memory only, parked messages."""
        group, topic = self._registry.group_by_id(place[0]), self._registry.topic_by_id(place[1])
        progress = self._table.progress(*place)
        if group is None or topic is None or progress is None:
            return None
        # The newest tells: before one that is a record none of the queue is in memory only.
        if group.buffered or (progress.open and progress.open[-1].buffered):
            self._left_out.add(group.id)
        if group.id in self._left_out or topics.is_parked_topic(topic.name):
            return None
        count = self._store.queue(topic.id, place[2]).count
        return QueueCounts(
            stored=count,
            waiting=progress.waiting(count),
            in_flight=progress.in_flight,
            filtered=progress.filtered,
            expired=progress.expired,
            blocked=progress.blocked if isinstance(progress, FifoProgress) else 0,
            ordered=isinstance(progress, FifoProgress),
            ends=_NO_ENDS,
        )

    def _sources(self) -> list[Source]:
        """In the order in which they are taken, the last first."""
        copies = [(topic.id, 0) for topic in self._registry.topics() if _holds_ends(topic)]
        revive = [(topics.REVIVE_TOPIC_ID, number) for number in range(topics.REVIVE_QUEUES)]
        return [*copies, _MOVES_END, *revive, (topics.OFFSETS_TOPIC_ID, 0)]

    # -- the log

    def _read_on(self, cut: _Cut, now_ms: int) -> None:
        if self._store.confirmed < cut.end:
            return  # queues show what is confirmed
        assert self._ledger is not None
        left = UNITS_A_STEP
        while left > 0:
            if not cut.sources:
                if self._comparing is None:
                    self._comparing = self._compare(cut, self._ledger)
                if next(self._comparing, _OVER) is _OVER:
                    self._comparing = None
                return
            source = cut.sources[-1]
            if source == _MOVES_END:
                self._ledger.moves_end()
                read = 0
            else:
                read = self._read(source, cut, self._ledger, left)
            if read < 0 or len(self._ledger.open) > OPEN_LIMIT:
                self._begin_anew(now_ms)
                return
            left -= max(1, read)
            if not read:
                cut.sources.pop()

    def _read(self, source: Source, cut: _Cut, ledger: AuditLedger, limit: int) -> int:
        """Take some records of a queue; 0 when it is read up to the cut, -1 when they are gone:
        what was not read of a topic that was deleted may have been the end of deliveries."""
        topic_id, queue_id = source
        if self._is_deleted(topic_id):
            return -1
        queue = self._store.queue(topic_id, queue_id)
        at = self._at.get(source, 0)  # of a topic made since: from its first record on
        if at < queue.min_offset:
            return -1
        if topic_id == topics.REVIVE_TOPIC_ID:
            read = ledger.take(queue.raw(at, limit, wait=False), cut.end)
        else:
            units = [unit for unit in queue.units(at, limit, wait=False) if unit.position < cut.end]
            read = len(units)
            if topic_id == topics.OFFSETS_TOPIC_ID:
                for unit in units:
                    self._take_offset(self._store.reader.record(unit, wait=False), ledger)
            else:
                for message in self._store.reader.read(units, wait=False):
                    if not isinstance(message, DamagedMessage) and message.token is not None:
                        ledger.revived(message.token)
        self._at[source] = at + read
        return read

    def _take_offset(self, data: bytes, ledger: AuditLedger) -> None:
        record = OffsetRecord.decode(data[HEADER_SIZE:])
        if record.reason in (OffsetReason.RESET, OffsetReason.PULLED):
            place = record.group_id, record.topic_id, record.queue_id
            ledger.reset(place, decode_header(data).position)
        elif record.reason is OffsetReason.COMMITTED:  # its check points were buffered for a while
            self._left_out.add(record.group_id)

    def _begin_anew(self, now_ms: int) -> None:
        """Retention was faster, a record is damaged, a topic was deleted, or there are too many
        to follow."""
        self.restarts += 1
        self._missed = False
        self._cut, self._ledger, self._base, self._at = None, None, {}, {}
        self._next_ms = now_ms + APART_MS

    # -- the comparison

    def _compare(self, cut: _Cut, ledger: AuditLedger) -> Iterator[None]:
        """Look at so many places between two `yield`s."""
        in_flight = ledger.in_flight
        balances: dict[int, Balance] = {}
        for place in [place for place in in_flight if place not in cut.places]:
            if self._is_gone(place):
                ledger.drop(place)
            else:  # the table does not know of these deliveries at all
                balances.setdefault(place[0], Balance()).unaccounted += in_flight[place]
        for number, (place, taken) in enumerate(cut.places.items(), 1):
            if number % PLACES_A_STEP == 0:
                yield
            if place[0] in self._left_out:
                continue
            noted = taken._replace(ends=ledger.ends.get(place, DeliveryEndCounts()).copy())
            base = self._base.get(place)
            if base is None or base.ends.resets != noted.ends.resets:
                base = self._base[place] = noted
            if noted.ordered:
                self._ordered.add(place[0])
            balance = balances.setdefault(place[0], Balance())
            missing = abs(in_flight.get(place, 0) - noted.in_flight)
            if not noted.ordered:
                missing = max(missing, abs(_missing(base, noted)))
            _add(balance, base, noted)
            balance.unaccounted += missing
        for place in [place for place in self._base if place not in cut.places]:
            del self._base[place]
        self._publish(cut, balances)

    def _is_deleted(self, topic_id: int) -> bool:
        mine = topic_id < topics.FIRST_USER_TOPIC_ID
        return not mine and self._registry.topic_by_id(topic_id) is None

    def _is_gone(self, place: GroupQueue) -> bool:
        group, topic = self._registry.group_by_id(place[0]), self._registry.topic_by_id(place[1])
        if group is None or topic is None:
            return True
        return group.id in self._left_out or topics.is_parked_topic(topic.name)

    def _publish(self, cut: _Cut, balances: dict[int, Balance]) -> None:
        before, self.balances = self.unaccounted, balances
        self.unaccounted = sum(balance.unaccounted for balance in balances.values())
        self.passes += 1
        self.taken_ms = cut.taken_ms
        self._cut, self._next_ms = None, cut.taken_ms + APART_MS
        if self.unaccounted > before:
            groups = {number for number, balance in balances.items() if balance.unaccounted}
            names = [group.name for group in self._registry.groups() if group.id in groups]
            logger.error(
                "messages are unaccounted for",
                extra={"messages": self.unaccounted, "groups": sorted(names)[:10], "end": cut.end},
            )

    def _warm(self, cold: ColdRead) -> None:
        self._warming = True

        def done(error: BaseException | None) -> None:
            self._warming = False  # an error shows again, at the next try

        self._store.readers.submit(lambda: _read_cold(cold), done)


def _holds_ends(topic: TopicConfig) -> bool:
    """Retries and dead letters are ends of deliveries."""
    return topics.is_retry_topic(topic.name) or topics.is_dead_letter_topic(topic.name)


def _read_cold(cold: ColdRead) -> None:
    cold.warm()


def _missing(base: QueueCounts, now: QueueCounts) -> int:
    """What was stored since the base, or waited then, and is neither there nor ended."""
    ended = (
        (now.ends.acked - base.ends.acked)
        + (now.ends.dead - base.ends.dead)
        + (now.ends.revived - base.ends.revived)
        + (now.ends.lost - base.ends.lost)
        + (now.filtered - base.filtered)
        + (now.expired - base.expired)
    )
    return base.alive + (now.stored - base.stored) - now.alive - ended


def _add(balance: Balance, base: QueueCounts, now: QueueCounts) -> None:
    """A retry is the message that it repeats, and is stored once; one lost to a damaged disk is
    as dead as a dead letter."""
    revived = now.ends.revived - base.ends.revived
    balance.stored += base.alive + now.stored - base.stored - revived
    balance.ready += now.waiting - now.blocked
    balance.in_flight += now.in_flight
    balance.blocked += now.blocked
    balance.filtered += now.filtered - base.filtered
    balance.acked += now.ends.acked - base.ends.acked
    balance.dead += now.ends.dead - base.ends.dead + now.ends.lost - base.ends.lost
    balance.expired += now.expired - base.expired
