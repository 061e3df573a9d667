"""Two broker groups behind one proxy: official clients, operators' requests, a third group."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from e2e import delay_scenario
from e2e.many import Many
from e2e.official import PYTHON_MS_PER_MIB, Scenario, launch_python
from e2e.payloads import PYTHON_MAX_BODY
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.cli.drain import read_remainder
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

pytestmark = pytest.mark.more

SEED = 20_260_808
WAIT_S = 30.0
BOTH = {"broker-a", "broker-b"}


def until(what: str, look: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, f"not {what} within {WAIT_S:g} s"
        time.sleep(0.05)


def create(client: Client, name: str, kind: str = "normal", queues: int = 4) -> None:
    topic = admin.Topic(name=name, type=kind, queues=queues)
    client.topic(admin.CreateTopicRequest(topic=topic))


def send(
    client: Client, topic: str, ids: Iterable[str], *, key: str = "", due_s: float = 0
) -> list[str]:
    for name in ids:
        properties = api.SystemProperties(
            message_id=name, body_encoding=api.IDENTITY, message_type=api.NORMAL
        )
        if key:
            properties.message_group, properties.message_type = key, api.FIFO
        if due_s:
            properties.delivery_timestamp.CopyFrom(Timestamp(seconds=int(time.time() + due_s)))
            properties.message_type = api.DELAY
        client.send(
            api.Message(topic=api.Resource(name=topic), body=b"x", system_properties=properties)
        )
    return list(ids)


def receive(
    client: Client,
    topic: str,
    count: int,
    *,
    ack: bool = True,
    invisible_ms: int = 20_000,
    within_s: float = WAIT_S,
) -> set[str]:
    """Ids of so many messages, fewer when they do not come in time."""
    sets: set[str] = set()
    deadline_s = time.monotonic() + within_s
    while len(sets) < count and time.monotonic() < deadline_s:
        got = client.receive(
            "g",
            api.MessageQueue(topic=api.Resource(name=topic)),
            limit=min(32, count - len(sets)),
            wait_ms=200,
            invisible_ms=invisible_ms,
        )
        sets |= {message.system_properties.message_id for message in got}
        if got and ack:
            client.ack("g", topic, got)
    return sets


def homes(client: Client, topic: str, ids: Iterable[str]) -> set[str]:
    """The broker groups that those messages are at."""
    sets = set()
    for name in ids:
        reply = client.call_admin(
            admin.ExplainRequest(message_id=name, topic=topic), admin.ExplainReply
        )
        sets |= {message.broker for message in reply.messages}
    return sets


def ready(client: Client) -> int:
    return sum(
        lag.ready for lag in client.call_admin(admin.LagRequest(group="g"), admin.LagReply).lags
    )


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_every_message_of_two_groups_comes_once_to_every_group_of_the_python_client(
    tmp_path: Path,
) -> None:
    scenario = Scenario(
        launch=launch_python,
        seed=SEED,
        count=200,
        max_body=PYTHON_MAX_BODY,
        client_ms_per_mib=PYTHON_MS_PER_MIB,
    )
    with Many(tmp_path, "--groups", "2") as many:
        outcome = scenario.run(many, tmp_path)
        with Client(many.ready.endpoint) as client:
            lags = client.call_admin(admin.LagRequest(topic="official"), admin.LagReply).lags
    outcome.check(f"official Python client, two groups, seed {SEED}", sent=200)
    assert {lag.broker for lag in lags} == BOTH
    assert sum(lag.ready + lag.in_flight for lag in lags) == 0


@pytest.mark.heavy
@pytest.mark.alone
@pytest.mark.timeout(120)
def test_delivery_times_and_recall_over_two_groups(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many:
        late_ms = delay_scenario.run(many, launch_python, tmp_path)
    print(f"\nofficial Python client, two groups, lateness in ms: {sorted(late_ms)}")


def test_operators_see_and_change_two_groups_as_one(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        create(client, "orders")
        group = admin.Group(name="g", max_attempts=1)
        client.group(admin.CreateGroupRequest(group=group))
        ids = send(client, "orders", [f"m-{number}" for number in range(60)])
        assert homes(client, "orders", ids[:12]) == BOTH
        # The first receive meets one of the groups; what waits at the other is counted too.
        got = receive(client, "orders", 1)
        assert ready(client) == 59
        got |= receive(client, "orders", 19)
        assert len(got) == 20
        assert ready(client) == 40
        # What is given up becomes a dead letter where it is, and is sent back there.
        assert len(receive(client, "orders", 40, ack=False, invisible_ms=300)) == 40

        def dead() -> list[admin.DeadLetter]:
            request = admin.ListDeadLettersRequest(group="g", limit=99)
            return list(client.call_admin(request, admin.ListDeadLettersReply).letters)

        until("dead", lambda: len(dead()) == 40)
        assert {dead_letter.broker for dead_letter in dead()} == BOTH
        for broker in BOTH:
            client.call_admin(
                admin.RedriveRequest(group="g", broker=broker, limit=99), admin.RedriveReply
            )
        assert len(receive(client, "orders", 40)) == 40
        client.call_admin(
            admin.ResetOffsetRequest(group="g", topic="orders", oldest=True), admin.ResetOffsetReply
        )
        assert ready(client) == 60
        create(client, "later", "delay")
        send(client, "later", [f"t-{number}" for number in range(30)], due_s=3_600)
        timers = client.call_admin(admin.ListTimersRequest(limit=50), admin.ListTimersReply).timers
        assert len(timers) == 30
        assert {timer.broker for timer in timers} == BOTH


def test_a_third_group_learns_the_topics_and_takes_no_message_group_away(tmp_path: Path) -> None:
    keys = [f"k-{number}" for number in range(8)]
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        create(client, "orders")
        create(client, "fifo", "fifo")
        before = client.topic(admin.DescribeTopicRequest(name="orders"))
        at = [homes(client, "fifo", send(client, "fifo", [key], key=key)) for key in keys]
        assert set().union(*at) == BOTH
    with Many(tmp_path, "--groups", "3") as many, Client(many.ready.endpoint) as client:
        assert client.topic(admin.DescribeTopicRequest(name="orders")) == before
        ids = send(client, "orders", [f"m-{number}" for number in range(40)])
        assert homes(client, "orders", ids) == {*BOTH, "broker-c"}
        again = [send(client, "fifo", [f"2-{key}"], key=key) for key in keys]
        assert [homes(client, "fifo", item) for item in again] == at
        assert receive(client, "orders", 40) == set(ids)


def test_while_the_owner_is_away_the_other_group_works_on(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        create(client, "orders")
        until("copied", lambda: _takes_messages(client, BOTH))
        os.kill(many.process("broker-a-0")["pid"], signal.SIGKILL)
        ids = send(client, "orders", [f"m-{number}" for number in range(20)])
        assert "broker-b" in homes(client, "orders", ids)
        until("back", lambda: many.process("broker-a-0")["starts"] == 2)
        create(client, "more")
        assert set(ids) <= receive(client, "orders", 200, within_s=5)


def _takes_messages(client: Client, brokers: set[str]) -> bool:
    """Each of them stores some."""
    ids = send(client, "orders", [f"t-{time.monotonic_ns()}-{number}" for number in range(8)])
    return homes(client, "orders", ids) == brokers


def test_a_group_is_drained_and_taken_away(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        create(client, "orders")
        create(client, "fifo", "fifo")
        ids = send(client, "orders", [f"m-{number}" for number in range(20)])
        keys = [f"k-{number}" for number in range(8)]
        for key in keys:
            send(client, "fifo", [key], key=key)
        receive(client, "orders", 1, ack=False, invisible_ms=300)
        receive(client, "fifo", 1, ack=False, invisible_ms=300)
        create(client, "later", "delay")
        timers = send(client, "later", [f"t-{number}" for number in range(20)], due_s=3_600)
        assert homes(client, "later", timers) == BOTH
        with pytest.raises(PopmqError, match="owns the topics and consumer groups"):
            client.call_admin(admin.DrainRequest(group="broker-a"), admin.DrainReply)
        client.call_admin(admin.DrainRequest(group="broker-b"), admin.DrainReply)
        rest = read_remainder(client, "broker-b")
        assert rest.messages > 0
        assert (rest.homed, rest.is_drained) == (("fifo",), False)

        def placed_elsewhere() -> bool:
            new = [f"n-{time.monotonic_ns()}-{number}" for number in range(8)]
            try:
                send(client, "orders", new)
            except PopmqError:  # the route is a moment old
                return False
            ids.extend(new)
            return homes(client, "orders", new) == {"broker-a"}

        until("elsewhere", placed_elsewhere)

        # What is there is still delivered, and message groups keep their place until it is.
        def emptied() -> bool:
            for name in ("orders", "fifo"):
                receive(client, name, 32, within_s=1)
            return read_remainder(client, "broker-b").is_drained

        until("drained", emptied)
        topic = client.topic(admin.DescribeTopicRequest(name="fifo"))
        assert list(topic.brokers) == ["broker-a"]
        until("moved", lambda: _sends_to(client, keys) == {"broker-a"})
        # Timers that are due in an hour hold nothing up: they wait at the other group.
        timer = client.call_admin(admin.ListTimersRequest(limit=50), admin.ListTimersReply).timers
        assert {message.message_id: message.broker for message in timer} == dict.fromkeys(
            timers, "broker-a"
        )
        assert read_remainder(client, "broker-b").moved > 0


def _sends_to(client: Client, keys: list[str]) -> set[str]:
    """Where message groups go now; a refusal means that they are still being moved."""
    sets: set[str] = set()
    for key in keys:
        try:
            ids = send(client, "fifo", [f"{key}-{time.monotonic_ns()}"], key=key)
        except PopmqError:
            return set()
        sets |= homes(client, "fifo", ids)
    return sets
