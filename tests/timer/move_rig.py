"""Broker groups between which timers move: brokers on simulated disks, one clock, a bad link."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from timer.timer_client import send

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.node.timer_migrator import TimerMigrator
from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply, RecallResult
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire.controller_pb2 import BrokerAddress
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import SMALL, Answer, CoreBroker

LOSSES = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED, Loss.NOTHING)


def named(name: str, **timer: int) -> Settings:
    return replace(
        SMALL,
        broker=replace(SMALL.broker, name=name),
        topic=replace(SMALL.topic, auto_create=False),
        store=replace(SMALL.store, segment_bytes=64 << 10, snapshot_bytes=4 << 10),
        message=replace(SMALL.message, max_body_bytes=1 << 10),
        timer=replace(SMALL.timer, **{"moves_per_second": 1_000_000, **timer}),
    )


class Member(CoreBroker):
    """One broker group, and its mover; `died` hears of a crash."""

    mover: TimerMigrator
    died: Callable[[], None]

    def __init__(self, rig: "MoveRig", name: str, seed: int, **timer: int) -> None:
        self.rig, self.name, self.lives = rig, name, 0
        self.dead = False
        disk = SimDisk(random.Random(seed))
        super().__init__(disk=disk, clock=rig.clock, seed=seed, settings=named(name, **timer))
        self.topic("orders", queues=1, type=MessageType.MIXED)
        self.group("g")

    def start(self) -> None:
        self.lives += 1
        self.mover = TimerMigrator(
            self.settings, open_port=self.rig.port, clock=self.clock, rng=self.rig.rng
        )
        super().start()

    def crash(self, loss: Loss = Loss.NOTHING) -> None:
        """The process dies, and starts again; with the power gone, what was not synced goes."""
        self.broker.release_files()
        assert isinstance(self.disk, SimDisk)
        self.disk.crash(loss)
        self.rig.lost(self)
        self.start()

    def drain(self, *, undo: bool = False, look: bool = False) -> admin.DrainReply:
        request = admin.DrainRequest(group=self.name, undo=undo, look=look)
        # The first group owns the topics; that a group with topics of its own is drained is what
        # the registry's owner forbids, and here each has the same ones.
        self.broker.registry.owner = "somebody"
        return admin.DrainReply.FromString(self.reply(Kind.DRAIN, request.SerializeToString()))

    def recall(self, message_id: str) -> admin.RecallReply:
        request = admin.RecallRequest(topic="orders", message_id=message_id)
        return admin.RecallReply.FromString(self.reply(Kind.RECALL, request.SerializeToString()))

    def fired(self) -> list[tuple[str, int]]:
        """Body and wall time of all that is in the topic."""
        store, topic = self.broker.store, self.broker.registry.topic("orders")
        queue = store.queue(topic.id, 0)
        results = store.reader.read(list(queue.units(0, queue.count))) if queue.count else []
        reporteds = []
        for result in results:
            assert not isinstance(result, DamagedMessage)
            reporteds.append((result.head.decode(), result.header.wall_ms))
        return reporteds

    @property
    def pending(self) -> int:
        return self.broker.timers.state.pending_total


class MoveRig:
    """Members by name; their names are their addresses. What one asks of another waits in `mail`
    until `deliver`, unless the link is `instant`."""

    def __init__(self, *names: str, seed: int = 1, **timer: int) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.instant = True
        self.cut: set[str] = set()  # members that nobody reaches
        self.asked: list[tuple[str, bytes]] = []
        self.mail: list[tuple[Member | None, Callable[[], None]]] = []
        self.lost_answers = 0
        self.waiting: list[tuple[Member, int, OnReply]] = []
        self.answers: list[OnReply] = []  # whose answers are in the mail
        self.members = {
            name: Member(self, name, seed * 16 + number, **timer)
            for number, name in enumerate(names)
        }

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    # -- the link

    def port(self, address: str) -> "Way":
        return Way(self, address)

    def ask(self, address: str, kind: Kind, body: bytes, on_reply: OnReply) -> None:
        self.asked.append((address, body))
        if address in self.cut or address not in self.members:
            on_reply(Unavailable(f"{address} is away"))
        elif self.instant:
            self.serve(self.members[address], kind, body, on_reply)
        else:
            target = self.members[address]
            self.mail.append((target, partial(self.serve, target, kind, body, on_reply)))

    def serve(self, target: Member, kind: Kind, body: bytes, on_reply: OnReply) -> None:
        waits = (target, target.lives, on_reply)
        self.waiting.append(waits)

        def heard(answer: bytes | PopmqError) -> None:
            if waits not in self.waiting:
                return
            self.waiting.remove(waits)
            if self.instant:
                on_reply(answer)
            else:
                self.answers.append(on_reply)
                self.mail.append((None, partial(self.answer, on_reply, answer)))

        target.server.request(kind, body, 10_000, heard)
        if self.instant:
            target.run_until_idle()

    def answer(self, on_reply: OnReply, answer: bytes | PopmqError) -> None:
        if on_reply in self.answers:
            self.answers.remove(on_reply)
            on_reply(answer)

    def lose(self) -> None:
        """Connections break: what was asked may come yet, no answer does."""
        for waits in list(self.waiting):
            self.waiting.remove(waits)
            self.answers.append(waits[2])
        for on_reply in list(self.answers):
            self.lost_answers += 1
            self.answer(on_reply, Unavailable("the connection broke", unknown=True))

    def lost(self, dead: Member) -> None:
        """What it was asked it will not answer; the asker's connection breaks."""
        for waits in [entry for entry in self.waiting if entry[0] is dead]:
            self.waiting.remove(waits)
            waits[2](Unavailable(f"{dead.name} broke off", unknown=True))

    # -- time

    def tell_peers(self, *absent: str) -> None:
        """As controllers do, in the answers to heartbeats."""
        peers = [
            BrokerAddress(broker=name, address=name, draining=item.broker.registry.draining)
            for name, item in self.members.items()
            if name not in absent
        ]
        for member in self.members.values():
            if member.mover.wants_peers(member.broker):
                member.mover.hear(peers)

    def step(self, rounds: int = 1) -> None:
        """Each member's background work; what is asked and answered goes its way."""
        for _ in range(rounds):
            self.tell_peers()
            for member in self.members.values():
                member.broker.step()
                member.mover.step(member.broker)
                member.run_until_idle()

    def run(self, ms: int = 0, *, parts: int = 20) -> None:
        """Let time pass in parts."""
        for _ in range(parts):
            self.clock.advance(ms // parts)
            self.step(4)

    def move_all(self, name: str, *, limit: int = 4_000) -> None:
        """Until nothing is left that waits at `name`."""
        member = self[name]
        for _ in range(limit):
            self.clock.advance(1)
            self.step()
            if not member.pending and not member.broker.timers.outgoing_timers.is_under_way:
                return
        raise AssertionError(f"{name} still has {member.pending}: {member.drain(look=True)}")

    def fired(self) -> list[str]:
        return sorted(body for member in self.members.values() for body, _ in member.fired())


class Way:
    def __init__(self, rig: MoveRig, address: str) -> None:
        self._rig, self._address = rig, address

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._rig.ask(self._address, kind, body, on_reply)
        return 1

    def cancel(self, request_id: int) -> None: ...


def send_ids(member: Member, ids: list[str], ahead_ms: int) -> None:
    for message_id in ids:
        send(member, message_id, member.clock.wall_ms() + ahead_ms)
    member.run_steps()


__all__ = ["LOSSES", "Answer", "Member", "MoveRig", "PowerCut", "RecallResult", "named", "send_ids"]
