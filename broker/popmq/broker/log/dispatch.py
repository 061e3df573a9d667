"""Dispatch: from confirmed records to the queues that readers see.

Runs behind the confirmed position, never at the tail (D2): a message that a reader can pop is
durable.  At run time the entries come from memory, at recovery from the scan; both go
through `enter`, which ignores what a queue already holds.
"""

import logging
import struct
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.open_files import OpenFiles
from popmq.broker.log.queue_unit import FindUnit
from popmq.broker.log.segment_file import SegmentFile, Syncable
from popmq.broker.log.snapshot_table import Row, SnapshotTable, snapshot_pieces
from popmq.common.disk import Disk, suppress_shortage
from popmq.common.errors import StoreDamaged, TopicNotFound
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

_SPILL_BYTES = 64 << 10
_QUEUES_A_PIECE = 16  # whose files are written
_RAISED_A_PIECE = 512  # whose oldest unit is looked for
_NEXT = struct.Struct(">IIQ")  # topic, queue, next offset


class PendingUnit(NamedTuple):
    """A record that waits for its confirmation."""

    end: int
    position: int
    topic_id: int
    queue_id: int
    queue_offset: int
    unit: bytes


@dataclass(frozen=True, slots=True)
class _Topic:
    folder: str
    unit_size: int


