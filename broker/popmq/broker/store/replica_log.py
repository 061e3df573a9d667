"""ReplicaLog: the log as other replicas read it, and as a slave gets it.

A master gives whole records from any position (`recent`); a slave takes them at its own end
(`append_block`) and removes what its new master never had (`cut`).  Both logs are equal byte by
byte, so one position means the same on every replica (docs/concepts/replication.md).
"""

from collections.abc import Callable

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.group_commit import GroupCommit
from popmq.broker.log.log_block import LogBlock, checked_block, whole_records
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import HEADER_SIZE


class ReplicaLog:
    def __init__(
        self,
        log: CommitLog,
        commit: GroupCommit,
        on_block: Callable[[LogBlock], None],
        before_truncate: Callable[[int], None],
    ) -> None:
        """A slave's tables hear of what is appended, and of a cut before it happens."""
        self._log = log
        self._commit = commit
        self._on_block = on_block
        self._before_truncate = before_truncate

    @property
    def segment_bytes(self) -> int:
        return self._log.segment_end(0)

    def trim_tail(self) -> None:
        """After a batch reached the disk."""
        if self._log.tail is not None:
            self._log.tail.trim(self._commit.durable)

    def read_tail(self, position: int, limit: int) -> bytes | None:
        """Whole records from `position`, where one begins: at least one, or `limit` bytes of them.

        They all lie in one segment.  b"" when there is nothing behind `position` yet, None when
        it is not in this log (any more).  ColdRead instead of waiting for the disk.
        """
        log, durable = self._log, self._commit.durable
        if not log.start <= position <= log.end:
            return None
        until = log.segment_end(position)
        if log.tail is not None:
            tail = log.tail.read(position, limit, until)
            if tail is not None:
                return tail
        if position >= durable:
            return b""  # on its way to the disk, or nothing at all
        most = min(until, durable) - position
        data = log.view_warm(position, min(max(limit, HEADER_SIZE), most))
        count = whole_records(data, limit)
        if not count:
            size = int.from_bytes(data[:4], "big")  # the first one is larger than `limit`
            data = log.view_warm(position, min(size, most))
            count = whole_records(data, size)
        if not count:
            raise StoreDamaged(
                f"{log.path_of(position)}: no record begins at position {position}: "
                "run `popmq doctor`"
            )
        return bytes(data[:count])

    def append_block(self, position: int, data: bytes) -> LogBlock:
        """Take a master's records at this log's end; `on_durable` says when they are on the disk.

        BadRecord, with nothing changed, unless they are intact and follow on what is here.
        """
        block = checked_block(position, data, segment_end=self._log.segment_end(position))
        self._log.append_block(block)
        self._commit.schedule_flush()
        self._on_block(block)
        return block

    def truncate(self, position: int, *, known: int, done: Callable[[], None]) -> None:
        """Remove what was appended from `position` on, physically and durably; then `done`.

        A record has to begin there, `known` is where one begins at or below it.  Never below
        what is confirmed or applied (R22): that, like a position inside a record, breaks a rule.
        """
        self._before_truncate(position)
        self._commit.truncate(position, known, done)
