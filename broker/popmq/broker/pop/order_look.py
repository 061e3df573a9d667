"""OrderLook: after a start, whose messages wait behind one that is in flight.

What a FIFO group may have is a function of the queue's content that memory holds (OrderInfo), and
a start forgets it.  The first receive makes it anew; until then lag would call READY what is
BLOCKED.  So it is looked up where something is in flight, as far as a receive would look, in
bounded pieces beside everything else.
"""

from collections import defaultdict
from collections.abc import Iterator

from popmq.broker.meta.registry import Registry
from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.fifo_service import FifoService
from popmq.broker.pop.fifo_visit import FifoVisit
from popmq.broker.pop.queue_progress import FifoProgress
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead

PAIR_UNITS = 800  # of one group in one topic, as one receive looks at
_LEAST_UNITS = 32  # of one queue
LOOK_LIMIT = 100_000  # units in all: about 15 MB of order infos


class OrderLook:
    def __init__(
        self, store: MessageStore, registry: Registry, table: CheckPointTable, fifo: FifoService
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._fifo = fifo
        self._places: Iterator[tuple[FifoProgress, int]] | None = None
        self._visit: FifoVisit | None = None
        self._left = LOOK_LIMIT
        self._warming = False
        self.done = False

    def step(self) -> int:
        """A bounded piece, in the background. Returns 1 for work done."""
        if self.done or self._warming:
            return 0
        try:
            self.look()
        except ColdRead as cold:
            self._warm(cold)
            return 0
        return 1

    def look(self) -> None:
        """The next piece, until `done`. ColdRead: call again."""
        if self._places is None:
            self._places = iter(self._busy_places())
        if self._visit is None:
            found = next(self._places, None)
            if found is None or self._left <= 0:
                self.done = True
                return
            self._visit = self._visit_of(*found)
        elif not (self._is_current(self._visit) and self._look_on(self._visit)):
            self._visit = None

    def _busy_places(self) -> list[tuple[FifoProgress, int]]:
        """Queues in which something is in flight, and how many units each is looked at."""
        pairs: dict[tuple[int, int], list[FifoProgress]] = defaultdict(list)
        for (group_id, topic_id, _), progress in self._table.progress_items():
            if isinstance(progress, FifoProgress) and progress.held:
                pairs[group_id, topic_id].append(progress)
        return [
            (progress, max(_LEAST_UNITS, PAIR_UNITS // len(queues)))
            for queues in pairs.values()
            for progress in queues
        ]

    def _visit_of(self, progress: FifoProgress, units: int) -> FifoVisit | None:
        """None where a receive was faster, or topic or group are gone."""
        topic = self._registry.topic_by_id(progress.place[1])
        if topic is None or progress.order is not None or topics.is_group_owned(topic.name):
            return None
        if self._table.progress(*progress.place) is not progress:
            return None
        return self._fifo.look_at(topic, progress, units)

    def _is_current(self, visit: FifoVisit) -> bool:
        progress = visit.progress
        known = self._table.progress(*progress.place) is progress
        return known and progress.order is visit.order

    def _look_on(self, visit: FifoVisit) -> bool:
        before = visit.left
        more = visit.look()
        self._left -= before - visit.left
        return more

    def _warm(self, cold: ColdRead) -> None:
        """Old messages come from the disk; nobody waits for them here."""
        self._warming = True

        def read() -> None:
            cold.warm()

        def done(error: BaseException | None) -> None:
            self._warming = False
            if error is not None:
                self._visit = None  # a receive will say what is wrong

        self._store.readers.submit(read, done)
