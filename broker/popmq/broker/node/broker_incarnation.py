"""BrokerIncarnation: one `Broker` on the disk at a time, and the next one only when its work has
ended.

A deposed master and a store that is rebuilt begin again from the disk; what the old broker's
threads still do is waited for, and what they say is not heard any more.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import replace

from popmq.broker.core.broker import Broker
from popmq.broker.ha.flusher_group import FlusherGroup
from popmq.broker.store.message_store import ReplicaListener, StoreThreads
from popmq.common.clock import Clock, LogClock
from popmq.common.disk import Disk, is_shortage
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.settings.settings import Settings

logger = logging.getLogger(__name__)

RETRY_MS = 1_000


class BrokerIncarnation:
    """`broker` is the newest; between `end` and the next `begin` its files are closed."""

    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        waits: Clock | None,
        threads: StoreThreads,
        rng: random.Random,
        node: ReplicaListener,
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._waits = waits
        self._threads = threads
        self._rng = rng
        self._node = node
        self._own = FlusherGroup()
        self._log_clock = LogClock(clock)  # what was heard of log time holds for the next broker
        self.changing = False
        self.broker: Broker
        self._again: Callable[[], None] | None = None  # what met a shortage, and from when on
        self._again_ms = 0

    def begin(self) -> Broker:
        """A broker that was not started yet."""
        self._own = FlusherGroup()
        threads = self._threads
        if not self._settings.replication.is_single:
            threads = replace(
                threads,
                flusher=self._own.wrap(threads.flusher),
                housekeeper=self._own.wrap(threads.housekeeper),
                readers=self._own.wrap(threads.readers),
            )
        self.broker = Broker(
            self._settings,
            disk=self._disk,
            clock=self._clock,
            waits=self._waits,
            threads=threads,
            rng=self._rng,
            log_clock=self._log_clock,
            node=self._node,
        )
        self.changing = False
        return self.broker

    def end(self, then: Callable[[], None]) -> None:
        """Begin nothing more; `then` once nothing goes on and the files are closed. `then` is
        called again while the machine has no room or descriptors for it."""
        self.changing = True

        def ended() -> None:
            try:
                self.broker.release_files()
                then()
            except Exception as error:
                if is_shortage(error):
                    logger.warning("not begun, tried again", extra={"reason": str(error)})
                    self.changing = True
                    self._again, self._again_ms = then, self._clock.boot_ms() + RETRY_MS
                    return
                # Without a broker nothing is served: the process ends, its next start says why.
                self._threads.on_failure(error)

        self._own.stop(ended)

    def step(self) -> None:
        """Between two brokers: try again what met a shortage."""
        if self._again is not None and self._clock.boot_ms() >= self._again_ms:
            then, self._again = self._again, None
            if self._own.is_stopped:
                self._own = FlusherGroup()
            self.end(then)

    def release_files(self) -> None:
        if hasattr(self, "broker") and not self.changing:
            self.broker.release_files()


def nowhere(address: str) -> Port:
    raise AssertionError(f"a broker with replicas needs a way to {address}")
