"""Sampler: how things are in every queue, for reports, each `reports.sample_interval_ms`.

A regular sample is taken in steps, so that many queues do not hold the loop: the counts of one
group in one topic are of one moment, those of the next pair of a moment later.  One that a report
asks for is of one moment, since records behind that moment are left out of the report.

The ages of the oldest ready messages take looks into the log.  Their times are remembered
(`head_times.py`), so only new ones are read: a regular sample waits for the disk for `COLD_READS`
of them at most, one that a report asks for waits for all.  What is left is UNKNOWN in that sample,
and read for a later one.
"""

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.group_topic_counts import EndCounts
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.diagnostics.head_times import Head, HeadTimes
from popmq.broker.diagnostics.lag import Lag, QueueLag, met_pairs, queue_lags
from popmq.broker.diagnostics.read_budget import ReadBudget
from popmq.broker.diagnostics.sample_log import SampleLog
from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.meta.registry import Registry
from popmq.broker.operations.resumable_reads import ResumableRead, read
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_forecast import BUCKETS_MS
from popmq.broker.timer.timers import Timers
from popmq.common.clock import Clock
from popmq.common.disk import ColdRead
from popmq.common.record.report_layouts import (
    OFFSET_SAMPLE,
    SAMPLE_VERSION,
    TIMER_SAMPLE,
    TOPIC_SAMPLE,
    OffsetFlag,
    TimerRow,
)
from popmq.common.settings.report_settings import ReportsSettings
from popmq.common.topics import MessageType, StartAt, TopicConfig

UNKNOWN = 0xFFFF_FFFF_FFFF_FFFF  # nobody knows when the oldest ready message was stored
FIRST_MS = 1_000
COLD_READS = 64  # of one regular sample
_READS_A_STEP = 64
_ROWS_A_STEP = 256
_AGE = struct.Struct(">Q")
_ENDS = len(EndCounts._fields)
_AGE_AT = OFFSET_SAMPLE.size - (_ENDS + 1) * _AGE.size  # before these counts


class _RowHead(NamedTuple):
    """Where the age of an offset row belongs, and whose store time that is."""

    at: int
    head: Head


@dataclass(slots=True)
class _Sample:
    number: int
    wall_ms: int
    cold_reads: int  # that it may still wait for
    offsets: bytearray = field(default_factory=bytearray)  # rows
    heads: deque[_RowHead] = field(default_factory=deque)  # whose ages are not looked up yet
    topics: list[bytes] = field(default_factory=list)
    timers: bytes = b""


