"""One run of the light replicas: faults for some twenty seconds, then everything heals.

`python -m popmq.testing.cluster --light --seed N --trace` replays it.
"""

from collections.abc import Callable
from functools import partial

from popmq.testing.cluster_world.sometimes_states import ModelSometimes
from popmq.testing.model.node import GROUP
from popmq.testing.model.world import ModelReplica, ModelWorld
from popmq.testing.sim.lives import SeedResult, broken

_PAUSES_MS = (300, 1_500, 4_000, 9_000)
_GAPS_MS = (20, 150, 600, 2_000)


def run_model_seed(seed: int) -> SeedResult:
    return _Run(seed).run()


class _Run:
    def __init__(self, seed: int) -> None:
        world = self.world = ModelWorld(seed)
        rng = self.rng = world.rng
        self._actions: list[tuple[Callable[[], None], float]] = [
            (self._crash, 6),
            (self._pause, 3),
            (self._isolate, 5),
            (self._cut_one_way, 5),
            (self._heal, 6),
            (self._reset, 3),
            (self._controller, 2),
            (self._store, 2),
            (self._all_down, 0.5),
            (self._wipe, 1.5 if world.count == 3 and world.min_in_sync == 2 else 0),
        ]
        world.records.manners.silent = rng.choice((0.0, 0.1, 0.3))
        world.records.manners.late = rng.choice((0.0, 0.5, 1.0))
        world.records.manners.stale = rng.choice((0.0, 0.1, 0.4))

    def run(self) -> SeedResult:
        world = self.world
        try:
            world.start()
            self._go(4_000)
            actions = [action for action, _ in self._actions]
            weights = [weight for _, weight in self._actions]
            for action in self.rng.choices(actions, weights, k=self.rng.choice((8, 20, 45))):
                if world.violations:
                    break
                action()
                self._go(self.rng.choice(_GAPS_MS))
            if not world.violations:
                world.trace_line("heal")
                world.heal()
                world.drain()
        except Exception as error:
            world.violations.append(broken(error))
        for violation in world.violations:
            world.trace_line(str(violation))
        result = SeedResult(world.seed, world.violations, world.trace, world.tally)
        result.world, result.module = "--light ", "cluster"
        return result

    def _go(self, ms: int) -> None:
        world = self.world
        world.time.run(world.time.now_ms + ms, stop=lambda: bool(world.violations))

    # -- faults

    def _replica(self) -> ModelReplica:
        """The master more often than others."""
        masters = [
            replica
            for replica in self.world.replicas
            if replica.node is not None and replica.node.sync
        ]
        some = masters if masters and self.rng.random() < 0.5 else self.world.replicas
        return self.rng.choice(some)

    def _later(self, ms: int, action: Callable[[], None]) -> None:
        self.world.time.after(ms, lambda: None if self.world.healed else action())

    def _crash(self) -> None:
        replica = self._replica()
        if replica.node is None:
            return
        power = self.rng.random() < 0.5
        down_ms = self.rng.choice((5, 300, 3_000, 9_000))
        self.world.trace_line(f"{replica.host.name} dies, power={power}, for {down_ms} ms")
        replica.crash(power=power)
        self._later(down_ms, lambda: self._start(replica))

    def _start(self, replica: ModelReplica) -> None:
        if replica.node is None:
            self.world.trace_line(f"{replica.host.name} starts at {replica.log.end}")
            replica.start()

    def _wipe(self) -> None:
        """Only while another member of the recorded set is there and none has lost its disk: two
        are min_in_sync, and without any nobody is elected by itself."""
        world, replica = self.world, self._replica()
        record = world.records.newest(GROUP)
        if replica.node is None or record is None:
            return
        whole = {replica.store_id for replica in world.replicas}
        if not whole.issuperset(record.sync_state_set):
            return
        if not set(record.sync_state_set) - {replica.store_id}:
            return
        world.trace_line(f"{replica.host.name} loses its disk")
        world.tally.hit(ModelSometimes.WIPED)
        replica.crash(power=True)
        replica.wipe()
        self._later(self.rng.choice((5, 1_000, 4_000)), lambda: self._start(replica))

    def _all_down(self) -> None:
        self.world.tally.hit(ModelSometimes.ALL_DOWN)
        power = self.rng.random() < 0.7
        self.world.trace_line(f"everybody dies, power={power}")
        for replica in self.world.replicas:
            if replica.node is not None:
                replica.crash(power=power)
            self._later(self.rng.choice((5, 500, 3_000)), partial(self._start, replica))

    def _pause(self) -> None:
        replica, ms = self._replica(), self.rng.choice(_PAUSES_MS)
        self.world.trace_line(f"{replica.host.name} stands still for {ms} ms")
        self.world.tally.hit(ModelSometimes.PAUSE)
        replica.host.pause()
        self._later(ms, replica.host.resume)

    def _hosts(self) -> list[str]:
        world = self.world
        replicas = [replica.host.name for replica in world.replicas]
        return [*replicas, *(controller.host.name for controller in world.controllers)]

    def _isolate(self) -> None:
        """One broker from the other brokers, from the controllers, or from both."""
        name = self._replica().host.name
        others = [host for host in self._hosts() if host != name]
        match self.rng.choice(("all", "brokers", "controllers", "one controller")):
            case "brokers":
                others = [host for host in others if host[0] != "x"]
            case "controllers":
                others = [host for host in others if host[0] == "x"]
            case "one controller":
                others = [self.rng.choice(("x0", "x1"))]
            case _:
                pass
        self.world.trace_line(f"{name} is cut off from {others}")
        for other in others:
            self.world.net.cut(name, other)
            self.world.net.cut(other, name)

    def _cut_one_way(self) -> None:
        source, target = self.rng.sample(self._hosts(), 2)
        self.world.trace_line(f"nothing from {source} to {target}")
        self.world.net.cut(source, target)

    def _heal(self) -> None:
        self.world.trace_line("the network is whole")
        self.world.net.heal_all()

    def _reset(self) -> None:
        name = self._replica().host.name
        self.world.trace_line(f"connections of {name} break")
        self.world.net.break_some(
            lambda connection: name in connection.hosts and self.rng.random() < 0.6
        )

    def _controller(self) -> None:
        world, controller = self.world, self.rng.choice(self.world.controllers)
        away_ms = self.rng.choice((100, 3_000, 9_000))
        if not controller.host.up:
            return
        if self.rng.random() < 0.5:
            world.trace_line(f"{controller.host.name} stands still for {away_ms} ms")
            controller.host.pause()
            self._later(away_ms, controller.host.resume)
            return
        world.trace_line(f"{controller.host.name} dies for {away_ms} ms")
        controller.stop(off=self.rng.random() < 0.5)
        self._later(away_ms, lambda: None if controller.host.up else controller.start())
        up = any(controller_node.host.up for controller_node in world.controllers)
        world.tally.hit(ModelSometimes.CONTROLLERS_AWAY, int(not up))

    def _store(self) -> None:
        manners = self.world.records.manners
        self.world.trace_line("the metadata store is away")
        self.world.tally.hit(ModelSometimes.AWAY)
        manners.away = True

        def back() -> None:
            manners.away = False

        self.world.time.after(self.rng.choice((500, 3_000)), back)
