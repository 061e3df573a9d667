"""Three masters in a row: what only the first and the third had is cut, and written again.

The first one's newest bytes reach one slave only, and die with it. The other slave leads next, so
the first slave cuts them and takes others in their place; then it leads itself, and gives those,
from its memory, to the first, which was away in the meantime.
"""

from collections.abc import Callable

from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.clients import NORMAL
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes as States
from popmq.testing.cluster_world.world import ClusterWorld
from popmq.testing.disk.crash_loss import Loss

_UNHEARD_MS = 2_300  # longer than `dead_after_ms`
_ALONE_MS = 250  # shorter than any `laggard_ms`: nobody leaves the set
_SENDS = 5  # meanwhile
_LOOK_MS = 50
_REIGN_MS = 1_000  # of the second one


class Succession:
    """At most once in a run; it ends early where somebody else has come to lead."""

    LASTS_MS = 16_000

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world

    def begin(self) -> None:
        world = self._world
        if len(world.masters) != 1 or any(broker.node is None for broker in world.brokers):
            return
        first = world.masters[0]
        second, third = world.rng.sample(
            [broker for broker in world.brokers if broker is not first], 2
        )
        world.trace_line(f"{first.name}, {second.name} and {third.name} are to lead in turn")
        # Controllers take it for dead, and elect the other one; it copies what it is given.
        self._cut(third, [controller.host.name for controller in world.controllers])
        self._later(_UNHEARD_MS, lambda: self._alone(first, second, third))

    def _alone(self, first: ClusterBroker, second: ClusterBroker, third: ClusterBroker) -> None:
        world = self._world
        self._cut(first, [second.name])
        for _ in range(_SENDS):
            self._later(_ALONE_MS // 2, lambda: world.clients.send(NORMAL))
        self._later(_ALONE_MS, lambda: self._die(first, second, third))

    def _die(self, first: ClusterBroker, second: ClusterBroker, third: ClusterBroker) -> None:
        first.crash(Loss.NOTHING)
        self._cut(third, [first.name, second.name])
        self._when(lambda: self._leads(second), lambda: self._join(first, second, third))

    def _join(self, first: ClusterBroker, second: ClusterBroker, third: ClusterBroker) -> None:
        self._world.net.heal_all()

        def end_reign() -> None:
            if self._leads(second):
                second.crash(Loss.NOTHING)
                self._when(lambda: self._leads(third), lambda: self._return(first, second))
            else:
                self._return(first, second)

        def reigned() -> None:
            self._later(_REIGN_MS, end_reign)

        self._when(lambda: second in self._world.masters, reigned)

    def _return(self, *gone: ClusterBroker) -> None:
        for broker in gone:
            if broker.node is None:
                broker.start()
        self._world.tally.hit(States.SUCCESSION)

    # -- inside

    def _cut(self, broker: ClusterBroker, others: list[str]) -> None:
        for other in others:
            self._world.net.cut(broker.name, other)
            self._world.net.cut(other, broker.name)

    def _later(self, ms: int, then: Callable[[], None]) -> None:
        """Nothing more is done when all has healed: nobody would start who dies then."""
        self._world.time.after(ms, lambda: None if self._world.healed else then())

    @staticmethod
    def _leads(broker: ClusterBroker) -> bool:
        return broker.node is not None and broker.node.master_role is not None

    def _when(self, there: Callable[[], bool], then: Callable[[], None]) -> None:
        if there():
            then()
        else:
            self._later(_LOOK_MS, lambda: self._when(there, then))
