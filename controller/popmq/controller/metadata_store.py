"""Where the records of the broker groups are kept, and the one way to write them (R1).

Every write is a compare-and-set on the record's version.  A store may answer late or not at all:
then nobody knows whether it was written, and `WriteOutcome.UNKNOWN` says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.group_record import GroupRecord


class WriteOutcome(Enum):
    UNKNOWN = "unknown"  # it may be written later still
    WRITTEN = "written"
    CONFLICT = "conflict"  # not written, and never will be: the version has moved on


@dataclass(frozen=True, slots=True)
class WriteResult:
    """`record` is the newest that was read after the attempt; None with CONFLICT: there is none."""

    outcome: WriteOutcome
    record: GroupRecord | None = None
    reason: str = ""  # of UNKNOWN


class MetadataStoreUnavailable(PopmqError):
    """The metadata store did not answer, or not what it should; trying again is right."""

    code = Code.HA_NOT_AVAILABLE


OnRead = Callable[[GroupRecord | MetadataStoreUnavailable | None], None]
OnSwapped = Callable[[WriteResult], None]


class MetadataStore(Protocol):
    """Answers come on the loop, possibly before the call returns."""

    def read(self, key: str, then: OnRead) -> None:
        """The record of that key, None when there is none. It may be an old one."""
        ...

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        """Write `record` if the version in the store is the expected one (0: there is none)."""
        ...


class BlockingStore(Protocol):
    """A store that makes its caller wait; `ThreadedStore` in process.py makes one of the others."""

    def read(self, key: str) -> GroupRecord | None:
        """Raises MetadataStoreUnavailable."""
        ...

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult: ...


class MemoryStore:
    """Forgets all when its process ends.  One controller's own, or shared by those of a test."""

    def __init__(self) -> None:
        self._records: dict[str, GroupRecord] = {}

    def read(self, key: str, then: OnRead) -> None:
        then(self._records.get(key))

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        assert record.version == expected_version + 1, "each write moves the version by one"
        found_record = self._records.get(key)
        if (found_record.version if found_record else 0) != expected_version:
            then(WriteResult(WriteOutcome.CONFLICT, found_record))
            return
        self._records[key] = record
        then(WriteResult(WriteOutcome.WRITTEN, record))


def judge(
    requested: GroupRecord, expected_version: int, record: GroupRecord | None, reason: str
) -> WriteResult:
    """What became of a write whose answer is lost, by what was read afterwards.

    Equal content means that it, or one just like it, was written.  A version that has moved on
    otherwise means that it never can be.  The expected version says nothing: the write may be on
    its way, and the read may be old.
    """
    if record == requested:
        return WriteResult(WriteOutcome.WRITTEN, record)
    if record is not None and record.version > expected_version:
        return WriteResult(WriteOutcome.CONFLICT, record)
    return WriteResult(WriteOutcome.UNKNOWN, record, reason)
