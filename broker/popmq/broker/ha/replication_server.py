"""ReplicationServer: gives the log to slaves, and turns what they acknowledge into confirmed (R10,
R15).

Everything that a slave says names epoch, store and session; what does not fit is refused and
counts for nothing.  No waiting in here: a FETCH with nothing to be told stays until `grown`,
`step` or its end.
"""

import logging
import random
from collections.abc import Callable, Mapping
from typing import Protocol

from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.memory_confirmation import MemoryConfirmation
from popmq.broker.ha.slave_progress import ByteRate, SlaveProgress, WaitingFetch
from popmq.broker.ha.snapshot_source import SnapshotSource
from popmq.broker.ha.sync_state import SyncState
from popmq.broker.ha.sync_state_set_updater import SyncStateSetOwner, SyncStateSetUpdater
from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, NotMaster, PopmqError, Refused
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.protocol.replication_payloads import (
    Block,
    HandshakeReply,
    MasterTimers,
    TablesMark,
)
from popmq.common.settings.replication_settings import ReplicationSettings

logger = logging.getLogger(__name__)

TELL_CONFIRMED_MS = 20  # who copies nothing hears of the confirmed position so much later
FOLLOWER_LIMIT = 32
# Between snapshots that are made only so that a slave compares its tables: one that does not know
# whether they are this master's, and one that knows that they were not.
COMPARE_MS = 30_000
COMPARE_AGAIN_MS = 300_000
NEAR_BLOCKS = 4  # of a slave that is to join: so many fetches behind the end


class LeadingBroker(Protocol):
    """The broker whose log this is."""

    @property
    def log_id(self) -> str:
        """Empty as long as the record that names the log was not applied."""
        ...

    def timer_check_point(self) -> MasterTimers:
        """Of this moment."""
        ...


