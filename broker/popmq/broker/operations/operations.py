"""Operations: builds offset resets, redrives and pulls."""

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.group_topic_counts import EndCounts
from popmq.broker.meta.registry import Registry
from popmq.broker.operations.offset_reset import OffsetReset
from popmq.broker.operations.pull_ends import PullEnds
from popmq.broker.operations.pull_offsets import PullOffsets
from popmq.broker.operations.pull_reader import PullReader
from popmq.broker.operations.redrive_service import RedriveService
from popmq.broker.pop.pop_service import PopService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore


class Operations:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pops: PopService,
        lookup: Lookup,
        ends: EndCounts,
        max_lite_topics: int,
    ) -> None:
        self.pull_ends = PullEnds(ends)
        self.pulls = PullReader(store)
        self.pull_offsets = PullOffsets(store, deliveries, pops, self.pull_ends)
        self.redrives = RedriveService(store, registry, deliveries.redriven, max_lite_topics)
        self.offset_reset = OffsetReset(store, registry, deliveries, pops, lookup)
