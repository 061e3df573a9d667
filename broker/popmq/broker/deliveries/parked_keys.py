"""ParkedKeys: the message groups of FIFO groups that were moved out of the way.

A function of the log: parking records, the ends of deliveries out of parking topics, and what
operators said.  Per (group, topic) there is one parking topic with one queue; a key's messages
are listed by their offsets in the topic that they came from, which is their order.
"""

import struct
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.log.snapshot_table import Row, SnapshotTable, entry_hash

# Group, topic, parking topic, queue; since, state, until, and the name and messages that follow.
_KEY = struct.Struct(">IIIIQBQHI")
_MESSAGE = struct.Struct(">QQ")  # offset where it came from, offset in the parking queue


@dataclass(slots=True, eq=False)
class ParkedKey:
    """`messages`: (offset in its queue, offset in the parking queue) of what is not over."""

    group_id: int
    topic_id: int
    parking_id: int
    queue_id: int
    name: bytes
    since_ms: int
    state: UnparkAction | None = None  # None: parked
    action_end_offset: int = 0  # DEAD_LETTER: below this offset of the parking queue
    remaining: int = 0  # DEAD_LETTER: messages below `until`
    messages: list[tuple[int, int]] = field(default_factory=list)
    snapshot: int = 0

    @property
    def line(self) -> bytes:
        """Names the key among those of its parking queue."""
        return b"%d:" % self.queue_id + self.name

    def recount_remaining(self) -> None:
        self.remaining = sum(offset < self.action_end_offset for _, offset in self.messages)

    def encode(self) -> bytes:
        head = _KEY.pack(
            self.group_id,
            self.topic_id,
            self.parking_id,
            self.queue_id,
            self.since_ms,
            self.state or 0,
            self.action_end_offset,
            len(self.name),
            len(self.messages),
        )
        return head + self.name + b"".join(_MESSAGE.pack(*message) for message in self.messages)


