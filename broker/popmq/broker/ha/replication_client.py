"""ReplicationClient: follows the master of one epoch: agrees where the logs part, copies,
acknowledges.

The invariant (R21, R23): nothing is appended, acknowledged or taken for confirmed before this
log was cut to what the master has, on the answer of this very connection; and what is
acknowledged is on the disk.
"""

import logging
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from popmq.broker.ha.catch_up_progress import CatchUpProgress
from popmq.broker.ha.differing_snapshots import OnPiece
from popmq.broker.ha.epoch_file import EpochFile, consistent_point
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.master_session import MasterSession
from popmq.broker.ha.snapshot_download import SnapshotDownload
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.slave_store import SlaveStore
from popmq.common.disk import is_shortage
from popmq.common.errors import PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.protocol.replication_payloads import (
    Block,
    HandshakeReply,
    MasterTimers,
    TablesMark,
)
from popmq.common.record.message import BadRecord
from popmq.common.settings.settings import Settings

logger = logging.getLogger(__name__)

AHEAD_FETCHES = 8  # received and not yet on the disk; then the slave waits for its disk


class Phase(Enum):
    RESTING = "resting"  # until it may try (again)
    SHAKING = "shaking hands"
    CUTTING = "cutting"
    COPYING = "copying a snapshot"
    FOLLOWING = "following"
    ENDED = "ended"


class RebuildRequired(Exception):
    """This log cannot be brought to the master's by cutting and copying: a new store has to be."""


class InvariantBroken(AssertionError):
    """What is confirmed would have to go: the broker stops before it does harm (R22)."""


class FollowingBroker(Protocol):
    """The broker whose log is kept like the master's."""

    copying: CatchUpProgress

    @property
    def log_id(self) -> str: ...

    @property
    def tables_mark(self) -> TablesMark:
        """What the master is to know of this store's tables."""
        ...

    def on_useless_log(self, reason: str) -> None:
        """This log cannot be brought to the master's."""
        ...

    def on_broken(self, broken: BaseException) -> None:
        """What must never happen."""
        ...

    def on_timers(self, timers: MasterTimers) -> None:
        """The master's TimerCheckPoint."""
        ...


