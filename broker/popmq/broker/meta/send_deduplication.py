"""SendDeduplication: what the first send of a message id came to, so that a resend stores nothing.

The key is (topic, full message id); it is entered when the record is appended and again when the
log is replayed.  Within `dedup.window_ms` of log time a second send of the id gets the first one's
receipt, once all that was appended before is confirmed.  At the bound (`dedup.max_ids`) the oldest
leave, and a metric says so; what has left is let go of in sixteenths of the window or of the bound,
so that no more than another sixteenth is ever held.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from popmq.broker.log.dispatch import PendingUnit
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.common.protocol.messaging_payloads import PutResult
from popmq.common.settings.send_settings import DedupSettings

_BUCKETS = 16  # that a window and the bound are cut into; an id may stay that much longer
_PER_PIECE = 512
_PER_STEP = 2_048
_PIECE = struct.Struct(">QI")  # log time from which its entries are, their number
_ENTRY = struct.Struct(">HIQQ")  # size of the key, queue, offset, due time; then the key
_QUEUE_AT, _DUE_AT = 64, 96  # bits of a packed receipt
_HALF = 1 << 31  # of the queue: the first send was a half message
_LOW_32, _LOW_64 = (1 << 32) - 1, (1 << 64) - 1


class _IdBucket(NamedTuple):
    """Ids of one stretch of log time, in the order in which they came."""

    from_ms: int
    keys: list[bytes]
    receipts: list[int]


class FirstSend(NamedTuple):
    """What a send came to; of a half message the result has no transaction id yet."""

    result: PutResult
    half: bool


class SendDeduplication(SnapshotTable):
    """What has left it by now is no state."""

    table_number = 7

    def __init__(self, settings: DedupSettings) -> None:
        self._window_ms = settings.window_ms
        self._width_ms = max(1, settings.window_ms // _BUCKETS)
        self._limit = settings.max_ids
        self._bucket_ids = max(1, settings.max_ids // _BUCKETS)
        self._receipts: dict[bytes, int] = {}
        self._buckets: deque[_IdBucket] = deque()
        self._until_ms = 0  # from then on there is another bucket
        self._gone = 0  # of the oldest bucket
        self._entered = 0  # in all buckets, those that are gone left out
        self.duplicates = 0
        self.evicted = 0  # ids that left before their time, for lack of room

    def __len__(self) -> int:
        return len(self._receipts)

    def find(self, topic_id: int, message_id: str) -> FirstSend | None:
        """The receipt of the id's first send, if that is known."""
        packed = self._receipts.get(topic_id.to_bytes(4, "big") + message_id.encode())
        if packed is None:
            return None
        self.duplicates += 1
        queue_id = packed >> _QUEUE_AT & _LOW_32
        due_ms = packed >> _DUE_AT
        offset = packed & _LOW_64
        result = PutResult(queue_id=queue_id & ~_HALF, queue_offset=offset, due_ms=due_ms)
        return FirstSend(result, bool(queue_id & _HALF))

    def record_send(
        self, topic_id: int, message_id: str, result: PutResult, log_ms: int, *, half: bool = False
    ) -> None:
        """The message was appended at that log time; `find` did not know its id just now."""
        if self._window_ms:
            _, _, queue_id, offset, due_ms = result
            if half:
                queue_id |= _HALF
            receipt = due_ms << _DUE_AT | queue_id << _QUEUE_AT | offset
            self._enter(topic_id.to_bytes(4, "big") + message_id.encode(), receipt, log_ms)

    def knows(self, key: bytes) -> bool:
        """Whether `find` would find the message of that `key_of`."""
        return key in self._receipts

    def record_sends(
        self, keys: Iterable[bytes], units: Iterable[PendingUnit], log_ms: int
    ) -> None:
        """`record_send` of ordinary messages that were appended as these units."""
        if self._window_ms:
            enter = self._enter
            for key, unit in zip(keys, units, strict=True):
                enter(key, unit.queue_id << _QUEUE_AT | unit.queue_offset, log_ms)

    def restore_entry(
        self,
        topic_id: int,
        message_id: bytes,
        queue_id: int,
        queue_offset: int,
        due_ms: int,
        log_ms: int,
        *,
        half: bool = False,
    ) -> None:
        """A message with that id was appended, so no earlier one was known then: at a replay,
        which may know it still, the newest counts."""
        if self._window_ms and message_id:
            self.step(log_ms)  # or a long log would be held on to until its end
            queue_id |= _HALF if half else 0
            receipt = due_ms << _DUE_AT | queue_id << _QUEUE_AT | queue_offset
            self._enter(key_of(topic_id, message_id), receipt, log_ms)

    def items(self) -> Iterator[tuple[bytes, int, int]]:
        """Key, packed receipt, and the log time from which its bucket is; for checks."""
        start = self._gone
        for bucket in self._buckets:
            for at in range(start, len(bucket.keys)):
                yield bucket.keys[at], bucket.receipts[at], bucket.from_ms
            start = 0

    @property
    def held_ids(self) -> int:
        """Entries in memory, those included that are forgotten and not let go of yet."""
        return self._entered + self._gone

    def step(self, log_ms: int) -> int:
        """Forget some of what is older than the window; returns how many."""
        old_ms = log_ms - self._window_ms - self._width_ms
        forgotten = 0
        while forgotten < _PER_STEP and self._buckets and self._buckets[0].from_ms <= old_ms:
            forgotten += self._forget(_PER_STEP - forgotten)
        return forgotten

    def _enter(self, key: bytes, receipt: int, log_ms: int) -> None:
        if log_ms >= self._until_ms or not self._buckets:
            self._begin_bucket(log_ms)
        _, keys, receipts = self._buckets[-1]
        keys.append(key)
        receipts.append(receipt)
        self._receipts[key] = receipt
        self._entered += 1
        if len(keys) >= self._bucket_ids:
            self._until_ms = 0  # it is full
        if self._entered > self._limit:
            self.evicted += 1
            self._forget(1)

    def _begin_bucket(self, from_ms: int) -> None:
        self._buckets.append(_IdBucket(from_ms, [], []))
        self._until_ms = from_ms + self._width_ms

    def _forget(self, limit: int) -> int:
        """The oldest ids of the oldest bucket."""
        keys, receipts = self._buckets[0].keys, self._buckets[0].receipts
        end = min(len(keys), self._gone + limit)
        for at in range(self._gone, end):
            if self._receipts.get(keys[at]) == receipts[at]:  # else a newer one stands for it
                del self._receipts[keys[at]]
        forgotten, self._gone = end - self._gone, end
        self._entered -= forgotten
        if end == len(keys):
            self._buckets.popleft()
            self._gone = 0
        return forgotten

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        """Buckets only grow, so where each ends now is the state of now."""
        return self._pieces([(bucket, len(bucket.keys)) for bucket in self._buckets], self._gone)

    def _pieces(self, ends: list[tuple[_IdBucket, int]], start: int) -> Iterator[tuple[bytes, int]]:
        for bucket, end in ends:
            for at in range(start, end, _PER_PIECE):
                behind = min(at + _PER_PIECE, end)
                entries = [_PIECE.pack(bucket.from_ms, behind - at)]
                for key, receipt in zip(
                    bucket.keys[at:behind], bucket.receipts[at:behind], strict=True
                ):
                    queue_id = receipt >> _QUEUE_AT & _LOW_32
                    due_ms = receipt >> _DUE_AT
                    entries += (_ENTRY.pack(len(key), queue_id, receipt & _LOW_64, due_ms), key)
                yield b"".join(entries), 0
            start = 0

    def restore(self, content: bytes) -> None:
        from_ms, count = _PIECE.unpack_from(content)
        at = _PIECE.size
        if not self._window_ms:
            return
        if not self._buckets or self._buckets[-1].from_ms != from_ms:
            # Never into one that began earlier: it would leave before its time.
            self._begin_bucket(from_ms)
        for _ in range(count):
            size, queue_id, offset, due_ms = _ENTRY.unpack_from(content, at)
            at += _ENTRY.size
            key, at = content[at : at + size], at + size
            self._enter(key, due_ms << _DUE_AT | queue_id << _QUEUE_AT | offset, from_ms)


def key_of(topic_id: int, message_id: bytes) -> bytes:
    return topic_id.to_bytes(4, "big") + message_id
