"""Reads messages out of the log, and checks each: a damaged one harms only itself."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.queue_unit import QueueUnit
from popmq.common.clock import Clock, LogClock
from popmq.common.disk import ColdRead
from popmq.common.errors import StoreDamaged
from popmq.common.protocol.pop_reply import (
    DeliveryContent,
    content_of,
    intact_contents,
    recent_contents,
)
from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    RecordKind,
    StoredMessage,
    check_record,
    decode_header,
    decode_message,
    intact_message,
    peek_message,
)
from popmq.common.record.message_deadline import deadline_of
from popmq.common.record.timer_body import TimerBody, intact_bodies

logger = logging.getLogger(__name__)


# Copying what lies between two messages costs less than another call to the kernel (measured).
_GAP_BYTES = 64 << 10
_SPAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DamagedMessage:
    """Stands for a record that cannot be read any more."""

    position: int
    reason: str


class MessageReader:
    def __init__(self, log: CommitLog, folder: str, clock: Clock, log_clock: LogClock) -> None:
        self._log = log
        self._folder = folder
        self._clock = clock
        self._log_clock = log_clock
        self.damaged = 0
        self.expired = 0  # times that a message was not delivered because its deadline was over

    def read(
        self, units: list[QueueUnit], *, wait: bool = True
    ) -> list[StoredMessage | DamagedMessage]:
        """The messages of confirmed units, in order; those near each other in the log in one read.

        A damaged one is counted and logged, and stands in the result as `DamagedMessage`.
        With `wait` off ColdRead is raised instead of waiting for the disk.
        """
        recent = self._recent(units)
        if recent is not None:
            return [
                self._checked(memoryview(record), position, size, position)
                for record, (position, size, _) in zip(recent, units, strict=True)
            ]
        # What lies between the messages is never copied out of the view.
        read = self._log.read_up_to if wait else self._log.view_warm
        messages: list[StoredMessage | DamagedMessage] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            data = memoryview(read(start, last.position + last.size - start))
            try:
                messages += [
                    intact_message(data, position - start, position, size)
                    or self._checked(data, position, size, start)
                    for position, size, _ in span
                ]
            except BadRecord:  # of a token: one by one, and all but that one are read
                messages += [self._checked(data, unit.position, unit.size, start) for unit in span]
        return messages

    def raw(self, units: list[QueueUnit], head_bytes: int = 0, *, wait: bool = True) -> list[bytes]:
        """The records of confirmed units as they lie in the log, for reports; with `head_bytes`
        that many bytes of each, padded with zeros.

        Unchecked but for its place: of a unit that leads elsewhere there are zeros, or nothing.
        """
        read = self._log.read_up_to if wait else self._log.view_warm
        records: list[bytes] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            data = memoryview(read(start, last.position + last.size - start))
            for position, size, _ in span:
                at = position - start
                record = bytes(data[at : at + (min(size, head_bytes) or size)])
                if not _stands_at(record, position, size):
                    record = b""
                records.append(record.ljust(head_bytes, b"\0"))
        return records

    def contents(self, units: list[QueueUnit]) -> list[DeliveryContent | None]:
        """Like `read`, for deliveries and without waiting; None for what is damaged or expired."""
        recent = self._recent(units)
        if recent is not None:
            return [
                content or self._content(memoryview(record), unit, unit.position)
                for content, record, unit in zip(
                    recent_contents(recent), recent, units, strict=True
                )
            ]
        found_contents: list[DeliveryContent | None] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            data = memoryview(self._log.view_warm(start, last.position + last.size - start))
            contents = intact_contents(data, start, span)
            if None in contents:
                contents = [
                    content or self._content(data, unit, start)
                    for content, unit in zip(contents, span, strict=True)
                ]
            found_contents += contents
        return found_contents

    def timer_bodies(self, units: list[QueueUnit]) -> list[TimerBody | None]:
        """Like `read`, for firings and without waiting; None where `read` has to say what it is."""
        timer_bodies: list[TimerBody | None] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            data = memoryview(self._log.view_warm(start, last.position + last.size - start))
            timer_bodies += intact_bodies(data, start, span)
        return timer_bodies

    def _recent(self, units: Sequence[QueueUnit]) -> list[bytes] | None:
        """The records of units if all are in memory."""
        tail = self._log.tail
        return tail.records(units) if tail is not None else None

    def _content(self, data: memoryview, unit: QueueUnit, start: int) -> DeliveryContent | None:
        message = self._checked(data, unit.position, unit.size, start)
        if isinstance(message, DamagedMessage) or self.is_expired(message):
            return None
        return content_of(message)

    def is_expired(self, message: StoredMessage) -> bool:
        """Whether its deadline is over, so that nobody is to get it any more. It is counted."""
        if message.any_token is None or not self.expired_at_ms(message):
            return False
        self.expired += 1
        return True

    def expired_at_ms(self, message: StoredMessage) -> int:
        """Its deadline, if that is over; else 0.

        The wall clock may be another machine's than the one that stored the message: what was left
        of its time then has to have passed in log time too.  A moved body does not say when that
        was."""
        deadline_ms = deadline_of(message.properties) if message.any_token is not None else 0
        if not deadline_ms or self._clock.wall_ms() < deadline_ms:
            return 0
        header = message.header
        left_ms = deadline_ms - header.wall_ms if header.kind == RecordKind.MESSAGE else 0
        return deadline_ms if self._log_clock.now_ms() - header.log_ms >= left_ms else 0

    def touch(self, units: list[QueueUnit]) -> None:
        """Raise ColdRead unless the bytes of all these units are in memory; it warms all of them,
        and nothing that lies between."""
        cold: list[tuple[int, int]] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            size = last.position + last.size - start
            try:
                self._log.view_warm(start, size)
            except ColdRead:
                cold.append((start, size))
        if cold:
            raise ColdRead(lambda: [self._log.read_up_to(*span) for span in cold])

    def _spans(self, units: list[QueueUnit]) -> Iterator[list[QueueUnit]]:
        """The units in pieces, of which each costs less to read in one go."""
        span: list[QueueUnit] = []
        end = limit = 0
        if self._is_one_span(units):
            yield units
            return
        for unit in units:
            position, size, _ = unit
            if span and 0 <= position - end <= _GAP_BYTES and position + size <= limit:
                span.append(unit)
            else:
                if span:
                    yield span
                span = [unit]
                limit = min(position + _SPAN_BYTES, self._log.segment_end(position))
            end = position + size
        if span:
            yield span

    def _is_one_span(self, units: list[QueueUnit]) -> bool:
        """As `_spans` would say; nearly always so, and cheaper to see."""
        if not units:
            return False
        end = start = units[0][0]
        for position, size, _ in units:
            if not 0 <= position - end <= _GAP_BYTES:
                return False
            end = position + size
        return end <= min(start + _SPAN_BYTES, self._log.segment_end(start))

    def stored_ms(self, unit: QueueUnit, *, wait: bool = True) -> int:
        """Wall time at which a confirmed unit's record was written; 0 when it is damaged.

        Reads the header alone, unchecked but for its place.
        """
        read = self._log.read_up_to if wait else self._log.read_warm
        try:
            header = decode_header(read(unit.position, HEADER_SIZE))
        except BadRecord:
            return 0
        return header.wall_ms if header.position == unit.position else 0

    def record(self, unit: QueueUnit, *, wait: bool = True) -> bytes:
        """Any confirmed record, checked, header included. Raises StoreDamaged."""
        read = self._log.read_up_to if wait else self._log.read_warm
        data = read(unit.position, unit.size)
        try:
            check_record(data, 0, unit.position)
        except BadRecord as error:
            raise StoreDamaged(
                f"{self._log.path_of(unit.position)}: the record at position {unit.position} is "
                f"damaged ({error}): look with `popmq doctor --data {self._folder}`"
            ) from error
        return data

    def _checked(
        self, data: memoryview, position: int, size: int, start: int
    ) -> StoredMessage | DamagedMessage:
        offset = position - start
        try:
            message = intact_message(data, offset, position, size)
            if message is not None:
                return message
            header = check_record(data, offset, position)
            if header.size != size:  # a unit of a record that is gone leads to its neighbour
                raise BadRecord(f"a record of {header.size} bytes, its unit says {size}")
            return decode_message(data, offset, header)
        except BadRecord as error:
            self.damaged += 1
            logger.error(
                "damaged message",
                extra={
                    "path": self._log.path_of(position),
                    "position": position,
                    "reason": str(error),
                    "what_to_do": f"popmq doctor --data {self._folder}",
                },
            )
            return DamagedMessage(position, str(error))


def _stands_at(record: bytes, position: int, size: int) -> bool:
    try:
        header = decode_header(record)
    except BadRecord:
        return False
    return header.position == position and header.size == size


def find_unit(
    log: CommitLog, place: tuple[int, int], offset: int, first: int, last: int | None
) -> QueueUnit | None:
    """Look for the record number `offset` of the queue `place` in [first, last) of the log.

    `first` is where a record starts; `last` None means as far as records go.  Returns None when
    it is not there, or damage is in the way.
    """
    position = max(first, log.start)
    while last is None or position < last:
        header = log.record_at(position)
        if header is None:
            following = log.segment_end(position)
            if following - position >= HEADER_SIZE:
                return None
            position = following
            continue
        if (header.topic_id, header.queue_id, header.queue_offset) == (*place, offset) and (
            header.kind != RecordKind.MOVED
        ):
            is_message = header.kind == RecordKind.MESSAGE
            data = log.read_up_to(position, header.size) if is_message else b""
            return QueueUnit(position, header.size, peek_message(data)[0] if is_message else 0)
        position = header.end
    return None