class Sampler:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: CheckPointTable,
        ends: EndCounts,
        timers: Timers,
        head_times: HeadTimes,
        stored_by_topic: dict[str, int],
        settings: ReportsSettings,
        clock: Clock,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._ends = ends
        self._timers = timers
        self._head_times = head_times
        self._stored_by_topic = stored_by_topic
        self._interval_ms = settings.sample_interval_ms
        self._clock = clock
        # Soon, since what comes later is compared with the first one.
        self._next_ms = clock.boot_ms() + min(self._interval_ms, FIRST_MS)
        self._running: ResumableRead[int] | None = None
        self._cold = ColdReadRetry(store.readers)
        self.taken = 0
        self.budget = ReadBudget(settings.read_bytes_per_second)  # of all that reports read
        self.logs = {
            "offsets": SampleLog(OFFSET_SAMPLE.size, settings.sample_bytes),
            "topics": SampleLog(TOPIC_SAMPLE.size, settings.sample_bytes),
            "timers": SampleLog(TIMER_SAMPLE.size, settings.sample_bytes),
        }

    @property
    def held_bytes(self) -> int:
        return sum(log.held_bytes for log in self.logs.values())

    def step(self) -> int:
        """A piece of the regular sample, when its time has come. Returns how much was done."""
        if self._cold.waiting:
            return 0
        if self._running is not None:
            try:
                missing = next(self._running)
            except StopIteration:
                self._running = None
            else:
                if isinstance(missing, ColdRead):
                    self._cold.warm(missing)
            return 1
        if self._interval_ms and self._clock.boot_ms() >= self._next_ms:
            self._next_ms = self._clock.boot_ms() + self._interval_ms
            self._running = self.take(patient=False)
            return 1
        return 0

    def take(self, *, patient: bool) -> ResumableRead[int]:
        """A sample; its number when it can be read.

        With `patient` its counts are of now, and all ages are waited for when they are on the disk.
        """
        self.taken += 1
        sample = _Sample(self.taken, self._clock.wall_ms(), COLD_READS)
        for _ in self._counts(sample):
            if not patient:
                yield None
        sample.timers = b"".join(self._timer_rows(sample))
        while sample.heads:
            heads = [sample.heads.popleft() for _ in range(min(_READS_A_STEP, len(sample.heads)))]
            ages = yield from read(lambda heads=heads: self._ages(sample, heads, patient))  # type: ignore[misc]
            for row_head, age in zip(heads, ages, strict=True):
                _AGE.pack_into(sample.offsets, row_head.at, age)
        self.logs["offsets"].append(bytes(sample.offsets))
        self.logs["topics"].append(b"".join(sample.topics))
        self.logs["timers"].append(sample.timers)
        return sample.number

    def _counts(self, sample: _Sample) -> Iterator[None]:
        """In pieces."""
        size, step_size = 0, _ROWS_A_STEP * OFFSET_SAMPLE.size
        for lag in met_pairs(self._registry, self._table):
            if lag is not None and self._exists(lag):
                self._add_pair(sample, lag)
            if lag is None or len(sample.offsets) - size >= step_size:
                size = len(sample.offsets)
                yield
        rows = 0
        for topic in list(self._registry.topics()):
            if self._registry.topic_by_id(topic.id) is None:
                continue  # deleted since the piece before
            sample.topics += self._topic_rows(sample, topic)
            if len(sample.topics) - rows >= _ROWS_A_STEP:
                rows = len(sample.topics)
                yield

    def _exists(self, lag: Lag) -> bool:
        """The pair was found some steps ago."""
        topic, group = self._registry.topic_by_id(lag.topic.id), lag.group.id
        return topic is not None and self._registry.group_by_id(group) is not None

    # -- offsets

    def _add_pair(self, sample: _Sample, lag: Lag) -> None:
        pair = (lag.group.name, lag.topic.name)
        first = True
        for queue in queue_lags(self._store, self._registry, self._table, lag):
            row = self._offset_row(sample, lag, queue)
            if first:  # what is counted for the pair stands once, so that rows can be summed
                row[2] |= OffsetFlag.FIRST
                row[-_ENDS:] = self._ends.of(pair)
                first = False
            if queue.head >= 0:
                head = Head(queue.topic.id, queue.queue_id, queue.head)
                sample.heads.append(_RowHead(len(sample.offsets) + _AGE_AT, head))
            sample.offsets += OFFSET_SAMPLE.pack(*row)

    def _offset_row(self, sample: _Sample, lag: Lag, queue: QueueLag) -> list[int]:
        progress = queue.progress
        flags = OffsetFlag.FIFO if isinstance(progress, FifoProgress) else 0
        flags |= OffsetFlag.NEWEST if lag.group.start_at is StartAt.NEWEST else 0
        flags |= OffsetFlag.BUFFERED if lag.group.buffered else 0
        if queue.topic.id != lag.topic.id:
            flags |= OffsetFlag.PARKED if queue.parked else OffsetFlag.RETRY
        return [
            *(SAMPLE_VERSION, 0, flags, self._store.epoch, sample.number, sample.wall_ms),
            *(lag.group.id, lag.topic.id, queue.topic.id, queue.queue_id),
            *(queue.min_offset, queue.max_offset),
            progress.cursor if progress is not None else queue.min_offset,
            progress.committed if progress is not None else queue.min_offset,
            *(queue.ready, queue.in_flight, queue.blocked, queue.expired),
            progress.filtered if progress is not None else 0,
            *(0,) * (1 + _ENDS),
        ]

    def _ages(self, sample: _Sample, heads: list[_RowHead], patient: bool) -> list[int]:
        ages = []
        for _, head in heads:
            try:
                ages.append(self._head_times.stored_ms(head) or UNKNOWN)
            except ColdRead:
                if patient or sample.cold_reads:
                    sample.cold_reads -= not patient
                    raise
                ages.append(UNKNOWN)
        return ages

    # -- topics and timers

    def _topic_rows(self, sample: _Sample, topic: TopicConfig) -> Iterator[bytes]:
        if topic.type is MessageType.LITE:
            yield self._lite_row(sample, topic)
            return
        stored = self._stored_by_topic.get(topic.name, 0)
        pending = self._timers.state.pending.get(topic.id, 0)
        for queue_id in self._registry.queue_ids(topic):
            queue = self._store.queue(topic.id, queue_id)
            yield TOPIC_SAMPLE.pack(
                SAMPLE_VERSION,
                0,
                0,
                self._store.epoch,
                sample.number,
                sample.wall_ms,
                topic.id,
                queue_id,
                queue.min_offset,
                queue.count,
                stored,
                pending,
            )
            stored = pending = 0  # of the whole topic: they stand once, so that rows can be summed

    def _lite_row(self, sample: _Sample, topic: TopicConfig) -> bytes:
        """All its lite topics as one queue: there may be very many."""
        queues = [
            self._store.queue(topic.id, queue_id) for queue_id in self._registry.queue_ids(topic)
        ]
        return TOPIC_SAMPLE.pack(
            SAMPLE_VERSION,
            0,
            0,
            self._store.epoch,
            sample.number,
            sample.wall_ms,
            topic.id,
            0,
            sum(queue.min_offset for queue in queues),
            sum(queue.count for queue in queues),
            self._stored_by_topic.get(topic.name, 0),
            0,
        )

    def _timer_rows(self, sample: _Sample) -> Iterator[bytes]:
        moment = (self._store.epoch, sample.number, sample.wall_ms)

        def row(kind: TimerRow, key: int, count: int) -> bytes:
            return TIMER_SAMPLE.pack(SAMPLE_VERSION, kind, 0, *moment, 0, 0, key, count)

        service, counts = self._timers.service, self._timers.forecast.counts()
        for within_ms, count in zip((*BUCKETS_MS, 0), counts or (), strict=False):
            yield row(TimerRow.DUE_WITHIN, within_ms, count)
        below = 0
        for bound, upto in service.lateness.buckets:
            key = 0 if bound == "+Inf" else round(float(bound) * 1_000)
            yield row(TimerRow.LATENESS, key, int(upto) - below)
            below = int(upto)
        for key, count in (
            (1, max(0, service.enqueue.behind)),
            (2, service.dequeue_lag_ms),
            (3, len(self._timers.state.late)),
            (4, service.fired),
            (5, self._timers.recall.recalled),
        ):
            yield row(TimerRow.STATE, key, int(count))
