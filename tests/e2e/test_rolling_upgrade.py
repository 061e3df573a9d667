"""A cluster of the earlier version becomes one of today's, role by role, under load.

The earlier version (`earlier.BEFORE_INCARNATIONS`) computes state hashes on its master that no
replica can reach, once a group with buffered check points holds messages.  New slaves of such
a master keep their stores, and sends continue.
"""

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.crash_ledger import Ack, CrashReport, Seen, check_crashes
from e2e.earlier import BEFORE_INCARNATIONS, earlier_tree, run_current, run_earlier
from e2e.official import PYTHON_MS_PER_MIB, Scenario, launch_python
from e2e.payloads import PYTHON_MAX_BODY
from e2e.processes import Cluster, Role
from e2e.raw_client import SERVICE, NoAnswer, RawClient, Received, Refused
from e2e.replicated import GroupClient, ReplicatedGroup, agree_on_tables
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

TOPIC = "orders"
DURABLE, BUFFERED = "durable", "buffered"
SENDERS, RECEIVERS = 4, 2  # receivers of each group at each proxy
INVISIBLE_MS = 15_000  # longer than a buffered check point stays in memory
POLL_MS = 500
UNACKED_SHARE = 0.2
PAUSE_S = 0.05
OLD_MASTER_S = 20.0
LONGEST_GAP_S = 5.0
DRAIN_S = 60.0

pytestmark = pytest.mark.heavy


@pytest.mark.timeout(360)
def test_a_group_of_three_is_upgraded_under_load_and_keeps_every_store(tmp_path: Path) -> None:
    tree = earlier_tree(BEFORE_INCARNATIONS, tmp_path / "earlier")
    # Small snapshots, so that state hashes are compared all the time.
    settings = {"POPMQ_STORE_SNAPSHOT_BYTES": "256KiB"}
    group = ReplicatedGroup(tmp_path, proxies=2, settings=settings)
    run_earlier(tree, group.controller, *group.brokers, *group.proxies)
    upgraded: dict[str, int] = {}  # broker -> size of its log when it was upgraded
    with group:
        for proxy in group.proxies:
            proxy.settings["POPMQ_PROXY_LISTEN"] = proxy.ready.endpoint
        group.popmq("topic", "create", TOPIC)
        group.popmq("group", "create", DURABLE)
        group.popmq("group", "create", BUFFERED, "--check-points", "buffered")
        load = Load(group.endpoints, random.Random(1))
        asyncio.run(drive(group, load, upgraded))

    rebuilds = {name: 0 for name in upgraded}
    for name, size in upgraded.items():
        lines = (tmp_path / f"{name}.log").read_bytes()[size:].decode().splitlines()
        rebuilds[name] = sum("rebuilding this store" in line for line in lines)
        failures = [line for line in lines if '"level": "critical"' in line]
        assert [line for line in failures if "the tables are not the master's" not in line] == []
    reports = {group: load.report(group) for group in (DURABLE, BUFFERED)}
    for name, report in reports.items():
        print(f"\ngroup {name}\n{report.table()}")
    print(f"longest gap between OK sends beside an old master: {load.gap_s:.2f} s")
    print(f"rebuilds after the upgrade: {rebuilds}, the old master comes last")
    *slaves, old_master = rebuilds.values()
    assert slaves == [0, 0]
    assert old_master <= 1  # its last snapshot has the wrong tables; the two others outvote it
    assert load.gap_s < LONGEST_GAP_S
    assert reports[DURABLE].faults == []
    # A message of a buffered group may come back early after its master has stopped.
    assert reports[BUFFERED].lost == 0
    assert reports[BUFFERED].acked_seen_again == 0


@pytest.mark.parametrize(
    "older",
    [
        pytest.param(0, id="old owner"),
        pytest.param(1, marks=pytest.mark.long, id="old follower"),
    ],
)
@pytest.mark.alone  # what comes back 5 s late is a fault, and a busy machine makes it late
@pytest.mark.timeout(240)
def test_old_and_new_proxies_and_broker_groups_serve_official_clients_together(
    tmp_path: Path, older: int
) -> None:
    """Every pair of an old or new proxy and an old or new broker group is in use: each client
    talks to both groups, the producer to the old proxy, consumers to either."""
    tree = earlier_tree(BEFORE_INCARNATIONS, tmp_path / "earlier")
    cluster = Cluster(tmp_path, groups=2, proxies=2)
    run_earlier(tree, cluster.brokers[older], cluster.proxies[0])
    seed = 22
    scenario = Scenario(
        launch=launch_python,
        seed=seed,
        count=100,
        max_body=PYTHON_MAX_BODY,
        client_ms_per_mib=PYTHON_MS_PER_MIB,
        late_ms=5_000,  # punctuality has tests of its own
    )
    with cluster:
        outcome = scenario.run(cluster, tmp_path)
        for sender, receiver in itertools.permutations(cluster.endpoints):
            every_kind(sender, receiver)
        old_proxy, new_proxy = cluster.endpoints
        with Client(new_proxy) as client:
            clients = client.call_admin(admin.ListClientsRequest(), admin.ListClientsReply)
            group = client.groups()[0].name
        watched = cluster.popmq("lag", "--watch", "--group", group)
    assert clients.incomplete.startswith(f"broker broker-{'ab'[older]}: frame kind ")
    assert "not everything: " in watched
    assert f"{old_proxy} does not serve ListClients: its popmq is too old" in watched
    outcome.check(f"official Python client, mixed versions, seed {seed}", sent=100)


