"""The official Node client, unmodified, against controller, broker and two proxies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from e2e import delay_scenario
from e2e.lane_share import check_that_calls_take_their_lane
from e2e.many import Many
from e2e.official import (
    OfficialClient,
    Scenario,
    check_that_connections_may_end,
    check_that_it_makes_our_messages,
    ensure_node_client,
    launch_node,
)
from e2e.payloads import NODE_MAX_BODY, PYTHON_MAX_BODY
from e2e.processes import Cluster, Served

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin

SEED = 20_260_102
COUNT = 2_000

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("max_body", [PYTHON_MAX_BODY, NODE_MAX_BODY])
def test_both_languages_make_the_same_messages(max_body: int, tmp_path: Path) -> None:
    check_that_it_makes_our_messages(launch_node, SEED, tmp_path, count=COUNT, max_body=max_body)


@pytest.mark.alone
@pytest.mark.parametrize("count", [120, pytest.param(COUNT, marks=pytest.mark.long)])
@pytest.mark.parametrize("transport", ["lean"])
@pytest.mark.timeout(480)  # the first run installs the client
def test_every_group_of_the_node_client_gets_every_message_once_and_a_tenth_twice(
    tmp_path: Path, transport: str, count: int
) -> None:
    ensure_node_client()
    scenario = Scenario(launch=launch_node, seed=SEED, count=count, max_body=NODE_MAX_BODY)

    with Cluster(tmp_path, proxies=2, settings={"POPMQ_PROXY_TRANSPORT": transport}) as cluster:
        outcome = scenario.run(cluster, tmp_path)

    outcome.check(f"official Node client, seed {SEED}", sent=count)


@pytest.mark.alone
@pytest.mark.timeout(420)
def test_delivery_times_and_recall_with_the_node_client(tmp_path: Path) -> None:
    ensure_node_client()
    with Cluster(tmp_path, proxies=2) as cluster:
        late_ms = delay_scenario.run(cluster, launch_node, tmp_path)
    print(f"\nofficial Node client, lateness of delays in ms: {sorted(late_ms)}")


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["lean"])  # the one that has lanes
@pytest.mark.timeout(420)
def test_the_calls_of_the_node_client_take_their_lane(tmp_path: Path, transport: str) -> None:
    ensure_node_client()
    check_that_calls_take_their_lane(launch_node, tmp_path, "official Node client")


@pytest.mark.alone
@pytest.mark.parametrize("transport", ["lean"])
@pytest.mark.timeout(480)
def test_the_node_client_loses_nothing_while_its_connections_reach_their_age(
    tmp_path: Path, transport: str
) -> None:
    ensure_node_client()
    check_that_connections_may_end(launch_node, SEED, tmp_path, transport=transport)


@contextmanager
def lite_consumer(cluster: Served, folder: Path, lite_ttl_ms: int = 0) -> Iterator[OfficialClient]:
    """A push consumer of the lite topics of `chats`, a topic that is created first."""
    ensure_node_client()
    with Client(cluster.endpoints[0]) as client:
        chats = admin.Topic(name="chats", type="lite", lite_ttl_ms=lite_ttl_ms)
        client.topic(admin.CreateTopicRequest(topic=chats))
    with OfficialClient("lite", launch_node("lite"), folder=folder) as node:
        node.tell(endpoint=cluster.endpoints[-1], topic="chats", group="readers")
        node.wait(lambda: node.count("ready") > 0, "its start", within_s=30)
        yield node


def tell(node: OfficialClient, op: str, lite_topic: str, *bodies: str, at_ms: int = 0) -> None:
    """Ask for it once for each body, and wait for each answer."""

    def answers() -> int:
        return node.count("done") + node.count("refused")

    def answered(wanted: int) -> bool:
        return answers() >= wanted

    for body in bodies or ("",):
        expected = answers() + 1
        node.tell(op=op, lite_topic=lite_topic, body=body, at_ms=at_ms)
        node.wait(partial(answered, expected), f"an answer to {op}", within_s=10)


@pytest.mark.timeout(420)
def test_a_lite_push_consumer_of_the_node_client_gets_what_it_subscribed_to(tmp_path: Path) -> None:
    settings = {"POPMQ_LITE_MAX_TOPICS": "3"}
    with (
        Cluster(tmp_path, proxies=2, settings=settings) as cluster,
        lite_consumer(cluster, tmp_path) as node,
    ):
        tell(node, "subscribe", "first")
        tell(node, "subscribe", "second")
        for name in ("first", "second", "third"):
            tell(node, "send", name, *(f"{name}-{number}" for number in range(5)))
        node.wait(lambda: node.count("got") >= 10, "ten messages", within_s=30)
        tell(node, "unsubscribe", "first")
        tell(node, "send", "first", "nobody's")
        tell(node, "send", "second", "somebody's")
        node.wait(lambda: node.count("got") >= 11, "one more message", within_s=30)
        assert node.of("refused") == []
        tell(node, "send", "fourth", "too many")
        tell(node, "subscribe", "no/name")
        got = [(message["lite_topic"], message["body"]) for message in node.of("got")]
        for name in ("first", "second"):
            bodies = [body for lite_topic, body in got[:10] if lite_topic == name]
            assert bodies == [f"{name}-{number}" for number in range(5)]
        assert got[10:] == [("second", "somebody's")]
        quota, bad_name = node.of("refused")
        assert "42901" in quota["error"]
        assert "40020" in bad_name["error"]


@pytest.mark.timeout(420)
def test_a_lite_push_consumer_of_the_node_client_begins_at_a_time(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, lite_consumer(cluster, tmp_path) as node:
        tell(node, "send", "timed", "early")
        between_ms = time.time_ns() // 1_000_000 + 1
        time.sleep(0.002)  # the broker's clock, which says when a message was stored
        tell(node, "send", "timed", "late")
        tell(node, "subscribe", "timed", at_ms=between_ms)
        tell(node, "send", "timed", "later")
        node.wait(lambda: node.count("got") >= 2, "two messages", within_s=30)
        assert node.of("refused") == []
        assert [message["body"] for message in node.of("got")] == ["late", "later"]


@pytest.mark.timeout(420)
def test_a_lite_push_consumer_that_does_not_heed_an_end_goes_on_and_says_it_again(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, settings={"POPMQ_LITE_TTL_ENDS_SUBSCRIPTIONS": "true"}) as cluster:
        (proxy,) = cluster.proxies
        with lite_consumer(cluster, tmp_path, lite_ttl_ms=1_000) as node:
            tell(node, "subscribe", "brief")
            tell(node, "send", "brief", "before")
            node.wait(lambda: node.count("got") >= 1, "a message", within_s=10)
            deadline_s = time.monotonic() + 40
            while proxy.metric("popmq_proxy_lite_notices_total") == 0:
                assert time.monotonic() < deadline_s, "no word of the end"
                time.sleep(0.1)
            # What nobody has read yet would be over after a second, and the client may take thirty.
            with Client(cluster.endpoints[0]) as client:
                topic = admin.Topic(name="chats", lite_ttl_ms=600_000)
                client.topic(admin.AlterTopicRequest(topic=topic))
            tell(node, "send", "brief", "behind")
            node.wait(lambda: node.count("got") >= 2, "one more message", within_s=40)
            assert [message["body"] for message in node.of("got")] == ["before", "behind"]


@pytest.mark.timeout(420)
def test_a_lite_push_consumer_goes_on_at_once_when_its_broker_was_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        began_s = time.monotonic()
        with lite_consumer(cluster, tmp_path) as node:
            tell(node, "subscribe", "mine")
            tell(node, "send", "mine", "before")
            node.wait(lambda: node.count("got") >= 1, "a message", within_s=10)
            cluster.broker.kill9()
            cluster.broker.restart()
            tell(node, "send", "mine", "behind")
            node.wait(lambda: node.count("got") >= 2, "one more message", within_s=20)
            assert [message["body"] for message in node.of("got")] == ["before", "behind"]
            # The client would have said by itself what it wants, but only then.
            assert time.monotonic() - began_s < 30


@pytest.mark.timeout(420)
def test_lite_topics_of_two_broker_groups_are_one_set_for_the_node_client(tmp_path: Path) -> None:
    names = [f"chat-{number}" for number in range(16)]
    with (
        Many(tmp_path / "up", "--groups", "2") as cluster,
        lite_consumer(cluster, tmp_path) as node,
    ):
        for name in names:
            tell(node, "subscribe", name)
        for name in (*names, "other"):
            tell(node, "send", name, "1", "2")
        node.wait(lambda: node.count("got") >= 2 * len(names), "all", within_s=30)
        assert node.of("refused") == []
        got = [(message["lite_topic"], message["body"]) for message in node.of("got")]
        for name in names:
            assert [body for lite_topic, body in got if lite_topic == name] == ["1", "2"]
        with Client(cluster.endpoints[0]) as client:
            (topics,) = [topic for topic in client.topics(system=False) if topic.name == "chats"]
        assert 0 < topics.lite_topics < len(names)  # some are at the other broker group