class ParkedKeys(SnapshotTable):
    table_number = 5

    def __init__(self) -> None:
        # By (group, topic), then by (queue, name).
        self._keys: dict[tuple[int, int], dict[tuple[int, bytes], ParkedKey]] = {}
        self._owner: dict[tuple[int, int], ParkedKey] = {}  # of each parked message
        self.counts: dict[tuple[int, int], int] = {}  # parked messages by (group, topic)
        # Keys of which an operator said something that takes time.
        self._resumed: dict[tuple[int, int], dict[tuple[int, bytes], ParkedKey]] = {}
        self._dead_lettering: dict[tuple[int, int, int, bytes], ParkedKey] = {}
        self._snapshots = 0
        self._saving = 0
        self._kept: list[bytes] = []

    # -- look up

    def of_group(self, group_id: int) -> list[ParkedKey]:
        return [
            key
            for place, keys in self._keys.items()
            if place[0] == group_id
            for key in keys.values()
        ]

    def find(self, group_id: int, topic_id: int, queue_id: int, name: bytes) -> ParkedKey | None:
        return self._keys.get((group_id, topic_id), {}).get((queue_id, name))

    def owner(self, parking_id: int, offset: int) -> ParkedKey | None:
        return self._owner.get((parking_id, offset))

    def parked_queues(self) -> Iterator[tuple[int, int]]:
        """Parking topic and offset of every parked message."""
        return iter(list(self._owner))

    def resumed(self, group_id: int, topic_id: int) -> list[ParkedKey]:
        """In the order in which they were resumed."""
        return list(self._resumed.get((group_id, topic_id), {}).values())

    def dead_lettering(self) -> list[ParkedKey]:
        return list(self._dead_lettering.values())

    # -- apply

    def park(
        self,
        place: tuple[int, int, int],
        parking_id: int,
        name: bytes,
        *,
        origin: int,
        offset: int,
        log_ms: int,
    ) -> None:
        """The message at `origin` of the place (group, topic, queue) is now at `offset`."""
        group_id, topic_id, queue_id = place
        keys = self._keys.setdefault((group_id, topic_id), {})
        key = keys.get((queue_id, name))
        if key is None:
            key = ParkedKey(group_id, topic_id, parking_id, queue_id, name, log_ms)
            key.snapshot = self._saving
            keys[(queue_id, name)] = key
        self._keep(key)
        insort(key.messages, (origin, offset))
        self._owner[(parking_id, offset)] = key
        self._count(key, 1)

    def finish_message(self, parking_id: int, offset: int) -> ParkedKey | None:
        """The message at that offset of the parking queue is over. Its key if it was the last: it
        is parked no more."""
        key = self._owner.pop((parking_id, offset), None)
        if key is None:
            return None
        self._keep(key)
        at = next(at for at, (_, parked) in enumerate(key.messages) if parked == offset)
        del key.messages[at]
        self._count(key, -1)
        if key.state is UnparkAction.DEAD_LETTER and offset < key.action_end_offset:
            key.remaining -= 1
        return key if self._settle(key) else None

    def set_action(self, key: ParkedKey, what: UnparkAction, until: int) -> None:
        """RESUME, or DEAD_LETTER for the messages that are there now (below `until`)."""
        self._keep(key)
        key.state, key.action_end_offset = what, until
        key.recount_remaining()
        self._index(key)

    def skip(self, key: ParkedKey, offsets: set[int]) -> bool:
        """These messages of the parking queue are over, unread. True if there are no others of the
        key: it is parked no more."""
        self._keep(key)
        key.messages = [message for message in key.messages if message[1] not in offsets]
        for offset in offsets:
            del self._owner[(key.parking_id, offset)]
        self._count(key, -len(offsets))
        key.recount_remaining()
        return self._settle(key)

    def drop(self, gone: Callable[[ParkedKey], bool]) -> None:
        """Their topic or group was deleted."""
        for place, keys in list(self._keys.items()):
            for at, key in list(keys.items()):
                if gone(key):
                    del keys[at]
                    key.state = None
                    self._index(key)
                    self._count(key, -len(key.messages))
                    for _, offset in key.messages:
                        self._owner.pop((key.parking_id, offset), None)
            if not keys:
                del self._keys[place]

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        self._snapshots += 1
        self._saving = self._snapshots
        self._kept = []  # what was kept for one that was given up is no part of this one
        return self._pieces([key for keys in self._keys.values() for key in keys.values()])

    def _pieces(self, keys: list[ParkedKey]) -> Iterator[tuple[bytes, int]]:
        for key in keys:
            self._keep(key)
            while self._kept:
                entry = self._kept.pop()
                yield entry, entry_hash(entry)
        while self._kept:
            entry = self._kept.pop()
            yield entry, entry_hash(entry)
        self._saving = 0

    def restore(self, content: bytes) -> None:
        *ids, since, state, until, name_size, count = _KEY.unpack_from(content)
        group_id, topic_id, parking_id, queue_id = ids
        at = _KEY.size + name_size
        name = content[_KEY.size : at]
        key = ParkedKey(group_id, topic_id, parking_id, queue_id, name, since)
        key.state, key.action_end_offset = UnparkAction(state) if state else None, until
        key.messages = [
            (origin, offset)
            for origin, offset in _MESSAGE.iter_unpack(content[at : at + count * _MESSAGE.size])
        ]
        key.recount_remaining()
        self._keys.setdefault((group_id, topic_id), {})[(queue_id, name)] = key
        self._owner.update({(parking_id, offset): key for _, offset in key.messages})
        self._count(key, len(key.messages))
        self._index(key)

    def check_invariants(self) -> None:
        """Each parked message has its one key, and each key that is acted on is looked at."""
        owners: dict[tuple[int, int], ParkedKey] = {}
        resumed: dict[tuple[int, int], dict[tuple[int, bytes], ParkedKey]] = {}
        for place, keys in self._keys.items():
            assert self.counts[place] == sum(len(key.messages) for key in keys.values())
            for name, key in keys.items():
                assert key.messages, f"{key.name!r} is parked without a message"
                assert key.messages == sorted(key.messages)
                owners.update({(key.parking_id, offset): key for _, offset in key.messages})
                if key.state is UnparkAction.RESUME:
                    resumed.setdefault(place, {})[name] = key
                dead = key.state is UnparkAction.DEAD_LETTER
                assert dead == ((*place, *name) in self._dead_lettering)
        assert self._owner == owners, "a parked message without its key"
        assert self._resumed == resumed, "a key was resumed and is not looked at"
        assert self.counts.keys() == self._keys.keys()

    # -- inside

    def _keep(self, key: ParkedKey) -> None:
        """Called before a key changes while a snapshot runs."""
        if self._saving and key.snapshot < self._saving:
            key.snapshot = self._saving
            self._kept.append(key.encode())

    def _settle(self, key: ParkedKey) -> bool:
        """A key is parked no more when none of its messages is left, or goes on waiting."""
        if not key.messages:
            keys = self._keys[(key.group_id, key.topic_id)]
            del keys[(key.queue_id, key.name)]
            if not keys:
                del self._keys[(key.group_id, key.topic_id)]
            key.state = None
            self._index(key)
            return True
        if key.state is UnparkAction.DEAD_LETTER and not key.remaining:
            key.state = None  # what came later waits for a word of its own
            self._index(key)
        return False

    def _index(self, key: ParkedKey) -> None:
        """Enter the key's state where those who act on it look."""
        place, name = (key.group_id, key.topic_id), (key.queue_id, key.name)
        resumed = self._resumed.setdefault(place, {})
        resumed.pop(name, None)
        self._dead_lettering.pop((*place, *name), None)
        if key.state is UnparkAction.RESUME:
            resumed[name] = key
        elif key.state is UnparkAction.DEAD_LETTER:
            self._dead_lettering[(*place, *name)] = key
        if not resumed:
            del self._resumed[place]

    def _count(self, key: ParkedKey, more: int) -> None:
        place = (key.group_id, key.topic_id)
        self.counts[place] = self.counts.get(place, 0) + more
        if not self.counts[place]:
            del self.counts[place]


def snapshot_rows(content: bytes) -> Iterator[Row]:
    group, topic, parking, queue, since_ms, state, until, size, _ = _KEY.unpack_from(content)
    at = _KEY.size + size
    name = content[_KEY.size : at].decode(errors="replace")
    yield Row(
        f"group {group}, topic {topic}, queue {queue}, message group {name}",
        {
            "parking_topic": parking,
            "since_ms": since_ms,
            "state": state,
            "until": until,
            "messages": list(_MESSAGE.iter_unpack(content[at:])),
        },
    )