def every_kind(sender: str, receiver: str) -> None:
    """Messages in order, delayed, recalled and in transactions, sent at one proxy and received at
    another."""
    suffix = f"{sender.rpartition(':')[2]}-{receiver.rpartition(':')[2]}"
    with Client(sender) as sends, Client(receiver) as receives:
        topics = {kind: f"{kind}-{suffix}" for kind in ("fifo", "delay", "transaction")}
        for kind, name in topics.items():
            topic = admin.Topic(name=name, type=kind, queues=4)
            sends.topic(admin.CreateTopicRequest(topic=topic))
        group = admin.Group(name=f"all-{suffix}", type="fifo")
        receives.group(admin.CreateGroupRequest(group=group))
        keyed = [(f"{key}-{number}", f"key-{key}") for number in range(3) for key in range(12)]
        for name, key_name in keyed:
            send(sends, topics["fifo"], name, message_group=key_name, message_type=api.FIFO)
        due = Timestamp(seconds=int(time.time()) + 5)
        kept, recalled = (
            send(sends, topics["delay"], name, delivery_timestamp=due, message_type=api.DELAY)
            for name in ("kept", "recalled")
        )
        handle = recalled.recall_handle
        call(receiver, "RecallMessage", topics["delay"], recall_handle=handle)
        for resolution in (api.COMMIT, api.ROLLBACK):
            name = f"half-{resolution}"
            half = send(sends, topics["transaction"], name, message_type=api.TRANSACTION)
            call(
                receiver,
                "EndTransaction",
                topics["transaction"],
                message_id=half.message_id,
                transaction_id=half.transaction_id,
                resolution=resolution,
            )
        in_order = receive_all(receives, f"all-{suffix}", topics["fifo"], len(keyed))
        assert sorted(in_order) == sorted(name for name, _ in keyed)
        for key in range(12):
            of_key = [name for name in in_order if name.startswith(f"{key}-")]
            assert of_key == sorted(of_key), in_order
        assert receive_all(receives, f"all-{suffix}", topics["delay"], 1) == [kept.message_id]
        committed = receive_all(receives, f"all-{suffix}", topics["transaction"], 1)
        assert committed == [f"half-{api.COMMIT}"]


def send(client: Client, topic: str, message_id: str, **properties: Any) -> service.SendResultEntry:
    system = api.SystemProperties(message_id=message_id, body_encoding=api.IDENTITY, **properties)
    message = api.Message(topic=api.Resource(name=topic), body=b"x", system_properties=system)
    return client.send(message)


def receive_all(client: Client, group: str, topic: str, count: int) -> list[str]:
    """Ids in the order of their delivery, each acknowledged; one more look finds nothing."""
    queue = api.MessageQueue(topic=api.Resource(name=topic))
    ids: list[str] = []
    end = time.monotonic() + 20
    while time.monotonic() < end and len(ids) < count:
        messages = client.receive(group, queue, limit=8, wait_ms=500, invisible_ms=60_000)
        ids += [message.system_properties.message_id for message in messages]
        if messages:
            client.ack(group, topic, messages)
    assert not client.receive(group, queue, limit=8, wait_ms=500, invisible_ms=60_000)
    return ids


def call(endpoint: str, method: str, topic: str, **fields: Any) -> None:
    """One call of the public service that popmq's own client does not make."""
    request = getattr(service, f"{method}Request")(topic=api.Resource(name=topic), **fields)
    with grpc.insecure_channel(endpoint) as channel:
        unary = channel.unary_unary(
            f"{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(service, f"{method}Response").FromString,
        )
        reply = unary(request, metadata=(("x-mq-client-id", "mixed"),), timeout=10)
    assert reply.status.code == api.OK, reply.status


