"""SnapshotInstall: an empty slave begins with a master's snapshot, and with its log from its start.

The file comes in pieces.  Once it is whole the tables are restored from it in bounded steps and
this log begins where the master's does; what is copied then fills queues and key index only, up
to the snapshot's position.  There the snapshot gets its name, and the store is whole: a start
before that finds no snapshot, and the store has to be copied anew (docs/concepts/store.md).
"""

from collections import deque
from collections.abc import Callable, Iterator

from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.group_commit import GroupCommit
from popmq.broker.persistence.snapshot import (
    Snapshot,
    SnapshotHeader,
    read_snapshot,
)
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.common.disk import DiskFile, is_shortage
from popmq.common.errors import Code, Refused
from popmq.common.step_loop import Flusher, Work

_PIECES_PER_STEP = 4


class SnapshotInstall:
    def __init__(
        self,
        snapshots: SnapshotScheduler,
        log: CommitLog,
        commit: GroupCommit,
        *,
        start: int,
        restored: Callable[[SnapshotHeader], None],
    ) -> None:
        """`start` is where the master's log begins. Refused unless segments can begin there."""
        if start != log.segment_start(start):
            raise Refused(
                Code.BAD_REQUEST,
                f"the master's log begins at {start}, where no segment of this one begins: "
                "store.segment_bytes has to be the same on all replicas",
            )
        assert log.end == log.start == 0, "a snapshot is installed into an empty store only"
        self._snapshots = snapshots
        self._path = f"{snapshots.folder}/copied.new"
        self._log = log
        self._commit = commit
        self._restored = restored
        self._start = start
        self._file: DiskFile | None = None
        self._closed = False
        self._offset = 0
        self._found: Snapshot | None = None
        self._then: Callable[[str], None] = lambda trouble: None
        self._work: Iterator[None] | None = None
        self._jobs: deque[tuple[Flusher, Work, Work]] = deque()  # with what follows, in order
        self._held_up = False  # the machine was short of something for the first job
        self.pending_bytes = 0  # given, and not written yet

    @property
    def offset(self) -> int:
        """Bytes of the file that were given so far."""
        return self._offset

    def append_chunk(self, data: bytes) -> None:
        """The next bytes of the file."""
        offset = self._offset
        self._offset += len(data)
        self.pending_bytes += len(data)

        def done() -> None:
            self.pending_bytes -= len(data)

        self._submit(self._snapshots.flusher, lambda: self._write(data, offset), done)

    def finish(self, then: Callable[[str], None]) -> None:
        """That was all: restore the tables, and begin the log; `then` hears "" or what is wrong."""
        self._then = then

        def checked() -> None:
            if self._found is None:
                then(f"the snapshot that came is not whole, or older than the log at {self._start}")
                return
            self._log.set_end(self._start)
            self._submit(self._commit.flusher, lambda: self._log.restart_at(self._start), begun)

        def begun() -> None:
            assert self._found is not None
            self._work = self._restore(self._found)

        self._submit(self._snapshots.flusher, self._check, checked)

    def step(self) -> int:
        """A piece of the tables, or a job that was held up again; 1 for work done."""
        if self._held_up:
            self._held_up = False
            self._run()
        if self._work is None:
            return 0
        if next(self._work, self) is self:
            self._work = None
            self._then("")
        return 1

    def publish(self, position: int, then: Callable[[], None]) -> None:
        """The log is here up to the snapshot's position: it gets its name."""
        disk, target = self._snapshots.disk, f"{self._snapshots.folder}/{position:020d}"

        def rename() -> None:
            if disk.exists(self._path):
                disk.replace(self._path, target)
            else:  # renamed, and then there was no descriptor for the folder
                disk.sync_folder(self._snapshots.folder)

        self._submit(self._snapshots.flusher, rename, then)

    # -- inside

    def _write(self, data: bytes, offset: int) -> None:
        if self._file is None:
            self._snapshots.disk.make_folder(self._snapshots.folder)
            self._file = self._snapshots.disk.open(self._path, create=True)
            self._file.truncate(0)
        self._file.write(data, offset)

    def _check(self) -> None:
        if self._file is None:
            return
        if not self._closed:
            self._file.sync()
            self._file.close()
            self._closed = True
        self._snapshots.disk.sync_folder(self._snapshots.folder)
        snapshot = read_snapshot(self._snapshots.disk, self._path)
        if snapshot is not None and snapshot.head.position >= self._start:
            self._snapshots.log_starts_at(self._start)  # durable, before it does
            self._found = snapshot

    def _restore(self, snapshot: Snapshot) -> Iterator[None]:
        by_number = {table.table_number: table for table in self._snapshots.tables}
        for at, (number, content) in enumerate(snapshot.pieces()):
            if number in by_number:
                by_number[number].restore(content)
            if at % _PIECES_PER_STEP == 0:
                yield
        for table in self._snapshots.tables:
            table.restored()
            yield
        self._restored(snapshot.head)

    def _submit(self, flusher: Flusher, work: Work, then: Work) -> None:
        """Do it when what was submitted before is done; it may be begun more than once."""
        self._jobs.append((flusher, work, then))
        if len(self._jobs) == 1:
            self._run()

    def _run(self) -> None:
        flusher, work, _ = self._jobs[0]
        flusher.submit(work, self._ran)

    def _ran(self, error: BaseException | None) -> None:
        if is_shortage(error):
            self._held_up = True
            return
        if error is not None:
            self._commit.fail(error)
            return
        _, _, then = self._jobs.popleft()
        if self._jobs:
            self._run()
        then()