class ReplicationServer:
    def __init__(
        self,
        store: MessageStore,
        sync: SyncState,
        epochs: EpochFile,
        snapshots: SnapshotSource,
        settings: ReplicationSettings,
        master: LeadingBroker,
        *,
        controllers: SyncStateSetOwner,
        now_ms: Callable[[], int],
        rng: random.Random,
    ) -> None:
        self.sync = sync
        self.followers: dict[str, SlaveProgress] = {}
        self.refused = 0
        self._store = store
        self._epochs = epochs
        self._snapshots = snapshots
        self._settings = settings
        self._master = master
        self._now_ms = now_ms
        self._rng = rng
        self._number = 0
        self._compared_ms = now_ms() - COMPARE_MS  # when the last such snapshot was asked for
        self._waiting: dict[int, SlaveProgress] = {}
        self._rate = ByteRate(settings.catch_up_bytes_per_second, settings.fetch_bytes, now_ms())
        self._cold = ColdReadRetry(store.readers)
        self.received = MemoryConfirmation(
            sync,
            self.followers,
            end=lambda: store.end,
            soon=lambda work: store.call_soon(work),
            nudge=self.grown,
        )
        self.keeper = SyncStateSetUpdater(
            sync,
            self.followers,
            controllers,
            laggard_ms=settings.laggard_ms,
            near_bytes=NEAR_BLOCKS * settings.fetch_bytes,
            began_ms=now_ms(),
        )

    # -- what the broker itself says

    def durable(self, position: int) -> None:
        """This disk has everything below `position` (R15)."""
        if self.sync.on_fsynced(self.sync.own_id, position):
            self._store.confirm(self.sync.confirmed)
        self.grown()  # without a tail in memory it can be read only now

    def grown(self) -> None:
        """Something was appended: whoever waits for it gets it."""
        for follower in list(self._waiting.values()):
            self._try(follower)

    def learn(self, *, epoch: int, version: int, members: frozenset[str]) -> None:
        """The record was read (R18, R20)."""
        before = self.sync.members
        if self.sync.on_record(epoch=epoch, version=version, members=members):
            self._store.confirm(self.sync.confirmed)
        self.received.release_ready()
        if self.sync.members != before:
            logger.info(
                "sync state set",
                extra={"members": sorted(self.sync.members), "version": self.sync.version},
            )

    def step(self) -> int:
        """Ends of waits, laggards and candidates. Returns how much was done."""
        now_ms = self._now_ms()
        done = self.keeper.step(end=self._store.end, now_ms=now_ms)
        every_ms = _compare_every_ms(self.followers, now_ms, self._settings.laggard_ms)
        if every_ms is not None and now_ms - self._compared_ms >= every_ms:
            self._compared_ms = now_ms
            self._store.snapshots.wanted = True
        for follower in list(self._waiting.values()):
            fetch = follower.fetch
            if fetch is None or fetch.reading:
                continue
            late = now_ms >= fetch.since_ms + TELL_CONFIRMED_MS
            if now_ms >= fetch.until_ms or (late and follower.sent_confirmed < self.sync.confirmed):
                self._answer(follower, fetch, b"")
            else:
                self._try(follower)
        return done

    def stop(self) -> None:
        """Not the master any more: nobody is told anything but that."""
        self.received.stop()
        for follower in list(self._waiting.values()):
            self._refuse_fetch(follower, NotMaster("this broker is not the master any more"))

    # -- what slaves ask

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Serve one request of a slave; returns a number for `cancel`."""
        self._number += 1
        try:
            self._serve(kind, body, on_reply)
        except PopmqError as refusal:
            self.refused += 1
            on_reply(refusal)
        return self._number

    def cancel(self, number: int) -> None:
        """The asker is gone, or does not wait any longer."""
        follower = self._waiting.pop(number, None)
        if follower is not None:
            follower.fetch = None
            follower.on_connection_closed(self._now_ms(), self._settings.laggard_ms)

    def lost(self, node: str) -> None:
        """A connection of that node ended, whether it waited for an answer or not."""
        for follower in self.followers.values():
            if follower.node == node:
                follower.on_connection_closed(self._now_ms(), self._settings.laggard_ms)

    def check_signing_keys(self) -> None:
        """Raises PRECONDITION_FAILED while a slave would ignore another key: as the next master it
        would refuse what that signs."""
        for follower in self.followers.values():
            if not follower.features & replication.SIGNING_KEYS:
                raise Refused(
                    Code.PRECONDITION_FAILED,
                    f"node {follower.node} runs a release that has one key for receipt handles: "
                    "upgrade it first",
                )

    def _serve(self, kind: Kind, body: bytes, on_reply: OnReply) -> None:
        match kind:
            case Kind.FETCH:
                self._fetch(replication.decode_fetch(body), on_reply)
            case Kind.ACKED:
                on_reply(self._acked(replication.decode_acked(body)))
            case Kind.HANDSHAKE:
                on_reply(self._handshake(replication.decode_handshake(body)))
            case Kind.READ_SNAPSHOT:
                part = replication.decode_read_snapshot(body)
                self._follower(part.epoch, part.store_id, part.session)
                size = min(part.max_bytes, self._settings.fetch_bytes)
                self._snapshots.read(part.snapshot_position, part.offset, size, on_reply)
            case Kind.TIMER_CHECK_POINT:
                asked = replication.decode_ask_timers(body)
                self._follower(asked.epoch, asked.store_id, asked.session)
                on_reply(replication.encode_master_timers(self._master.timer_check_point()))
            case _:
                raise Refused(Code.UNSUPPORTED, f"a master does not serve requests of {kind.name}")

    def _follower(self, epoch: int, store_id: str, session: int) -> SlaveProgress:
        """Who speaks, if it is this epoch's newest session of that store (R10)."""
        _check_epoch(self.sync, epoch)
        follower = self.followers.get(store_id)
        if follower is None or follower.session != session:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"session {session} of store {store_id[:32]} is over: shake hands again",
            )
        follower.mark_seen(self._now_ms())
        return follower

    def _handshake(self, asked: replication.Handshake) -> bytes:
        _check_epoch(self.sync, asked.epoch)
        log_id = self._master.log_id
        # One that was just elected may not have applied the record that names its log.
        if asked.log_id and log_id and asked.log_id != log_id:
            raise Refused(
                Code.FORBIDDEN,
                f"node {asked.node} has the log of another broker group ({asked.log_id[:32]}, "
                f"this one's is {log_id}): give it a data directory of its own",
            )
        segment_bytes = self._store.replicas.segment_bytes
        if asked.segment_bytes != segment_bytes:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"node {asked.node} has segments of {asked.segment_bytes} bytes, the master's have "
                f"{segment_bytes} (store.segment_bytes): the logs of a broker group are the same",
            )
        now_ms = self._now_ms()
        known = self.followers.get(asked.store_id)
        if known is not None:
            self._refuse_fetch(known, Refused(Code.PRECONDITION_FAILED, "a newer session began"))
        self._make_room(asked.store_id, now_ms)
        follower = SlaveProgress(
            store_id=asked.store_id,
            node=asked.node,
            session=self._rng.getrandbits(63) | 1,
            last_seen_ms=now_ms,
            caught_up_ms=known.caught_up_ms if known else now_ms,
            position=asked.end,
            mark_position=self._store.end,
            mark_ms=now_ms,
            tables=known.tables if known else TablesMark.EQUAL,
            features=asked.features,
        )
        self.followers[asked.store_id] = follower
        # The slave may have restarted, and lost its memory.
        self.sync.received_positions.pop(asked.store_id, None)
        logger.info("slave connected", extra={"node": asked.node, "end_bytes": asked.end})
        snapshot_position, snapshot_bytes = self._snapshots.newest()
        return replication.encode_handshake_reply(
            HandshakeReply(
                self.sync.epoch,
                self.sync.own_id,
                follower.session,
                log_id,
                self._store.start,
                self._store.end,
                self.sync.confirmed,
                snapshot_position,
                snapshot_bytes,
                self._epochs.entries,
            )
        )

    def _make_room(self, store_id: str, now_ms: int) -> None:
        """Stores that were rebuilt leave their old names behind."""
        if store_id in self.followers or len(self.followers) < FOLLOWER_LIMIT:
            return
        silent = [
            follower
            for follower in self.followers.values()
            if follower.is_silent(now_ms, self._settings.laggard_ms)
            and follower.store_id not in self.sync.maximal_set
        ]
        if not silent:
            raise Refused(
                Code.TOO_MANY_REQUESTS, f"{FOLLOWER_LIMIT} slaves are connected, which is the limit"
            )
        del self.followers[min(silent, key=lambda progress: progress.last_seen_ms).store_id]

    # -- acks

    def _acked(self, asked: replication.Acked) -> bytes:
        follower = self._follower(asked.epoch, asked.store_id, asked.session)
        if asked.position > self._store.end:
            raise Refused(
                Code.BAD_REQUEST,
                f"node {follower.node} acknowledges {asked.position}, but the log ends at "
                f"{self._store.end}",
            )
        follower.ack(asked.position, end=self._store.end, now_ms=self._now_ms())
        if asked.tables is not follower.tables:
            follower.tables = asked.tables
            logger.info(
                "tables of a slave", extra={"node": follower.node, "are": asked.tables.name}
            )
        if self.sync.on_fsynced(asked.store_id, asked.position):
            self._store.confirm(self.sync.confirmed)
        self.received.release_ready()
        follower.sent_confirmed = self.sync.confirmed
        reply = replication.AckedReply(self.sync.epoch, self.sync.confirmed)
        return replication.encode_acked_reply(reply)

    # -- the log

    def _fetch(self, asked: replication.Fetch, on_reply: OnReply) -> None:
        follower = self._follower(asked.epoch, asked.store_id, asked.session)
        self._refuse_fetch(follower, Refused(Code.PRECONDITION_FAILED, "a newer fetch came"))
        now_ms = self._now_ms()
        follower.position, follower.sent_confirmed = asked.position, asked.confirmed
        wait_ms = min(asked.wait_ms, self._settings.fetch_wait_ms)
        fetch = WaitingFetch(
            self._number, asked.position, asked.max_bytes, now_ms, now_ms + wait_ms, on_reply
        )
        follower.fetch = fetch
        self._waiting[fetch.number] = follower
        self.received.on_fetch(follower, asked)
        self.received.release_ready()
        self._try(follower)

    def _try(self, follower: SlaveProgress) -> None:
        """Answer its fetch if there is something to copy, and it may."""
        fetch = follower.fetch
        if fetch is None or fetch.reading:
            return
        if fetch.position == self._store.end:
            if follower.sent_round < self.received.heartbeat_round:
                self._answer(follower, fetch, b"")  # it is to speak again
            return
        limit = min(fetch.max_bytes, self._settings.fetch_bytes)
        held_back = follower.store_id not in self.sync.maximal_set
        if held_back and self._rate.left(self._now_ms()) <= 0:
            return
        try:
            data = self._read(fetch.position, limit)
        except ColdRead as cold:
            self._warm(follower, fetch, cold)
            return
        except PopmqError as refusal:
            self._refuse_fetch(follower, refusal)
            return
        if data:
            if held_back:
                self._rate.take(len(data))
            self._answer(follower, fetch, data)

    def _read(self, position: int, limit: int) -> bytes:
        """Whole records of one epoch; b"" when they are not to be read yet."""
        end = self._epochs.end_of_epoch(position, self._store.end)
        known = self._store.start <= position <= self._store.end
        data = (
            self._store.replicas.read_tail(position, min(limit, end - position)) if known else None
        )
        if data is None or self._epochs.entry_at(position) is None:
            raise Refused(
                Code.ILLEGAL_OFFSET,
                f"position {position} is not in the log, which begins at {self._store.start} "
                f"and ends at {self._store.end}: shake hands again",
            )
        return data

    def _warm(self, follower: SlaveProgress, fetch: WaitingFetch, cold: ColdRead) -> None:
        """Read on a thread that may wait (D3), then try again."""
        fetch.reading = True

        def warmed(error: BaseException | None) -> None:
            fetch.reading = False
            if follower.fetch is not fetch:
                return
            if error is not None:
                logger.error("cannot read the log for a slave", extra={"reason": str(error)})
                refusal = Refused(Code.INTERNAL_ERROR, f"the log cannot be read: {error}")
                self._refuse_fetch(follower, refusal)
            else:
                self._try(follower)

        self._cold.warm(cold, warmed)

    def _answer(self, follower: SlaveProgress, fetch: WaitingFetch, data: bytes) -> None:
        self._waiting.pop(fetch.number, None)
        follower.fetch = None
        follower.sent_round = self.received.heartbeat_round
        entry = self._epochs.entry_at(fetch.position)
        block_epoch, epoch_start = entry or (0, 0)
        follower.sent_confirmed = self.sync.confirmed
        block = Block(
            self.sync.epoch,
            block_epoch,
            epoch_start,
            fetch.position,
            self.sync.confirmed,
            self._store.end,
            data,
            follower.sent_round,
        )
        fetch.on_reply(replication.encode_block(block))

    def _refuse_fetch(self, follower: SlaveProgress, refusal: PopmqError) -> None:
        fetch, follower.fetch = follower.fetch, None
        if fetch is not None:
            self._waiting.pop(fetch.number, None)
            fetch.on_reply(refusal)


def _check_epoch(sync: SyncState, epoch: int) -> None:
    if epoch != sync.epoch:
        raise NotMaster(f"epoch {epoch} was asked for, this is the master of {sync.epoch}")


def _compare_every_ms(
    followers: Mapping[str, SlaveProgress], now_ms: int, laggard_ms: int
) -> int | None:
    """How often a slave that still speaks wants a snapshot to compare its tables with."""
    marks = {
        follower.tables
        for follower in followers.values()
        if not follower.is_silent(now_ms, laggard_ms)
    }
    if TablesMark.COMPARE in marks:
        return COMPARE_MS
    return COMPARE_AGAIN_MS if TablesMark.DIFFER in marks else None
