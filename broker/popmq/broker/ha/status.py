"""Status: what one broker of a group says of itself, to controllers, operators and metrics."""

from dataclasses import dataclass

from popmq.broker.ha.role import BrokerRole
from popmq.broker.ha.tables_check import RebuildWish, TablesCheck
from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint
from popmq.common.settings.settings import Settings
from popmq.common.wire import controller_pb2 as controller
from popmq.common.wire import replication_pb2 as pb


@dataclass(frozen=True, slots=True)
class SlaveStatus:
    """One slave, as its master knows it."""

    store_id: str
    node: str
    acked: int
    in_sync: bool
    silent_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    settings: Settings
    address: str
    store_id: str
    log_id: str
    role: BrokerRole
    epoch: int  # accepted
    record: GroupRecord | None
    start: int
    end: int
    durable: int
    confirmed: int
    slaves: tuple[SlaveStatus, ...]
    lag_bytes: int  # of a slave behind its master; of a master: of the slave furthest behind
    copying_from: int  # 0 and 0 when nothing is copied
    copying_to: int
    timers: TimerCheckPoint | None  # newest TimerCheckPoint of a master, this one included
    now_ms: int
    trouble: str
    state_hash: tuple[int, int]  # of the newest snapshot: position and hash of its tables
    tables: TablesCheck  # whether they are the master's
    rebuild_wish: RebuildWish | None
    owner: str = ""  # the broker group that this log's topics are copied from
    meta_version: int = 0
    shortage: str = ""  # what the machine lacks, so that an order could not be done
    draining: bool = False
    moves_timers: bool = False  # to other broker groups

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.record.sync_state_set) if self.record else frozenset()


def registration(status: BrokerStatus) -> bytes:
    """A heartbeat."""
    settings = status.settings
    request = controller.RegisterRequest(
        cluster=settings.cluster.name,
        broker=controller.BrokerAddress(
            broker=settings.broker.name,
            address=status.address,
            epoch=status.epoch,
            store_id=status.store_id,
            node=settings.node,
            draining=status.draining,
        ),
        replicas=settings.replication.replicas,
        min_in_sync=settings.replication.effective_min_in_sync,
        role=controller.BrokerRole.ValueType(int(status.role)),
        end=status.durable,
        confirmed=status.confirmed,
        priority=settings.replication.priority,
        catch_up_from=status.copying_from,
        catch_up_to=status.copying_to,
        log_id=status.log_id,
        owner=status.owner,
        meta_version=status.meta_version,
        moves_timers=status.moves_timers,
        shortage=status.shortage,
    )
    tables, wish = status.tables, status.rebuild_wish
    request.tables_equal_at = tables.equal_at
    if tables.differs_now:
        request.tables_differ_at = tables.known.differs_at
        request.tables_hash_at, own_hash = tables.newest
        request.tables_hash = f"{own_hash:032x}"
    if wish is not None:
        tables_differ = wish.because_of_tables
        request.asks_rebuild = controller.TABLES_DIFFER if tables_differ else controller.LOG_DIFFERS
    if status.timers is not None:
        request.timer_check_point.CopyFrom(status.timers.to_wire(status.now_ms))
    return request.SerializeToString()


def described(status: BrokerStatus) -> bytes:
    """The answer to DESCRIBE_ROLE."""
    record = status.record
    return pb.DescribeRoleReply(
        group=status.settings.broker.name,
        node=status.settings.node,
        store_id=status.store_id,
        role=status.role.name,
        epoch=status.epoch,
        version=record.version if record else 0,
        leader=record.leader if record else "",
        sync_state_set=sorted(status.members),
        min_in_sync=status.settings.replication.effective_min_in_sync,
        start=status.start,
        end=status.end,
        durable=status.durable,
        confirmed=status.confirmed,
        slaves=[
            pb.DescribeRoleReply.Slave(
                store_id=slave.store_id,
                node=slave.node,
                acked=slave.acked,
                lag_bytes=max(0, status.end - slave.acked),
                in_sync=slave.in_sync,
                silent_ms=slave.silent_ms,
            )
            for slave in status.slaves
        ],
        trouble=status.trouble,
        state_hash_position=status.state_hash[0],
        state_hash=f"{status.state_hash[1]:032x}",
    ).SerializeToString()
