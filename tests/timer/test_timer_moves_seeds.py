"""Timers move while brokers die, disks lose their power and the link loses, delays and repeats:
none is lost, none is delivered twice or early, and what a recall says is true."""

import os
import random
from collections import Counter
from contextlib import suppress

import pytest
from timer.move_rig import LOSSES, Member, MoveRig, PowerCut
from timer.timer_client import HOUR, MINUTE, SECOND, send

from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.testing.disk.sim_disk import SimDisk

SEEDS = int(os.environ.get("POPMQ_MOVE_SEEDS", "60"))
EVERY_DAY = 4
NAMES = ("a", "b", "c")


class Run:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = MoveRig(*NAMES, seed=seed, moves_per_second=self.rng.choice([20, 200, 10_000]))
        self.rig.instant = False
        self.due: dict[str, int] = {}  # told OK
        self.perhaps: set[str] = set()  # not answered
        self.cancelled: set[str] = set()
        self.perhaps_cancelled: set[str] = set()
        self.first: dict[str, str] = {}  # where it was sent to
        self.sent = self.crashes = self.stale = 0
        self.seen: Counter[str] = Counter()

    # -- what happens

    def go(self, steps: int) -> None:
        actions = [self.send] * 6 + [self.step] * 14 + [self.mail] * 10 + [self.recall] * 3
        actions += [self.time] * 3 + [self.drain, self.kill, self.arm, self.cut, self.lose]
        for _ in range(steps):
            self.guard(self.rng.choice(actions))
        self.heal()

    def guard(self, action: object) -> None:
        assert callable(action)
        try:
            action()
        except PowerCut:
            self.bring_back()

    def bring_back(self) -> None:
        """Whoever's power went: it starts anew, and may lose its power in the start."""
        for _ in range(4):
            try:
                for member in self.rig.members.values():
                    assert isinstance(member.disk, SimDisk)
                    if member.disk.faults.sick or member.name == self.armed:
                        self.armed = ""
                        self.crash(member)
                return
            except PowerCut:
                continue

    armed = ""

    def crash(self, member: Member) -> None:
        self.crashes += 1
        member.crash(self.rng.choice(LOSSES))

    def member(self) -> Member:
        return self.rig[self.rng.choice(NAMES)]

    def send(self) -> None:
        member = self.member()
        name = f"m{self.sent}"
        self.sent += 1
        due_ms = self.rig.clock.wall_ms() + self.rng.choice(
            [2 * SECOND, 15 * SECOND, MINUTE, 5 * MINUTE, 3 * HOUR]
        )
        self.perhaps.add(name)
        with suppress(Unavailable):  # it is drained
            self.first[name] = member.name
            send(member, name, due_ms)
            self.due[name] = due_ms
        if name not in self.due:
            self.perhaps.discard(name)

    def step(self) -> None:
        """Of one member, or of all; what the disk has to do may be done, or wait."""
        rig = self.rig
        rig.tell_peers()
        for member in self.rng.sample(list(rig.members.values()), self.rng.randint(1, 3)):
            member.broker.step()
            member.mover.step(member.broker)
            if self.rng.random() < 0.5:
                member.run_until_idle()
            else:
                for _ in range(self.rng.randrange(8)):
                    member.tick()

    def mail(self) -> None:
        mail = self.rig.mail
        if mail:
            at = self.rng.randrange(len(mail))
            target, work = mail[at]
            if target is not None and target.name in self.rig.cut:
                return
            if target is None or self.rng.random() > 0.1:
                del mail[at]
            else:
                self.stale += 1  # it comes once more, some time
            work()
            if target is not None and self.rng.random() < 0.7:
                target.run_until_idle()

    def lose(self) -> None:
        self.rig.lose()

    def recall(self) -> None:
        if not self.due:
            return
        name = self.rng.choice(sorted(self.due))
        asks, asked = [self.first[name]], set[str]()
        best, unknown = RecallResult.NOT_FOUND, False
        while asks:
            member = asks.pop()
            if member in asked:
                continue
            asked.add(member)
            self.perhaps_cancelled.add(name)
            try:
                reply = self.rig[member].recall(name)
            except PopmqError:
                unknown = True
                continue
            asks += reply.moved_to
            if reply.outcome == RecallResult.DONE:
                best = RecallResult.DONE
            elif reply.outcome == RecallResult.ALREADY_VISIBLE and best != RecallResult.DONE:
                best = RecallResult.ALREADY_VISIBLE
        self.seen[str(best) if not unknown else "unknown"] += 1
        if best == RecallResult.DONE:
            assert self.count(name) == 0, f"{name} was recalled and is visible"
            self.cancelled.add(name)
        elif best == RecallResult.ALREADY_VISIBLE:
            assert self.count(name) == 1, f"{name} is said to be visible, and is not"
        elif not unknown:
            raise AssertionError(f"{name} is found nowhere")
        if best != RecallResult.DONE and name not in self.cancelled and not unknown:
            self.perhaps_cancelled.discard(name)

    def count(self, name: str) -> int:
        return self.rig.fired().count(name)

    def time(self) -> None:
        self.rig.clock.advance(self.rng.choice([10, 200, SECOND, 10 * SECOND]))

    def drain(self) -> None:
        member = self.member()
        draining = [other for other in NAMES if self.rig[other].broker.registry.draining]
        undo = member.name in draining or len(draining) == 2
        member.drain(undo=undo)

    def kill(self) -> None:
        self.crash(self.member())

    def arm(self) -> None:
        """The power of one goes at one of its next operations."""
        if not self.armed:
            member = self.member()
            assert isinstance(member.disk, SimDisk)
            member.disk.faults.cut_at(self.rng.randrange(30))
            self.armed = member.name

    def cut(self) -> None:
        if self.rig.cut:
            self.rig.cut.clear()
        else:
            self.rig.cut.add(self.rng.choice(NAMES))

    # -- the end

    def heal(self) -> None:
        rig = self.rig
        for member in rig.members.values():
            assert isinstance(member.disk, SimDisk)
            member.disk.faults.heal()
        rig.cut.clear()
        rig.instant = True
        while rig.mail:
            rig.mail.pop(0)[1]()
            for member in rig.members.values():
                member.run_until_idle()
        rig["a"].drain(undo=True)
        rig["b"].drain()
        rig.move_all("b", limit=20_000)
        rig.run(4 * HOUR, parts=24)

    def check(self) -> None:
        fired: Counter[str] = Counter()
        for member in self.rig.members.values():
            for body, wall_ms in member.fired():
                fired[body] += 1
                if body in self.due:
                    assert wall_ms >= self.due[body], (
                        f"{body} fired {self.due[body] - wall_ms} early"
                    )
        assert not [name for name, times in fired.items() if times > 1], "delivered twice"
        assert not [name for name in self.cancelled if fired[name]], "recalled and delivered"
        sure = self.due.keys() - self.perhaps_cancelled
        assert not [name for name in sure if not fired[name]], "lost"
        assert not fired.keys() - self.perhaps - self.due.keys(), "made up"
        for member in self.rig.members.values():
            assert member.pending == 0
            assert not member.broker.timers.outgoing_timers.is_under_way


def run(seed: int) -> Run:
    print(f"seed {seed}")
    result = Run(seed)
    result.go(500)
    result.check()
    return result


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number < EVERY_DAY else [pytest.mark.more])
        for number in range(SEEDS)
    ],
)
def test_timers_that_move_are_delivered_once_whatever_breaks(number: int) -> None:
    seed = random.randrange(1 << 32) if number % 2 else number
    created = run(seed)
    assert created.sent > 10


@pytest.mark.more
def test_the_seeds_reach_what_they_are_for() -> None:
    total: Counter[str] = Counter()
    for seed in range(8):
        created = run(seed)
        total += created.seen
        total["moved"] += sum(
            member.broker.timers.outgoing_timers.moved for member in created.rig.members.values()
        )
        total["crashes"] += created.crashes
        total["lost"] += created.rig.lost_answers
        total["stale"] += created.stale
    for what in ("moved", "crashes", "lost", "stale", "DONE", "ALREADY_VISIBLE", "unknown"):
        assert total[what] > 3, (what, total)
