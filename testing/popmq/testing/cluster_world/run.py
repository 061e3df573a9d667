"""One run of a cluster: faults under load; then everything heals, and the clients drain."""

from collections.abc import Callable

from popmq.testing.cluster_world.clients import DELAY, FIFO, INVISIBLE_MS, NORMAL, QUICK
from popmq.testing.cluster_world.drain import drain
from popmq.testing.cluster_world.faults import ClusterFaults
from popmq.testing.cluster_world.history import DeliveryHistory
from popmq.testing.cluster_world.isolated_master import IsolatedMaster
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes
from popmq.testing.cluster_world.succession import Succession
from popmq.testing.cluster_world.world import ClusterWorld
from popmq.testing.sim.lives import SeedResult, broken

_GAPS_MS = (20, 200, 1_000, 3_000)
_APART = 0.4
_LONG_TAIL = 1 << 20  # whose bytes are there yet when the first of three masters is back
_BEATS_MS = (15, 40, 120)  # between two moves of the clients


def run_cluster_seed(seed: int) -> SeedResult:
    return ClusterRun(seed).run()


class ClusterRun:
    def __init__(self, seed: int) -> None:
        world = self.world = self._make_world(seed)
        rng = self.rng = world.rng
        self.apart = IsolatedMaster(world)
        self.faults = ClusterFaults(world, [(self.apart.begin, 3)])
        self._beat_ms = rng.choice(_BEATS_MS)
        self._moves: list[tuple[Callable[[], None], float]] = [
            (lambda: world.clients.send(NORMAL), 10),
            (lambda: world.clients.send(FIFO), 6),
            (lambda: world.clients.send(DELAY), 0 if world.far else 4),
            (lambda: world.clients.send(QUICK), 4),
            (self._receive, 14),
            (self._ack, 14),
            (self._change, 3),
            (self._recall, 1),
        ]
        manners = world.records.manners
        manners.silent = rng.choice((0.0, 0.05, 0.2))
        manners.late = rng.choice((0.0, 0.5, 1.0))
        manners.stale = rng.choice((0.0, 0.1, 0.3))

    def _make_world(self, seed: int) -> ClusterWorld:
        return ClusterWorld(seed)

    def run(self) -> SeedResult:
        world, oracle = self.world, self.world.oracle
        try:
            world.start()
            world.clients.make()
            world.go(6_000)
            self._move()
            self._report()
            world.go(1_000)
            self._acts()
            if not oracle.violations:
                world.heal()
                drain(world)
                self.apart.check_topics()
        except Exception as error:
            oracle.violations.append(broken(error))
        for violation in oracle.violations:
            world.trace_line(str(violation))
        result = SeedResult(world.seed, oracle.violations, world.trace, world.tally)
        result.module = "cluster"
        return result

    def _acts(self) -> None:
        """What happens under the clients' load."""
        self._first_act()
        for _ in range(self.rng.choice((4, 10, 18))):
            if self.world.oracle.violations:
                break
            self.faults.one()
            self.world.go(self.rng.choice(_GAPS_MS))

    def _first_act(self) -> None:
        """Some seeds begin with one of these, and nothing else is wrong meanwhile."""
        world = self.world
        if self.rng.random() < _APART:
            self.apart.begin()
            world.go(IsolatedMaster.LASTS_MS)
        elif world.settings.store.tail_bytes >= _LONG_TAIL:
            Succession(world).begin()
            world.go(Succession.LASTS_MS)

    # -- clients

    def _move(self) -> None:
        """One move of some client, and the next one soon."""
        world = self.world
        if world.healed or world.oracle.violations:
            return
        moves = [move for move, _ in self._moves]
        weights = [weight for _, weight in self._moves]
        world.oracle.now_ms = world.time.now_ms
        self.rng.choices(moves, weights)[0]()
        if len(world.masters) > 1:
            world.tally.hit(ClusterSometimes.STALE_MASTER)
        world.time.after(self.rng.choice((1, self._beat_ms, 2 * self._beat_ms)), self._move)

    def _report(self) -> None:
        world = self.world
        if not world.healed and not world.oracle.violations:
            world.clients.report()
            world.time.after(1_000, self._report)

    def _receive(self) -> None:
        rng, world = self.rng, self.world
        spared = self.apart.spared
        world.clients.receive(
            rng.choice([reader for reader in world.oracle.readers if reader is not spared]),
            limit=rng.choice((1, 4, 16)),
            invisible_ms=rng.choice(INVISIBLE_MS),
            poll_ms=rng.choice((0, 0, 500, 3_000)),
        )

    def _some_held(self) -> DeliveryHistory | None:
        held = self.world.clients.held
        if len(held) > 60:
            del held[:20]
        if not held:
            return None
        return held[-1 - min(int(self.rng.expovariate(0.3)), len(held) - 1)]

    def _ack(self) -> None:
        held = self._some_held()
        if held is not None:
            self.world.clients.ack(held)
            if self.rng.random() < 0.8:
                self.world.clients.held.remove(held)

    def _change(self) -> None:
        held = self._some_held()
        if held is not None and not held.reader.renewed:
            self.world.clients.change(held, self.rng.choice((1, 800, 5_000)))

    def _recall(self) -> None:
        some = [
            message
            for message in self.world.oracle.messages[-60:]
            if message.due_ms and message.ok_at
        ]
        if some:
            self.world.clients.recall(self.rng.choice(some))
