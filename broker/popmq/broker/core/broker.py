"""Broker: wires store, metadata and pop together, orders their steps, and decides nothing.

No asyncio in here: a shell (server.py) or a test under virtual time calls the methods and
`step`.  Every method that appends returns at once; the caller replies to its client when
`when_acks_confirmed` runs its callback.
"""

import random

from popmq.broker.core.construction import (
    build_diagnostics,
    build_expiries,
    build_followers,
    build_receiving,
    build_records,
    build_remoting,
    build_sending,
    build_tables,
)
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE
from popmq.broker.filter.sql92 import SqlFilters
from popmq.broker.meta.registry import Registry
from popmq.broker.operations.offset_reset import ResetMarks
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.retention import LiveBody
from popmq.broker.pop.revive_service import RENEW_LIMIT_MS
from popmq.broker.store.message_store import MessageStore, ReplicaListener, StoreThreads
from popmq.common import topics
from popmq.common.clock import Clock, LogClock
from popmq.common.disk import Disk
from popmq.common.settings.settings import Settings
from popmq.common.topics import SubscriptionGroup, TopicConfig

SECRET_BYTES = 32
KEY_SLACK_MS = 600_000  # how long ending a transaction again still returns OK


class Broker:
    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        waits: Clock | None = None,
        threads: StoreThreads,
        rng: random.Random,
        log_clock: LogClock | None = None,
        node: ReplicaListener | None = None,
    ) -> None:
        self.settings, self.clock, self.disk = settings, clock, disk
        self.rng = rng  # makes keys and ids
        self.waits = waits or clock
        self.epoch_start = EpochStart()  # what `start` decided about the epoch before
        self.store = store = MessageStore(
            disk, settings.broker.data, settings.store, clock, threads, self, log_clock, node
        )
        self.registry = Registry(store, self, queue_limit=settings.topic.queues_total)
        self.deliveries = Deliveries(store, settings.pop, self.on_unblocked)
        self.table, self.buffer = self.deliveries.table, self.deliveries.buffer
        tables = build_tables(settings, clock, self.waits, store, self.registry, self.deliveries)
        self.metadata_resolver, self.polling = tables.metadata_resolver, tables.polling
        self.send_deduplication, self.lookup = tables.send_deduplication, tables.lookup
        receiving = build_receiving(tables, _rng_of_visible_choices(rng))
        self.pop, self.fifo, self.lites = receiving.pop, receiving.fifo, receiving.lites
        self.operations, self.ends = receiving.operations, receiving.ends
        self.sql_filters = SqlFilters()
        sending = build_sending(tables, disk, threads.housekeeper)
        self.timers, self.transactions = sending.timers, sending.transactions
        self.sends = sending.service
        self.followers = build_followers(tables)
        self.remoting = build_remoting(tables, self.timers, self.operations.pull_ends)
        self.diagnostics = build_diagnostics(tables, self.pop, sending, self.ends)
        self.expiries = build_expiries(tables, self.lites)
        self.records = build_records(
            tables, sending, self.lites, self.remoting.send_back, self._on_promoted
        )

    # -- start and stop

    def start(self, earlier_start: EpochStart | None = None) -> None:
        """Recover, and begin a new epoch as master. Serve when `when_acks_confirmed` runs its
        callback.

        `earlier_start` is the `epoch_start` of another start on the same log.  With it both starts
        decide the same about unanswered deliveries, so that their tables can be compared.
        """
        self.open()
        self.store.recover(self.records.applier.apply)
        self.timers.recover()
        self._begin()
        if earlier_start is None and not self.store.stopped_cleanly:
            lived = self.timers.files.checkpoint.lived
            earlier_start = EpochStart.after(self.store.metrics.newest, lived)
        self.epoch_start = start = earlier_start or EpochStart()
        self.store.start_epoch(start.encode())
        self.table.start_epoch(self.store.epoch, start.unanswered_from_ms)
        self._ensure_log_id_and_key()

    @property
    def serving(self) -> bool:
        """Whether this broker is master, and everything before its epoch is confirmed."""
        return self.store.slave is None

    def wall_ms_of(self, log_ms: int) -> int:
        """The approximate wall time of `log_ms`, for display; 0 stays 0."""
        return self.clock.wall_ms() - (self.store.log_ms() - log_ms) if log_ms else 0

    def stop(self) -> None:
        """Answer all waiting requests. The shell then closes the store when it is idle."""
        self.pop.catch_up.release_all()
        self.polling.answer_all_empty()
        self.transactions.checks.dismiss()
        self.remoting.members.dismiss()
        self.remoting.relay.dismiss()
        self.buffer.write_all()

    def close(self) -> None:
        """Close after a clean stop: everything is confirmed, and the flushers are idle."""
        self.timers.service.close()
        self.store.close()

    def release_files(self) -> None:
        """Close every file and write nothing; after a crash in tests, or a failed start."""
        self.timers.service.release_files()
        self.store.release_files()

    def step(self) -> int:
        """One round of the background work; returns how much was done."""
        if not self.serving:
            return self.records.slave_lifecycle.step()
        done = self.timers.step() + self.send_deduplication.step(self.store.log_ms())
        done += self.pop.catch_up.step() + self.buffer.step() + self.pop.revive.step()
        done += self.fifo.parking.step()
        self.deliveries.described.forget(self.store.log_ms())
        done += self.diagnostics.step() + self.polling.step(self.waits.boot_ms())
        done += self.transactions.checks.step(
            now_ms=self.waits.boot_ms(), log_ms=self.store.log_ms()
        )
        self.lites.step(self.waits.boot_ms())
        self.remoting.members.step(self.waits.boot_ms())
        self.remoting.relay.step(self.waits.boot_ms())
        self.remoting.leases.step(self.waits.boot_ms())
        done += self.metadata_resolver.step(self.clock.boot_ms())
        done += self.expiries.lites.step(self.clock.boot_ms(), self.store.log_ms())
        done += self.expiries.topics.step(now_ms=self.clock.boot_ms())
        done += self.expiries.groups.step(now_ms=self.clock.boot_ms())
        return done + self.store.step()

    # -- events of the store (StoreListener)

    def before_batch(self) -> None:
        self.buffer.before_batch()

    def before_snapshot(self) -> None:
        self.records.replica.before_snapshot()

    def on_dispatched(self, grown: set[tuple[int, int]]) -> None:
        self.records.wakeups.on_dispatched(grown)

    def on_relocated(self, body: LiveBody) -> None:
        self.records.applier.moved(body)

    def on_snapshot_made(self, position: int, state_hash: int) -> None:
        self.records.replica.on_snapshot_made(position, state_hash)

    def on_log_start(self, position: int) -> None:
        self.records.replica.on_log_start(position)

    # -- events of the tables

    def on_unblocked(self, topic_id: int, group_id: int, queue_id: int) -> None:
        self.records.wakeups.on_unblocked(topic_id, group_id, queue_id)

    def on_topic_deleted(self, topic: TopicConfig) -> None:
        self.table.drop_topic(topic.id)
        self.buffer.forget_deleted()
        self.pop.catch_up.forget_topic(topic.name)
        self.deliveries.redriven.drop_topic(topic.id)
        self.transactions.table.drop_topic(topic.id)
        self.polling.answer_all_empty(topic_id=topic.id)
        self.lites.remove_subscriber(topic_id=topic.id)
        self.sends.on_topic_deleted(topic.name)
        self.ends.drop(topic=topic.name)
        self.diagnostics.audit.on_topic_deleted(topic)

    def on_group_deleted(self, group: SubscriptionGroup) -> None:
        self.table.drop_group(group.id)
        self.buffer.forget_deleted()
        self.polling.answer_all_empty(group_id=group.id)
        self.lites.remove_subscriber(group_id=group.id)
        self.ends.drop(group=group.name)

    # -- inside

    def open(self) -> None:
        """Open the store. `start` calls it; a slave calls it before it follows the log."""
        self.store.open()
        self.store.add_topic(topics.META_TOPIC_ID, topics.META_TOPIC)
        self.store.add_topic(topics.OFFSETS_TOPIC_ID, topics.OFFSETS_TOPIC)
        self.store.add_topic(
            topics.REVIVE_TOPIC_ID,
            topics.revive_topic(self.settings.cluster.name),
            unit_size=RECORD_SIZE,
        )
        self.timers.add_topic()
        self.transactions.add_topics()
        bodies = self.deliveries.bodies
        self.store.retention.live = (bodies, self.timers.bodies, self.transactions.bodies)
        self.store.retention.exact = (bodies,)
        self.store.snapshots.tables = (
            self.registry,
            self.registry.lites,
            self.table,
            self.table.parked,
            self.store.dispatch,
            self.deliveries.redriven,
            *self.timers.tables,
            self.send_deduplication,
            self.transactions.table,
            ResetMarks(self.table),
            self.remoting.send_back,
        )

    def _begin(self) -> None:
        """Begin the background work of a master; the tables are complete."""
        self.expiries.lites.begin()
        self.expiries.topics.run_all()
        self.deliveries.liveness.start_grace(self.store.log_ms())
        if not self.settings.replication.is_single:
            self.records.replica.begin()

    def _on_promoted(self) -> None:
        """Called when a promoted slave has applied everything, and all of it is confirmed."""
        self.timers.promote()
        self._begin()
        self._ensure_log_id_and_key()

    def _ensure_log_id_and_key(self) -> None:
        if not self.registry.log_id:
            self.registry.set_log_id(self.rng.randbytes(16).hex())
        if not self.registry.signing_keys:
            self.registry.set_receipt_key(self.rng.randbytes(SECRET_BYTES))

    def rotate_signing_key(self) -> None:
        """Older keys stay valid as long as receipt handles and transaction ids that they signed."""
        pop, transaction = self.settings.pop, self.settings.transaction
        life_ms = max(pop.invisible_max_ms, RENEW_LIMIT_MS, transaction.keep_ms)
        self.registry.rotate_signing_key(self.rng.randbytes(SECRET_BYTES), life_ms + KEY_SLACK_MS)


def _rng_of_visible_choices(rng: random.Random) -> random.Random:
    """A generator for choices that clients can see.  It differs from `rng`, so that these choices
    reveal nothing about keys.  A simulator has one seed, and one generator for both."""
    return random.Random(rng.getrandbits(128)) if isinstance(rng, random.SystemRandom) else rng
