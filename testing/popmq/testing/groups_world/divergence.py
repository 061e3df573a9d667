"""Planted divergence: tables of a replica that are not a function of its log any more.

The rule for what a group does then: no acknowledged message is lost (the nemesis' checker sees
that), a broker that leads never rebuilds its store, and of the complete copies at most one is given
up at a time (docs/concepts/replication.md).
"""

import random
from collections.abc import Callable, Sequence

from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.groups_world.sometimes_states import GroupsSometimes as States
from popmq.testing.harness.sometimes import StateCounts

NO_GROUP = 77  # a number that no consumer group has: clients never see the change


class Divergence:
    def __init__(
        self, rng: random.Random, tally: StateCounts, report: Callable[[str, str], None]
    ) -> None:
        self._rng, self._tally, self._report = rng, tally, report
        self.groups: set[str] = set()  # broker groups with a planted difference
        self._rebuilds: dict[str, int] = {}
        self._offset = 0

    def plant(self, brokers: Sequence[ClusterBroker]) -> list[str]:
        """In some of the brokers of one group; returns their names."""
        masters = [item for item in brokers if item.node is not None and item.node.master_role]
        slaves = [item for item in brokers if item.node is not None and item not in masters]
        chosen = [
            slaves[:1],
            self._rng.sample(slaves, len(slaves))[:2],
            masters,
            [*masters, *slaves[:1]],
        ]
        kind = self._rng.choices(range(4), (3, 2, 2, 1))[0]
        for broker in chosen[kind]:
            assert broker.node is not None
            self._offset += 1
            self.groups.add(broker.group)
            broker.node.broker.deliveries.redriven._add(NO_GROUP, self._offset)
            self._tally.hit(States.PLANTED_MASTER if broker in masters else States.PLANTED)
        return [broker.name for broker in chosen[kind]]

    def look(self, brokers: Sequence[ClusterBroker]) -> None:
        """At the brokers of one group."""
        given_up = []
        for broker in brokers:
            node = broker.node
            if node is None:
                continue
            if node.rebuilds != self._rebuilds.get(broker.name, 0):
                self._rebuilds[broker.name] = node.rebuilds
                self._tally.hit(States.REBUILT, int(node.rebuilds > 0))
            if not node.identity.copying:
                continue
            if node.master_role is not None:
                self._report("divergence", f"{broker.name} leads, and its store is being rebuilt")
            if node.rebuilds:
                given_up.append(broker.name)
        if len(given_up) > 1:
            self._report("divergence", f"{given_up} rebuild at the same time")
