"""SendDeduplication: what the first send of a message came to, so that a resend stores nothing.

A resend has topic, message id and fingerprint (client and body, record/send_fingerprint.py) of the
first send.  A message with the id of another one is stored, and counted as a collision.  An entry
is made when the record is appended and again when the log is replayed.  Within `dedup.window_ms` of
log time a resend gets the receipt of the first send, once all that was appended before is
confirmed.  The entry of a message that will not be delivered leaves at once: of a timer that was
recalled, of a half message that was rolled back.  At the bound (`dedup.max_ids`) the oldest leave,
and a metric says so; what has left is let go of in sixteenths of the window or of the bound, so
that no more than another sixteenth is ever held.
"""

import struct
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from popmq.broker.log.dispatch import PendingUnit
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.common.protocol.messaging_payloads import PutResult
from popmq.common.settings.send_settings import DedupSettings

_BUCKETS = 16  # that a window and the bound are cut into; an id may stay that much longer
_PER_PIECE = 512
_PER_STEP = 2_048
_PIECE = struct.Struct(">QI")  # log time from which its entries are, their number
# Size of the key, queue, offset, due time; then the key, of (topic, id) and the _TAIL.
_ENTRY = struct.Struct(">HIQQ")
# Fingerprint, and the identity of a timer.  An older popmq takes it for a part of the id, so that
# it does not recognise a resend.  An older snapshot has none, and no id ends with its first byte.
_TAIL = struct.Struct(">BQQ")
_TAIL_MARK = 0
_PRINT_TAIL = struct.Struct(">BQ")  # of the key of a message with the id of another one
# Bits of a packed receipt.
_QUEUE_AT, _DUE_AT, _PRINT_AT, _TIMER_AT = 64, 96, 160, 224
_VOID = -1  # in place of a receipt that counts no more
_HALF = 1 << 31  # of the queue: the first send was a half message
_LOW_32, _LOW_64 = (1 << 32) - 1, (1 << 64) - 1


class _IdBucket(NamedTuple):
    """Ids of one stretch of log time, in the order in which they came."""

    from_ms: int
    keys: list[bytes]
    receipts: list[int]


