"""Reads messages out of the log, and checks each: a damaged one harms only itself."""

import logging
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
        read = self._log.read_up_to if wait else self._log.read_warm
        messages: list[StoredMessage | DamagedMessage] = []
        first = 0
        while first < len(units):
            last = first
            start = units[first].position
            limit = min(start + _SPAN_BYTES, self._log.segment_end(start))
            while last + 1 < len(units) and _near(units[last], units[last + 1], limit):
                last += 1
            data = read(start, units[last].position + units[last].size - start)
            messages += [self._checked(data, unit, start) for unit in units[first : last + 1]]
            first = last + 1
        return messages

    def touch(self, units: list[Unit]) -> None:
        """Raise ColdRead unless the bytes of all these units are in memory."""
        first = 0
        while first < len(units):
            start, last = units[first].position, first
            limit = min(start + _SPAN_BYTES, self._log.segment_end(start))
            while last + 1 < len(units) and _near(units[last], units[last + 1], limit):
                last += 1
            self._log.read_warm(start, units[last].position + units[last].size - start)
            first = last + 1

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

    def _checked(self, data: bytes, unit: Unit, start: int) -> StoredMessage | DamagedMessage:
        offset = unit.position - start
        try:
            header = check_record(data, offset, unit.position)
            if header.size != unit.size:  # a unit of a record that is gone leads to its neighbour
                raise BadRecord(f"a record of {header.size} bytes, its unit says {unit.size}")
            return decode_message(data, offset, header)
        except BadRecord as error:
            self.damaged += 1
            logger.error(
                "damaged message",
                extra={
                    "path": f"{self._folder}/commitlog",
                    "position": unit.position,
                    "reason": str(error),
                    "what_to_do": f"popmq doctor --data {self._folder}",
                },
            )
            return DamagedMessage(unit.position, str(error))


def _near(one: Unit, two: Unit, limit: int) -> bool:
    """Whether a read of both costs less than two reads; `limit` is where a read has to end."""
    gap = two.position - one.position - one.size
    return 0 <= gap <= _GAP_BYTES and two.position + two.size <= limit
