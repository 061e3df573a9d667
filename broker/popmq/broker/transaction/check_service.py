"""CheckService: asks producers about half messages without a commit or rollback.

Proxies that have producers wait here, as consumers wait for messages; an answer names the halves
to ask about, of topics that the proxy's producers publish to, or of their producer groups for
those that Remoting clients sent.  So a check counts only when somebody can be asked, and a half
waits for its producers as long as there are none.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from popmq.broker.index.message_keys import ID, names_in
from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.broker.transaction.half_service import HalfService
from popmq.broker.transaction.transaction_table import HalfMessage, TransactionTable
from popmq.common.disk import ColdRead
from popmq.common.errors import TooManyRequests
from popmq.common.record.message import StoredMessage
from popmq.common.record.producer_group import producer_group_of
from popmq.common.record.transaction_token import TransactionEnd
from popmq.common.settings.send_settings import TransactionSettings

WAITING_LIMIT = 1_024
_BATCH = 32
_BATCH_BYTES = 1 << 20  # beyond the first message
_PER_STEP = 256


class Check(NamedTuple):
    """One half message to ask about."""

    topic: str
    transaction_id: str
    queue_id: int
    half_offset: int
    message: StoredMessage
    producer_group: str  # empty: any producer of the topic


Answer = Callable[[Sequence[Check]], None]


@dataclass(slots=True)
class _WaitingProxy:
    number: int
    topics: frozenset[str]
    producer_groups: frozenset[str]
    deadline_ms: int
    answer: Answer

    def may_check(self, topic: str, producer_group: str) -> bool:
        if producer_group:
            return producer_group in self.producer_groups
        return topic in self.topics


class CheckService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: TransactionTable,
        halves: HalfService,
        settings: TransactionSettings,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._halves = halves
        self._settings = settings
        self._waiting: deque[_WaitingProxy] = deque()
        # By topic and producer group: offsets whose time has come.
        self._ready: dict[tuple[int, str], deque[int]] = {}
        self._cold = ColdReadRetry(store.readers)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add_waiting_proxy(
        self,
        number: int,
        topics: Iterable[str],
        producer_groups: Iterable[str],
        deadline_ms: int,
        answer: Answer,
    ) -> None:
        """A proxy asks for checks of those topics and groups; `answer` comes by then, perhaps with
        none."""
        if len(self._waiting) >= WAITING_LIMIT:
            raise TooManyRequests(f"{WAITING_LIMIT} proxies wait for transaction checks already")
        names = frozenset(topics), frozenset(producer_groups)
        self._waiting.append(_WaitingProxy(number, *names, deadline_ms, answer))

    def cancel(self, number: int) -> bool:
        """That proxy is gone; whether it waited."""
        left = [proxy for proxy in self._waiting if proxy.number != number]
        cancel = len(left) < len(self._waiting)
        self._waiting = deque(left)
        return cancel

    def dismiss(self) -> None:
        """The broker stops: everybody is answered with nothing."""
        while self._waiting:
            self._waiting.popleft().answer(())

    def step(self, *, now_ms: int, log_ms: int) -> int:
        """Hand out what is due; returns how much was done. `now_ms` is what waits count in."""
        self._table.forget(log_ms)
        try:
            done = self._collect(log_ms) + self._serve()
        except ColdRead as cold:
            self._cold.warm(cold)
            done = 1
        while self._waiting and any(proxy.deadline_ms <= now_ms for proxy in self._waiting):
            due = next(proxy for proxy in self._waiting if proxy.deadline_ms <= now_ms)
            self._waiting.remove(due)
            due.answer(())
            done += 1
        return done

    def _collect(self, log_ms: int) -> int:
        """Halves whose time has come; those that were asked about too often are given up."""
        if self._cold.waiting:
            return 0
        self._give_up_old(log_ms - self._settings.keep_ms)
        due = self._table.take_due(log_ms, _PER_STEP)
        done = len(due)
        for at, half in enumerate(due):
            try:
                if half.checks < self._settings.max_checks:
                    done -= not self._is_made_ready(half)
                elif self._may_give_up(half):
                    self._halves.give_up(half)
                else:
                    self._table.schedule_check(half)
                    done -= 1
            except ColdRead:
                for left in due[at:]:
                    self._table.schedule_check(left)
                raise
        return done

    def _is_made_ready(self, half: HalfMessage) -> bool:
        """Whether it waits for its producers now; ColdRead: it does not."""
        if half.unit.position >= self._store.confirmed:
            self._table.schedule_check(half)  # new, or retention has just moved it
            return False
        message = self._halves.read(half)
        group = "" if message is None else producer_group_of(message.properties)
        self._ready.setdefault((half.topic_id, group), deque()).append(half.offset)
        return True

    def _give_up_old(self, before_ms: int) -> None:
        """For days there was no producer to ask."""
        while (half := self._table.older_than(before_ms)) and self._may_give_up(half):
            self._halves.give_up(half)

    def _may_give_up(self, half: HalfMessage) -> bool:
        return half.unit.position < self._store.confirmed and self._store.guard.copies_allowed

    def _serve(self) -> int:
        """Who waited longest is answered first, and waits again behind the others."""
        if self._cold.waiting or not self._ready:
            return 0
        served = 0
        for waiting in list(self._waiting):
            checks = self._checks_for(waiting)
            if checks:
                self._waiting.remove(waiting)
                self._answer(waiting, checks)
                served += 1
        return served

    def _answer(self, waiting: _WaitingProxy, checks: Sequence[Check]) -> None:
        self._store.when_log_confirmed(lambda: waiting.answer(checks))

    def _checks_for(self, waiting: _WaitingProxy) -> list[Check]:
        """What the proxy is to ask; each was written as a check."""
        checks: list[Check] = []
        size = 0
        for key in list(self._ready):
            topic_id, producer_group = key
            topic = self._registry.topic_by_id(topic_id)
            if topic is None:
                del self._ready[key]  # and its halves with it
            elif waiting.may_check(topic.name, producer_group):
                offsets = self._ready[key]
                while offsets and len(checks) < _BATCH and size < _BATCH_BYTES:
                    try:
                        check = self._checked(topic.name, offsets[0])
                    except ColdRead:
                        if checks:  # these are counted: they must leave
                            return checks
                        raise
                    offsets.popleft()
                    if check is not None:
                        checks.append(check)
                        size += check.message.header.size
                if not offsets:
                    del self._ready[key]
        return checks

    def _checked(self, topic: str, offset: int) -> Check | None:
        """Read it and count the check; None when it ended meanwhile."""
        half = self._table.pending.get(offset)
        if half is None:
            return None
        if half.unit.position >= self._store.confirmed:
            self._table.schedule_check(half)  # retention has just moved it
            return None
        message = self._halves.read(half)
        if message is None:
            self._halves.write_op(half, TransactionEnd.LOST)
            return None
        self._halves.write_op(half, TransactionEnd.CHECKED, half.checks + 1)
        producer_group = producer_group_of(message.properties)
        # The ids of Remoting clients' transactions are not those of their messages, which repeat.
        names = () if producer_group else names_in(message.properties)
        name = next((name for kind, name in names if kind == ID), b"")
        transaction_id = self._halves.id_of(half.topic_id, offset, name.decode(errors="replace"))
        return Check(topic, transaction_id, half.queue_id, offset, message, producer_group)
