"""A broker's life as a slave, and the steps from there to master.

A slave applies what is confirmed and does nothing by itself: nothing fires, revives, expires or
moves.  Promoted, it puts the first record of its epoch at the log's end, goes on applying until
that is confirmed, and only then does what a master does (RULES R11 to R14).
"""

import logging
from collections.abc import Callable

from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.log.store_metrics import NEVER, EpochLogTime
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.retention import EVERYTHING
from popmq.broker.persistence.snapshot_install import SnapshotInstall
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timers import Timers

logger = logging.getLogger(__name__)


class SlaveLifecycle:
    def __init__(
        self,
        store: MessageStore,
        timers: Timers,
        applier: RecordApplier,
        on_promoted: Callable[[], None],
    ) -> None:
        self._store = store
        self._timers = timers
        self._applier = applier
        self._on_promoted = on_promoted
        self._timers_from: int | None = 0  # the timers begin when this position is applied
        self.promoted = False
        self.master_lived = NEVER  # as masters told
        self._on_opened: Callable[[], None]  # of the one promotion

    def start(self) -> None:
        known = self._timers.open_files()
        keep_from = self._timers.slave_keep_position
        slave = self._store.follow(self._applier.apply, known=known, keep_from=keep_from)
        self._timers_from = self._store.confirmed
        logger.info(
            "follows",
            extra={
                "end_bytes": self._store.end,
                "applied_bytes": slave.applied,
                "confirmed_bytes": self._store.confirmed,
                "torn_bytes": self._store.metrics.torn_bytes,
            },
        )

    def begin_install(self, start: int) -> SnapshotInstall:
        """See `SlaveStore.begin_install`; timers begin when the copy is whole."""
        slave = self._store.slave
        assert slave is not None, "a master begins with no other's snapshot"
        self._timers_from = EVERYTHING
        return slave.begin_install(start)

    def promote(self, epoch: int, on_opened: Callable[[], None] = lambda: None) -> None:
        """The log is durable to its end, and the EpochFile has the epoch already."""
        assert self._store.durable == self._store.end, "promoted with records not on the disk"
        assert not self.promoted, "promoted twice"
        self.promoted = True
        self._on_opened = on_opened
        slave = self._store.slave
        assert slave is not None, "a master is not promoted"
        newest = slave.apply.newest(self._store.confirmed)
        start = EpochStart.after(EpochLogTime(newest.epoch, newest.log_ms), self.master_lived)
        self._store.lead(epoch, start.encode())

    def step(self) -> int:
        """One round; returns how much was done."""
        store, slave = self._store, self._store.slave
        assert slave is not None
        done = store.step() + self._applier.forget_old(store.log_ms())
        if self._timers_from == EVERYTHING and slave.install is None:
            self._timers_from = slave.applied
        if self._timers_from is not None and slave.applied >= self._timers_from:
            self._timers_from = None
            self._timers.run_as_slave()
        if self._timers_from is None:
            done += self._timers.step_slave()
        if self.promoted and slave.applied == store.end == store.confirmed:
            store.opened()
            self._on_promoted()
            logger.info("leads", extra={"epoch": store.epoch, "end_bytes": store.end})
            self._on_opened()
            done += 1
        return done
