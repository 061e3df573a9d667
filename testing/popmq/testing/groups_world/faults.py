"""Faults of several broker groups, beside those that one group has (`cluster_world/faults.py`)."""

from collections.abc import Iterable
from functools import partial

from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.controller import ControllerNode
from popmq.testing.cluster_world.faults import Kinds, later
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.groups_world.sometimes_states import GroupsSometimes as States
from popmq.testing.groups_world.world import GroupsWorld

SETTLED_MS = 11_000  # nothing that was received is invisible any more
HALVES_MS = SETTLED_MS + 11_000


class GroupFaults:
    """`kinds` with their weights. Each ends by itself, at the latest when the world heals."""

    def __init__(self, world: GroupsWorld) -> None:
        self._world = world
        self._rng = world.rng

    @property
    def kinds(self) -> Kinds:
        return [
            (self._group_down, 2),
            (self._group_absent, 2),
            (self._owner_alone, 1.5),
            (self._proxy_sees_some, 1),
            (self._plant_divergence, 2.5 if self._world.replicas > 1 else 0),
        ]

    def _down(self, group: str, ms: int) -> None:
        world = self._world
        world.trace_line(f"all brokers of {group} die for {ms} ms")
        world.tally.hit(States.GROUP_DOWN)
        for broker in self._world.of(group):
            if broker.node is not None:
                broker.crash(Loss.NOTHING)
            later(world, ms, partial(_start, broker))

    def _group_down(self) -> None:
        self._down(self._rng.choice(self._world.names), self._rng.choice((600, 3_000, 8_000)))

    def _group_absent(self) -> None:
        """Controllers and proxies start while a group is away: no route names it for a while."""
        world = self._world
        self._down(self._rng.choice(world.names), self._rng.choice((6_000, 10_000)))
        world.tally.hit(States.GROUP_ABSENT)
        for controller in world.controllers:
            if controller.host.up:
                controller.stop(off=False)
            later(world, 300, partial(_start_controller, controller))
        for number, host in enumerate(world.proxies):
            if host.up:
                world.kill_proxy(number)
            later(world, 400, partial(self._start_proxy, number))

    def _start_proxy(self, number: int) -> None:
        if not self._world.proxies[number].up:
            self._world.start_proxy(number)

    def _owner_alone(self) -> None:
        """The brokers of the owner do not reach those of other groups, and they not them."""
        world, owner = self._world, self._world.names[0]
        world.trace_line(f"{owner} is cut off from the other groups")
        world.tally.hit(States.OWNER_ALONE)
        for broker in self._world.of(owner):
            for other in world.brokers:
                if other.group != owner:
                    world.net.cut(broker.name, other.name)
                    world.net.cut(other.name, broker.name)
        later(world, self._rng.choice((1_500, 5_000)), world.net.heal_all)

    def owner_in_two_halves(self) -> bool:
        """An old master of the owner that goes on answering other groups, beside its successor.

        First the proxies do not reach the owner, until nothing is in flight there: what was not
        confirmed would keep the old master's answers back. Then its master and a controller that
        does not reach the metadata store are cut off from the rest of the owner and the other
        controller; other groups reach both. False if there is no master.
        """
        world, owner = self._world, self._world.names[0]
        masters = [broker for broker in world.masters if broker.group == owner]
        if not masters:
            return False
        old = masters[0].name
        proxies = [host.name for host in world.proxies]
        world.trace_line(f"no proxy reaches {owner}")
        for broker in world.of(owner):
            self._cut([(broker.name, proxy) for proxy in proxies])
        later(world, SETTLED_MS, partial(self._halve, old))
        later(world, HALVES_MS, self._join)
        return True

    def _halve(self, old: str) -> None:
        world, owner = self._world, self._world.names[0]
        cut_off, other = (item.host.name for item in world.controllers)
        rest = [broker.name for broker in world.of(owner) if broker.name != old]
        world.trace_line(f"{old} and {cut_off} on one side, the rest of {owner} on the other")
        world.tally.hit(States.OWNER_HALVES)
        world.net.heal_all()
        world.records.manners.away_from.add(cut_off)
        self._cut([(old, host.name) for host in world.proxies])
        self._cut([(old, name) for name in (*rest, other)])
        self._cut([(cut_off, name) for name in rest])

    def _join(self) -> None:
        self._world.records.manners.away_from.clear()
        self._world.net.heal_all()

    def _cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        for source, target in pairs:
            self._world.net.cut(source, target)
            self._world.net.cut(target, source)

    def _proxy_sees_some(self) -> None:
        """A proxy does not reach one of the groups."""
        world = self._world
        group, proxy = self._rng.choice(world.names), self._rng.choice(world.proxies)
        world.trace_line(f"{proxy.name} does not reach {group}")
        for broker in self._world.of(group):
            world.net.cut(broker.name, proxy.name)
            world.net.cut(proxy.name, broker.name)
        later(world, self._rng.choice((1_500, 5_000)), world.net.heal_all)

    def _plant_divergence(self) -> None:
        """Tables of some replicas of a group are changed behind its back."""
        world = self._world
        names = world.divergence.plant(world.of(self._rng.choice(world.names)))
        world.trace_line(f"the tables of {names} are changed")


def _start(broker: ClusterBroker) -> None:
    if broker.node is None:
        broker.start()


def _start_controller(controller: ControllerNode) -> None:
    if not controller.host.up:
        controller.start()
