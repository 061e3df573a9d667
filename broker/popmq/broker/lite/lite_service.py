"""LiteService: receives of lite topics, and what clients subscribe to
(docs/concepts/lite-topics.md).

A lite topic is a queue of its parent topic in one line: what is in flight holds up what comes
behind it, and what comes back waits in its place, as in a FIFO group.  A receive visits the lite
topics of its client in which something may be ready, each in its turn.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.lite.lite_notices import LiteNotices
from popmq.broker.lite.lite_subscriptions import LiteSubscriptions, Subscriber, SubscriberKey
from popmq.broker.meta.lite_topics import LiteTopic
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.long_polling import LongPolling
from popmq.broker.pop.pop_batch import PopBatch
from popmq.broker.pop.pop_service import PopParams, PopResult, PopService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import Code, Refused
from popmq.common.settings.settings import Settings
from popmq.common.topics import (
    StartAt,
    SubscriptionGroup,
    TopicConfig,
    check_lite_topic_name,
)

_VISITS = 64  # of lite topics in one receive
Wake = Callable[[tuple[int, int], int], None]  # those of a client who wait for (topic, group)


class Action(IntEnum):
    """Numbers of the public protocol's LiteSubscriptionAction, and one between our processes."""

    PARTIAL_ADD = 0
    PARTIAL_REMOVE = 1
    COMPLETE_ADD = 2
    COMPLETE_REMOVE = 3
    RESUBSCRIBE = 4  # by a proxy: adds what a client had said before


class LiteStart(NamedTuple):
    """Where a group begins in a lite topic that it never read; -1: not said."""

    newest: bool = False
    offset: int = -1
    tail: int = -1
    stored_ms: int = -1  # wall milliseconds: the first message stored then or later