async def drive(group: ReplicatedGroup, load: "Load", upgraded: dict[str, int]) -> None:
    async with GroupClient(group.address) as client, load:
        master = group.master(await client.in_sync(3))
        slaves = [broker for broker in group.brokers if broker is not master]
        for slave in slaves:
            await upgrade(slave, upgraded)
        started = time.monotonic()
        await load.until(started + OLD_MASTER_S)
        load.gap_s = load.longest_gap(started)
        await upgrade(group.proxies[0], {})
        await upgrade(master, upgraded)
        await client.in_sync(3, within_s=60)
        await upgrade(group.controller, {})
        await upgrade(group.proxies[1], {})
        await load.drain()
        await agree_on_tables(group, client, "filler", may_have_differed=True)


async def upgrade(role: Role, upgraded: dict[str, int]) -> None:
    upgraded[role.name] = role.log.stat().st_size
    run_current(role)
    await asyncio.to_thread(role.terminate)
    await asyncio.to_thread(role.restart)


@dataclass(slots=True)
class Load:
    """Senders, and receivers of both groups that leave some messages unacknowledged at first."""

    endpoints: list[str]
    dice: random.Random
    gap_s: float = 0.0
    sent_ok: list[str] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    sent_unknown: list[str] = field(default_factory=list)
    seen: dict[str, list[Seen]] = field(default_factory=lambda: {DURABLE: [], BUFFERED: []})
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _sending: bool = True
    _receiving: bool = True

    async def __aenter__(self) -> "Load":
        for number in range(SENDERS):
            endpoint = self.endpoints[number % len(self.endpoints)]
            self._tasks.append(asyncio.create_task(self._send_loop(endpoint, number)))
        for endpoint, group, number in itertools.product(
            self.endpoints, self.seen, range(RECEIVERS)
        ):
            name = f"{group}-{number}-{endpoint}"
            self._tasks.append(asyncio.create_task(self._receive_loop(endpoint, group, name)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sending = self._receiving = False
        await asyncio.gather(*self._tasks)

    def report(self, group: str) -> CrashReport:
        return check_crashes(
            sent_ok=self.sent_ok,
            sent_unknown=self.sent_unknown,
            deliveries=self.seen[group],
            invisible_ms=INVISIBLE_MS,
        )

    def longest_gap(self, since: float) -> float:
        """Seconds, between OK sends from `since` until now."""
        times = [since, *(at for at in self.sent_at if at > since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))

    async def until(self, moment: float) -> None:
        """Let the load run until this moment of the monotonic clock."""
        while time.monotonic() < moment:
            await asyncio.sleep(0.05)
            for task in self._tasks:
                if task.done():
                    task.result()

    async def drain(self) -> None:
        """Stop sending; return when every message was acknowledged by both groups."""
        self._sending = False
        end = time.monotonic() + DRAIN_S
        while time.monotonic() < end:
            settled = [
                {seen_message.message_id for seen_message in seen if seen_message.ack is Ack.OK}
                for seen in self.seen.values()
            ]
            if all(set(self.sent_ok) <= ids for ids in settled):
                break
            await asyncio.sleep(0.1)
        await self.until(time.monotonic() + INVISIBLE_MS / 1_000)  # what comes back would show

    async def _send_loop(self, endpoint: str, number: int) -> None:
        async with RawClient(endpoint, f"sender-{number}") as client:
            for count in itertools.count():
                if not self._sending:
                    return
                message_id = f"{number:02d}-{count:06d}"
                try:
                    await client.send(TOPIC, message_id, message_id.encode() * 16)
                except NoAnswer:
                    self.sent_unknown.append(message_id)
                    await asyncio.sleep(PAUSE_S)
                else:
                    self.sent_ok.append(message_id)
                    self.sent_at.append(time.monotonic())
                    await asyncio.sleep(PAUSE_S / 10)

    async def _receive_loop(self, endpoint: str, group: str, name: str) -> None:
        async with RawClient(endpoint, name) as client, asyncio.TaskGroup() as acks:
            while self._receiving:
                asked_ms = time.monotonic() * 1_000
                try:
                    messages = await client.receive(
                        group, TOPIC, limit=16, invisible_ms=INVISIBLE_MS, poll_ms=POLL_MS
                    )
                except NoAnswer:
                    await asyncio.sleep(PAUSE_S)
                    continue
                for message in messages:
                    received_ms = time.monotonic() * 1_000
                    seen = Seen(message.message_id, message.attempt, asked_ms, received_ms)
                    self.seen[group].append(seen)
                    if message.attempt > 1 or self.dice.random() >= UNACKED_SHARE:
                        seen.ack = Ack.UNKNOWN
                        acks.create_task(acknowledge(client, group, message, seen))


async def acknowledge(client: RawClient, group: str, message: Received, seen: Seen) -> None:
    try:
        await client.ack(group, TOPIC, message)
    except Refused:
        seen.ack = Ack.REFUSED
    except NoAnswer:
        seen.ack = Ack.UNKNOWN
    else:
        seen.ack = Ack.OK
    seen.ack_ms = time.monotonic() * 1_000
