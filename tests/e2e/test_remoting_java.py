"""The official Java client over Remoting, unmodified: versions 4.9.8 and 5.3.3 at a real proxy."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from e2e.official_java import remoting_program
from e2e.processes import Cluster
from e2e.remoting_programs import (
    RUN_S,
    ConsumerProgram,
    Event,
    check_order,
    check_that_two_share_the_queues,
    ids,
    received,
    run_scenario,
    send,
    texts,
)
from programs import run_program

CONSUMED = ("shared-5", "shared-4", "filtered", "chosen", "told", "assigned", "ordered", "failed")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("remoting")
    with Cluster(folder, proxies=2, groups=2) as new_cluster:
        for name, kind in (
            *(("orders-5", "normal"), ("orders-4", "normal"), ("orders-tls-5", "normal")),
            *(("steps-5", "fifo"), ("later-4", "delay")),
            *(("asked-4", "normal"), ("asked-5", "normal")),
            *(("popped-3", "normal"), ("popped-5", "normal")),
            *(("kept-4", "normal"), ("kept-5", "normal")),
            *(("paid-4", "transaction"), ("paid-5", "transaction")),
            *((name, "normal") for name in CONSUMED),
        ):
            new_cluster.popmq("topic", "create", name, "--type", kind, "--queues", "4")
        yield new_cluster


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


def wait_listed(cluster: Cluster, group: str, topic: str, *proxies: str) -> None:
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


@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_two_consumers_share_the_queues_and_one_that_is_left_takes_them_all(
    cluster: Cluster, version: str
) -> None:
    topic, group = f"shared-{version[0]}", f"sharers-{version[0]}"
    options = version, "push", group, topic, "*"
    first, second = (consumer(endpoint, *options) for endpoint in cluster.endpoints)
    listed = partial(wait_listed, cluster, group, topic, *cluster.endpoints)
    check_that_two_share_the_queues(cluster, topic, first, second, listed)


def test_orderly_consumers_process_each_queue_in_order_and_alone(cluster: Cluster) -> None:
    options = "5.3.3", "orderly", "orderlies", "ordered", "*"
    first, second = (consumer(endpoint, *options) for endpoint in cluster.endpoints)
    check_that_two_share_the_queues(cluster, "ordered", first, second)
    check_order(first, second)


def test_a_consumer_gets_the_messages_that_its_filter_accepts_and_failed_ones_again(
    cluster: Cluster,
) -> None:
    cluster.popmq("send", "filtered", "bad one", "--tag", "red")
    cluster.popmq("send", "filtered", "good one", "--tag", "red")
    cluster.popmq("send", "filtered", "another", "--tag", "blue")
    address = cluster.endpoints[0]
    with consumer(address, "5.3.3", "push", "filterers", "filtered", "red", "1") as program:
        program.wait(lambda got: len(got) >= 3, "the failed message again")
        received = sorted(
            (event["body"], event["times"], event["topic"]) for event in program.got()
        )
        assert received == [
            ("bad one", "0", "filtered"),
            ("bad one", "1", "filtered"),
            ("good one", "0", "filtered"),
        ]
        deadline = time.monotonic() + RUN_S
        while "bad" not in (letters := cluster.popmq("dlq", "peek", "filterers")):
            assert time.monotonic() < deadline, letters


def test_a_push_consumer_that_fails_every_message_is_failing(cluster: Cluster) -> None:
    count = 12
    for number in range(count):
        cluster.popmq("send", "failed", f"bad {number}")
    with consumer(cluster.endpoints[0], "4.9.8", "push", "failers", "failed", "*") as program:
        program.wait(lambda got: len(got) >= 2 * count, "each message twice")
        deadline_s, verdict = time.monotonic() + RUN_S, ""
        while verdict != "FAILING":  # a consumer writes its offsets every five seconds
            assert time.monotonic() < deadline_s, f"failers are {verdict}"
            lines = cluster.popmq("lag", "--group", "failers", "--json").splitlines()
            verdict = next((row["verdict"] for row in map(json.loads, lines)), "")


def test_sql_chooses_messages_and_a_wrong_expression_stops_the_start(cluster: Cluster) -> None:
    cluster.popmq("send", "chosen", "small", "--property", "size=1")
    cluster.popmq("send", "chosen", "large", "--property", "size=9")
    address = cluster.endpoints[0]
    with consumer(address, "5.3.3", "push", "choosers", "chosen", "sql:size > 5") as program:
        program.wait(lambda got: len(got) >= 1, "a message")
        assert texts(program.got()) == ["large"]
    wrong = remoting_program("5.3.3")
    done = run_program([*wrong, address, "push", "wrong", "chosen", "sql:a LIKE"], timeout=RUN_S)
    assert "expected a text in single quotes after LIKE" in done.stdout


def test_every_broadcasting_consumer_gets_every_message(cluster: Cluster, tmp_path: Path) -> None:
    address = cluster.endpoints[0]
    own = f"-Drocketmq.client.localOffsetStoreDir={tmp_path}"  # else in the home directory
    cluster.popmq("send", "told", "before")
    with consumer(address, "5.3.3", "broadcast", "listeners", "told", "*", option=own) as first:
        first.wait(lambda got: texts(got) == ["before"], "what was there")
        cluster.popmq("send", "told", "after")
        first.wait(lambda got: texts(got) == ["after", "before"], "what came later")


def test_a_lite_pull_consumer_seeks_reads_and_commits(cluster: Cluster) -> None:
    send(cluster, "assigned", 6)
    events = run(cluster.endpoints[0], "5.3.3", "lite", "lites", "assigned")
    got = [event for event in events if event["event"] == "got"]
    assert len({event["id"] for event in got}) == 6
    committed = [int(event["offset"]) for event in events if event["event"] == "committed"]
    assert (len(committed), sum(committed)) == (8, 6)


@pytest.mark.parametrize(
    ("version", "topic", "option"),
    [
        ("5.3.3", "orders", ""),
        ("5.3.3", "orders-tls", "-Dtls.enable=true"),
        ("4.9.8", "orders", "-Drocketmq.serialize.type=ROCKETMQ"),
    ],
)
def test_every_form_of_send_is_stored_once_and_received_over_grpc(
    cluster: Cluster, version: str, topic: str, option: str
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


def test_a_queue_selector_keeps_its_messages_in_one_queue(cluster: Cluster) -> None:
    events = run(cluster.endpoints[0], "5.3.3", "order", "steps-5")
    assert [event["queue"] for event in events] == ["2"] * 10
    assert [int(event["offset"]) for event in events] == list(range(10))


def test_a_level_a_duration_and_a_time_delay_a_message(cluster: Cluster) -> None:
    topic = "later-4"
    events = run(cluster.endpoints[0], "4.9.8", "delay", topic)
    assert [event["status"] for event in events] == ["SEND_OK"] * 3
    message = received(cluster, topic, 3)
    assert sorted(str(item["body"]) for item in message) == ["exact", "level", "timer"]


def test_a_refusal_reaches_the_application_with_its_sentence(cluster: Cluster) -> None:
    (event,) = run(cluster.endpoints[0], "5.3.3", "refused", "orders-5")
    assert "takes NORMAL messages and this one is DELAY" in event["why"]


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
def test_transactions_are_committed_rolled_back_and_checked(cluster: Cluster, version: str) -> None:
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
    cluster: Cluster, asks: str, answers: str
) -> None:
    topic, group = f"asked-{asks[0]}", f"repliers-{asks[0]}"
    with consumer(cluster.endpoints[1], answers, "answer", group, topic) as replier:
        replier.wait_started()
        with consumer(cluster.endpoints[0], asks, "ask", topic, "how are you") as asker:
            assert asker.wait_for("reply", 1)[0]["body"] == "re: how are you"
            assert replier.wait_for("answered", 1)[0]["status"] == "SEND_OK"


@pytest.mark.parametrize("version", ["4.9.8", "5.3.3"])
def test_messages_are_found_by_key_and_by_id_at_every_broker_group(
    cluster: Cluster, version: str
) -> None:
    topic = f"kept-{version[0]}"
    for number in range(6):
        cluster.popmq("send", topic, f"text {number}", "--key", "order-1")
    events = run(cluster.endpoints[1], version, "find", topic, "order-1")
    messages = [event for event in events if event["event"] == "got"]
    assert texts(messages) == [f"text {number}" for number in range(6)]
    viewed = {event["id"]: event["body"] for event in events if event["event"] == "viewed"}
    assert viewed == {event["id"]: event["body"] for event in messages}
    oldest = [int(event["time"]) for event in events if event["event"] == "oldest"]
    assert (len(oldest), max(oldest) > 0) == (8, True)


@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
def test_pop_consumers_get_every_message_once_and_failed_ones_again(
    cluster: Cluster, version: str
) -> None:
    topic, group = f"popped-{version[2]}", f"poppers-{version[2]}"
    options = version, "pop", group, topic, "red"
    first, second = (consumer(endpoint, *options) for endpoint in cluster.endpoints)
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
