"""A replica of either side takes over while timers move: it goes on with the batch it finds."""

import random
from dataclasses import replace

import pytest
from replica.pair import Slave
from timer.move_rig import Member, MoveRig, named, send_ids
from timer.timer_client import HOUR

from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.testing.disk.sim_disk import SimDisk


class Replica(Slave, Member):
    """Follows a member by hand; takes its place in the rig when it is promoted."""

    def __init__(self, master: Member) -> None:
        self.rig, self.name, self.lives, self.master = master.rig, master.name, 0, master
        settings = replace(named(master.name), replication=ReplicationSettings(replicas=2))
        Slave.__init__(
            self,
            disk=SimDisk(random.Random(3)),
            clock=master.clock,
            seed=master.seed,
            settings=settings,
        )

    def take_over(self) -> None:
        self.take(self.master, most=self.master.broker.store.confirmed)
        self.rig.lost(self.master)
        self.master.broker.release_files()
        self.rig.members[self.name] = self
        self.promote()


def state(member: Member) -> list[bytes]:
    timers = member.broker.timers
    return [
        piece
        for departure in (timers.outgoing_timers, timers.incoming_timers)
        for piece, _ in departure.begin_snapshot()
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("replaced_side", ["a", "b"])
def test_a_replica_that_takes_over_moves_on_and_nothing_fires_twice(
    replaced_side: str, seed: int
) -> None:
    rng = random.Random(seed)
    rig = MoveRig("a", "b", seed=seed, moves_per_second=200)
    replica = Replica(rig[replaced_side])
    ids = [f"T{number}" for number in range(120)]
    send_ids(rig["a"], ids, HOUR)
    rig["a"].drain()
    rig.instant = False
    for _ in range(rng.randrange(5, 120)):
        rig.clock.advance(5)
        rig.step()
        if rig.mail and rng.random() < 0.5:
            target, work = rig.mail.pop(rng.randrange(len(rig.mail)))
            work()
            if target is not None:
                target.run_until_idle()
        if rng.random() < 0.1:
            rig.lose()
        if rng.random() < 0.2:
            replica.follow(rig[replaced_side])
    rig[replaced_side].run_until_idle()
    replica.follow(rig[replaced_side])
    assert state(replica) == state(rig[replaced_side])
    if seed % 2:  # and something that nobody confirmed goes with the master
        rig[replaced_side].broker.step()
        rig[replaced_side].mover.step(rig[replaced_side].broker)
    replica.take_over()
    rig.lose()
    while rig.mail:  # what was on its way arrives late
        target, work = rig.mail.pop()
        if target is None or target in rig.members.values():
            work()
    rig.instant = True
    rig.move_all("a")
    rig.run(2 * HOUR)
    assert rig.fired() == sorted(ids)
    assert rig["a"].drain(look=True).moved == 120
