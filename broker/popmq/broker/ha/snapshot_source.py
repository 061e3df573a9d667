"""SnapshotSource: the newest finished snapshot, for a slave that has to begin with one."""

from popmq.broker.persistence.snapshot import snapshot_names
from popmq.common.disk import Disk, is_shortage
from popmq.common.errors import Code, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import OnReply
from popmq.common.step_loop import Flusher


class SnapshotSource:
    """`folder` is the broker's data folder; `readers` may wait for the disk."""

    def __init__(self, disk: Disk, folder: str, readers: Flusher) -> None:
        self._disk = disk
        self._folder = f"{folder}/snapshot"
        self._readers = readers

    def newest(self) -> tuple[int, int]:
        """Position and bytes of the newest; (0, 0) when there is none. Unavailable while it
        cannot be opened."""
        try:
            return self._newest()
        except OSError as error:
            if not is_shortage(error):
                raise
            raise Unavailable(f"the snapshots of {self._folder} cannot be read: {error}") from error

    def _newest(self) -> tuple[int, int]:
        names = snapshot_names(self._disk, self._folder)
        if not names:
            return 0, 0
        file = self._disk.open(f"{self._folder}/{names[-1]}")
        try:
            return int(names[-1]), file.size()
        finally:
            file.close()

    def read(self, position: int, offset: int, size: int, on_reply: OnReply) -> None:
        """The bytes from `offset`; a refusal when the snapshot is not there any more."""
        blocks: list[bytes] = []

        def work() -> None:
            file = self._disk.open(f"{self._folder}/{position:020d}")
            try:
                blocks.append(file.read(size, offset))
            finally:
                file.close()

        def done(error: BaseException | None) -> None:
            if error is None:
                on_reply(blocks[0])
            else:
                text = f"the snapshot of position {position} cannot be read any more: {error}"
                on_reply(Refused(Code.NOT_FOUND, text))

        self._readers.submit(work, done)
