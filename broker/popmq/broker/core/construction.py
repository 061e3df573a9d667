"""Builds the services of a Broker in stages, each from the results of earlier stages.

The result of a stage is a frozen dataclass: its services are never replaced.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from popmq.broker.core.meta_copies import MetaCopies
from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.core.replica_record_writer import ReplicaRecordWriter
from popmq.broker.core.send_service import SendService
from popmq.broker.core.slave_lifecycle import SlaveLifecycle
from popmq.broker.core.user_follows import UserFollows
from popmq.broker.core.wakeups import Wakeups
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.group_topic_counts import EndCounts
from popmq.broker.diagnostics.diagnostics import Diagnostics
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.lite.lite_expiry import LiteExpiry
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.meta.metadata_resolver import MetadataResolver
from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.meta.topic_expiry import TopicExpiry
from popmq.broker.operations.client_relay import ClientRelay
from popmq.broker.operations.group_expiry import GroupExpiry
from popmq.broker.operations.group_members import GroupMembers
from popmq.broker.operations.operations import Operations
from popmq.broker.operations.pull_ends import PullEnds
from popmq.broker.operations.queue_leases import QueueLeases
from popmq.broker.operations.send_back import SendBack
from popmq.broker.pop.long_polling import LongPolling
from popmq.broker.pop.pop_services import PopServices
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timers import Timers
from popmq.broker.transaction.transactions import Transactions
from popmq.common.clock import Clock
from popmq.common.disk import Disk
from popmq.common.quantities import KIB
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import Flusher


@dataclass(frozen=True, slots=True)
class Tables:
    """What all services use: the log, its tables, and the waiting long polls."""

    settings: Settings
    clock: Clock
    waits: Clock  # for long polls and leases: its boot time never jumps, as log time may
    store: MessageStore
    registry: Registry
    metadata_resolver: MetadataResolver
    send_deduplication: SendDeduplication
    deliveries: Deliveries
    lookup: Lookup
    polling: LongPolling


@dataclass(frozen=True, slots=True)
class Receiving:
    pop: PopServices
    fifo: FifoService
    lites: LiteService
    ends: EndCounts
    operations: Operations


@dataclass(frozen=True, slots=True)
class Followers:
    """Other processes that follow tables of this broker: topics and groups, and users."""

    metadata: MetaCopies
    users: UserFollows


@dataclass(frozen=True, slots=True)
class Sending:
    timers: Timers
    transactions: Transactions
    service: SendService


@dataclass(frozen=True, slots=True)
class RemotingServices:
    """Services that only Remoting clients use."""

    members: GroupMembers
    relay: ClientRelay
    leases: QueueLeases
    send_back: SendBack


@dataclass(frozen=True, slots=True)
class Expiries:
    topics: TopicExpiry
    groups: GroupExpiry
    lites: LiteExpiry


@dataclass(frozen=True, slots=True)
class Records:
    """Services that apply records of the log, and that write records for the replicas."""

    applier: RecordApplier
    wakeups: Wakeups
    replica: ReplicaRecordWriter
    slave_lifecycle: SlaveLifecycle


def build_tables(
    settings: Settings,
    clock: Clock,
    waits: Clock,
    store: MessageStore,
    registry: Registry,
    deliveries: Deliveries,
) -> Tables:
    return Tables(
        settings,
        clock,
        waits,
        store,
        registry,
        MetadataResolver(registry, settings),
        SendDeduplication(settings.dedup),
        deliveries,
        Lookup(store, store.index),
        LongPolling(settings.poll.waiters),
    )


def build_receiving(tables: Tables, rng: random.Random) -> Receiving:
    """`rng` makes the choices that clients can see."""
    store, registry, deliveries = tables.store, tables.registry, tables.deliveries
    settings, lookup = tables.settings, tables.lookup
    pop = PopServices(store, registry, deliveries, settings, tables.waits.boot_ms, rng)
    fifo = FifoService(store, registry, deliveries, pop.service, settings.pop)
    lites = LiteService(
        store, registry, deliveries, pop.service, fifo, lookup, tables.polling, settings
    )
    ends = EndCounts(
        pop.service.delivered,
        pop.service.acked,
        pop.revive.returned_by_pair,
        pop.revive.dead_by_pair,
    )
    operations = Operations(
        store, registry, deliveries, pop.service, lookup, ends, settings.lite.max_topics
    )
    return Receiving(pop, fifo, lites, ends, operations)


def build_followers(tables: Tables) -> Followers:
    registry, polling, buffer = tables.registry, tables.polling, tables.deliveries.buffer
    waits_ms = tables.waits.boot_ms
    return Followers(
        MetaCopies(tables.settings, registry, tables.metadata_resolver, polling, buffer, waits_ms),
        UserFollows(tables.store, registry, polling, buffer, waits_ms),
    )


def build_sending(tables: Tables, disk: Disk, housekeeper: Flusher) -> Sending:
    store, registry, settings = tables.store, tables.registry, tables.settings
    sends = tables.send_deduplication
    timers = Timers(
        store, registry, tables.lookup, sends, settings, disk, tables.clock, housekeeper
    )
    transactions = Transactions(store, registry, sends, settings.transaction, settings.broker.name)
    service = SendService(
        store,
        registry.lites,
        sends,
        timers.admission,
        transactions.halves,
        settings.lite.max_topics,
    )
    return Sending(timers, transactions, service)


def build_remoting(tables: Tables, timers: Timers, ends: PullEnds) -> RemotingServices:
    largest_bytes = tables.settings.message.largest_bytes + 4 * KIB
    return RemotingServices(
        GroupMembers(),
        ClientRelay(),
        QueueLeases(),
        SendBack(tables.store, tables.registry, timers.admission, ends, largest_bytes),
    )


def build_diagnostics(
    tables: Tables, pop: PopServices, sending: Sending, ends: EndCounts
) -> Diagnostics:
    return Diagnostics(
        tables.store,
        tables.registry,
        tables.deliveries,
        pop.service,
        tables.lookup,
        sending.timers,
        sending.service.stored_by_topic,
        tables.settings,
        tables.clock,
        ends,
    )


def build_expiries(tables: Tables, lites: LiteService) -> Expiries:
    store, registry, table = tables.store, tables.registry, tables.deliveries.table
    return Expiries(
        TopicExpiry(store, registry, tables.lookup),
        GroupExpiry(registry, table, tables.metadata_resolver),
        LiteExpiry(store, registry, table, lites),
    )


def build_records(
    tables: Tables,
    sending: Sending,
    lites: LiteService,
    send_back: SendBack,
    on_promoted: Callable[[], None],
) -> Records:
    """`on_promoted` is called when a promoted slave has applied everything."""
    timers = sending.timers
    applier = RecordApplier(
        tables.registry,
        tables.deliveries,
        timers,
        tables.send_deduplication,
        sending.transactions,
        send_back,
    )
    return Records(
        applier,
        Wakeups(tables.registry, tables.polling, applier, lites),
        ReplicaRecordWriter(tables.store, tables.deliveries.buffer, timers.state),
        SlaveLifecycle(tables.store, timers, applier, on_promoted),
    )
