"""LongPolling: receives that found nothing wait here for a message, bounded in time and number.

A waiter costs no reads while nothing arrives.  An arrival wakes the waiters of the groups
that read that topic, in the order in which they came.  Those that share a filter find the same, so
an arrival costs a look for each filter and for each answer, however many wait.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from popmq.common.errors import TooManyRequests

# Topic id and group id; the name of a topic that does not exist yet, and 0.
GroupTopicId = tuple[int | str, int]


class WaiterResult(Enum):
    ANSWERED = "answered"  # with messages, or with an error
    EMPTY = "empty"
    MORE = "more"  # nothing for this filter so far, but not all was looked at


@dataclass(slots=True, eq=False)
class Waiter:
    """`attempt` pops again and says what came of it; `give_up` answers with nothing."""

    key: GroupTopicId
    filter_key: object
    deadline_ms: int
    attempt: Callable[[], WaiterResult]
    give_up: Callable[[], None]
    client: int = 0  # of a receive of lite topics: only what it subscribed to wakes it
    done: bool = False
    number: int = 0


class LongPolling:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiters: dict[GroupTopicId, dict[object, OrderedDict[int, Waiter]]] = {}
        self._groups_of_topic: dict[int | str, set[int]] = {}
        self._of_client: dict[tuple[GroupTopicId, int], dict[int, Waiter]] = {}
        self._deadlines: list[tuple[int, int, Waiter]] = []
        self._number = 0
        self._unfinished: dict[GroupTopicId, None] = {}
        self._unfinished_of: dict[tuple[GroupTopicId, int], None] = {}
        self._later: list[tuple[int, int, GroupTopicId, Callable[[], None]]] = []
        self.count = 0
        self.woken = 0
        self.timed_out = 0
        self.refused = 0
        self.hits = 0  # receives that may wait and need not: their first look found something

    def add_waiter(self, waiter: Waiter) -> None:
        """Wait. Raises TooManyRequests at the bound."""
        if self.count >= self._limit:
            self.refused += 1
            raise TooManyRequests(
                f"{self.count} receives wait already, the limit is {self._limit} (poll.waiters)"
            )
        self._number = waiter.number = self._number + 1
        filters = self._waiters.setdefault(waiter.key, {})
        filters.setdefault(waiter.filter_key, OrderedDict())[self._number] = waiter
        self._groups_of_topic.setdefault(waiter.key[0], set()).add(waiter.key[1])
        if waiter.client:
            place = (waiter.key, waiter.client)
            self._of_client.setdefault(place, {})[self._number] = waiter
        heapq.heappush(self._deadlines, (waiter.deadline_ms, waiter.number, waiter))
        self.count += 1

    def remove(self, waiter: Waiter) -> None:
        """Its client is gone."""
        if waiter.done:
            return
        waiter.done = True
        self._unpark(waiter)

    def wake(self, topic_id: int | str, group_id: int | None = None) -> None:
        """Messages came into the topic: for every group, or (a retry) for one.

        By its name who waits since before it existed.
        """
        groups = self._groups_of_topic.get(topic_id)
        if not groups:
            return
        for group in sorted(groups) if group_id is None else (group_id,):
            self._serve((topic_id, group))

    def wake_client(self, key: GroupTopicId, client: int) -> None:
        """Messages came that this client of the group subscribed to."""
        missed: set[object] = set()
        for waiter in list(self._of_client.get((key, client), {}).values()):
            if waiter.done or waiter.filter_key in missed:
                continue
            if not self._answers(waiter):
                missed.add(waiter.filter_key)

    def step(self, now_ms: int, limit: int = 256) -> int:
        """Answer up to `limit` waiters whose time is over; returns how many."""
        while self._later and self._later[0][0] <= now_ms:
            _, _, key, then = heapq.heappop(self._later)
            then()
            self._unfinished[key] = None
        ended = self._go_on()
        while self._deadlines and ended < limit and self._deadlines[0][0] <= now_ms:
            _, _, waiter = heapq.heappop(self._deadlines)
            if waiter.done:
                continue
            waiter.done = True
            self._unpark(waiter)
            self.timed_out += 1
            ended += 1
            waiter.give_up()
        return ended

    @property
    def unfinished(self) -> bool:
        """Whether the next step has receives to go on with."""
        return bool(self._unfinished or self._unfinished_of)

    def next_ms(self, now_ms: int, at_most_ms: int) -> int:
        """How long until the first waiter's time is over; at most `at_most_ms`."""
        firsts = [heap[0][0] - now_ms for heap in (self._deadlines, self._later) if heap]
        return min(at_most_ms, *firsts) if firsts else at_most_ms

    def answer_all_empty(self, *, topic_id: int | None = None, group_id: int | None = None) -> None:
        """Everybody (of that topic, of that group) gets an empty reply now."""
        for key in list(self._waiters):
            if topic_id in (None, key[0]) and group_id in (None, key[1]):
                parked = [w for same in self._waiters[key].values() for w in same.values()]
                for waiter in sorted(parked, key=attrgetter("number")):
                    self.remove(waiter)
                    waiter.give_up()

    def retry_waiters(self, key: GroupTopicId) -> None:
        """A receive that parks has not looked through everything: the next step goes on."""
        self._unfinished[key] = None

    def retry_client_waiters(self, key: GroupTopicId, client: int) -> None:
        """The same of this client's receives of lite topics; 0: of all the group's."""
        if client:
            self._unfinished_of[key, client] = None
        else:
            self._unfinished[key] = None

    def retry_at(self, key: GroupTopicId, at_ms: int, then: Callable[[], None]) -> None:
        """Call `then`, and let those who wait look again, at that time."""
        self._number += 1
        heapq.heappush(self._later, (at_ms, self._number, key, then))

    def _go_on(self) -> int:
        """Let receives whose filter passes over much look a little further."""
        keys = list(self._unfinished)
        self._unfinished.clear()
        for key in keys:
            self._serve(key)
        places = list(self._unfinished_of)
        self._unfinished_of.clear()
        for key, client in places:
            self.wake_client(key, client)
        return len(keys) + len(places)

    def _serve(self, key: GroupTopicId) -> None:
        """Let waiters pop, oldest first, until the messages are gone.

        Waiters of one filter find the same, so the first miss of a filter is the last try
        of it; those with another filter are still asked.
        """
        newest = self._number  # those that come meanwhile have looked already
        filters = self._waiters.get(key, {}).values()
        oldest = [next(iter(waiters.items())) for waiters in filters]
        heapq.heapify(oldest)
        while oldest:
            _, waiter = heapq.heappop(oldest)
            if not waiter.done and not self._answers(waiter):
                continue
            following = self._waiters.get(key, {}).get(waiter.filter_key)
            if following is not None:
                number, waiter = next(iter(following.items()))
                if number <= newest:
                    heapq.heappush(oldest, (number, waiter))

    def _answers(self, waiter: Waiter) -> bool:
        outcome = waiter.attempt()
        if outcome is WaiterResult.ANSWERED:
            self.remove(waiter)
            self.woken += 1
            return True
        if outcome is WaiterResult.MORE:
            self.retry_client_waiters(waiter.key, waiter.client)
        return False

    def _unpark(self, waiter: Waiter) -> None:
        key = waiter.key
        filters = self._waiters[key]
        same_filter = filters[waiter.filter_key]
        del same_filter[waiter.number]
        if not same_filter:
            del filters[waiter.filter_key]
        self.count -= 1
        if waiter.client:
            mine = self._of_client[key, waiter.client]
            del mine[waiter.number]
            if not mine:
                del self._of_client[key, waiter.client]
        if not filters:
            del self._waiters[key]
            groups = self._groups_of_topic[key[0]]
            groups.discard(key[1])
            if not groups:
                del self._groups_of_topic[key[0]]
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
