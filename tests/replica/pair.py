"""A master and a slave in one process: the log goes from one to the other by hand."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from popmq.broker.core.broker import Broker
from popmq.common.disk import ColdRead, Disk
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import Settings, StoreSettings
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import SMALL, CoreBroker

C = TypeVar("C", bound=CoreBroker)

OF_TWO = replace(
    SMALL,
    replication=ReplicationSettings(replicas=2),
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=32 << 10),
)

# Retention takes what is an hour old.
SHORT = replace(
    OF_TWO,
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10, retention_hours=1),
)


class Slave(CoreBroker):
    """A broker that follows; after `promote` it answers like any other."""

    def begin(self, broker: Broker) -> None:
        broker.open()
        broker.records.slave_lifecycle.start()

    def take(self, source: CoreBroker, *, most: int = 1 << 62, piece: int = 1 << 20) -> None:
        """Copy the log up to its end, or up to `most`; all of it durable here."""
        store, slave = self.broker.store, self.broker.store.slave
        assert slave is not None
        while store.end < min(most, source.broker.store.end):
            try:
                data = source.broker.store.replicas.read_tail(store.end, piece)
            except ColdRead as cold:
                cold.warm()
                continue
            assert data, f"nothing at {store.end}"
            slave.append_block(store.end, data)
            self.run_until_idle()

    def follow(self, source: CoreBroker) -> None:
        """Everything that the source has confirmed is copied and applied."""
        self.take(source)
        store = self.broker.store
        store.confirm(min(source.broker.store.confirmed, store.end))
        self.run_steps()
        assert store.slave is not None
        assert store.slave.applied == store.confirmed

    def promote(self) -> None:
        store = self.broker.store
        assert store.slave is not None
        self.broker.records.slave_lifecycle.promote(store.slave.apply.newest(store.end).epoch + 1)
        self.run_until_idle()
        store.confirm(store.durable)  # the only replica that is left
        self.run_steps()
        assert self.broker.serving


@dataclass
class Pair:
    folder: Path
    settings: Settings = OF_TWO
    clock: ManualClock = field(default_factory=ManualClock)
    slave_settings: Settings | None = None  # None: those of the master

    def __post_init__(self) -> None:
        self.master = self.core(CoreBroker, "master")
        self.slave = self.core(Slave, "slave")

    def core(self, kind: type[C], name: str, disk: Disk | None = None) -> C:
        of_kind = self.slave_settings if issubclass(kind, Slave) else None
        settings = of_kind or self.settings
        settings = replace(settings, broker=replace(settings.broker, data=str(self.folder / name)))
        return kind(disk=disk or ResidentDisk(), clock=self.clock, settings=settings)

    def follow(self) -> None:
        self.slave.follow(self.master)

    def fail_over(self) -> Slave:
        """The master is gone; the slave has all that it confirmed."""
        self.slave.take(self.master, most=self.master.broker.store.confirmed)
        self.slave.promote()
        return self.slave


def fill(core: CoreBroker, count: int, size: int = 100) -> list[bytes]:
    sent = [b"%05d" % number + bytes(size) for number in range(count)]
    for body in sent:
        core.send("orders", body)
    return sent