class ReplicationClient:
    """`members` are the record's set; `store` follows (`MessageStore.follow`)."""

    def __init__(
        self,
        store: MessageStore,
        identity: Identity,
        epochs: EpochFile,
        port: Port,
        settings: Settings,
        broker: FollowingBroker,
        *,
        members: frozenset[str],
        now_ms: Callable[[], int],
        snapshot: SnapshotDownload,
    ) -> None:
        self.phase = Phase.RESTING
        self.cutting = False  # goes on when this side is stopped
        self.truncations = 0
        self.truncated_bytes = 0
        self.master_end = 0
        self._snapshot = snapshot
        self._store = store
        self._identity = identity
        self._epochs = epochs
        self._broker = broker
        self._settings = settings.replication
        self._node = settings.node
        self.members = members
        self._timer_sync_ms = settings.timer.checkpoint_sync_ms
        self._now_ms = now_ms
        self._link = MasterSession(port, now_ms, on_lost=self._rest)
        self._epoch = identity.epoch
        self._session = 0
        self._confirmed = 0  # as the master told it, in this session
        self._acked = -1
        self._marked = TablesMark.EQUAL  # in the last acknowledgement
        self._round = 0  # of the master's last block
        self._acking = self._fetching = self._asking_timers = False
        self._timers_due_ms = 0

    # -- from outside

    def step(self) -> int:
        """What time asks for. Returns how much was done."""
        now_ms = self._now_ms()
        if self.phase is Phase.RESTING and self._link.can_retry(now_ms):
            self._shake_hands()
            return 1
        if self.phase is Phase.COPYING:
            self._snapshot.step()
        if self.phase is not Phase.FOLLOWING:
            return 0
        if self._identity.copying and not self._slave.apply.rebuilding:
            if not self._wrote(self._identity.copied):
                return 0
            logger.info("the copy is whole", extra={"position": self._slave.applied})
        self._fetch()
        self._ack()
        self._broker.copying.look(self._store.end, self.master_end, now_ms)
        if now_ms >= self._timers_due_ms and not self._asking_timers:
            self._timers_due_ms = now_ms + self._timer_sync_ms
            self._ask_timers()
        return 0

    def durable(self, position: int) -> None:
        """This disk has everything below `position`: the master may count on it (R23)."""
        self._ack()
        self._fetch()

    def stop(self) -> None:
        """Another order came: nothing that is on its way counts any more."""
        self.phase = Phase.ENDED
        self._link.end()

    def _wrote(self, write: Callable[[], None]) -> bool:
        """Whether a small file was written; if not, for want of room or descriptors, this session
        is over and the next one tries again."""
        try:
            write()
        except OSError as error:
            if not is_shortage(error):
                raise
            self._link.fail(str(error))
            return False
        return True

    # -- the handshake

    def _shake_hands(self) -> None:
        self.phase = Phase.SHAKING
        self._session, self._acked, self._round = 0, -1, 0
        self._acking = self._fetching = self._asking_timers = False
        body = replication.encode_handshake(
            replication.Handshake(
                self._epoch,
                self._identity.store_id,
                self._node,
                self._broker.log_id,
                self._store.end,
                self._store.replicas.segment_bytes,
                replication.SIGNING_KEYS,
            )
        )
        self._link.begin()
        self._link.request(Kind.HANDSHAKE, body, 2_000, self._shaken)

    def _shaken(self, body: bytes) -> None:
        reply = replication.decode_handshake_reply(body)
        if reply.epoch != self._epoch:  # R10; the master would not have answered
            self._link.fail(f"the master speaks of epoch {reply.epoch}")
            return
        self.master_end = reply.end
        if not self._wrote(lambda: self._epochs.cut_suffix(self._store.end)):  # after a cut
            return
        try:
            point = self._point(reply)
        except RebuildRequired as reason:
            self.stop()
            self._broker.on_useless_log(str(reason))
            return
        except InvariantBroken as broken:
            self.stop()
            self._broker.on_broken(broken)
            return
        if point < self._store.end:
            self._cut(point, reply)
        elif self._identity.copying and not self._snapshot.ready and reply.start > 0:
            self._copy_snapshot(reply)
        else:
            self._agreed(reply)

    def _point(self, reply: HandshakeReply) -> int:
        """Up to where both logs are the same (R21); Rebuild when that is of no use."""
        own_id, end = self._identity.store_id, self._store.end
        if not self._epochs.entries:  # nothing was ever appended
            began = not self._identity.copying or self._snapshot.ready
            if began and end < reply.start:
                raise RebuildRequired(f"it is empty, and the master's log begins at {reply.start}")
            return end
        point = consistent_point(self._epochs.entries, end, reply.entries, reply.end)
        # The first master may lose all that it wrote while nothing is confirmed (R21: none is 0).
        began = self._store.confirmed > 0 or self._store.start > 0
        broken = began if point is None else point < self._store.confirmed
        if own_id in self.members and broken:
            raise InvariantBroken(
                f"the master of epoch {self._epoch} agrees with this log up to {point}, but it is "
                f"confirmed up to {self._store.confirmed}, and this store is in the set"
            )
        if point is None:
            raise RebuildRequired("the master's log and this one have no epoch in common")
        if point < self._store.confirmed:
            raise RebuildRequired(
                f"the master's log parts from this one at {point}, which was applied"
            )
        if point < reply.start:
            raise RebuildRequired(f"the master's log begins at {reply.start}, behind {point}")
        if point <= self._store.start:
            raise RebuildRequired(f"the master's log parts from this one at {point}")
        return point

    def _cut(self, point: int, reply: HandshakeReply) -> None:
        """Remove what the master never had: the log first, then what says whose it was."""
        self.phase = Phase.CUTTING
        self.cutting = True
        gone = self._store.end - point
        logger.warning(
            "log truncated",
            extra={"node": self._node, "position": point, "bytes": gone, "epoch": self._epoch},
        )
        self.truncations += 1
        self.truncated_bytes += gone

        def done() -> None:
            self.cutting = False
            goes_on = self.phase is Phase.CUTTING
            if goes_on:
                self.phase = Phase.SHAKING
            if self._wrote(lambda: self._epochs.cut_suffix(point)) and goes_on:
                self._wrote(lambda: self._agreed(reply))

        self._slave.truncate(point, done)

    def _copy_snapshot(self, reply: HandshakeReply) -> None:
        """The records before the master's first are known to its snapshot only (D1)."""
        self.phase = Phase.COPYING
        self._session = reply.session
        logger.info(
            "copying a snapshot",
            extra={"position": reply.snapshot_position, "bytes": reply.snapshot_bytes},
        )

        def done() -> None:
            if self.phase is Phase.COPYING and self._session == reply.session:
                self._agreed(reply)

        def bad(reason: str) -> None:
            self.stop()
            self._broker.on_useless_log(reason)

        own_id, failed = self._identity.store_id, self._link.fail
        self._snapshot.fetch(self._link, reply, own_id, done=done, failed=failed, bad=bad)

    def _agreed(self, reply: HandshakeReply) -> None:
        """From here on this log is the beginning of the master's, or of what it has of it."""
        self.phase = Phase.FOLLOWING
        self._session = reply.session
        if self._identity.copying and not self._snapshot.ready:
            self._identity.copied()  # it begins where the log did: any part of that is whole
        self._timers_due_ms = self._now_ms()
        self._broker.copying.begin(self._store.end, reply.end, self._now_ms())
        self._link.mark_healthy()
        logger.info(
            "following the master",
            extra={"epoch": self._epoch, "position": self._store.end, "end": reply.end},
        )
        self._take_confirmed(reply.confirmed)
        self._ack()
        self._fetch()

    # -- the log

    def _fetch(self) -> None:
        behind = self._store.end - self._store.durable
        if (
            self._fetching
            or self.phase is not Phase.FOLLOWING
            or behind > AHEAD_FETCHES * self._settings.fetch_bytes
        ):
            return
        self._fetching = True
        wait_ms = self._settings.fetch_wait_ms
        body = replication.encode_fetch(
            replication.Fetch(
                self._epoch,
                self._identity.store_id,
                self._session,
                self._store.end,
                self._settings.fetch_bytes,
                self._confirmed,
                wait_ms,
                self._round,
            )
        )
        self._link.request(Kind.FETCH, body, wait_ms + 2_000, self._fetched)

    def _fetched(self, body: bytes) -> None:
        block = replication.decode_block(body)
        self._fetching = False
        if block.epoch != self._epoch:
            self._link.fail(f"the master speaks of epoch {block.epoch}")
            return
        self.master_end = max(self.master_end, block.end)
        self._round = block.round
        if block.data:
            try:
                self._take_block(block)
            except BadRecord as error:
                logger.error("a block of log was refused", extra={"reason": str(error)})
                self._link.fail(str(error))
                return
            except PopmqError as error:  # the disk is full
                self._link.fail(str(error))
                return
        self._take_confirmed(block.confirmed)
        self._fetch()

    def _take_block(self, block: Block) -> None:
        """Append it, once its epoch is on the disk (R6, R23). BadRecord when it does not fit."""
        end, entries = self._store.end, self._epochs.entries
        if block.position != end:
            raise BadRecord(f"a block of position {block.position}, but the log ends at {end}")
        last = entries[-1] if entries else None
        if last is not None and block.block_epoch == last.epoch:
            if block.epoch_start != last.start:
                raise BadRecord(f"epoch {last.epoch} begins at {block.epoch_start} there")
        elif last is not None and (block.block_epoch < last.epoch or block.epoch_start != end):
            raise BadRecord(f"epoch {block.block_epoch} of {block.epoch_start} behind {last}")
        elif block.block_epoch > self._epoch:
            raise BadRecord(f"epoch {block.block_epoch} in the log of epoch {self._epoch}")
        else:
            self._epochs.append(block.block_epoch, block.epoch_start)
        taken = self._slave.append_block(block.position, block.data)
        self._store.log_clock.sample(taken.log_ms, epoch=self._epoch)

    # -- acks

    def _ack(self) -> None:
        durable, mark = self._store.durable, self._broker.tables_mark
        if (
            self._acking
            or self.phase is not Phase.FOLLOWING
            or self._identity.copying  # its log has no tables yet: it could not be elected
            or (durable <= self._acked and mark is self._marked)
        ):
            return
        self._acking, self._acked, self._marked = True, durable, mark
        body = replication.encode_acked(
            replication.Acked(self._epoch, self._identity.store_id, self._session, durable, mark)
        )

        def taken(body: bytes) -> None:
            reply = replication.decode_acked_reply(body)
            self._acking = False
            if reply.epoch != self._epoch:
                self._link.fail(f"the master speaks of epoch {reply.epoch}")
                return
            self._take_confirmed(reply.confirmed)
            self._ack()

        self._link.request(Kind.ACKED, body, 2_000, taken)

    def _take_confirmed(self, confirmed: int) -> None:
        """Told by the master of this session, after this log was cut (R17, R21)."""
        self._confirmed = max(self._confirmed, confirmed)
        self._store.confirm(min(self._confirmed, self._store.end))

    # -- a snapshot of the master, to be looked at (differing_snapshots.py)

    @property
    def session(self) -> int:
        """0 while there is none."""
        return self._session if self.phase is Phase.FOLLOWING else 0

    def read_snapshot(self, position: int, offset: int, size: int, on_piece: OnPiece) -> None:
        own_id = self._identity.store_id
        body = replication.encode_read_snapshot(
            replication.ReadSnapshot(self._epoch, own_id, self._session, position, offset, size)
        )
        self._link.request(Kind.READ_SNAPSHOT, body, 10_000, on_piece, on_piece)

    # -- timers

    def _ask_timers(self) -> None:
        self._asking_timers = True
        body = replication.encode_ask_timers(
            replication.TimerCheckPointRequest(self._epoch, self._identity.store_id, self._session)
        )

        def received(body: bytes) -> None:
            self._asking_timers = False
            timers = replication.decode_master_timers(body)
            if timers.epoch == self._epoch:
                self._broker.on_timers(timers)

        self._link.request(Kind.TIMER_CHECK_POINT, body, 2_000, received)

    @property
    def _slave(self) -> SlaveStore:
        slave = self._store.slave
        assert slave is not None, "the store of a slave follows"
        return slave

    # -- trouble

    def _rest(self) -> None:
        """The session is over. A cut that began goes on and is not undone by that."""
        if self.phase in (Phase.SHAKING, Phase.COPYING, Phase.FOLLOWING):
            self.phase = Phase.RESTING