class LiteService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pops: PopService,
        fifo: FifoService,
        lookup: Lookup,
        polling: LongPolling,
        settings: Settings,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._pops = pops
        self._fifo = fifo
        self._lookup = lookup
        self.settings, self._limits = settings.lite, settings.pop
        self._now_ms = 0  # of what the last step or request said
        self.subscriptions = LiteSubscriptions(settings.lite)
        self.notices = LiteNotices()
        self._polling = polling

    # -- receives

    def pop(self, params: PopParams) -> PopResult:
        """Like `PopService.pop`, of the lite topics that the client subscribed to; the rest is how
        many of these may have something yet."""
        begin = self._pops.start_pop(params)
        batch = PopBatch(params.limit, min(params.reply_bytes, self._limits.reply_bytes))
        subscriber = self._subscriber(params)
        if subscriber is not None:
            for ck in self._fifo.received(params):
                if self._wanted(subscriber, ck.queue_id):
                    self._fifo.repeat_deliveries(ck, batch)
            if not batch.deliveries:
                self._fill(params, subscriber, batch)
            batch.remaining = len(subscriber.ready)
        return self._pops.finish(params, batch, begin)

    def has_ready(self, params: PopParams) -> bool:
        """Whether a pop might find something: reads no message, writes no check point."""
        subscriber = self._subscriber(params)
        if subscriber is None:
            return False
        if any(self._wanted(subscriber, ck.queue_id) for ck in self._fifo.received(params)):
            return True
        while subscriber.ready:
            queue_id = next(iter(subscriber.ready))
            if self._wanted(subscriber, queue_id) and self._may_leave(
                params.group, params.topic, queue_id
            ):
                return True
            del subscriber.ready[queue_id]
        return False

    def _fill(self, params: PopParams, subscriber: Subscriber, batch: PopBatch) -> None:
        for queue_id in list(islice(subscriber.ready, _VISITS)):
            if batch.full:
                break
            cold = len(batch.cold)
            try:
                more = self._wanted(subscriber, queue_id) and self._fifo.pop_queue_in_order(
                    params, queue_id, batch
                )
            except OSError as error:
                batch.pass_over(params.topic, queue_id, error)
                continue  # first again
            if len(batch.cold) > cold:
                continue  # first again, when it was read from the disk
            del subscriber.ready[queue_id]
            if more:
                subscriber.ready[queue_id] = None  # behind the others

    def _subscriber(self, params: PopParams) -> Subscriber | None:
        return self.subscriptions.find((params.topic.id, params.group.id, params.client))

    def _wanted(self, subscriber: Subscriber, queue_id: int) -> bool:
        lite = self._registry.lites.at(subscriber.who[0], queue_id)
        return lite is not None and lite.name in subscriber.names

    def _may_leave(self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int) -> bool:
        """Whether the group may get something of the queue now, as far as is known."""
        progress = self._pops.progress(group, topic, queue_id)
        waiting = progress.waiting(self._store.queue(topic.id, queue_id).count)
        return waiting > 0 and not progress.in_flight

    # -- what happens to lite topics

    def arrived(self, topic: TopicConfig, queue_id: int) -> None:
        """Messages came in."""
        lite = self._registry.lites.at(topic.id, queue_id)
        if lite is not None:
            for group_id in self.subscriptions.groups(topic.id, lite.name):
                self._look(topic, lite, group_id, self._polling.wake_client)

    def on_unblocked(self, topic: TopicConfig, queue_id: int, group_id: int) -> None:
        """What was in flight to the group ended."""
        lite = self._registry.lites.at(topic.id, queue_id)
        if lite is not None:
            # From inside of a change of the tables: they try in the next step.
            self._look(topic, lite, group_id, self._polling.retry_client_waiters)

    def _look(self, topic: TopicConfig, lite: LiteTopic, group_id: int, wake: Wake) -> None:
        """Tell the group's subscribers if there is something for them."""
        subscribers = list(self.subscriptions.of(topic.id, lite.name, group_id))
        group = self._registry.group_by_id(group_id) if subscribers else None
        if group is None or not self._may_leave(group, topic, lite.queue_id):
            return
        for subscriber in subscribers:
            subscriber.ready[lite.queue_id] = None
        for subscriber in subscribers:
            if subscriber.ready:
                wake((topic.id, group_id), subscriber.who[2])

    # -- what clients say

    def sync(
        self,
        topic: TopicConfig,
        group: SubscriptionGroup,
        client: int,
        action: Action,
        names: Sequence[str],
        begin: LiteStart,
        now_ms: int,
    ) -> None:
        """Add to a client's subscriptions, take from them, or set all of them.

        Raises ILLEGAL_LITE_TOPIC, or LITE_SUBSCRIPTION_QUOTA_EXCEEDED, with nothing changed; but of
        a whole list that is too long for one client its beginning counts, and the client is to
        forget the rest. Raises ColdRead instead of waiting for the disk, with nothing changed.
        """
        if not topic.kind.has_lite_topics:
            raise Refused(
                Code.BAD_REQUEST,
                f"topic {topic.name} is {topic.type.name}: only one of type LITE has lite topics",
            )
        ids = (topic.id, group.id, client)
        known = self.subscriptions.find(ids)
        had = known.names if known is not None else set[str]()
        requested = self._wanted_names(action, client, had, names)
        over: list[str] = []
        if action is Action.COMPLETE_ADD and len(requested) > self.subscriptions.limit:
            # By the client's own order, the same at each broker group.
            order = [name for name in dict.fromkeys(names) if name in requested]
            over = order[self.subscriptions.limit :]
        total = len(requested)
        requested.difference_update(over)
        self._now_ms = now_ms
        self.subscriptions.check(len(requested) - len(had), len(requested))
        begins = self._begins(group, topic, requested - had, begin) if _begins_anew(action) else ()
        if action is Action.PARTIAL_ADD:
            self.notices.forget(client, names)
        self._set(topic, group, ids, requested, begins)
        if over:
            self.notices.add(client, over, now_ms)
            raise self.subscriptions.too_many(total)

    def _set(
        self,
        topic: TopicConfig,
        group: SubscriptionGroup,
        client: SubscriberKey,
        requested: set[str],
        begins: Iterable[tuple[int, int]],
    ) -> None:
        known = self.subscriptions.find(client)
        if not requested:
            if known is not None:
                self.subscriptions.remove_subscriber(known)
            return
        subscriber = self.subscriptions.mark_seen(client, self._now_ms)
        for queue_id, offset in begins:
            self._pops.open_progress_at(group, topic, queue_id, offset)
        for name in sorted(subscriber.names - requested):
            self.subscriptions.remove(subscriber, name)
        for name in sorted(requested - subscriber.names):
            self.subscriptions.add(subscriber, name)
            lite = self._registry.lites.find(topic.id, name)
            if lite is not None:
                self._look(topic, lite, group.id, self._polling.wake_client)

    def _wanted_names(
        self, action: Action, client: int, had: set[str], names: Sequence[str]
    ) -> set[str]:
        if action is Action.COMPLETE_REMOVE:
            return set()
        if action is Action.PARTIAL_REMOVE:
            return had.difference(names)
        for name in names:
            check_lite_topic_name(name)
        if action is Action.COMPLETE_ADD:
            return set(names) - self.notices.of(client)
        return had.union(names)

    def _begins(
        self, group: SubscriptionGroup, topic: TopicConfig, names: set[str], begin: LiteStart
    ) -> list[tuple[int, int]]:
        """Queues that the group never read, and the offset at which it begins there, where that is
        not the oldest."""
        queue_ids = []
        for name in sorted(names):
            lite = self._registry.lites.find(topic.id, name)
            if lite is None:
                continue
            if self._table.progress(group.id, topic.id, lite.queue_id) is not None:
                continue
            offset = self._beginning(group, topic, lite.queue_id, begin)
            if offset is not None:
                queue_ids.append((lite.queue_id, offset))
        return queue_ids

    def _beginning(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, begin: LiteStart
    ) -> int | None:
        queue = self._store.queue(topic.id, queue_id)
        if begin.stored_ms >= 0:
            return self._lookup.by_time(topic.id, queue_id, begin.stored_ms, wait=False)
        if begin.tail >= 0:
            return max(queue.min_offset, queue.count - begin.tail)
        if begin.offset >= 0:
            return min(max(begin.offset, queue.min_offset), queue.count)
        if begin.newest or (group.start_at is StartAt.NEWEST and begin == LiteStart()):
            return queue.count
        return None

    # -- subscriptions that end

    def step(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self.subscriptions.step(now_ms)
        self.notices.step(now_ms)

    def on_client_closed(self, client: int) -> None:
        """It said good-bye."""
        self.subscriptions.on_client_closed(client)
        self.notices.take(client)

    def ended(self, lite: LiteTopic) -> None:
        """Its time to live is over; subscriptions to its name end with it if they are to."""
        if not self.settings.ttl_ends_subscriptions:
            return
        for group_id in self.subscriptions.groups(lite.topic_id, lite.name):
            for subscriber in list(self.subscriptions.of(lite.topic_id, lite.name, group_id)):
                self.subscriptions.remove(subscriber, lite.name)
                self.notices.add(subscriber.who[2], [lite.name], self._now_ms)

    def remove_subscriber(self, *, topic_id: int = 0, group_id: int = 0) -> None:
        """The parent topic was deleted, or the group."""
        for subscription in self.subscriptions:
            if subscription.who[0] == topic_id or subscription.who[1] == group_id:
                self.notices.add(subscription.who[2], sorted(subscription.names), self._now_ms)
                self.subscriptions.remove_subscriber(subscription)


def _begins_anew(action: Action) -> bool:
    """Only a new subscription says where: one that is told again after a restart must not pass over
    what came meanwhile."""
    return action is Action.PARTIAL_ADD


def waiting_client(params: PopParams) -> int:
    """Of a receive that only this client's own lite topics may wake; 0: any of the group's."""
    return params.client if params.topic.kind.waits_by_client else 0
