"""Lookup: stored messages by id, by key, by place in a queue, and by time.

Nothing here changes anything.  Every lookup has a bound on the messages that it returns, on
those that it reads, and on bytes; what a bound kept back is said in `LookupResult.incomplete`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from popmq.broker.index.index_file import NO_MS
from popmq.broker.index.key_index import KeyIndex
from popmq.broker.index.message_keys import ID, KEY, names_in
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import Code, Refused
from popmq.common.record.message import Header, StoredMessage

MESSAGES_LIMIT = 64  # RocketMQ's (maxMsgsNumBatch)
REPLY_BYTES = 8 << 20
# Of candidates whose hash is right and whose name, topic or time is not.
_READS_LIMIT = 1024
_READ_BYTES = 32 << 20
# So many damaged messages in a row are passed over in the search for a time.
_DAMAGED_LIMIT = 16


@dataclass(slots=True)
class LookupResult:
    """Messages, and why there may be more; an empty reason means that these are all."""

    messages: list[StoredMessage] = field(default_factory=list)
    incomplete: str = ""


class Lookup:
    def __init__(self, store: MessageStore, index: KeyIndex) -> None:
        self._store = store
        self._index = index

    def by_id(
        self, topic_id: int, message_id: str, *, limit: int = MESSAGES_LIMIT, wait: bool = True
    ) -> LookupResult:
        """Messages of that id, newest first; several when a client sent one again.

        With `wait` off ColdRead is raised instead of waiting for a message from the disk.
        """
        return self._by_name(topic_id, ID, message_id, limit, 0, NO_MS, wait=wait)

    def all_by_id(self, topic_id: int, message_id: str) -> LookupResult:
        """All messages of that id, newest first, without their bodies and properties.

        `incomplete` says when they are more than one request reads.  Raises ColdRead.
        """
        return self._by_name(topic_id, ID, message_id, None, 0, NO_MS, wait=False)

    def by_key(
        self,
        topic_id: int,
        key: str,
        *,
        limit: int = MESSAGES_LIMIT,
        begin_ms: int = 0,
        end_ms: int = NO_MS,
    ) -> LookupResult:
        """Messages with that key stored in [begin_ms, end_ms] (wall time), newest first."""
        return self._by_name(topic_id, KEY, key, limit, begin_ms, end_ms)

    def at(self, topic_id: int, queue_id: int, offset: int, *, limit: int = 1) -> LookupResult:
        """Messages of a queue from `offset` on, in order.

        Raises ILLEGAL_OFFSET when the queue has no message there (any more, or yet).
        """
        queue = self._store.queue(topic_id, queue_id)
        if not queue.min_offset <= offset < queue.count:
            held = f"{queue.min_offset} to {queue.count - 1}"
            raise Refused(
                Code.ILLEGAL_OFFSET,
                f"offset {offset} of queue {queue_id}: the queue holds "
                + (held if queue.count > queue.min_offset else "nothing"),
            )
        findings = LookupResult()
        size = 0
        for unit in queue.units(offset, min(limit, MESSAGES_LIMIT)):
            size += unit.size
            if size > max(REPLY_BYTES, unit.size):
                findings.incomplete = f"a reply holds {REPLY_BYTES} bytes"
                break
            message = self._read_one(unit, findings)
            if message is not None:
                findings.messages.append(message)
        return findings

    def by_time(self, topic_id: int, queue_id: int, wall_ms: int, *, wait: bool = True) -> int:
        """Offset of the first message stored at or after `wall_ms`; the queue's end if none.

        With `wait` off ColdRead is raised instead of waiting for the disk.

        A binary search, right as long as the wall clock did not go back.  Where it did, the
        answer is the border of one of the stretches in between: the message before it is older
        than `wall_ms`, the one at it is not.
        """
        queue = self._store.queue(topic_id, queue_id)
        return self._search(queue, lambda header: header.wall_ms >= wall_ms, wait=wait)

    def by_log_time(self, topic_id: int, queue_id: int, log_ms: int) -> int:
        """Offset of the first message stored at or after `log_ms` of log time, which never goes
        back; the queue's end if none."""
        queue = self._store.queue(topic_id, queue_id)
        return self._search(queue, lambda header: header.log_ms >= log_ms, wait=True)

    def _search(self, queue: ConsumeQueue, is_late: Callable[[Header], bool], *, wait: bool) -> int:
        low, high = queue.min_offset, queue.count
        while low < high:
            middle = (low + high) // 2
            header = self._header(queue, middle, wait=wait)
            if header is None or is_late(header):
                high = middle
            else:
                low = middle + 1
        return low

    def _header(self, queue: ConsumeQueue, offset: int, *, wait: bool) -> Header | None:
        """Of the message at `offset`, or of the next one that is not damaged."""
        for unit in queue.units(offset, _DAMAGED_LIMIT, wait=wait):
            message = self._read_one(unit, LookupResult(), wait=wait)
            if message is not None:
                return message.header
        return None

    def _by_name(
        self,
        topic_id: int,
        kind: int,
        name: str,
        limit: int | None,
        begin_ms: int,
        end_ms: int,
        *,
        wait: bool = True,
    ) -> LookupResult:
        """With no limit on messages they come without what takes room."""
        requested = (kind, name.encode())
        candidates = self._index.find(topic_id, *requested, begin_ms=begin_ms, end_ms=end_ms)
        findings = LookupResult()
        size = 0
        seen: set[tuple[int, int]] = set()
        for message in self._read(candidates, findings, wait=wait):
            header = message.header
            if header.topic_id != topic_id or not begin_ms <= header.wall_ms <= end_ms:
                continue
            place = (header.queue_id, header.queue_offset)
            # One that retention moved stands twice in the log for a while; the newer counts.
            if place in seen or requested not in names_in(message.properties):
                continue
            seen.add(place)
            if limit is None:
                findings.messages.append(message._replace(head=b"", properties=b""))
                continue
            size += header.size
            if len(findings.messages) >= min(limit, MESSAGES_LIMIT):
                findings.incomplete = f"these are the newest {len(findings.messages)}"
                break
            if findings.messages and size > REPLY_BYTES:
                findings.incomplete = f"a reply holds {REPLY_BYTES} bytes"
                break
            findings.messages.append(message)
        if self._index.has_hole:
            findings.incomplete = "a damaged index file was deleted; a restart builds it again"
        return findings

    def _read(
        self, candidates: Iterable[tuple[int, int]], findings: LookupResult, *, wait: bool
    ) -> Iterable[StoredMessage]:
        """The messages that the index points to, each once, up to the bounds on reading."""
        reads = read_bytes = 0
        last = -1
        for position, size in candidates:
            if position == last:
                continue
            last = position
            reads += 1
            read_bytes += size
            if reads > _READS_LIMIT or read_bytes > max(_READ_BYTES, size):
                findings.incomplete = f"gave up after {reads - 1} messages; narrow the time"
                return
            message = self._read_one(QueueUnit(position, size, 0), findings, wait=wait)
            if message is not None:
                yield message

    def _read_one(
        self, unit: QueueUnit, findings: LookupResult, *, wait: bool = True
    ) -> StoredMessage | None:
        (message,) = self._store.reader.read([unit], wait=wait)
        if isinstance(message, DamagedMessage):
            findings.incomplete = f"the message at position {unit.position} is damaged"
            return None
        return message
