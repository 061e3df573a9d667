"""DifferingSnapshots: keeps both snapshots of a position at which the tables are not the master's.

`<data>/differing/own/<position>` and `<data>/differing/master/<position>`, the newest two pairs.
A rebuild of the store does not remove them; `popmq doctor diff` reads them
(docs/concepts/doctor.md).
"""

import logging
from collections.abc import Callable
from typing import Protocol

from popmq.broker.persistence.snapshot import snapshot_names
from popmq.common.disk import Disk
from popmq.common.errors import PopmqError
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

KEPT_PAIRS = 2
PIECE_BYTES = 1 << 20

OnPiece = Callable[[bytes | PopmqError], None]


class SnapshotReader(Protocol):
    """A session with the master."""

    @property
    def session(self) -> int:
        """0: there is none now."""
        ...

    def read_snapshot(self, position: int, offset: int, size: int, on_piece: OnPiece) -> None:
        """Not answered when the session ends before."""
        ...


class DifferingSnapshots:
    """One for each life of the broker. `readers` may wait for the disk."""

    def __init__(self, disk: Disk, data: str, readers: Flusher) -> None:
        self._disk = disk
        self._data = data
        self._folder = f"{data}/differing"
        self._readers = readers
        self._position = 0
        self._offset = 0  # of the master's snapshot: bytes that are on the disk
        self._busy = False
        self._session = 0  # that was asked for a piece; 0: none is awaited
        self._settled = 0  # this position's pair is kept, or cannot be

    def settled(self, position: int) -> bool:
        """Whether nothing more can be kept of that position."""
        return self._settled == position

    def step(self, position: int, master: SnapshotReader | None) -> None:
        """Copy the next piece of what is missing of that position's pair."""
        if self._settled == position or self._busy:
            return
        if position != self._position:
            self._position, self._offset, self._session = position, 0, 0
            self._run(self._keep_own, self._own_kept)
            return
        session = master.session if master is not None else 0
        if master is not None and session and session != self._session:
            self._offset = 0  # each session begins with the first byte
            self._ask(master, session)

    # -- own

    def _path(self, origin: str) -> str:
        return f"{self._folder}/{origin}/{self._position:020d}"

    def _keep_own(self) -> None:
        """The snapshot folder keeps two: a copy stays when they are replaced, or wiped."""
        try:
            source = self._disk.open(f"{self._data}/snapshot/{self._position:020d}")
        except FileNotFoundError:
            return
        try:
            offset = 0
            while data := source.read(PIECE_BYTES, offset):
                self._write("own", data, offset)
                offset += len(data)
        finally:
            source.close()
        self._finish("own")

    def _own_kept(self) -> None:
        if self._disk.exists(self._path("master")):  # before a restart
            self._settle()

    # -- the master's

    def _ask(self, master: SnapshotReader, session: int) -> None:
        position, self._session = self._position, session

        def written() -> None:
            if master.session == session:
                self._ask(master, session)

        def came(piece: bytes | PopmqError) -> None:
            if position != self._position or session != self._session:
                return
            if isinstance(piece, PopmqError):
                self._give_up(str(piece))
            elif piece:
                offset = self._offset
                self._offset += len(piece)
                self._run(lambda: self._write("master", piece, offset), written)
            elif not self._offset:
                self._give_up("it is empty")
            else:
                self._run(lambda: self._finish("master"), self._settle)

        master.read_snapshot(position, self._offset, PIECE_BYTES, came)

    def _give_up(self, reason: str) -> None:
        logger.warning(
            "the master's snapshot is not kept",
            extra={"position": self._position, "reason": reason},
        )
        self._settle()

    def _settle(self) -> None:
        self._settled = self._position
        logger.info(
            "snapshots of differing tables are kept",
            extra={"position": self._position, "folder": self._folder},
        )

    # -- files

    def _run(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        self._busy = True

        def done(error: BaseException | None) -> None:
            self._busy = False
            if error is None:
                then()
            else:
                self._give_up(f"it cannot be written: {error}")

        self._readers.submit(work, done)

    def _write(self, origin: str, data: bytes, offset: int) -> None:
        self._disk.make_folder(f"{self._folder}/{origin}")
        file = self._disk.open(self._path(origin) + ".new", create=True)
        try:
            if not offset:
                file.truncate(0)
            file.write(data, offset)
        finally:
            file.close()

    def _finish(self, origin: str) -> None:
        folder, path = f"{self._folder}/{origin}", self._path(origin)
        file = self._disk.open(path + ".new")
        try:
            file.sync()
        finally:
            file.close()
        self._disk.replace(path + ".new", path)
        kept = snapshot_names(self._disk, folder)[-KEPT_PAIRS:]
        for name in self._disk.names(folder):
            if name not in kept:
                self._disk.remove(f"{folder}/{name}")
        self._disk.sync_folder(folder)
