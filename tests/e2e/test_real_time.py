"""Pop with notify, measured: a message at any of 4 broker groups reaches a receive that waits.

A receive may not end with nothing while a message was ready for 100 ms or longer.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc
import pytest
from e2e.processes import Cluster, Role

from popmq.cli.client import MESSAGING, Client, duration, new_client_id
from popmq.cli.message_ids import MessageIds
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

TOPIC, GROUP = "now", "waiters"
RECEIVERS = 16
POLL_MS = 4_000
READY_S = 0.1
# Receivers at one proxy are half of them: few, or many from the first on.
FEW, MANY = {"POPMQ_POLL_SWITCH_POLL_LIMIT": "64"}, {"POPMQ_POLL_SWITCH_POLL_LIMIT": "2"}

pytestmark = pytest.mark.alone


@dataclass
class Round:
    """One message; times of one monotonic clock in seconds."""

    sent: float
    confirmed: float = float("inf")
    received: float = float("inf")


@dataclass
class Rounds:
    """Receivers that never stop waiting, and what they saw."""

    endpoints: list[str]
    rounds: dict[str, Round] = field(default_factory=dict)
    empties: list[float] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def receive_for_ever(self, number: int) -> None:
        with Client(self.endpoints[number % len(self.endpoints)]) as client:
            while not self.over:
                queue = api.MessageQueue(topic=api.Resource(name=TOPIC))
                got = client.receive(GROUP, queue, limit=1, wait_ms=POLL_MS, invisible_ms=60_000)
                now = time.monotonic()
                with self.changed:
                    for message in got:
                        self.took(message.system_properties.message_id, now)
                    if not got:
                        self.empties.append(now)
                    self.changed.notify_all()
                client.ack(GROUP, TOPIC, got) if got else None

    def took(self, message_id: str, now: float) -> None:
        known = self.rounds.get(message_id)
        if known is None or known.received != float("inf"):
            self.unknown.append(message_id)
        else:
            known.received = now

    def one(self, client: Client, message_id: str) -> None:
        message = api.Message(topic=api.Resource(name=TOPIC), body=b"now")
        message.system_properties.MergeFrom(
            api.SystemProperties(
                message_id=message_id, body_encoding=api.IDENTITY, message_type=api.NORMAL
            )
        )
        mine = self.rounds[message_id] = Round(time.monotonic())
        client.send(message)
        mine.confirmed = time.monotonic()
        with self.changed:
            came = self.changed.wait_for(lambda: mine.received < float("inf"), POLL_MS / 1_000 + 2)
        assert came, f"message {message_id} reached nobody"

    def false_empties(self) -> list[str]:
        return [
            f"{at - message.confirmed:.3f} s after message {name} was confirmed, before it was "
            "received"
            for at in self.empties
            for name, message in self.rounds.items()
            if message.confirmed + READY_S <= at < message.received
        ]


def run_rounds(cluster: Cluster, count: int) -> Rounds:
    rounds = Rounds(cluster.endpoints)
    threads = [
        threading.Thread(target=rounds.receive_for_ever, args=(n,)) for n in range(RECEIVERS)
    ]
    for thread in threads:
        thread.start()
    ids = MessageIds()
    try:
        with Client(cluster.endpoints[0]) as client:
            for _ in range(count):
                rounds.one(client, ids.next(int(time.time())))
    finally:
        rounds.over = True
        for thread in threads:
            thread.join()
    return rounds


def latency(rounds: Rounds) -> str:
    ms = [(message.received - message.sent) * 1_000 for message in rounds.rounds.values()]
    cuts = quantiles(ms, n=100)
    return f"send to receive p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms, max {max(ms):.1f} ms"


@contextmanager
def served(folder: Path, groups: int, settings: dict[str, str]) -> Iterator[Cluster]:
    with Cluster(folder, proxies=2, groups=groups, settings=settings) as cluster:
        with Client(cluster.endpoints[0]) as client:
            until(lambda: is_made(client))
            until(
                lambda: len({number.broker.name for number in client.query_route(TOPIC)}) == groups
            )
        yield cluster


def is_made(client: Client) -> bool:
    topic = admin.Topic(name=TOPIC, type="normal", queues=8)
    try:
        client.topic(admin.CreateTopicRequest(topic=topic))
    except PopmqError:  # the groups are not heard of yet
        return False
    return True


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("groups", "settings", "count"),
    [
        pytest.param(4, FEW, 50, marks=pytest.mark.heavy, id="notified"),
        pytest.param(4, MANY, 50, marks=pytest.mark.heavy, id="plain"),
        pytest.param(4, FEW, 1_000, marks=pytest.mark.long, id="notified-long"),
        pytest.param(4, MANY, 1_000, marks=pytest.mark.long, id="plain-long"),
        pytest.param(1, FEW, 1_000, marks=pytest.mark.long, id="one-broker-long"),
    ],
)
@pytest.mark.timeout(400)
def test_no_receive_ends_empty_while_a_message_is_ready_at_any_broker_group(
    tmp_path: Path, groups: int, settings: dict[str, str], count: int
) -> None:
    with served(tmp_path, groups, settings) as cluster:
        rounds = run_rounds(cluster, count)
        notified = sum(
            proxy.metric("popmq_proxy_pop_with_notify_total") for proxy in cluster.proxies
        )
        plain = sum(proxy.metric("popmq_proxy_plain_polls_total") for proxy in cluster.proxies)
    print(f"\n{groups} groups, {count} rounds, {RECEIVERS} receivers: {latency(rounds)}")
    print(f"{notified} notified, {plain} plain, {len(rounds.empties)} ended with nothing")
    assert rounds.false_empties() == []
    assert rounds.unknown == []
    assert (plain > 0) == (settings is MANY and groups > 1)
    assert (notified > 0) == (groups > 1)


def cpu_ms(roles: list[Role]) -> int:
    """Processor time of these processes so far."""
    ticks = 0
    for role in roles:
        fields = Path(f"/proc/{role.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * 1_000 // os.sysconf("SC_CLK_TCK")


def waits_at(brokers: list[Role]) -> int:
    return sum(broker.metric("popmq_waiting_receives") for broker in brokers)


@pytest.mark.parametrize(
    ("polls", "seconds"),
    [
        pytest.param(50, 1, marks=pytest.mark.heavy),
        pytest.param(1_000, 60, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("settings", [{"POPMQ_POLL_SWITCH_POLL_LIMIT": "100000"}, MANY])
@pytest.mark.timeout(300)
def test_what_idle_receives_over_four_groups_cost(
    tmp_path: Path, polls: int, seconds: int, settings: dict[str, str]
) -> None:
    with served(tmp_path, 4, settings) as cluster:
        channel = grpc.insecure_channel(cluster.endpoints[0])
        ask = channel.unary_stream(
            MESSAGING + "ReceiveMessage",
            request_serializer=service.ReceiveMessageRequest.SerializeToString,
            response_deserializer=service.ReceiveMessageResponse.FromString,
        )
        request = service.ReceiveMessageRequest(
            group=api.Resource(name=GROUP),
            message_queue=api.MessageQueue(topic=api.Resource(name=TOPIC)),
            invisible_duration=duration(60_000),
            long_polling_timeout=duration((seconds + 15) * 1_000),
        )
        metadata = (("x-mq-client-id", new_client_id()),)
        calls: list[Any] = [
            ask(request, timeout=seconds + 30, metadata=metadata) for _ in range(polls)
        ]
        proxy = cluster.proxies[0]
        waiting = polls * 4 if settings is not MANY else polls + 3 * 2
        until(lambda: waits_at(cluster.brokers) == waiting)
        before = cpu_ms([proxy, *cluster.brokers])
        began = time.monotonic()
        time.sleep(seconds)
        spent = cpu_ms([proxy, *cluster.brokers]) - before
        passed = time.monotonic() - began
        for call in calls:
            call.cancel()
        channel.close()
    print(
        f"\n{polls} idle receives over 4 groups, switch at {settings}: {waiting} wait at brokers, "
        f"{waiting / (seconds + 15):.1f} requests/s to them, {spent / passed / 10:.1f} % of a core"
    )
