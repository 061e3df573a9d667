"""One controller of a simulated cluster: the product's core, stepped."""

import random

from popmq.controller.controller import Controller, ControllerTimeouts
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_metadata_store import HostMetadataStore, SimMetadataStore
from popmq.testing.cluster_world.sim_network import SimNet

STEP_MS = 50
TIMES = ControllerTimeouts(heartbeat_ms=500, dead_after_ms=2_000)


class ControllerNode:
    """Starts and dies with its host; keeps nothing."""

    def __init__(
        self,
        net: SimNet,
        host: Host,
        records: SimMetadataStore,
        rng: random.Random,
        *,
        cluster: str,
        times: ControllerTimeouts = TIMES,
    ) -> None:
        self.host = host
        self.address = f"{host.name}:1"
        self.controller: Controller
        self._net, self._records, self._rng = net, records, rng
        self._cluster, self._times = cluster, times

    def start(self) -> None:
        host, net = self.host, self._net
        host.boot()
        self.controller = Controller(
            self._cluster,
            HostMetadataStore(self._records, host),
            host.process_clock,
            lambda address: SimPort(net, host, address),
            times=self._times,
            first_version=1 + self._rng.getrandbits(40),
        )
        net.listen(self.address, host, self.controller)
        self._step()

    def stop(self, *, off: bool) -> None:
        self.host.die(off=off)
        self._net.process_ended(self.host, quietly=off)

    def _step(self) -> None:
        self.controller.step(self.host.process_clock.boot_ms())
        self.host.after(STEP_MS, self._step)
