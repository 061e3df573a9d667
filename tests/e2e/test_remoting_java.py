"""The official Java client over Remoting, unmodified: at two broker groups behind two proxies.

The long tests are the same at `popmq up`, and at two groups of three replicas.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from e2e.many import Many
from e2e.official_java import remoting_program
from e2e.processes import Cluster
from e2e.remoting_programs import (
    RUN_S,
    ConsumerProgram,
    Event,
    Server,
    check_order,
    check_that_two_share_the_queues,
    ids,
    received,
    run_scenario,
    send,
    texts,
)
from programs import run_program

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin

VERSIONS = ("4.9.8", "5.5.0")
TOPICS = {
    "normal": (
        *("orders", "shared", "filtered", "chosen", "assigned", "ordered", "again", "named"),
        *("asked", "failed", "kept", "orders-tls", "popped"),
    ),
    "fifo": ("steps",),
    "delay": ("later",),
    "transaction": ("paid",),
}

LONG = pytest.mark.long

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(
    scope="module",
    params=["groups", pytest.param("up", marks=LONG), pytest.param("replicas", marks=LONG)],
)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("remoting")
    with started(folder, request.param) as new_cluster:
        new_cluster.popmq("topic", "create", "told")  # waits until all is ready
        with Client(new_cluster.endpoints[0]) as client:
            for kind, names in TOPICS.items():
                for name in (f"{name}-{version}" for name in names for version in "345"):
                    topic = admin.Topic(name=name, type=kind, queues=4)
                    client.topic(admin.CreateTopicRequest(topic=topic))
        yield new_cluster


def started(folder: Path, kind: str) -> Server:
    if kind == "up":
        return Many(folder)
    return Cluster(folder, proxies=2, groups=2, replicas=3 if kind == "replicas" else 1)


def queues_of(cluster: Server) -> int:
    """How many a topic has at all broker groups together."""
    return 4 if isinstance(cluster, Many) else 8


def run(address: str, version: str, *arguments: str, option: str = "") -> list[Event]:
    return run_scenario(client_command(address, version, *arguments, option=option))


def consumer(
    address: str, version: str, scenario: str, *arguments: str, option: str = ""
) -> ConsumerProgram:
    return ConsumerProgram(client_command(address, version, scenario, *arguments, option=option))


def client_command(address: str, version: str, *arguments: str, option: str) -> list[str]:
    program = remoting_program(version)
    if option:
        program.insert(1, option)
    return [*program, address, *arguments]


def wait_until(what: str, met: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + RUN_S
    while not met():
        assert time.monotonic() < deadline_s, f"not within {RUN_S} s: {what}"
        time.sleep(0.1)  # between two looks


def wait_listed(cluster: Server, group: str, topic: str, *proxies: str) -> None:
    """Until `popmq clients` shows a push consumer of the group at each of these proxies."""
    deadline_s = time.monotonic() + RUN_S
    at: list[str] = []
    while at != sorted(proxies):
        assert time.monotonic() < deadline_s, f"consumers are listed at {at}"
        lines = cluster.popmq("clients", "--group", group, "--json").splitlines()
        rows = list(map(json.loads, lines))
        at = sorted(row["connections"][0]["proxy"] for row in rows)
    for row in rows:
        assert (row["kind"], row["protocol"], row["language"]) == (
            *("push consumer", "remoting", "JAVA"),
        )
        (shown,) = row["groups"]
        assert topic in [entry["topic"] for entry in shown["subscriptions"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_consumers_share_the_queues_and_one_that_is_left_takes_them_all(
    cluster: Server, version: str
) -> None:
    topic, group = f"shared-{version[0]}", f"sharers-{version[0]}"
    options = version, "push", group, topic, "*"
    first, second = (consumer(cluster.endpoints[at], *options) for at in (0, -1))
    places = cluster.endpoints[0], cluster.endpoints[-1]
    listed = partial(wait_listed, cluster, group, topic, *places)
    check_that_two_share_the_queues(cluster, topic, first, second, listed)


@pytest.mark.parametrize("version", VERSIONS)
def test_orderly_consumers_process_each_queue_in_order_and_alone(
    cluster: Server, version: str
) -> None:
    topic, group = f"ordered-{version[0]}", f"orderlies-{version[0]}"
    options = version, "orderly", group, topic, "*"
    first, second = (consumer(cluster.endpoints[at], *options) for at in (0, -1))
    check_that_two_share_the_queues(cluster, topic, first, second)
    check_order(first, second)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_consumer_gets_the_messages_that_its_filter_accepts_and_failed_ones_again(
    cluster: Server, version: str
) -> None:
    topic, group = f"filtered-{version[0]}", f"filterers-{version[0]}"
    cluster.popmq("send", topic, "bad one", "--tag", "red")
    cluster.popmq("send", topic, "good one", "--tag", "red")
    cluster.popmq("send", topic, "another", "--tag", "blue")
    address = cluster.endpoints[0]
    with consumer(address, version, "push", group, topic, "red", "1") as program:
        program.wait(lambda got: len(got) >= 3, "the failed message again")
        received = sorted(
            (event["body"], event["times"], event["topic"]) for event in program.got()
        )
        assert received == [
            ("bad one", "0", topic),
            ("bad one", "1", topic),
            ("good one", "0", topic),
        ]
        deadline = time.monotonic() + RUN_S
        while "bad" not in (letters := cluster.popmq("dlq", "peek", group)):
            assert time.monotonic() < deadline, letters


def test_a_push_consumer_that_fails_every_message_is_failing(cluster: Server) -> None:
    count = 12
    for number in range(count):
        cluster.popmq("send", "failed-4", f"bad {number}")
    with consumer(cluster.endpoints[0], "4.9.8", "push", "failers", "failed-4", "*") as program:
        program.wait(lambda got: len(got) >= 2 * count, "each message twice")
        deadline_s, verdict = time.monotonic() + RUN_S, ""
        while verdict != "FAILING":  # a consumer writes its offsets every five seconds
            assert time.monotonic() < deadline_s, f"failers are {verdict}"
            lines = cluster.popmq("lag", "--group", "failers", "--json").splitlines()
            verdict = next((row["verdict"] for row in map(json.loads, lines)), "")


@pytest.mark.parametrize("version", VERSIONS)
def test_sql_chooses_messages_and_a_wrong_expression_stops_the_start(
    cluster: Server, version: str
) -> None:
    topic, group = f"chosen-{version[0]}", f"choosers-{version[0]}"
    cluster.popmq("send", topic, "small", "--property", "size=1")
    cluster.popmq("send", topic, "large", "--property", "size=9")
    address = cluster.endpoints[0]
    with consumer(address, version, "push", group, topic, "sql:size > 5") as program:
        program.wait(lambda got: len(got) >= 1, "a message")
        assert texts(program.got()) == ["large"]
    wrong = remoting_program(version)
    done = run_program([*wrong, address, "push", "wrong", topic, "sql:a LIKE"], timeout=RUN_S)
    assert "expected a text in single quotes after LIKE" in done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_a_running_consumer_continues_where_a_reset_puts_its_group(
    cluster: Server, version: str
) -> None:
    topic, group = f"again-{version[0]}", f"repeaters-{version[0]}"
    send(cluster, topic, 12)

    def lag() -> int:
        lines = cluster.popmq("lag", "--group", group, "--json").splitlines()
        return sum(row["lag"] for row in map(json.loads, lines) if row.get("topic") == topic)

    with consumer(cluster.endpoints[0], version, "push", group, topic, "*") as program:
        program.wait(lambda got: len(got) == 12, "all messages")
        wait_until("all offsets are written", lambda: lag() == 0)
        cluster.popmq("reset-offset", "--group", group, "--topic", topic, "--to", "oldest", "-y")
        program.wait(lambda got: len(got) == 24, "all messages again")
        wait_until("all offsets are written again", lambda: lag() == 0)
        assert len(ids(program)) == 12
        send(cluster, topic, 4)
        program.wait(lambda got: len(got) == 28, "what came later")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pull_consumer_reads_at_offsets_of_its_own_writes_them_and_sends_back(
    cluster: Server, version: str
) -> None:
    topic, group = f"named-{version[0]}", f"namers-{version[0]}"
    send(cluster, topic, 9)
    cluster.popmq("send", topic, "bad")
    events = run(cluster.endpoints[0], version, "pull", group, topic)
    got = [event for event in events if event["event"] == "got"]
    assert (len(got), len({event["id"] for event in got})) == (10, 10)
    ended = {event["status"] for event in events if event["event"] == "ended"}
    assert ended == {"NO_NEW_MSG"}
    committed = [int(event["offset"]) for event in events if event["event"] == "committed"]
    assert (len(committed), sum(committed)) == (queues_of(cluster), 10)
    with consumer(cluster.endpoints[0], version, "push", group, topic, "*") as program:
        program.wait(lambda got: len(got) >= 1, "the message that was sent back")
        assert {(event["body"], event["times"]) for event in program.got()} == {("bad", "1")}


def test_every_broadcasting_consumer_gets_every_message(cluster: Server, tmp_path: Path) -> None:
    address = cluster.endpoints[0]
    own = f"-Drocketmq.client.localOffsetStoreDir={tmp_path}"  # else in the home directory
    cluster.popmq("send", "told", "before")
    with consumer(address, "5.5.0", "broadcast", "listeners", "told", "*", option=own) as first:
        first.wait(lambda got: texts(got) == ["before"], "what was there")
        cluster.popmq("send", "told", "after")
        first.wait(lambda got: texts(got) == ["after", "before"], "what came later")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lite_pull_consumer_seeks_reads_and_commits(cluster: Server, version: str) -> None:
    topic = f"assigned-{version[0]}"
    send(cluster, topic, 6)
    events = run(cluster.endpoints[0], version, "lite", f"lites-{version[0]}", topic)
    got = [event for event in events if event["event"] == "got"]
    assert len({event["id"] for event in got}) == 6
    committed = [int(event["offset"]) for event in events if event["event"] == "committed"]
    assert (len(committed), sum(committed)) == (queues_of(cluster), 6)


@pytest.mark.parametrize(
    ("version", "topic", "option"),
    [
        ("5.5.0", "orders", ""),
        ("5.5.0", "orders-tls", "-Dtls.enable=true"),
        ("4.9.8", "orders", "-Drocketmq.serialize.type=ROCKETMQ"),
    ],
)
def test_every_form_of_send_is_stored_once_and_received_over_grpc(
    cluster: Server, version: str, topic: str, option: str
) -> None:
    topic = f"{topic}-{version[0]}"
    events = run(cluster.endpoints[0], version, "send", topic, option=option)
    sent = {event["name"]: event for event in events}
    assert {name: event["status"] for name, event in sent.items()} == dict.fromkeys(
        ("plain", "again", "async", "batch", "large"), "SEND_OK"
    )
    assert sent["plain"]["id"] == sent["again"]["id"]
    message = received(cluster, topic, 8)
    assert sorted(str(item["body"])[:7] for item in message) == [
        *("async", "batch-0", "batch-1", "batch-2", "large l", "one-way", "plain", "plain")
    ]
    (plain, _) = [item for item in message if item["body"] == "plain"]
    assert plain["message_id"] == sent["plain"]["id"]
    assert (plain["tag"], plain["keys"]) == ("red", ["order-1", "order-2"])
    assert plain["properties"] == {"size": "9"}
    (large,) = [item for item in message if str(item["body"]).startswith("large")]
    assert large["body"] == "large " * 20_000


@pytest.mark.parametrize("version", VERSIONS)
def test_a_queue_selector_keeps_its_messages_in_one_queue(cluster: Server, version: str) -> None:
    events = run(cluster.endpoints[0], version, "order", f"steps-{version[0]}")
    assert [event["queue"] for event in events] == ["2"] * 10
    assert [int(event["offset"]) for event in events] == list(range(10))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_level_a_duration_and_a_time_delay_a_message(cluster: Server, version: str) -> None:
    topic = f"later-{version[0]}"
    events = run(cluster.endpoints[0], version, "delay", topic)
    assert [event["status"] for event in events] == ["SEND_OK"] * 3
    message = received(cluster, topic, 3)
    assert sorted(str(item["body"]) for item in message) == ["exact", "level", "timer"]


def test_a_refusal_reaches_the_application_with_its_sentence(cluster: Server) -> None:
    (event,) = run(cluster.endpoints[0], "5.5.0", "refused", "orders-5")
    assert "takes NORMAL messages and this one is DELAY" in event["why"]


@pytest.mark.parametrize("version", VERSIONS)
def test_transactions_are_committed_rolled_back_and_checked(cluster: Server, version: str) -> None:
    topic = f"paid-{version[0]}"
    names = "commit", "rollback", "later", "never"
    program = consumer(
        cluster.endpoints[0], version, "transaction", f"payers-{version[0]}", topic, *names
    )
    with program:
        messages = received(cluster, topic, 2)
        assert sorted(str(item["body"]) for item in messages) == ["commit", "later"]
        checked = program.wait_for("check", 2)
        assert sorted(event["body"] for event in checked) == ["later", "never"]
        sent = {event["name"]: event["id"] for event in program.wait_for("sent", 4)}
        assert {event["body"]: event["id"] for event in checked} == {
            name: sent[name] for name in ("later", "never")
        }


# Not 5.3.3, whose `request` gives up as soon as the request is stored.
@pytest.mark.parametrize(("asks", "answers"), [("4.9.8", "5.3.3"), ("5.5.0", "4.9.8")])
def test_a_request_is_answered_by_a_consumer_at_another_proxy(
    cluster: Server, asks: str, answers: str
) -> None:
    topic, group = f"asked-{asks[0]}", f"repliers-{asks[0]}"
    with consumer(cluster.endpoints[-1], answers, "answer", group, topic) as replier:
        replier.wait_started()
        with consumer(cluster.endpoints[0], asks, "ask", topic, "how are you") as asker:
            assert asker.wait_for("reply", 1)[0]["body"] == "re: how are you"
            assert replier.wait_for("answered", 1)[0]["status"] == "SEND_OK"


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_are_found_by_key_and_by_id_at_every_broker_group(
    cluster: Server, version: str
) -> None:
    topic = f"kept-{version[0]}"
    for number in range(6):
        cluster.popmq("send", topic, f"text {number}", "--key", "order-1")
    events = run(cluster.endpoints[-1], version, "find", topic, "order-1")
    messages = [event for event in events if event["event"] == "got"]
    assert texts(messages) == [f"text {number}" for number in range(6)]
    viewed = {event["id"]: event["body"] for event in events if event["event"] == "viewed"}
    assert viewed == {event["id"]: event["body"] for event in messages}
    oldest = [int(event["time"]) for event in events if event["event"] == "oldest"]
    assert (len(oldest), max(oldest) > 0) == (queues_of(cluster), True)


@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
def test_pop_consumers_get_every_message_once_and_failed_ones_again(
    cluster: Server, version: str
) -> None:
    topic, group = f"popped-{version[2]}", f"poppers-{version[2]}"
    options = version, "pop", group, topic, "red"
    first, second = (consumer(cluster.endpoints[at], *options) for at in (0, -1))
    with first, second:
        first.wait_started()
        second.wait_started()
        cluster.popmq("send", topic, "good", "--count", "40", "--tag", "red")
        cluster.popmq("send", topic, "bad", "--tag", "red")
        cluster.popmq("send", topic, "other", "--tag", "blue")
        first.wait(lambda _: len(ids(first, second)) == 41, "all messages")
        both = (first, second)
        deadline = time.monotonic() + RUN_S
        while "1" not in {event["times"] for program in both for event in program.got()}:
            assert time.monotonic() < deadline, "the failed message does not come again"
            time.sleep(0.1)
        events = [event for program in both for event in program.got()]
        again = {event["body"] for event in events if event["times"] == "1"}
        assert again == {"bad"}
        good = [event["id"] for event in events if event["body"] != "bad"]
        assert len(good) == len(set(good)) == 40
