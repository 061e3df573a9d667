"""SnapshotDownload: a master's snapshot on its way into the empty store of a slave.

The records before the master's first are known to its snapshots only (D1).  Until the log that
is copied behind it has come up to it, the store is no whole one (Identity.copying).
"""

from collections.abc import Callable

from popmq.broker.ha.master_session import MasterSession
from popmq.broker.persistence.snapshot_install import SnapshotInstall
from popmq.common.errors import PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.replication_payloads import HandshakeReply

PIECE_BYTES = 1 << 20
PIECE_MS = 10_000
UNWRITTEN_BYTES = 8 << 20  # received, and not on the disk yet


class SnapshotDownload:
    """One for each life of a store. `ready`: the tables are in, the log may come."""

    def __init__(self, begin: Callable[[int], SnapshotInstall]) -> None:
        self._begin = begin
        self._install: SnapshotInstall | None = None
        self._finishing = False
        self._ask: Callable[[], None] | None = None  # waits for the disk
        self._done: Callable[[], None] = lambda: None
        self._bad: Callable[[str], None] = lambda reason: None
        self.ready = False

    def step(self) -> None:
        """The disk may have come after."""
        install, ask = self._install, self._ask
        if ask is not None and install is not None and install.pending_bytes <= UNWRITTEN_BYTES:
            self._ask = None
            ask()

    def fetch(
        self,
        link: MasterSession,
        reply: HandshakeReply,
        store_id: str,
        *,
        done: Callable[[], None],
        failed: Callable[[str], None],
        bad: Callable[[str], None],
    ) -> None:
        """Get the snapshot that the master named, from its beginning; `done` when it is in.

        `failed` says why this session is of no use, `bad` why the store has to be begun anew.
        """
        self._done, self._bad = done, bad
        if self._finishing:
            return  # all of one is here: it goes in, whoever asks
        if not reply.snapshot_position:
            failed("the master's log does not begin at 0, and it has no snapshot")
            return
        try:
            install = self._install = self._begin(reply.start)
        except PopmqError as refusal:
            failed(str(refusal))
            return

        def ask() -> None:
            body = replication.encode_read_snapshot(
                replication.ReadSnapshot(
                    reply.epoch,
                    store_id,
                    reply.session,
                    reply.snapshot_position,
                    install.offset,
                    PIECE_BYTES,
                )
            )
            link.request(Kind.READ_SNAPSHOT, body, PIECE_MS, came)

        def came(data: bytes) -> None:
            size = install.offset + len(data)
            if not data or size > reply.snapshot_bytes:
                failed(f"the snapshot has {size} bytes, not {reply.snapshot_bytes}")
                return
            install.append_chunk(data)
            if size == reply.snapshot_bytes:
                self._finishing = True
                install.finish(self._finished)
            elif install.pending_bytes > UNWRITTEN_BYTES:
                self._ask = ask
            else:
                ask()

        ask()

    def _finished(self, trouble: str) -> None:
        if trouble:
            self._bad(trouble)
        else:
            self.ready = True
            self._done()
