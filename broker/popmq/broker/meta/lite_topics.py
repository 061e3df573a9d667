"""LiteTopicTable: which lite topics there are, as a function of the log
(docs/concepts/lite-topics.md).

A lite topic is a queue of its parent topic, made by the first message that names it.  The queue of
one that was removed is given to a later one, which begins where the queue ended: numbers of queues
stay as few as there ever were lite topics at a time, and no offset means two messages.

One LITE_TOPIC record for each that is made or removed (big-endian):

    0 version u8 = 1 | 1 what u8: 1 made, 2 removed | 2 topic u32 | 6 queue u32
    10 first offset u64 | 18 time of the last message u64 (log ms) | 26 name
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from popmq.broker.log.snapshot_table import Row, SnapshotTable, entry_hash
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import Code, Refused, StoreDamaged
from popmq.common.record.message import RecordKind
from popmq.common.topics import TopicConfig

LITE_VERSION = 1
_LAYOUT = struct.Struct(">BBIIQQ")
_PER_PIECE = 256


class LiteTopicChange(IntEnum):
    MADE = 1
    REMOVED = 2
    FREE = 3  # in snapshots only: a queue that the next lite topic may have


class LiteTopic(NamedTuple):
    """A value, so that a snapshot keeps what was there when it began."""

    topic_id: int
    queue_id: int
    name: str
    first: int  # offset of its first message in the queue
    last_ms: int  # log time of its last message


class LiteTopicTable(SnapshotTable):
    table_number = 9

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._queues: dict[int, dict[int, LiteTopic]] = {}  # by topic, by queue
        self._names: dict[int, dict[str, int]] = {}  # by topic: the queue of each name
        self._free: dict[int, list[int]] = {}  # heaps of queues that nobody has
        self._size: dict[int, int] = {}  # queues that were ever given, by topic
        self.made = 0  # since the start
        self.removed = 0

    # -- look up

    def at(self, topic_id: int, queue_id: int) -> LiteTopic | None:
        return self._queues.get(topic_id, {}).get(queue_id)

    def find(self, topic_id: int, name: str) -> LiteTopic | None:
        queue_id = self._names.get(topic_id, {}).get(name)
        return None if queue_id is None else self._queues[topic_id][queue_id]

    def queue_ids(self, topic_id: int) -> list[int]:
        return sorted(self._queues.get(topic_id, ()))

    def of(self, topic_id: int) -> list[LiteTopic]:
        return list(self._queues.get(topic_id, {}).values())

    def count(self, topic_id: int) -> int:
        return len(self._queues.get(topic_id, ()))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[LiteTopic]:
        for queues in list(self._queues.values()):
            yield from list(queues.values())

    # -- change

    def queue_of(self, topic: TopicConfig, name: str, limit: int) -> int:
        """The queue of that lite topic, which is made if it is not there.

        Raises ILLEGAL_LITE_TOPIC for the name, LITE_TOPIC_QUOTA_EXCEEDED at `limit` lite topics.
        """
        names = self._names.get(topic.id)
        known = names.get(name) if names is not None else None
        if known is not None:
            return known
        topics.check_lite_topic_name(name)
        if self.count(topic.id) >= limit:
            raise Refused(
                Code.LITE_TOPIC_QUOTA_EXCEEDED,
                f"topic {topic.name} has {self.count(topic.id)} lite topics here, the limit is "
                f"{limit} (lite.max_topics): {name} is not made",
            )
        free = self._free.get(topic.id)
        queue_id = free[0] if free else self._size.get(topic.id, 0)
        first = self._store.dispatch.next_offset(topic.id, queue_id)
        self._write(
            LiteTopicChange.MADE, LiteTopic(topic.id, queue_id, name, first, self._store.log_ms())
        )
        # After a start the queue shows what was in it before; all of that is confirmed.
        self._store.queue(topic.id, queue_id).raise_minimum(first)
        self.made += 1
        return queue_id

    def remove(self, lite: LiteTopic) -> None:
        self._write(LiteTopicChange.REMOVED, lite)
        self.removed += 1

    def _write(self, what: LiteTopicChange, lite: LiteTopic) -> None:
        body = _encode(what, lite)
        self._store.put_record(
            RecordKind.LITE_TOPIC, topic_id=topics.META_TOPIC_ID, queue_id=0, body=body
        )
        self.apply(body)

    # -- apply, in the order of the log

    def apply(self, body: bytes) -> LiteTopic | None:
        """One LITE_TOPIC record; the lite topic that it removes."""
        what, lite = _decode(body)
        if what is LiteTopicChange.REMOVED:
            return self._forget(lite)
        if not self._store.dispatch.has_topic(lite.topic_id):
            return None
        self._put(lite)
        return None

    def stored(self, topic_id: int, queue_id: int, log_ms: int) -> None:
        """A message came into that queue."""
        queues = self._queues.get(topic_id)
        lite = queues.get(queue_id) if queues is not None else None
        if queues is not None and lite is not None and lite.last_ms < log_ms:
            queues[queue_id] = LiteTopic(topic_id, queue_id, lite.name, lite.first, log_ms)

    def drop_topic(self, topic_id: int) -> None:
        """The parent topic is gone."""
        for table in (self._queues, self._names, self._free, self._size):
            table.pop(topic_id, None)

    def _put(self, lite: LiteTopic) -> None:
        """In the smallest free queue, or in a new one: so it was decided."""
        topic_id, queue_id = lite.topic_id, lite.queue_id
        free = self._free.setdefault(topic_id, [])
        if free and free[0] == queue_id:
            heappop(free)
        self._size[topic_id] = max(self._size.get(topic_id, 0), queue_id + 1)
        self._queues.setdefault(topic_id, {})[queue_id] = lite
        self._names.setdefault(topic_id, {})[lite.name] = queue_id

    def _forget(self, lite: LiteTopic) -> LiteTopic | None:
        gone = self._queues.get(lite.topic_id, {}).pop(lite.queue_id, None)
        if gone is not None:
            del self._names[lite.topic_id][gone.name]
            heappush(self._free[lite.topic_id], lite.queue_id)
        return gone

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        free = [
            (LiteTopicChange.FREE, LiteTopic(topic_id, queue_id, "", 0, 0))
            for topic_id, queues in sorted(self._free.items())
            for queue_id in sorted(queues)
        ]
        return self._pieces([*((LiteTopicChange.MADE, lite) for lite in self), *free])

    def _pieces(
        self, entries: list[tuple[LiteTopicChange, LiteTopic]]
    ) -> Iterator[tuple[bytes, int]]:
        for at in range(0, len(entries), _PER_PIECE):
            bodies = [_encode(*entry) for entry in entries[at : at + _PER_PIECE]]
            content = b"".join(len(body).to_bytes(2, "big") + body for body in bodies)
            yield content, sum(map(entry_hash, bodies))

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 2], "big")
            what, lite = _decode(content[at + 2 : at + 2 + size])
            if what is LiteTopicChange.FREE:
                self._size[lite.topic_id] = max(self._size.get(lite.topic_id, 0), lite.queue_id + 1)
                heappush(self._free.setdefault(lite.topic_id, []), lite.queue_id)
            else:
                self._put(lite)
            at += 2 + size


def _encode(what: LiteTopicChange, lite: LiteTopic) -> bytes:
    fixed = (lite.topic_id, lite.queue_id, lite.first, lite.last_ms)
    return _LAYOUT.pack(LITE_VERSION, what, *fixed) + lite.name.encode()


def describe_lite_record(body: bytes) -> dict[str, object]:
    """A LITE_TOPIC record for an administrator."""
    what, lite = _decode(body)
    return {"what": what.name.lower(), **lite._asdict()}


def _decode(body: bytes) -> tuple[LiteTopicChange, LiteTopic]:
    version, what, topic_id, queue_id, first, last_ms = _LAYOUT.unpack_from(body)
    if version != LITE_VERSION:
        raise StoreDamaged(
            f"a record of a lite topic has version {version}, this build reads {LITE_VERSION}: "
            "start a newer popmq"
        )
    name = body[_LAYOUT.size :].decode()
    return LiteTopicChange(what), LiteTopic(topic_id, queue_id, name, first, last_ms)


def snapshot_rows(content: bytes) -> Iterator[Row]:
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 2], "big")
        what, lite = _decode(content[at + 2 : at + 2 + size])
        at += 2 + size
        fields = {"is": what.name, "name": lite.name, "first": lite.first, "last_ms": lite.last_ms}
        yield Row(f"topic {lite.topic_id}, queue {lite.queue_id}", fields)
