"""A broker of the simulated cluster: the product's `BrokerNode` on a host with a `SimDisk`.

What the process shell does is done here under virtual time: threads, the step loop, ports to
peers, and the end of the process when its disk fails or an invariant breaks.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from popmq.broker.node.broker_incarnation import RETRY_MS
from popmq.broker.node.broker_node import BrokerNode
from popmq.broker.store.message_store import StoreThreads
from popmq.common.disk import is_shortage
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import Done, Work
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimConnection, SimPort
from popmq.testing.cluster_world.sim_network import SimNet
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk

IDLE_MS = 20  # between two steps that found nothing to do; 5 in the product
DATA = "data"


class HostThread:
    """One thread of a broker's process; implements `popmq.common.step_loop.Flusher`."""

    def __init__(self, host: Host, takes_ms: Callable[[], int]) -> None:
        self._host = host
        self._takes_ms = takes_ms
        self._jobs: deque[tuple[Work, Done]] = deque()

    def submit(self, work: Work, done: Done) -> None:
        self._jobs.append((work, done))
        if len(self._jobs) == 1:
            self._host.after(self._takes_ms(), self._run)

    def _run(self) -> None:
        work, done = self._jobs[0]
        error: OSError | None = None
        try:
            work()
        except OSError as failure:
            error = failure
        self._jobs.popleft()
        self._host.post(lambda: done(error))
        if self._jobs:
            self._host.after(self._takes_ms(), self._run)


class ClusterBroker:
    """`node` is None while the process is not up. `on_broken` hears of what no fault explains."""

    def __init__(
        self,
        net: SimNet,
        host: Host,
        settings: Settings,
        rng: random.Random,
        *,
        controllers: Sequence[str],
        note: Callable[[str], None],
        on_broken: Callable[["ClusterBroker", BaseException], None],
        on_moved: Callable[["ClusterBroker"], None],
    ) -> None:
        self.net, self.host, self.rng = net, host, rng
        self.settings = replace(
            settings, broker=replace(settings.broker, node=host.name, data=DATA)
        )
        self.address = f"{host.name}:1"
        self.node: BrokerNode | None = None
        self.disk = SimDisk(rng)
        self.sync_ms: Callable[[], int] = lambda: 1
        self.idle_ms = IDLE_MS
        self.on_dying: Callable[[], None] = lambda: None
        self.outlives_errors = False  # no error of its disk may end the process
        self._controllers = controllers
        self._note = note
        self._on_broken = on_broken
        self._on_moved = on_moved
        self.forward_ms = 0  # by which its wall clock was set forward before this life
        self._ports: dict[str, SimPort] = {}
        host.on_error = self._error

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def group(self) -> str:
        """The name of its broker group."""
        return self.settings.broker.name

    def start(self) -> bool:
        """False if the process ended before it served anything."""
        self.host.boot()
        return self._begin()

    def _begin(self) -> bool:
        host = self.host
        self.forward_ms = host.clock.forward_ms
        self._ports = {}
        life = host.life
        node = self.node = BrokerNode(
            self.settings,
            disk=self.disk,
            clock=host.process_clock,
            threads=StoreThreads(
                flusher=HostThread(host, lambda: self.sync_ms()),
                housekeeper=HostThread(host, lambda: self.sync_ms()),
                readers=HostThread(host, lambda: 1),
                call_soon=host.post,
                on_failure=self._error,
            ),
            rng=random.Random(self.rng.getrandbits(32)),
            open_port=self._peer,
            controllers=[SimPort(self.net, host, address) for address in self._controllers],
            on_demoted=self._drop_clients,
        )
        node.address = self.address
        try:
            node.start()
        except (PowerCut, OSError) as error:
            if is_shortage(error) and self.outlives_errors:
                node.release_files()
                self.node = None
                self.net.listeners.pop(self.address, None)
                host.after(RETRY_MS, self._begin_again)
                return True
            self._error(error)
        if host.life != life:
            return False
        self.net.listen(self.address, host, node.port)
        host.post(self._step)
        return True

    def _begin_again(self) -> None:
        self._begin()

    def crash(self, loss: Loss) -> None:
        """With `Loss.NOTHING` only the process dies, else the machine."""
        off = loss is not Loss.NOTHING
        self.on_dying()
        self.node = None
        self.host.die(off=off)
        self.net.process_ended(self.host, quietly=off)
        self.disk.crash(loss)
        if off:
            self.host.clock.reboot()

    def stop(self, then: Callable[[], None]) -> None:
        """A clean stop, as far as there is time for it; `then` when the process is gone."""
        node = self.node
        if node is None:
            return
        node.stop()

        def end() -> None:
            try:
                node.close()
            finally:
                self.crash(Loss.NOTHING)
                then()

        self.host.after(300, end)

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self.disk = SimDisk(self.rng)

    # -- the shell

    def _step(self) -> None:
        assert self.node is not None
        done = self.node.step()
        self.host.after(1 if done else self.idle_ms, self._step)

    def after_each(self) -> None:
        if self.node is not None and not self.node.changing:
            self._on_moved(self)

    def _peer(self, address: str) -> SimPort:
        sim_port = self._ports.get(address)
        if sim_port is None:
            sim_port = self._ports[address] = SimPort(self.net, self.host, address)
        return sim_port

    def _drop_clients(self) -> None:
        for connection in list(self.net.connections.values()):
            from_proxy = connection.hosts[0].startswith("proxy")
            if connection.hosts[1] == self.name and from_proxy:
                assert isinstance(connection, SimConnection)
                connection.close_server()

    def _error(self, error: BaseException) -> None:
        """What ends the process: its disk, or something that must not be."""
        if self.node is None:
            return
        faults = self.disk.faults
        if isinstance(error, PowerCut) or faults.off:
            self._note(f"{self.name} loses its power in the middle of something")
            self.crash(self.rng.choice((Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED)))
        elif (isinstance(error, OSError) and not self.outlives_errors) or faults.sick:
            self._note(f"{self.name} is stopped by its disk: {error}")
            self.crash(Loss.NOTHING)
        else:
            self._on_broken(self, error)