class Dispatch(SnapshotTable):
    """Owns the queues: what is in them, and the next offset of each."""

    table_number = 3

    def __init__(
        self,
        disk: Disk,
        housekeeper: Flusher,
        *,
        trusted_position: int,
        log_start: int,
        find: FindUnit,
    ) -> None:
        self._disk = disk
        self._housekeeper = housekeeper
        self._trusted_position = trusted_position
        self.log_start = log_start  # queues begin there; the log may still begin before it
        self._find = find
        self.open_files = OpenFiles(disk.open_limit())
        self.rewrites_vouched = False  # units below the checkpoint were missing
        self.rebuilding = False  # the whole log is scanned: what it does not hold was deleted
        self._topics: dict[int, _Topic] = {}
        self._queues: dict[tuple[int, int], ConsumeQueue] = {}
        self._next_offset: dict[tuple[int, int], int] = {}
        self._waiting: deque[PendingUnit] = deque()
        self._long_tails: dict[ConsumeQueue, None] = {}
        self._dirty: dict[ConsumeQueue, None] = {}
        # Of queues that could not be opened for want of descriptors, in log order; and queues
        # that were opened later than their records were confirmed.
        self._held_back: dict[tuple[int, int], list[PendingUnit]] = {}
        self._opened_late: dict[tuple[int, int], ConsumeQueue] = {}
        self.position = 0

    def add_topic(self, topic_id: int, folder: str, unit_size: int) -> None:
        """From now on the topic's queues live in `folder`/<queue id>/."""
        self._topics[topic_id] = _Topic(folder, unit_size)

    def has_topic(self, topic_id: int) -> bool:
        return topic_id in self._topics

    def drop_topic(self, topic_id: int) -> None:
        """Forget the topic; its queues' files are deleted behind what is being synced."""
        topic = self._topics.pop(topic_id, None)
        if topic is None:
            return
        with suppress_shortage():  # then files of queues that nobody used are left
            for name in self._disk.names(topic.folder):
                if name.isdigit():
                    self.queue(topic_id, int(name), topic)
        files: list[SegmentFile] = []
        for key in [key for key in self._queues if key[0] == topic_id]:
            gone = self._queues.pop(key)
            self._dirty.pop(gone, None)
            self._long_tails.pop(gone, None)
            files += gone.take_files()
        for key in [key for key in self._next_offset if key[0] == topic_id]:
            del self._next_offset[key]

        def work() -> None:
            for file in files:
                file.delete()

        if files:
            self._housekeeper.submit(work, _warn_not_deleted)

    def queue(self, topic_id: int, queue_id: int, topic: _Topic | None = None) -> ConsumeQueue:
        """The queue, opened at first use. TopicNotFound if the topic was deleted after
        the caller looked it up."""
        queue = self._queues.get((topic_id, queue_id))
        if queue is not None:
            return queue
        known = topic or self._topics.get(topic_id)
        if known is None:
            raise TopicNotFound(f"the topic with the number {topic_id} was deleted meanwhile")
        new_queue = ConsumeQueue(
            self._disk,
            f"{known.folder}/{queue_id}",
            unit_size=known.unit_size,
            place=(topic_id, queue_id),
            find=self._find,
            open_files=self.open_files,
        )
        new_queue.load(trusted_position=self._trusted_position, log_start=self.log_start)
        self._queues[(topic_id, queue_id)] = new_queue
        if held_back := self._held_back.pop((topic_id, queue_id), None):
            for queued in held_back:
                self._append(new_queue, queued)
            self._opened_late[topic_id, queue_id] = new_queue
        return new_queue

    def next_offset(self, topic_id: int, queue_id: int) -> int:
        """Offset of the next record put into the queue; counts unconfirmed ones."""
        return self._next_offset.get((topic_id, queue_id), 0)

    def expect(self, queued: PendingUnit) -> None:
        """Remember a record that was just appended, until `advance` passes it."""
        self._waiting.append(queued)
        self._next_offset[(queued.topic_id, queued.queue_id)] = queued.queue_offset + 1

    def expect_all(
        self, queued: Sequence[PendingUnit], following: Mapping[tuple[int, int], int]
    ) -> None:
        """The same of many, in log order; `following` has the next offset of each of the queues."""
        self._waiting.extend(queued)
        self._next_offset.update(following)

    def advance(self, confirmed: int) -> set[tuple[int, int]]:
        """Enter every waiting record that ends at or below `confirmed`; which queues grew.

        Those of a queue that cannot be opened for want of descriptors wait: `is_behind`.
        """
        grown: dict[tuple[int, int], ConsumeQueue] = {}
        if self.is_behind:
            self._enter_held_back(grown)
        waiting = self._waiting
        while waiting and waiting[0].end <= confirmed:
            queued = waiting.popleft()
            _, position, topic_id, queue_id, queue_offset, unit = queued
            queue = grown.get((topic_id, queue_id))
            if queue is None:
                if topic_id not in self._topics:
                    continue
                queue = self._queue_unless_short(topic_id, queue_id)
                if queue is None:
                    self._held_back.setdefault((topic_id, queue_id), []).append(queued)
                    continue
                grown[topic_id, queue_id] = queue
            if queue_offset == queue.count and position >= self._trusted_position:
                queue.append(unit, position)  # as `_append`, for all that is stored
            else:
                self._append(queue, queued)
        for queue in grown.values():
            if queue.unwritten_bytes >= _SPILL_BYTES:
                self._long_tails[queue] = None
        entered = min([confirmed, *(units[0].position for units in self._held_back.values())])
        self.position = max(self.position, entered)
        return set(grown)

    @property
    def is_behind(self) -> bool:
        """Whether `advance` has to be called again, although nothing more is confirmed."""
        return bool(self._held_back or self._opened_late)

    def _enter_held_back(self, grown: dict[tuple[int, int], ConsumeQueue]) -> None:
        for topic_id, queue_id in list(self._held_back):
            if topic_id in self._topics:
                with suppress_shortage():
                    self.queue(topic_id, queue_id)  # which enters them
            else:
                del self._held_back[topic_id, queue_id]
        grown.update(self._opened_late)
        self._opened_late.clear()

    def _queue_unless_short(self, topic_id: int, queue_id: int) -> ConsumeQueue | None:
        if (topic_id, queue_id) not in self._held_back:
            with suppress_shortage():
                return self.queue(topic_id, queue_id)
        return None

    def append_unit(self, queued: PendingUnit) -> None:
        """Put one record's unit at its offset; a queue that already has it is left alone."""
        queue = self.queue(queued.topic_id, queued.queue_id)
        if self.rebuilding:
            queue.fill_to(queued.queue_offset)
        key = (queued.topic_id, queued.queue_id)
        self._next_offset[key] = max(self._next_offset.get(key, 0), queued.queue_offset + 1)
        self._append(queue, queued)

    def _append(self, queue: ConsumeQueue, queued: PendingUnit) -> None:
        _, position, _, _, queue_offset, unit = queued
        if queue_offset == queue.count:
            queue.append(unit, position)
            if position < self._trusted_position:
                self.rewrites_vouched = True
            if queue.unwritten_bytes >= _SPILL_BYTES:
                self._long_tails[queue] = None
        elif queued.queue_offset > queue.count:
            raise StoreDamaged(
                f"queue {queued.queue_id} of topic {queued.topic_id} has {queue.count} units, "
                f"but the record at {queued.position} is number {queued.queue_offset}: "
                "delete the folders consumequeue and system, and start again to rebuild them"
            )

    def rebuilt(self) -> None:
        """The scan is over: queues whose records are all gone keep their numbers."""
        for (topic_id, queue_id), following in self._next_offset.items():
            if topic_id in self._topics:
                self.queue(topic_id, queue_id).fill_to(following)
        self.rebuilding = False

    # -- retention (persistence/retention.py)

    def log_starts_at(self, position: int) -> Iterator[None]:
        """Records below `position` are about to be deleted: when all pieces of this are done."""
        self.log_start = position
        for number, queue in enumerate(list(self._queues.values()), 1):
            queue.log_starts_at(position)
            if number % _RAISED_A_PIECE == 0:
                yield

    def queue_files_below_minimum(self) -> list[SegmentFile]:
        """Forget the files of queues that hold expired units only; the caller deletes them."""
        return [f for queue in self._queues.values() for f in queue.detach_files_below_minimum()]

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        entries = list(self._next_offset.items())
        return snapshot_pieces(entries, lambda entry: _NEXT.pack(*entry[0], entry[1]))

    def restore(self, content: bytes) -> None:
        for topic_id, queue_id, following in _NEXT.iter_unpack(content):
            self._next_offset[(topic_id, queue_id)] = following

    def covers_restored(self) -> bool:
        """Whether every queue has all the units that the snapshot knows of."""
        return all(
            self.queue(*key).count >= following
            for key, following in self._next_offset.items()
            if key[0] in self._topics
        )

    def flush_large_tails(self) -> None:
        """Write the units of queues that have many in memory. OSError when the disk is full."""
        for queue in self._long_tails:
            queue.flush()
        self._long_tails.clear()

    def flush(self) -> Generator[None, None, list[Syncable]]:
        """Write all units of now to their files, in pieces; returns the files that have to be
        synced, which are told again until `flushed`.

        OSError when the disk is full: nothing is lost, and the next call tries again.
        """
        self._dirty.update((queue, None) for queue in self._queues.values() if queue.clear_dirty())
        files: list[Syncable] = []
        for number, queue in enumerate(list(self._dirty), 1):
            if queue in self._dirty:  # or its topic was deleted meanwhile
                queue.flush()
                files += queue.files()
            if number % _QUEUES_A_PIECE == 0:
                yield
        return files

    def flushed(self) -> None:
        """Somebody syncs the files of the last `flush`."""
        self._dirty.clear()

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()


def _warn_not_deleted(error: BaseException | None) -> None:
    if error is not None:
        logger.warning("files not deleted", extra={"reason": str(error)})


def snapshot_rows(content: bytes) -> Iterator[Row]:
    for topic_id, queue_id, following in _NEXT.iter_unpack(content):
        yield Row(f"topic {topic_id}, queue {queue_id}", {"next_offset": following})