def _place(packed: int) -> int:
    """What names a message that may end before its delivery; 0: it is none.

    The identity of a timer, or below 0 for the offset of a half message.
    """
    if packed >> _QUEUE_AT & _HALF:
        return -1 - (packed & _LOW_64)
    return packed >> _TIMER_AT


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
        # By `key_of`, or by `_long_key` of a message that has the id of another one.
        self._receipts: dict[bytes, int] = {}
        self._long_keys = 0
        self._places: dict[int, bytes] = {}  # key by `_place`
        # Places of receipts in buckets that count no more, and how many ended before each.
        self._ended: dict[int, int] = {}
        self._endings = 0
        self._buckets: deque[_IdBucket] = deque()
        self._until_ms = 0  # from then on there is another bucket
        self._gone = 0  # of the oldest bucket
        self._entered = 0  # in all buckets, those that are gone left out
        self.duplicates = 0
        self.collisions = 0  # sends with the id of another message
        self.evicted = 0  # ids that left before their time, for lack of room

    def __len__(self) -> int:
        return len(self._receipts)

    def find(self, topic_id: int, message_id: str, fingerprint: int = 0) -> FirstSend | None:
        """The receipt of the message's first send, if that is known."""
        key = key_of(topic_id, message_id.encode())
        if not self.knows(key, fingerprint):
            self.collisions += key in self._receipts
            return None
        packed = self._receipts.get(key, -1)
        if packed < 0 or packed >> _PRINT_AT & _LOW_64 != fingerprint:
            packed = self._receipts[_long_key(key, fingerprint)]
        self.duplicates += 1
        queue_id = packed >> _QUEUE_AT & _LOW_32
        due_ms = packed >> _DUE_AT & _LOW_64
        offset = packed & _LOW_64
        result = PutResult(queue_id=queue_id & ~_HALF, queue_offset=offset, due_ms=due_ms)
        return FirstSend(result, bool(queue_id & _HALF))

    def record_send(
        self,
        topic_id: int,
        message_id: str,
        result: PutResult,
        log_ms: int,
        *,
        fingerprint: int = 0,
        timer: int = 0,
        half: bool = False,
    ) -> None:
        """The message was appended at that log time; `find` did not know it just now.

        `timer` is the identity of a delayed message.
        """
        if self._window_ms:
            _, _, queue_id, offset, due_ms = result
            if half:
                queue_id |= _HALF
            receipt = _packed(queue_id, offset, due_ms, fingerprint, timer)
            self._enter(key_of(topic_id, message_id.encode()), receipt, log_ms)

    @property
    def known(self) -> Container[bytes]:
        """Each `key_of` of which a message is known, unless `is_crowded`."""
        return self._receipts

    @property
    def is_crowded(self) -> bool:
        """Whether messages share an id, so that `known` does not tell all."""
        return self._long_keys > 0

    def knows(self, key: bytes, fingerprint: int) -> bool:
        """Whether `find` finds the message of that `key_of`."""
        packed = self._receipts.get(key, -1)
        if packed >= 0 and packed >> _PRINT_AT & _LOW_64 == fingerprint:
            return True
        return bool(self._long_keys) and _long_key(key, fingerprint) in self._receipts

    def record_sends(
        self, fingerprints: Mapping[bytes, int], units: Iterable[PendingUnit], log_ms: int
    ) -> None:
        """`record_send` of ordinary messages, by key, that became these units.

        None of the keys is `known`. Written out by hand: this runs for every message.
        """
        if not self._window_ms:
            return
        if log_ms >= self._until_ms or not self._buckets:
            self._begin_bucket(log_ms)
        _, bucket_keys, bucket_receipts = self._buckets[-1]
        count, known = len(fingerprints), self._receipts
        has_room = self._entered + count <= self._limit
        has_room = has_room and len(bucket_keys) + count < self._bucket_ids
        for (key, fingerprint), unit in zip(fingerprints.items(), units, strict=True):
            receipt = fingerprint << _PRINT_AT | unit[3] << _QUEUE_AT | unit[4]
            if has_room:
                bucket_keys.append(key)
                bucket_receipts.append(receipt)
                known[key] = receipt
            else:
                self._enter(key, receipt, log_ms)
        if has_room:
            self._entered += count

    def forget_timer(self, identity: int) -> None:
        """It was recalled, or lost: a message that is sent again is another one."""
        self._end(identity)

    def forget_half(self, half_offset: int) -> None:
        """It was rolled back, given up or lost."""
        self._end(-1 - half_offset)

    def replace_timer(self, before: int, identity: int, log_ms: int) -> None:
        """The timer was given another time: its message is that of timer `identity` now."""
        key = self._end(before)
        if key is not None:
            short, packed = key
            packed = packed & (1 << _TIMER_AT) - 1 | identity << _TIMER_AT
            self._enter(short, packed, log_ms)

    def _end(self, place: int) -> tuple[bytes, int] | None:
        """Take out the entry of that place; returns its `key_of` and receipt."""
        key = self._places.pop(place, None)
        packed = self._receipts.get(key, -1) if key is not None else -1
        if key is None or packed < 0 or _place(packed) != place:
            return None
        del self._receipts[key]
        self._ended[place] = self._endings  # its bucket has it still
        self._endings += 1
        tail = _PRINT_TAIL.pack(_TAIL_MARK, packed >> _PRINT_AT & _LOW_64)
        if len(key) > len(tail) + 4 and key.endswith(tail):
            self._long_keys -= 1
            key = key[: -len(tail)]
        return key, packed

    def restore_entry(
        self,
        topic_id: int,
        message_id: bytes,
        queue_id: int,
        queue_offset: int,
        due_ms: int,
        log_ms: int,
        *,
        fingerprint: int = 0,
        timer: int = 0,
        half: bool = False,
    ) -> None:
        """That message was appended, so no earlier one was known then: at a replay, which may
        know it still, the newest counts."""
        if self._window_ms and message_id:
            self.step(log_ms)  # or a long log would be held on to until its end
            queue_id |= _HALF if half else 0
            receipt = _packed(queue_id, queue_offset, due_ms, fingerprint, timer)
            self._enter(key_of(topic_id, message_id), receipt, log_ms)

    def items(self) -> Iterator[tuple[bytes, int, int]]:
        """Key, packed receipt, and the log time from which its bucket is; for checks."""
        start = self._gone
        for bucket in self._buckets:
            for at in range(start, len(bucket.keys)):
                if _place(bucket.receipts[at]) not in self._ended:
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
        known = self._receipts.get(key, -1)
        if known >= 0 and (known ^ receipt) >> _PRINT_AT & _LOW_64:
            key = _long_key(key, receipt >> _PRINT_AT & _LOW_64)
            self._long_keys += key not in self._receipts
        self._receipts[key] = receipt
        if receipt >> _TIMER_AT or receipt >> _QUEUE_AT & _HALF:
            self._places[_place(receipt)] = key
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
            key, receipt = keys[at], receipts[at]
            if self._receipts.get(key) == receipt:  # else a newer one stands for it
                del self._receipts[key]
            elif self._long_keys:
                key = _long_key(key, receipt >> _PRINT_AT & _LOW_64)
                if self._receipts.get(key) == receipt:
                    del self._receipts[key]
                    self._long_keys -= 1
            if place := _place(receipt):
                if self._places.get(place) is not None:
                    del self._places[place]
                if self._ended.pop(place, None) is not None:
                    receipts[at] = _VOID  # also for a snapshot that is being written
        forgotten, self._gone = end - self._gone, end
        self._entered -= forgotten
        if end == len(keys):
            self._buckets.popleft()
            self._gone = 0
        return forgotten

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        """Buckets only grow, so where each ends now is the state of now, but for what has ended."""
        ends = [(bucket, len(bucket.keys)) for bucket in self._buckets]
        return self._pieces(ends, self._gone, self._endings)

    def _pieces(
        self, ends: list[tuple[_IdBucket, int]], start: int, endings: int
    ) -> Iterator[tuple[bytes, int]]:
        for bucket, end in ends:
            for at in range(start, end, _PER_PIECE):
                behind = min(at + _PER_PIECE, end)
                pairs = zip(bucket.keys[at:behind], bucket.receipts[at:behind], strict=True)
                entries = [
                    _encoded(key, receipt)
                    for key, receipt in pairs
                    if receipt != _VOID and self._ended.get(_place(receipt), endings) >= endings
                ]
                yield _PIECE.pack(bucket.from_ms, len(entries)) + b"".join(entries), 0
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
            fingerprint = timer = 0
            if size >= 4 + _TAIL.size and key[-_TAIL.size] == _TAIL_MARK:
                _, fingerprint, timer = _TAIL.unpack_from(key, size - _TAIL.size)
                key = key[: -_TAIL.size]
            self._enter(key, _packed(queue_id, offset, due_ms, fingerprint, timer), from_ms)


def _packed(queue_id: int, offset: int, due_ms: int, fingerprint: int, timer: int) -> int:
    return (
        timer << _TIMER_AT
        | fingerprint << _PRINT_AT
        | due_ms << _DUE_AT
        | queue_id << _QUEUE_AT
        | offset
    )


def _encoded(key: bytes, receipt: int) -> bytes:
    """An entry of a snapshot."""
    queue_id, offset = receipt >> _QUEUE_AT & _LOW_32, receipt & _LOW_64
    due_ms, fingerprint = receipt >> _DUE_AT & _LOW_64, receipt >> _PRINT_AT & _LOW_64
    if fingerprint or receipt >> _TIMER_AT:
        key += _TAIL.pack(_TAIL_MARK, fingerprint, receipt >> _TIMER_AT)
    return _ENTRY.pack(len(key), queue_id, offset, due_ms) + key


def _long_key(key: bytes, fingerprint: int) -> bytes:
    return key + _PRINT_TAIL.pack(_TAIL_MARK, fingerprint)


def key_of(topic_id: int, message_id: bytes) -> bytes:
    return topic_id.to_bytes(4, "big") + message_id
