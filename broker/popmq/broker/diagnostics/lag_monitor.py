"""LagMonitor: what of a lag takes time to find out, for the metrics' page.

The age of the oldest ready message takes a look into the log, and the time until the lag is worked
off takes several looks at the lag.  Both are found in bounded steps, at most every few seconds,
and only while somebody scrapes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import NamedTuple

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.group_topic_counts import EndCounts
from popmq.broker.diagnostics.head_times import Head, HeadTimes
from popmq.broker.diagnostics.lag import Lag, count_lags, top_lags
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common.clock import Clock
from popmq.common.disk import ColdRead
from popmq.common.metric_table.verdicts import (
    STANDS_MS,
    WINDOW_MS,
    Facts,
    Verdict,
    VerdictRules,
    verdict_of,
)
from popmq.common.quantities import KIB

APART_MS, UNASKED_MS = 5_000, 30_000
ETA_MS = 60_000  # whose speed tells when the lag will be worked off
ASKED_MS = 300_000  # after a scrape it goes on for so long
# So a page with all of them has less than 1 MiB: pairs, and bytes of their names.
PAIRS_LIMIT, NAME_BYTES = 500, 30 * KIB
_READS_A_STEP = 64
_LAGS_A_STEP = 32

Pair = tuple[str, str]  # group, topic


@dataclass(slots=True)
class LagHistory:
    """One pair: when its oldest ready message was stored (0: there is none, or it is not known),
    the number of queues in which it is not known, and its lags."""

    oldest_wall_ms: int = 0
    unknown_ages: int = 0
    samples: deque["_Moment"] = field(default_factory=deque)
    # Of queues with messages in flight or blocked: their offset, and since when it has been that.
    fronts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    ready: int = 0
    verdict: Verdict = Verdict.UNKNOWN

    def eta_s(self) -> float:
        """Seconds until the lag is nothing, at the speed of the last minute."""
        last = self.samples[-1]
        if not last.lag:
            return 0.0
        first = next(sample for sample in self.samples if last.at_ms - sample.at_ms <= ETA_MS)
        worked_off = first.lag - last.lag
        took_ms = last.at_ms - first.at_ms
        return last.lag * took_ms / worked_off / 1_000 if worked_off > 0 else inf

    def judge(self, wall_ms: int, rules: VerdictRules) -> None:
        first, last = self.samples[0], self.samples[-1]
        oldest_ms = self.oldest_wall_ms if self.ready else 0
        facts = Facts(
            watched_ms=last.at_ms - first.at_ms,
            lag=last.lag,
            ready=self.ready,
            age_ms=max(0, wall_ms - oldest_ms) if oldest_ms else 0,
            unknown_ages=self.unknown_ages,
            delivered=last.delivered - first.delivered,
            acked=last.acked - first.acked,
            returned=last.returned - first.returned,
            dead=last.dead - first.dead,
            moved=int(last.committed != first.committed),
            standing=sum(last.at_ms - since >= STANDS_MS for _, since in self.fronts.values()),
        )
        self.verdict = verdict_of(facts, rules)


class _Moment(NamedTuple):
    """Boot time, the lag, and counts since the broker started."""

    at_ms: int
    lag: int
    committed: int  # of all queues together
    delivered: int
    acked: int
    returned: int
    dead: int


class LagMonitor:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: CheckPointTable,
        head_times: HeadTimes,
        clock: Clock,
        boot_ms: Callable[[], int],
        counts: EndCounts,
        rules: VerdictRules,
    ) -> None:
        """`boot_ms` tells intervals, `clock` how old a message is."""
        self._clock = clock
        self._counts = counts
        self._rules = rules
        self._looked_ms, self._ends = boot_ms(), counts.copy()
        self._store = store
        self._registry = registry
        self._table = table
        self._head_times = head_times
        self._boot_ms = boot_ms
        self._until_ms = 0  # somebody wants to know until then
        self._next_ms = 0
        self._counting: Iterator[Lag | None] | None = None
        self._counted: list[Lag] = []
        self._found: list[Lag] = []
        self._heads: list[tuple[Pair, Head]] = []
        self._oldest: dict[Pair, int] = {}
        self._unknown: dict[Pair, int] = {}
        self._warming = False
        self.pairs: dict[Pair, LagHistory] = {}

    def on_scrape(self) -> None:
        """Somebody scrapes: look more often for a while."""
        now_ms = self._boot_ms()
        if now_ms >= self._until_ms:
            self._next_ms = min(self._next_ms, now_ms)
        self._until_ms = now_ms + ASKED_MS

    def verdict(self, group: str, topic: str) -> str:
        """Empty for a pair that is not judged."""
        watched = self.pairs.get((group, topic))
        return watched.verdict.name if watched is not None else ""

    def step(self) -> None:
        """A bounded piece of a look; one begins when its time has come."""
        if self._warming:
            return
        if self._counting is not None:
            self._count_on(self._counting)
            return
        if self._found:
            self._look_on()
            return
        now_ms = self._boot_ms()
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + (APART_MS if now_ms < self._until_ms else UNASKED_MS)
            self._counting = count_lags(self._store, self._registry, self._table)
            self._count_on(self._counting)

    def _count_on(self, counting: Iterator[Lag | None]) -> None:
        some = list(islice(counting, _LAGS_A_STEP))
        self._counted += (lag for lag in some if lag is not None)
        if len(some) == _LAGS_A_STEP:
            return
        self._found, _ = top_lags(self._counted, PAIRS_LIMIT, NAME_BYTES)
        self._counting, self._counted = None, []
        self._oldest, self._unknown = {}, {}
        self._heads = [(_pair(lag), head) for lag in self._found for head in lag.heads]
        if not self._found:
            self.pairs = {}
            self._note_look(self._boot_ms())

    def _look_on(self) -> None:
        for _ in range(_READS_A_STEP):
            if not self._heads:
                self._publish()
                return
            pair, head = self._heads[-1]
            try:
                stored_ms = self._head_times.stored_ms(head)
            except ColdRead as cold:
                if self._boot_ms() < self._until_ms:
                    self._warm(cold)
                    return
                stored_ms = None  # nobody scrapes: samples for reports read it, in their budget
            self._heads.pop()
            if stored_ms is None:
                self._unknown[pair] = self._unknown.get(pair, 0) + 1
            else:
                self._oldest[pair] = min(self._oldest.get(pair, stored_ms), stored_ms)

    def _publish(self) -> None:
        now_ms, known, self.pairs = self._boot_ms(), self.pairs, {}
        for lag in self._found:
            pair = _pair(lag)
            watched = self.pairs[pair] = known.get(pair) or LagHistory()
            watched.oldest_wall_ms = self._oldest.get(pair, 0)
            watched.unknown_ages = self._unknown.get(pair, 0)
            if not watched.samples:  # what it did since the look before this one counts
                before = _Moment(self._looked_ms, lag.total, lag.committed, *self._ends.of(pair))
                watched.samples.append(before)
            watched.ready = lag.ready
            watched.samples.append(
                _Moment(now_ms, lag.total, lag.committed, *self._counts.of(pair))
            )
            while now_ms - watched.samples[0].at_ms > WINDOW_MS:
                watched.samples.popleft()
            fronts = watched.fronts
            watched.fronts = {
                place: fronts[place] if fronts.get(place, (-1, 0))[0] == front else (front, now_ms)
                for place, front in lag.fronts.items()
            }
            watched.judge(self._clock.wall_ms(), self._rules)
        self._found = []
        self._note_look(now_ms)

    def _note_look(self, now_ms: int) -> None:
        self._looked_ms, self._ends = now_ms, self._counts.copy()

    def _warm(self, cold: ColdRead) -> None:
        """An old record comes from the disk; nobody waits for it here."""
        self._warming = True

        def done(error: BaseException | None) -> None:
            self._warming = False  # of an error the head's time stays unknown

        self._store.readers.submit(lambda: _read(cold), done)


def _read(cold: ColdRead) -> None:
    cold.warm()


def _pair(lag: Lag) -> Pair:
    return lag.group.name, lag.topic.name
