"""LiteSubscriptions: which client of a group wants which lite topics
(docs/concepts/lite-topics.md).

Soft: clients say all of it again every 30 s, so nothing of it is a record.  Each subscriber has the
queues in which something may be ready for it, so that neither a message nor a receive costs more
for a client with thousands of subscriptions than for one with a few.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from popmq.common.errors import Code, Refused
from popmq.common.settings.lite_settings import LiteSettings

SubscriberKey = tuple[int, int, int]  # topic, group, client


class Subscriber:
    """One client of a group, for one parent topic."""

    __slots__ = ("heard_ms", "names", "ready", "who")

    def __init__(self, client: SubscriberKey) -> None:
        self.who = client
        self.names: set[str] = set()
        self.ready: dict[int, None] = {}  # queues, in the order in which they are visited
        self.heard_ms = 0


class LiteSubscriptions:
    def __init__(self, settings: LiteSettings) -> None:
        self._settings = settings
        # The one that was silent for longest comes first.
        self._subscribers: OrderedDict[SubscriberKey, Subscriber] = OrderedDict()
        self._by_name: dict[tuple[int, str], dict[int, dict[Subscriber, None]]] = {}  # by group
        self._of_client: dict[int, set[SubscriberKey]] = {}
        self.count = 0

    def topics(self) -> set[int]:
        """The parent topics that anybody subscribes to."""
        return {topic_id for topic_id, _, _ in self._subscribers}

    def find(self, client: SubscriberKey) -> Subscriber | None:
        return self._subscribers.get(client)

    def groups(self, topic_id: int, name: str) -> list[int]:
        """The groups that want this lite topic."""
        return list(self._by_name.get((topic_id, name), ()))

    def of(self, topic_id: int, name: str, group_id: int) -> Iterable[Subscriber]:
        return self._by_name.get((topic_id, name), {}).get(group_id, ())

    @property
    def limit(self) -> int:
        """Of one client, to lite topics of one parent topic."""
        return self._settings.max_client_subscriptions

    def check(self, added: int, total: int) -> None:
        """LITE_SUBSCRIPTION_QUOTA_EXCEEDED when the client would have `total`, `added` of them new,
        and that is too many."""
        if total > self.limit:
            raise self.too_many(total)
        most = self._settings.max_subscriptions
        if added > 0 and self.count + added > most:
            raise Refused(
                Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
                f"all clients have {self.count} subscriptions to lite topics here, and {added} "
                f"more are over the limit of {most} (lite.max_subscriptions)",
            )

    def too_many(self, total: int) -> Refused:
        return Refused(
            Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
            f"{total} subscriptions to lite topics of one client are over the limit of "
            f"{self.limit} (lite.max_client_subscriptions)",
        )

    def mark_seen(self, client: SubscriberKey, now_ms: int) -> Subscriber:
        """The subscriber, made if need be; it spoke just now."""
        subscriber = self._subscribers.get(client)
        if subscriber is None:
            subscriber = self._subscribers[client] = Subscriber(client)
            self._of_client.setdefault(client[2], set()).add(client)
        subscriber.heard_ms = now_ms
        self._subscribers.move_to_end(client)
        return subscriber

    def add(self, subscriber: Subscriber, name: str) -> None:
        if name in subscriber.names:
            return
        subscriber.names.add(name)
        groups = self._by_name.setdefault((subscriber.who[0], name), {})
        groups.setdefault(subscriber.who[1], {})[subscriber] = None
        self.count += 1

    def remove(self, subscriber: Subscriber, name: str) -> None:
        if name not in subscriber.names:
            return
        subscriber.names.remove(name)
        topic_id, group_id, _ = subscriber.who
        groups = self._by_name[topic_id, name]
        del groups[group_id][subscriber]
        if not groups[group_id]:
            del groups[group_id]
        if not groups:
            del self._by_name[topic_id, name]
        self.count -= 1

    # -- ends

    def step(self, now_ms: int) -> None:
        """Forget those who said nothing for too long."""
        silent_ms = now_ms - self._settings.subscription_expiry_ms
        while self._subscribers:
            oldest = next(iter(self._subscribers.values()))
            if oldest.heard_ms > silent_ms:
                break
            self.remove_subscriber(oldest)

    def on_client_closed(self, client: int) -> None:
        """It said good-bye."""
        for client_id in list(self._of_client.get(client, ())):
            self.remove_subscriber(self._subscribers[client_id])

    def remove_subscriber(self, subscriber: Subscriber) -> None:
        for name in list(subscriber.names):
            self.remove(subscriber, name)
        del self._subscribers[subscriber.who]
        mine = self._of_client[subscriber.who[2]]
        mine.discard(subscriber.who)
        if not mine:
            del self._of_client[subscriber.who[2]]

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(list(self._subscribers.values()))

    def __len__(self) -> int:
        return len(self._subscribers)

    def check_invariants(self) -> None:
        """Subscribers, names and clients lead to each other."""
        by_name = {
            (topic_id, group_id, name, subscriber)
            for (topic_id, name), groups in self._by_name.items()
            for group_id, subscribers in groups.items()
            for subscriber in subscribers
        }
        requested = {
            (*subscriber.who[:2], name, subscriber)
            for subscriber in self
            for name in subscriber.names
        }
        assert by_name == requested, "a subscription that no message finds, or one that is over"
        assert self.count == len(requested), f"{self.count} counted, {len(requested)} there"
        of_clients = {client for keys in self._of_client.values() for client in keys}
        assert of_clients == self._subscribers.keys(), "a subscriber that outlives its client"
