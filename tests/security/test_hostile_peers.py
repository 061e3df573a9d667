"""A hostile peer of each role against the frames of a running cluster: no OK without a quorum, no
byte of another broker group's log.

Each role has three peers: one without the cluster's secret, one with another secret, and one with
the right secret that sends what its role, its name or its group may not.  They know every name,
address and store id, and speak for the two slaves of a group that are stopped.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from e2e.processes import LOCAL, Role, free_port
from e2e.replicated import GROUP, GroupClient, ReplicatedGroup, put

from popmq.common.errors import PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.cluster_secret import (
    ClusterSecret,
    load_cluster_secret,
    make_cluster_secret,
)
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import KINDS_OF_ROLE
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb

HOSTILE_S = 60.0
OTHER_GROUP = "group-b"
TOPIC = "orders"
REQUESTS = [kind for kind in Kind if kind >= 16]
POSITION = 1 << 40  # behind the end of any log here

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


@dataclass
class Known:
    """What the hostile peers know of the group whose slaves are stopped."""

    state: pb.GroupState
    slaves: list[pb.BrokerAddress]
    end: int

    @property
    def epoch(self) -> int:
        return self.state.record.epoch


@dataclass
class Outcome:
    """What the hostile peers were answered."""

    answered: list[str] = field(default_factory=list)  # requests with a reply: none may have one
    refused: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)


def bodies(kind: Kind, known: Known, dice: random.Random) -> Iterator[bytes]:
    """Requests of the kind that would do harm if they were served."""
    slave, epoch = dice.choice(known.slaves), known.epoch
    store_id, session = slave.store_id, dice.getrandbits(63)
    match kind:
        case Kind.HANDSHAKE:
            for node in (slave.node, "made-up"):
                request = replication.Handshake(epoch, store_id, node, "", known.end, 64 << 20)
                yield replication.encode_handshake(request)
        case Kind.FETCH:
            fetch = replication.Fetch(epoch, store_id, session, 0, 1 << 20, 0, 100)
            yield replication.encode_fetch(fetch)
        case Kind.ACKED:
            for position in (known.end, POSITION):
                acked = replication.Acked(epoch, store_id, session, position)
                yield replication.encode_acked(acked)
        case Kind.READ_SNAPSHOT:
            part = replication.ReadSnapshot(epoch, store_id, session, 0, 0, 1 << 20)
            yield replication.encode_read_snapshot(part)
        case Kind.REGISTER:
            for name in (GROUP, "made-up"):
                lie = pb.BrokerAddress(
                    broker=name, address=f"{LOCAL}:9", epoch=epoch + 1, store_id=store_id
                )
                lie.node = slave.node
                yield pb.RegisterRequest(
                    cluster="popmq", broker=lie, replicas=3, role=pb.MASTER
                ).SerializeToString()
        case Kind.ALTER_SYNC_STATE_SET:
            record = known.state.record
            yield pb.AlterSyncStateSetRequest(
                cluster="popmq",
                group=GROUP,
                leader=record.leader,
                epoch=epoch,
                expected_version=record.version,
                sync_state_set=[record.leader],
            ).SerializeToString()
        case Kind.FAILOVER:
            yield pb.FailoverRequest(
                cluster="popmq", group=GROUP, node=slave.node, unclean=True
            ).SerializeToString()
        case Kind.WATCH_GROUP:
            yield pb.WatchGroupRequest(
                cluster="popmq", group=GROUP, store_id=store_id
            ).SerializeToString()
        case Kind.PUT:
            yield put(TOPIC, b"of a hostile peer")
        case _:
            yield b""


@dataclass
class Peer:
    """With the secret, `kinds` are those that its role, or its group, may not send."""

    name: str
    hello: Hello
    frames: FrameSettings
    kinds: list[Kind]

    async def attack(self, address: str, known: Known, outcome: Outcome, until_s: float) -> None:
        dice = random.Random(f"{self.name} {address}")
        port = FramePort(address, self.hello, settings=self.frames, peer_name=address)
        port.start()
        try:
            while time.monotonic() < until_s:
                requests = [
                    (kind, body) for kind in self.kinds for body in bodies(kind, known, dice)
                ]
                dice.shuffle(requests)
                asked = [self._ask(port, kind, body, outcome) for kind, body in requests]
                await asyncio.gather(*asked)
                outcome.rounds[self.name] += 1
                await asyncio.sleep(0.2)
        finally:
            await port.close()

    async def _ask(self, port: FramePort, kind: Kind, body: bytes, outcome: Outcome) -> None:
        try:
            reply = await call(port, kind, body, 2_000)
        except PopmqError as refusal:
            outcome.refused[f"{self.name}: {refusal.code.name}"] += 1
        else:
            outcome.answered.append(f"{self.name} {kind.name}: {reply[:100]!r}")


def hostile_peers(ours: ClusterSecret, known: Known) -> list[Peer]:
    """Without the secret a peer takes the name of a stopped slave."""
    peers = []
    for role in ProcessRole:
        hello = Hello(role=role, name=known.slaves[0].node, cluster="popmq")
        if role is ProcessRole.BROKER:
            hello = replace(hello, group=GROUP)
        without = FrameSettings(secret=None, secret_required=False)
        other = FrameSettings(
            secret=ClusterSecret((b"another secret " * 4,)), secret_required=False
        )
        peers.append(Peer(f"{role} without the secret", hello, without, REQUESTS))
        peers.append(Peer(f"{role} with another secret", hello, other, REQUESTS))
        wrong = [kind for kind in REQUESTS if kind not in KINDS_OF_ROLE[role]]
        if role is ProcessRole.BROKER:
            hello = replace(hello, name="broker-of-b", group=OTHER_GROUP)
            # Between masters of broker groups these are for any of them.
            between = (Kind.COPY_META, Kind.TAKE_TIMERS)
            wrong = [kind for kind in REQUESTS if kind not in between]
        good = FrameSettings(secret=ours)
        peers.append(Peer(f"{role} with the secret", hello, good, wrong))
    return peers


async def send_for(port: FramePort, until_s: float, timeout_ms: int) -> Counter[str]:
    """Sends one after the other: how many were OK, and the codes of the others."""
    counts: Counter[str] = Counter()
    while time.monotonic() < until_s:
        try:
            await call(port, Kind.PUT, put(TOPIC, b"honest"), timeout_ms)
        except PopmqError as error:
            counts[error.code.name] += 1
        else:
            counts["OK"] += 1
        await asyncio.sleep(0.05)
    return counts


def forbidden(role: Role, kind: ProcessRole) -> int:
    return role.metric(f'popmq_frames_forbidden_total{{role="{kind}"}}')


def test_hostile_peers_of_every_role_get_no_ok_without_a_quorum_and_no_byte_of_a_log(
    tmp_path: Path,
) -> None:
    secret_file = tmp_path / "cluster.secret"
    make_cluster_secret(str(secret_file))
    group = ReplicatedGroup(tmp_path, settings={"POPMQ_CLUSTER_SECRET_FILE": str(secret_file)})
    for broker in group.brokers:
        broker.settings["POPMQ_REPLICATION_MIN_IN_SYNC"] = "2"
    alone = Role(
        "alone",
        ["broker"],
        folder=tmp_path,
        settings={
            **group.brokers[0].settings,
            "POPMQ_BROKER_NAME": OTHER_GROUP,
            "POPMQ_BROKER_NODE": "",
            "POPMQ_BROKER_DATA": str(tmp_path / "data-alone"),
            "POPMQ_BROKER_LISTEN": f"{LOCAL}:{free_port()}",
            "POPMQ_REPLICATION_REPLICAS": "1",
            "POPMQ_REPLICATION_MIN_IN_SYNC": "1",
        },
    )
    ours = load_cluster_secret(str(secret_file))
    with group, alone:
        asyncio.run(attacked(group, alone, ours))


async def attacked(group: ReplicatedGroup, alone: Role, ours: ClusterSecret) -> None:
    async with GroupClient(group.address, FrameSettings(secret=ours)) as client:
        state = await client.in_sync(3)
        for _ in range(20):
            await client.ask(Kind.PUT, put(TOPIC, b"before"))
        master = group.master(state)
        address = master.settings["POPMQ_BROKER_LISTEN"]
        slaves = [broker for broker in group.brokers if broker is not master]
        known = Known(
            state,
            [member.broker for member in state.members if member.broker.node != master.name],
            (await client.role_of(address)).end,
        )
        targets = {
            group.controller: group.address,
            master: address,
            alone: alone.settings["POPMQ_BROKER_LISTEN"],
        }
        before = {role: forbidden_of(role, group) for role in targets}
        for slave in slaves:
            os.kill(slave.pid, signal.SIGSTOP)
        outcome = Outcome()
        until_s = time.monotonic() + HOSTILE_S
        try:
            async with asyncio.TaskGroup() as tasks:
                sends = tasks.create_task(send_for(client.port(address), until_s, 2_000))
                other = client.port(targets[alone])
                sends_alone = tasks.create_task(send_for(other, until_s, 5_000))
                for peer in hostile_peers(ours, known):
                    for role, where in targets.items():
                        if role is not alone or peer.hello.group != OTHER_GROUP:
                            tasks.create_task(peer.attack(where, known, outcome, until_s))
        finally:
            for slave in slaves:
                os.kill(slave.pid, signal.SIGCONT)
        report(outcome, sends.result(), sends_alone.result())
        assert outcome.answered == []
        assert sends.result()["OK"] == 0
        after = await client.in_sync(3)
        assert sum(sends.result().values()) > 10
        assert set(sends_alone.result()) == {"OK"}
        for role in targets:
            count = forbidden_of(role, group) - before[role]
            print(f"{role.name}: {count} requests and connections were forbidden")
            assert count > 100
        assert all(rounds > 10 for rounds in outcome.rounds.values())
        assert {member.broker.store_id for member in after.members} == {
            member.broker.store_id for member in state.members
        }
        await client.ask(Kind.PUT, put(TOPIC, b"after"))
        request = pb.ListReplicasRequest().SerializeToString()
        reply = await call(client.port(group.address), Kind.LIST_REPLICAS, request, 5_000)
        names = {known_group.group for known_group in pb.ListReplicasReply.FromString(reply).groups}
        assert names == {GROUP, OTHER_GROUP}


def forbidden_of(role: Role, group: ReplicatedGroup) -> int:
    is_controller = role is group.controller
    return forbidden(role, ProcessRole.CONTROLLER if is_controller else ProcessRole.BROKER)


def report(outcome: Outcome, sends: Counter[str], sends_alone: Counter[str]) -> None:
    print(f"\n{HOSTILE_S:g} s with two of three replicas stopped; sends: {dict(sends)}")
    print(f"sends to the other broker group: {dict(sends_alone)}")
    for name, count in sorted(outcome.refused.items()):
        print(f"{name}: {count}")
