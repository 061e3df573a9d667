"""Reads messages out of the log, and checks each: a damaged one harms only itself."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from popmq.broker.store.commit_log import CommitLog
from popmq.broker.store.unit_check import Unit
from popmq.common.errors import StoreDamaged
from popmq.common.message import (
    HEADER_SIZE,
    BadRecord,
    StoredMessage,
    check_record,
    decode_header,
    decode_message,
    intact_message,
)

logger = logging.getLogger(__name__)


# Copying what lies between two messages costs less than another call to the kernel (measured).
_GAP_BYTES = 16 << 10
_SPAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DamagedMessage:
    """Stands for a record that cannot be read any more."""

    position: int
    reason: str


class MessageReader:
    def __init__(self, log: CommitLog, folder: str) -> None:
        self._log = log
        self._folder = folder
        self.damaged = 0

    def read(self, units: list[Unit], *, wait: bool = True) -> list[StoredMessage | DamagedMessage]:
        """The messages of confirmed units, in order; those near each other in the log in one read.

        A damaged one is counted and logged, and stands in the result as `DamagedMessage`.
        With `wait` off ColdRead is raised instead of waiting for the disk.
        """
        # What lies between the messages is never copied out of the view.
        read = self._log.read_up_to if wait else self._log.view_warm
        messages: list[StoredMessage | DamagedMessage] = []
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            data = memoryview(read(start, last.position + last.size - start))
            messages += [self._checked(data, unit, start) for unit in span]
        return messages

    def touch(self, units: list[Unit]) -> None:
        """Raise ColdRead unless the bytes of all these units are in memory."""
        for span in self._spans(units):
            start, last = span[0].position, span[-1]
            self._log.view_warm(start, last.position + last.size - start)

    def _spans(self, units: list[Unit]) -> Iterator[list[Unit]]:
        """The units in pieces, of which each costs less to read in one go."""
        span: list[Unit] = []
        end = limit = 0
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

    def stored_ms(self, unit: Unit, *, wait: bool = True) -> int:
        """Wall time at which a confirmed unit's record was written; 0 when it is damaged.

        Reads the header alone, unchecked but for its place.
        """
        read = self._log.read_up_to if wait else self._log.read_warm
        try:
            header = decode_header(read(unit.position, HEADER_SIZE))
        except BadRecord:
            return 0
        return header.wall_ms if header.position == unit.position else 0

    def record(self, unit: Unit, *, wait: bool = True) -> bytes:
        """Any confirmed record, checked, header included. Raises StoreDamaged."""
        read = self._log.read_up_to if wait else self._log.read_warm
        data = read(unit.position, unit.size)
        try:
            check_record(data, 0, unit.position)
        except BadRecord as error:
            raise StoreDamaged(
                f"{self._folder}/commitlog: the record at position {unit.position} is damaged "
                f"({error}): look with `popmq doctor --data {self._folder}`"
            ) from error
        return data

    def _checked(self, data: memoryview, unit: Unit, start: int) -> StoredMessage | DamagedMessage:
        position, size, _ = unit
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
                    "path": f"{self._folder}/commitlog",
                    "position": position,
                    "reason": str(error),
                    "what_to_do": f"popmq doctor --data {self._folder}",
                },
            )
            return DamagedMessage(position, str(error))
