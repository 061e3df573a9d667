"""An independent account of what reports must say of one broker's history.

`report_histories.py` enters what each reply said; nothing here asks the broker.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from popmq.common.topics import GroupType

SILENT_S = 60
ENDS = ("acked", "retried", "dead_lettered", "returned", "undone", "reset")


@dataclass(slots=True)
class Held:
    """A delivery in flight."""

    handle: bytes
    offset: int  # of the message's first copy in its queue; its number among all
    queue: int
    side: bool  # out of the retry or parking topic
    attempt: int
    client: str
    popped_ms: int
    due_ms: int


@dataclass(slots=True)
class Waiting:
    """A message of a retry topic; it was stored between these wall times."""

    from_ms: int
    to_ms: int


@dataclass(slots=True)
class Pair:
    """One group in one topic, of one incarnation each."""

    cursors: dict[int, int] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)  # FIFO: of queue 0
    parked: dict[int, int] = field(default_factory=dict)  # FIFO: place in the parking queue -> own
    doomed: set[int] = field(default_factory=set)  # FIFO: parked ones that are to be dead letters
    retries: list[Waiting] = field(default_factory=list)
    taken: int = 0  # of `retries`, in order
    held: list[Held] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    clients: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    last_ack_ms: dict[str, int] = field(default_factory=dict)
    met: bool = False  # the group has been there; else a lag says nothing of the pair
    was_reset: bool = False

    def end(self, held: Held, how: str) -> None:
        self.held.remove(held)
        self.counts[how] += 1
        if how in ("acked", "undone"):
            self.clients[held.client][how] += 1


@dataclass(slots=True)
class Topic:
    name: str
    fifo: bool
    queues: dict[int, list[int]]  # wall times at which messages were stored
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # by body: queue, offset
    alive: bool = True
    pairs: dict[str, Pair] = field(default_factory=dict)  # by group that received


Message = tuple[int, int, int]  # of a topic, by its identity: queue, offset


@dataclass(slots=True)
class Letter:
    """A dead letter that is kept."""

    topic: Topic
    place: tuple[int, int]
    redriven: bool = False


class Account:
    def __init__(self, groups: dict[str, GroupType]) -> None:
        self.groups = groups
        self.topics: dict[str, Topic] = {}
        self.deleted: list[Topic] = []
        self.letters: dict[str, list[Letter]] = defaultdict(list)
        # By group; of each message that has a retry, or a dead letter, its last attempt.
        self.retried: dict[str, dict[Message, int]] = defaultdict(dict)
        self.dead: dict[str, dict[Message, int]] = defaultdict(dict)
        self.client_numbers: dict[str, int] = {}
        self.counts: Counter[str] = Counter()  # of what happened, for people

    def readers(self) -> Iterator[tuple[str, Topic, Pair]]:
        for topic in self.topics.values():
            for group, pair in topic.pairs.items():
                yield group, topic, pair

    # -- what happened

    def dead_letter(self, group: str, topic: Topic, pair: Pair, delivery: Held) -> None:
        pair.end(delivery, "dead_lettered")
        self.enter_letter(group, topic, (delivery.queue, delivery.offset), delivery.attempt)
        self.over(pair, topic, delivery)

    def enter_letter(self, group: str, topic: Topic, place: tuple[int, int], attempt: int) -> None:
        self.letters[group].append(Letter(topic, place))
        message = (id(topic), *place)
        self.dead[group][message] = max(attempt, self.dead[group].get(message, 0))

    def over(self, pair: Pair, topic: Topic, item: Held) -> None:
        if not topic.fifo:
            return
        if item.side:
            self.parked_over(pair, item.offset)
        else:
            pair.over.add(item.offset)

    def parked_over(self, pair: Pair, offset: int) -> None:
        pair.parked = {at: own for at, own in pair.parked.items() if own != offset}
        pair.doomed.discard(offset)

    def dead_letter_parked(self, group: str, topic: Topic, pair: Pair, offset: int) -> None:
        pair.counts["dead_lettered"] += 1
        pair.counts["parked dead"] += 1  # the end of no delivery
        self.enter_letter(group, topic, (0, offset), 0)
        self.parked_over(pair, offset)

    def reset_in_order(self, pair: Pair, at: int) -> None:
        """Parked messages that came from there or behind are read again where they came from."""
        pair.over = set(range(at))
        for item in list(pair.held):
            if item.side and item.offset >= at:
                pair.end(item, "reset")
                self.counts["taken back"] += 1
        for offset in [own for own in pair.parked.values() if own >= at]:
            self.parked_over(pair, offset)

    # -- what reports must say

    def lag_rows(self) -> dict[tuple[str, str], dict[str, int]]:
        rows = {}
        for group, topic, pair in self.readers():
            if not pair.met:
                continue
            waiting = len(pair.retries) - pair.taken
            if topic.fifo:
                lag = len(set(range(len(topic.queues[0]))) - pair.over) + len(pair.parked)
                rows[group, topic.name] = {"lag": lag, "in_flight": len(pair.held)}
            else:
                ready = sum(
                    len(times) - pair.cursors.get(queue, 0) for queue, times in topic.queues.items()
                )
                rows[group, topic.name] = {
                    **{"lag": ready + waiting + len(pair.held), "ready": ready + waiting},
                    **{"in_flight": len(pair.held), "retries": waiting, "blocked": 0},
                }
            rows[group, topic.name] |= {"expired": 0, "delayed": 0}
        return rows

    def oldest(self, group: str, topic: Topic) -> tuple[int, int] | None:
        """Between which wall times the oldest ready message was stored."""
        pair = topic.pairs[group]
        results = [
            (retry.from_ms, retry.to_ms) for retry in pair.retries[pair.taken : pair.taken + 1]
        ]
        for queue, times in topic.queues.items():
            at = pair.cursors.get(queue, 0)
            if topic.fifo:
                at = min(set(range(len(times))) - pair.over, default=len(times))
            results += [(ms, ms) for ms in times[at : at + 1]]
        return (
            (min(result[0] for result in results), min(result[1] for result in results))
            if results
            else None
        )

    def revive_rows(self) -> dict[tuple[str, str], dict[str, int]]:
        """Of pairs to which something was delivered, or of which something became a dead letter."""
        rows = {}
        for group, topic, pair in self.readers():
            counts = pair.counts
            if counts["delivered"] or counts["dead_lettered"]:
                rows[group, topic.name] = {
                    **{name: counts[name] for name in (*ENDS, "changed")},
                    "delivered": counts["delivered"] - counts["undone"],
                    "in_flight": len(pair.held),
                    "lost": 0,
                }
        return rows

    def attempts_rows(self) -> Counter[tuple[str, int]]:
        """Of groups without order: how many messages had how many attempts, if not one."""
        counters: Counter[tuple[str, int]] = Counter()
        for group, kind in self.groups.items():
            if kind is GroupType.NORMAL:
                retried, dead = self.retried.get(group, {}), self.dead.get(group, {})
                for message in retried.keys() | dead.keys():
                    counters[group, max(retried.get(message, 0), dead.get(message, 0))] += 1
        return counters

    def consumer_rows(
        self, names: dict[int, str], log_ms: int
    ) -> dict[tuple[str, str], dict[str, Any]]:
        """`names` are those of clients that the broker knows. `stuck` is None where a second more
        or less decides it."""
        shown = {
            name: names.get(number) or f"#{number:016x}"
            for name, number in self.client_numbers.items()
        }
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        held_s: dict[tuple[str, str], float] = {}
        ack_s: dict[tuple[str, str], float] = {}
        for group, _topic, pair in self.readers():
            for client, counts in pair.clients.items():
                key = group, shown[client]
                row = rows.setdefault(key, {"delivered": 0, "acked": 0, "in_flight": 0})
                row["delivered"] += counts["delivered"] - counts["undone"]
                row["acked"] += counts["acked"]
                mine = [entry for entry in pair.held if entry.client == client]
                row["in_flight"] += len(mine)
                for item in mine:
                    age = (log_ms - item.popped_ms) / 1_000
                    held_s[key] = max(age, held_s.get(key, 0))
                if client in pair.last_ack_ms:
                    age = (log_ms - pair.last_ack_ms[client]) / 1_000
                    ack_s[key] = min(age, ack_s.get(key, age))
        for key, row in rows.items():
            silent = min(held_s.get(key, 0), ack_s.get(key, 1e9))
            close = abs(silent - SILENT_S) < 1
            row["stuck"] = None if close else row["in_flight"] > 0 and silent > SILENT_S
        return rows

    def letter_rows(self) -> dict[str, int]:
        return {group: len(letters) for group, letters in self.letters.items() if letters}
