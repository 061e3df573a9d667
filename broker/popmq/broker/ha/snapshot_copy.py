"""SnapshotCopy: a master's snapshot on its way to the disk of a slave that begins with it.

The file gets its name among the snapshots only when the copied log reaches it: then a start
finds both, as after any crash, and goes on from there.
"""

from collections.abc import Callable

from popmq.broker.ha.link import Link
from popmq.broker.store.snapshot import read_snapshot
from popmq.common import replication
from popmq.common.disk import Disk, DiskFile
from popmq.common.hop import Kind
from popmq.common.replication import HandshakeReply
from popmq.common.steps import Flusher

PIECE_BYTES = 1 << 20
PIECE_MS = 10_000
FILE_NAME = "copied-snapshot"


class SnapshotCopy:
    """`position` is that of the whole copy that is here; 0: there is none."""

    def __init__(self, disk: Disk, folder: str, writer: Flusher) -> None:
        self._disk = disk
        self._path = f"{folder}/{FILE_NAME}"
        self._folder = f"{folder}/snapshot"
        self._writer = writer
        self.position = 0
        self.copied_bytes = 0

    def is_enough(self, reply: HandshakeReply, log_end: int) -> bool:
        """Whether the log can be copied now: it begins at 0, or goes on towards this snapshot."""
        if not self.position:
            return reply.start == 0
        return log_end >= reply.start

    def fetch(
        self,
        link: Link,
        reply: HandshakeReply,
        store_id: str,
        *,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Get the snapshot that the master named, piece by piece; `done` when it is whole."""
        self.position = self.copied_bytes = 0
        wanted, size = reply.snapshot_position, reply.snapshot_bytes
        if not wanted:
            failed("the master has no snapshot yet, and its log does not begin at 0")
            return

        def ask() -> None:
            body = replication.encode_read_snapshot(
                replication.ReadSnapshot(
                    reply.epoch, store_id, reply.session, wanted, self.copied_bytes, PIECE_BYTES
                )
            )
            link.ask(Kind.READ_SNAPSHOT, body, PIECE_MS, came)

        def came(data: bytes) -> None:
            at = self.copied_bytes
            if not data or at + len(data) > size:
                failed(f"the snapshot of {wanted} has {at + len(data)} bytes, not {size}")
                return
            self._writer.submit(lambda: self._write(data, at), lambda error: written(error, data))

        def written(error: BaseException | None, data: bytes) -> None:
            if error is not None:
                failed(f"the snapshot cannot be written: {error}")
                return
            self.copied_bytes += len(data)
            if self.copied_bytes < size:
                ask()
            else:
                self._writer.submit(lambda: self._check(wanted), checked)

        def checked(error: BaseException | None) -> None:
            if error is not None:
                failed(f"the snapshot is not whole: {error}")
                return
            self.position = wanted
            done()

        ask()

    def publish(self, done: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Give it its name: from now on a start begins with it."""
        position = self.position

        def work() -> None:
            self._disk.make_folder(self._folder)
            self._disk.replace(self._path, f"{self._folder}/{position:020d}")

        def ended(error: BaseException | None) -> None:
            if error is not None:
                failed(error)
            else:
                done()

        self._writer.submit(work, ended)

    def _write(self, data: bytes, at: int) -> None:
        file: DiskFile = self._disk.open(self._path, create=True)
        try:
            if at == 0:
                file.truncate(0)
            file.write(data, at)
            file.sync()
        finally:
            file.close()

    def _check(self, position: int) -> None:
        found = read_snapshot(self._disk, self._path)
        if found is None or found.head.position != position:
            raise OSError(f"{self._path} is not the snapshot of {position}")
