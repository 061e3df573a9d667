"""The official Go client 2.1.2 over Remoting, unmodified, and two others that cannot name a broker
group in their requests either: ali-ons (Node) and Java 4.9.3.  Here are two broker groups, and each
proxy has a port for each of them."""

import time
from collections.abc import Iterator

import pytest
from e2e.official import remoting_node_program
from e2e.official_go import remoting_go_program
from e2e.official_java import remoting_program
from e2e.processes import Cluster, free_port
from e2e.remoting_programs import (
    RUN_S,
    ConsumerProgram,
    check_order,
    check_that_two_share_the_queues,
    received,
    run_scenario,
    texts,
)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

TOPICS = (
    "go-orders",
    "go-shared",
    "go-ordered",
    "go-filtered",
    "go-chosen",
    "old-java",
    "node-orders",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("remoting-go"), proxies=2, groups=2)
    for proxy in made.proxies:
        ports = f"broker-a:{free_port()},broker-b:{free_port()}"
        proxy.settings["POPMQ_REMOTING_GROUP_PORTS"] = ports
    with made:
        for name in TOPICS:
            made.popmq("topic", "create", name, "--type", "normal", "--queues", "4")
        made.popmq("topic", "create", "go-paid", "--type", "transaction")
        yield made


def consumer(address: str, *arguments: str) -> ConsumerProgram:
    return ConsumerProgram([*remoting_go_program(), address, *arguments])


def test_every_form_of_send_reaches_the_broker_group_that_the_client_has_chosen(
    cluster: Cluster,
) -> None:
    command = [*remoting_go_program(), cluster.endpoints[0], "send", "go-orders"]
    sent = {event["name"]: event for event in run_scenario(command)}
    assert {name: event["status"] for name, event in sent.items()} == dict.fromkeys(
        ("plain", "again", "async", "batch", "large"), "SEND_OK"
    )
    assert {event["broker"] for event in sent.values()} == {"broker-a", "broker-b"}
    messages = received(cluster, "go-orders", 8)
    assert sorted(str(item["body"])[:7] for item in messages) == [
        *("async", "batch-0", "batch-1", "batch-2", "large l", "one-way", "plain", "plain")
    ]
    plain = next(item for item in messages if item["body"] == "plain")
    assert plain["message_id"] == sent["plain"]["id"]
    assert (plain["tag"], plain["keys"]) == ("red", ["order-1", "order-2"])
    assert plain["properties"] == {"size": "9"}
    (large,) = [item for item in messages if str(item["body"]).startswith("large")]
    assert large["body"] == "large " * 20_000


def test_two_consumers_share_the_queues_and_one_that_is_left_takes_them_all(
    cluster: Cluster,
) -> None:
    options = "push", "go-sharers", "go-shared", "*"
    first, second = (consumer(endpoint, *options) for endpoint in cluster.endpoints)
    check_that_two_share_the_queues(cluster, "go-shared", first, second)
    assert {event["broker"] for event in first.got()} == {"broker-a", "broker-b"}


def test_orderly_consumers_process_each_queue_in_order_and_alone(cluster: Cluster) -> None:
    options = "orderly", "go-orderlies", "go-ordered", "*"
    first, second = (consumer(endpoint, *options) for endpoint in cluster.endpoints)
    check_that_two_share_the_queues(cluster, "go-ordered", first, second)
    check_order(first, second)


def test_a_message_that_failed_comes_again_and_becomes_a_dead_letter(cluster: Cluster) -> None:
    for number in range(4):  # some at each broker group
        cluster.popmq("send", "go-filtered", f"bad {number}", "--tag", "red")
    cluster.popmq("send", "go-filtered", "good", "--tag", "red")
    cluster.popmq("send", "go-filtered", "another", "--tag", "blue")
    with consumer(
        cluster.endpoints[0], "push", "go-filterers", "go-filtered", "red", "1"
    ) as program:
        program.wait(lambda got: len(got) >= 9, "the failed messages again")
        seen = sorted((event["body"], event["times"], event["topic"]) for event in program.got())
        assert seen == [
            *((f"bad {n}", times, "go-filtered") for n in range(4) for times in "01"),
            ("good", "0", "go-filtered"),
        ]
        deadline = time.monotonic() + RUN_S
        while (letters := cluster.popmq("dlq", "peek", "go-filterers")).count("bad") < 4:
            assert time.monotonic() < deadline, letters


def test_sql_chooses_messages(cluster: Cluster) -> None:
    cluster.popmq("send", "go-chosen", "small", "--property", "size=1")
    cluster.popmq("send", "go-chosen", "large", "--property", "size=9")
    options = "push", "go-choosers", "go-chosen", "sql:size > 5"
    with consumer(cluster.endpoints[0], *options) as program:
        program.wait(lambda got: len(got) >= 1, "a message")
        assert texts(program.got()) == ["large"]


def test_transactions_are_committed_rolled_back_and_checked(cluster: Cluster) -> None:
    names = "commit", "rollback", "later", "never"
    with consumer(cluster.endpoints[0], "transaction", "go-payers", "go-paid", *names) as program:
        checked = program.wait_for("check", 2)
        assert sorted(event["body"] for event in checked) == ["later", "never"]
        messages = received(cluster, "go-paid", 2)
        assert sorted(str(item["body"]) for item in messages) == ["commit", "later"]


def test_a_java_client_from_before_4_9_5_is_served_too(cluster: Cluster) -> None:
    command = [*remoting_program("4.9.3"), cluster.endpoints[0]]
    sent = run_scenario([*command, "send", "old-java"])
    assert {event["broker"] for event in sent} == {"broker-a", "broker-b"}
    with ConsumerProgram([*command, "push", "old-readers", "old-java", "*"]) as program:
        program.wait(lambda got: len(got) >= 8, "all messages")
        assert sorted(event["body"][:7] for event in program.got()) == [
            *("async", "batch-0", "batch-1", "batch-2", "large l", "one-way", "plain", "plain")
        ]


def test_ali_ons_sends_to_every_broker_group_and_reads_from_all(cluster: Cluster) -> None:
    first, second = ([*remoting_node_program(), address] for address in cluster.endpoints)
    sent = run_scenario([*first, "send", "node-orders", "16"])
    assert [event["status"] for event in sent] == ["SEND_OK"] * 16
    assert {event["broker"] for event in sent} == {"broker-a", "broker-b"}
    with ConsumerProgram([*second, "push", "node-readers", "node-orders", "red"]) as program:
        program.wait(lambda got: len(got) >= 16, "all messages")
        assert texts(program.got()) == sorted(f"text {number}" for number in range(16))
