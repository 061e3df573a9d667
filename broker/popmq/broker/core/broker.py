"""Broker: wires store, metadata and pop together, orders their steps, and decides nothing.

No asyncio in here: a shell (server.py) or a test under virtual time calls the methods and
`step`.  Every method that appends returns at once; the caller tells its client once
`when_confirmed` says so.
"""

import random

from popmq.broker.core.meta_copies import MetaCopies
from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.core.replica_record_writer import ReplicaRecordWriter
from popmq.broker.core.send_service import SendService
from popmq.broker.core.slave_lifecycle import SlaveLifecycle
from popmq.broker.core.wakeups import Wakeups
from popmq.broker.deliveries.check_point_buffer import CheckPointBuffer
from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.client_liveness import ClientLiveness, ClientNames
from popmq.broker.deliveries.in_flight_bodies import InFlightBodies
from popmq.broker.deliveries.pop_check_point import RECORD_SIZE
from popmq.broker.deliveries.redriven_dead_letters import RedrivenDeadLetters
from popmq.broker.diagnostics.audit import Audit
from popmq.broker.diagnostics.explain import Explainer
from popmq.broker.diagnostics.fifo_block_reason import FifoBlockReason
from popmq.broker.diagnostics.head_times import HeadTimes
from popmq.broker.diagnostics.lag_monitor import LagMonitor
from popmq.broker.diagnostics.sampler import Sampler
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.fifo.parking_service import ParkingService
from popmq.broker.filter.sql92 import SqlFilters
from popmq.broker.lite.lite_expiry import LiteExpiry
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.meta.metadata_resolver import MetadataResolver
from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.meta.topic_expiry import TopicExpiry
from popmq.broker.operations.offset_reset import OffsetReset
from popmq.broker.operations.pull_offsets import PullOffsets
from popmq.broker.operations.pull_reader import PullReader
from popmq.broker.operations.redrive_service import RedriveService
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.retention import LiveBody
from popmq.broker.pop.ack_service import AckService
from popmq.broker.pop.catch_up_throttle import CatchUpThrottle
from popmq.broker.pop.long_polling import LongPolling
from popmq.broker.pop.pop_rollback import PopRollback
from popmq.broker.pop.pop_service import PopService
from popmq.broker.pop.revive_service import ReviveService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore, ReplicaListener, StoreThreads
from popmq.broker.timer.timers import Timers
from popmq.broker.transaction.transactions import Transactions
from popmq.common import topics
from popmq.common.clock import Clock, LogClock
from popmq.common.disk import Disk
from popmq.common.settings.settings import Settings
from popmq.common.topics import SubscriptionGroup, TopicConfig


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
        self.settings = settings
        self.rng = rng
        self.disk = disk
        self.clock = clock
        self.waits = waits or clock  # long polls wait on it: nothing moves it, unlike log time
        self.epoch_start = EpochStart()  # what this one, as a start alone, said of its last life
        self.store = MessageStore(
            disk, settings.broker.data, settings.store, clock, threads, self, log_clock, node
        )
        self.registry = Registry(self.store, self)
        self.directory = MetadataResolver(self.registry, settings)
        self.receipts = SendDeduplication(settings.dedup)
        self.table = CheckPointTable(
            settings.pop.revive_step_ms, lambda *place: self.arrivals.on_unblocked(*place)
        )
        self.buffer = CheckPointBuffer(self.store, self.table, settings.pop)
        self.catch_up = CatchUpThrottle(
            percent=settings.pop.catch_up_percent,
            behind_bytes=settings.pop.catch_up_behind_bytes,
            now_ms=self.waits.boot_ms,
        )
        self.redriven = RedrivenDeadLetters()
        self.pops = PopService(
            self.store,
            self.registry,
            self.table,
            settings.pop,
            buffer=self.buffer,
            catch_up=self.catch_up,
            broker=settings.broker.name,
            rng=rng,
        )
        self.undo = PopRollback(self.table)
        self.pulls = PullReader(self.store)
        self.pull_offsets = PullOffsets(self.store, self.table, self.buffer, self.pops)
        self.bodies = InFlightBodies(self.store, self.table)
        self.liveness = ClientLiveness()
        self.clients = ClientNames()
        self.revive = ReviveService(
            self.store, self.registry, self.table, self.buffer, self.bodies, self.liveness
        )
        self.acks = AckService(
            self.store,
            self.registry,
            self.table,
            self.pops,
            self.buffer,
            self.revive,
            broker=settings.broker.name,
        )
        self.parking = ParkingService(
            *(self.store, self.registry, self.table, self.bodies),
            *(self.pops.metrics, settings.pop),
        )
        self.fifo = FifoService(
            *(self.store, self.registry, self.table, self.bodies),
            *(self.pops, self.parking, settings.pop),
        )
        self.lookup = Lookup(self.store, self.store.index)
        self.polling = LongPolling(settings.poll.waiters)
        self.lites = LiteService(
            *(self.store, self.registry, self.table, self.pops, self.fifo),
            *(self.lookup, settings.lite, settings.pop, self.polling),
        )
        self.redrives = RedriveService(
            self.store, self.registry, self.redriven, settings.lite.max_topics
        )
        self.sql_filters = SqlFilters()
        self.meta_copies = MetaCopies(
            settings,
            self.registry,
            self.directory,
            self.polling,
            self.waits.boot_ms,
            self.buffer.when_confirmed,
        )
        self.timers = Timers(
            self.store,
            self.registry,
            self.lookup,
            settings.timer,
            disk=disk,
            folder=settings.broker.data,
            clock=clock,
            flusher=threads.housekeeper,
        )
        self.transactions = Transactions(
            self.store, self.registry, settings.transaction, settings.broker.name
        )
        self.sends = SendService(
            *(self.store, self.receipts, self.timers.admission, self.transactions.halves),
            *(self.registry.lites, settings.lite.max_topics),
        )
        self.head_times = HeadTimes(self.store, self.registry)
        self.lag_watch = LagMonitor(
            self.store, self.registry, self.table, self.head_times, clock.boot_ms
        )
        self.audit = Audit(self.store, self.registry, self.table, clock.boot_ms)
        self.sampler = Sampler(
            *(self.store, self.registry, self.table, self.pops, self.timers),
            *(self.head_times, self.sends.stored_by_topic, settings.reports, clock),
        )
        self.explainer = Explainer(self.store, self.registry, self.table, self.lookup)
        self.explainer.holds.append(FifoBlockReason(self.table))
        self.explainer.filters = self.pops.filters
        self.explainer.redriven = self.redriven
        self.offset_reset = OffsetReset(
            self.store, self.registry, self.table, self.buffer, self.pops, self.lookup
        )
        self.applier = RecordApplier(
            self.registry,
            self.table,
            self.redriven,
            self.timers,
            self.receipts,
            self.transactions,
        )
        self.expiry = TopicExpiry(self.store, self.registry, self.lookup)
        self.lite_expiry = LiteExpiry(self.store, self.registry, self.table, self.lites)
        self.arrivals = Wakeups(self.registry, self.polling, self.applier, self.lites)
        self.replica_records = ReplicaRecordWriter(self.store, self.buffer, self.timers.state)
        self.following = SlaveLifecycle(self.store, self.timers, self.applier, self._lead)

    # -- start and stop

    def start(self, judged: EpochStart | None = None) -> None:
        """Recover, and begin a new epoch as master. Serve once `when_confirmed` answers.

        What is `judged` of the life before is not judged again: by another start on the same log,
        whose tables these are compared with.
        """
        self.open()
        self.store.recover(self.applier.apply)
        self.timers.recover()
        self._begin()
        if judged is None and not self.store.stopped_cleanly:
            lived = self.timers.files.checkpoint.lived
            judged = EpochStart.after(self.store.metrics.newest, lived)
        self.epoch_start = start = judged or EpochStart()
        self.store.start_epoch(start.encode())
        self.table.start_epoch(self.store.epoch, start.unanswered_from_ms)
        self._name_log()

    @property
    def serving(self) -> bool:
        """Whether this broker is master, and everything before its epoch is confirmed."""
        return self.store.slave is None

    def wall_ms_of(self, log_ms: int) -> int:
        """About when that was on the wall clock, for people; 0 stays 0."""
        return self.clock.wall_ms() - (self.store.log_ms() - log_ms) if log_ms else 0

    def stop(self) -> None:
        """Answer everybody who waits. The shell then lets the store settle and closes it."""
        self.catch_up.release_all()
        self.polling.answer_all_empty()
        self.transactions.checks.dismiss()
        self.buffer.write_all()

    def close(self) -> None:
        """A clean stop: everything confirmed, the flushers idle. Leaves a whole store."""
        self.timers.service.close()
        self.store.close()

    def release_files(self) -> None:
        """Close every file without a word; after a crash in tests, or a failed start."""
        self.timers.service.release_files()
        self.store.release_files()

    def step(self) -> int:
        """One round of the background work; returns how much was done."""
        if not self.serving:
            return self.following.step()
        done = self.timers.step() + self.receipts.step(self.store.log_ms())
        done += self.catch_up.step() + self.buffer.step() + self.revive.step()
        done += self.parking.step()
        self.lag_watch.step()
        self.audit.step()
        self.sampler.step()
        done += self.polling.step(self.waits.boot_ms())
        done += self.transactions.checks.step(
            now_ms=self.waits.boot_ms(), log_ms=self.store.log_ms()
        )
        self.lites.step(self.waits.boot_ms())
        done += self.directory.step(self.clock.boot_ms())
        done += self.lite_expiry.step(self.clock.boot_ms(), self.store.log_ms())
        done += self.expiry.step(now_ms=self.clock.boot_ms())
        return done + self.store.step()

    # -- what the store says (StoreListener)

    def before_batch(self) -> None:
        self.buffer.before_batch()

    def before_snapshot(self) -> None:
        self.replica_records.before_snapshot()

    def on_dispatched(self, grown: set[tuple[int, int]]) -> None:
        self.arrivals.on_dispatched(grown)

    def on_relocated(self, body: LiveBody) -> None:
        self.applier.moved(body)

    def on_snapshot_made(self, position: int, state_hash: int) -> None:
        self.replica_records.on_snapshot_made(position, state_hash)

    def on_log_start(self, position: int) -> None:
        self.replica_records.on_log_start(position)

    # -- what the tables say

    def on_topic_deleted(self, topic: TopicConfig) -> None:
        self.table.drop_topic(topic.id)
        self.buffer.forget_deleted()
        self.catch_up.forget_topic(topic.name)
        self.redriven.drop_topic(topic.id)
        self.transactions.table.drop_topic(topic.id)
        self.polling.answer_all_empty(topic_id=topic.id)
        self.lites.remove_subscriber(topic_id=topic.id)
        self.sends.topic_gone(topic.name)
        self.pops.delivered.drop(topic=topic.name)
        self.pops.acked.drop(topic=topic.name)
        self.audit.topic_gone(topic)

    def on_group_deleted(self, group: SubscriptionGroup) -> None:
        self.table.drop_group(group.id)
        self.buffer.forget_deleted()
        self.polling.answer_all_empty(group_id=group.id)
        self.lites.remove_subscriber(group_id=group.id)
        self.pops.delivered.drop(group=group.name)
        self.pops.acked.drop(group=group.name)

    # -- inside

    def open(self) -> None:
        """Open what is there: `start` does, and a slave before it follows (`following.start`)."""
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
        self.store.retention.live = (self.bodies, self.timers.bodies, self.transactions.bodies)
        self.store.retention.exact = (self.bodies,)
        self.store.snapshots.tables = (
            self.registry,
            self.registry.lites,
            self.table,
            self.table.parked,
            self.store.dispatch,
            self.redriven,
            *self.timers.tables,
            self.receipts,
            self.transactions.table,
        )

    def _begin(self) -> None:
        """The tables are whole: what a master does beside requests begins."""
        self.lite_expiry.begin()
        self.expiry.run_all()
        self.liveness.start_grace(self.store.log_ms())
        if not self.settings.replication.is_single:
            self.replica_records.begin()

    def _lead(self) -> None:
        """A slave that was promoted has applied everything, and all of it is confirmed."""
        self.timers.promote()
        self._begin()
        self._name_log()

    def _name_log(self) -> None:
        if not self.registry.log_id:
            self.registry.set_log_id(self.rng.randbytes(16).hex())
        if not self.registry.receipt_key:
            self.registry.set_receipt_key(self.rng.randbytes(32))
