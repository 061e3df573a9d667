"""What official clients can ask for beside plain sends and receives, judged strictly.

One body judges every language: scenario_client.py plays the scenarios with the Python client,
node/scenarios.mjs with that of Node, and java/Scenarios.java with that of Java.
"""

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from e2e.official import HERE, ensure_node_client, launch_node
from e2e.official_java import java_program
from e2e.processes import Cluster, role_environment
from programs import run_program

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

AWAITS_S = (0, 1, 5, 20, 29)
REQUEST_TIMEOUT_S = 3.0
LATE_S = 1.5  # of the client, on two busy processors
LARGE_BYTES = (4 << 20) * 39 // 40  # 3.9 MiB
BACK_OFF_MS = (1_000, 2_000)  # before the second attempt of a dead letter, and the third
RUN = [
    *("awaits", "large", "gzip", "many_topics", "filters"),
    *("transactions", "ranks", "expiring", "ordered", "letters", "everyone"),
]
TYPES = {"halves": "transaction", "ranked": "priority", "ordered": "fifo", "chats": "lite"}
LITE_QUOTA = 6
# Node has tests of its own (tests/conformance/clients.md).
LITE = ["python", pytest.param("java", marks=pytest.mark.long)]
with_lites = pytest.mark.parametrize("language", LITE, indirect=True, scope="module")
java_only = pytest.mark.parametrize("language", LITE[1:], indirect=True, scope="module")
pytestmark = [pytest.mark.heavy, pytest.mark.alone, pytest.mark.timeout(900)]


@pytest.fixture(
    scope="module", params=["python", "node", pytest.param("java", marks=pytest.mark.long)]
)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(language: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario saw; one client process and one cluster for all."""
    folder = tmp_path_factory.mktemp(f"scenarios-{language}")
    attempts = len(BACK_OFF_MS) + 1
    settings = {
        "POPMQ_TRANSACTION_FIRST_CHECK_MS": "2000",
        "POPMQ_TOPIC_AUTO_CREATE": "false",
        "POPMQ_LITE_MAX_TOPICS": "10",
        "POPMQ_LITE_MAX_CLIENT_SUBSCRIPTIONS": str(LITE_QUOTA),
        "POPMQ_LITE_MAX_SUBSCRIPTIONS": str(2 * LITE_QUOTA - 2),
        "POPMQ_LITE_TTL_ENDS_SUBSCRIPTIONS": "true",
    }
    with Cluster(folder, settings=settings) as cluster:
        with Client(cluster.endpoints[0]) as client:
            named = ("quiet", "large", "gzip", "filtered", "expiring", "halves", "ranked")
            many = (f"many-{number}" for number in range(200))
            for name in (*named, "ordered", "letters", "everyone", *many):
                topic = admin.Topic(name=name, type=TYPES.get(name, "normal"), queues=4)
                client.topic(admin.CreateTopicRequest(topic=topic))
            for topic in (
                admin.Topic(name="chats", type=TYPES["chats"]),
                admin.Topic(name="sessions", type="lite", lite_ttl_ms=1_000),
            ):
                client.topic(admin.CreateTopicRequest(topic=topic))
            client.send(compressed("gzip", b"what was packed"))
        limits = ("--max-attempts", f"{attempts}", "--back-off", "1s,2s")
        cluster.popmq("group", "create", "letters", *limits)
        cluster.popmq("group", "create", "in-order", "--type", "fifo")
        start = {
            "endpoint": cluster.endpoints[0],
            "awaits": AWAITS_S,
            "large_bytes": LARGE_BYTES,
            "check_s": 60,
            "attempts": attempts,
            "lite_quota": LITE_QUOTA,
        }
        environment = role_environment({"HOME": str(folder), "PYTHONPATH": str(HERE.parent)})

        def play(run: list[str]) -> subprocess.CompletedProcess[str]:
            return run_program(
                command(language),
                input=json.dumps({**start, "run": run}) + "\n",
                timeout=300,
                env=environment,
            )

        with ThreadPoolExecutor(2) as threads:
            played = list(threads.map(play, processes(language)))
        dead = cluster.popmq("dlq", "list", "letters", "--json").splitlines()
    lines = [line for item in played for line in item.stdout.splitlines()]
    document = {load["scenario"]: load for load in map(json.loads, lines)}
    print(f"\n{language}: {json.dumps(document, indent=1)}")
    expected = [name for run in processes(language) for name in run]
    assert sorted(document) == sorted(expected), [item.stderr for item in played]
    return {**document, "dead": [json.loads(line) for line in dead]}


def processes(language: str) -> list[list[str]]:
    """What each process plays: other threads of the same client would disturb those that are
    timed, which Node does not have."""
    if language == "node":
        return [RUN]
    return [["awaits"], [*RUN[1:], "lites"]]


def command(language: str) -> list[str]:
    if language == "python":
        return [sys.executable, "-m", "e2e.scenario_client"]
    if language == "java":
        return java_program("Scenarios")
    ensure_node_client()
    return [launch_node("push")[0], str(HERE / "node" / "scenarios.mjs")]


def compressed(topic: str, body: bytes) -> api.Message:
    message = api.Message(topic=api.Resource(name=topic), body=gzip.compress(body))
    properties = api.SystemProperties(
        message_id="packed", body_encoding=api.GZIP, message_type=api.NORMAL
    )
    message.system_properties.MergeFrom(properties)
    return message


@pytest.mark.parametrize("await_s", AWAITS_S)
def test_a_wait_of_any_length_ends_with_nothing_at_its_time(
    seen: dict[str, Any], language: str, await_s: int
) -> None:
    took_s = seen["awaits"]["took_s"][str(await_s)]
    if (language, await_s) == ("python", 0):
        # This client leaves the field out then, which asks for the server's own wait; that ends
        # before the deadline of the call.
        assert took_s <= REQUEST_TIMEOUT_S
    else:
        assert await_s - 0.1 <= took_s <= await_s + LATE_S


def test_a_body_of_3_9_mib_comes_as_it_was_sent(seen: dict[str, Any]) -> None:
    assert seen["large"]["received"] == [seen["large"]["sent"]]


def test_a_compressed_body_is_unpacked_by_the_client(seen: dict[str, Any]) -> None:
    assert seen["gzip"]["received"] == ["what was packed"]


def test_a_producer_of_200_topics_starts_and_sends_to_each(seen: dict[str, Any]) -> None:
    assert seen["many_topics"]["sent"] == 200


def test_filters_by_tag_and_in_sql_let_through_what_they_say(seen: dict[str, Any]) -> None:
    assert seen["filters"]["tags"] == list(range(1, 20, 2))
    assert seen["filters"]["sql"] == [6, 8]


def test_transactions_are_committed_rolled_back_and_checked(seen: dict[str, Any]) -> None:
    assert seen["transactions"]["received"] == ["kept", "orphan"]
    assert seen["transactions"]["checked"] == ["orphan"]


def test_priorities_come_from_the_highest_on(seen: dict[str, Any]) -> None:
    assert seen["ranks"]["received"] == [3, 2, 1]


def test_what_expired_is_not_received(seen: dict[str, Any]) -> None:
    assert seen["expiring"]["received"] == ["stays"]


def test_message_groups_with_failures_are_consumed_in_order(seen: dict[str, Any]) -> None:
    assert seen["ordered"]["acked"] == {f"key-{key}": list(range(6)) for key in range(20)}
    assert seen["ordered"]["failed"] >= 3 * 2, "numbers 0 and 3 of groups 0, 7 and 14"


def test_what_a_push_consumer_never_manages_becomes_a_dead_letter_after_its_back_off(
    seen: dict[str, Any],
) -> None:
    attempts = [attempt for attempt, _ in seen["letters"]["deliveries"]]
    assert attempts == list(range(1, len(BACK_OFF_MS) + 2))
    gaps = [later - sooner for (_, sooner), (_, later) in pairwise(seen["letters"]["deliveries"])]
    for gap_ms, wanted_ms in zip(gaps, BACK_OFF_MS, strict=True):
        assert wanted_ms <= gap_ms <= wanted_ms + LATE_S * 1_000
    dead = [(letter["message_id"], letter["attempts"]) for letter in seen["dead"]]
    assert dead == [(seen["letters"]["sent"], len(attempts))]


def test_each_instance_with_a_group_of_its_own_gets_every_message(seen: dict[str, Any]) -> None:
    """What RocketMQ's broadcasting consumers of the older protocol did."""
    for group in ("each-1", "each-2", "each-3", "shared"):
        assert seen["everyone"][group] == list(range(20)), group


@pytest.mark.timeout(300)
@with_lites
def test_lite_consumers_get_what_is_in_their_lite_topics_in_order(seen: dict[str, Any]) -> None:
    lites = seen["lites"]
    for got, expected in (
        (lites["simple"], ("one", "two")),
        (lites["push"][:10], ("two", "three")),
    ):
        assert {name for name, _ in got} == set(expected)
        for name in expected:
            bodies = [body for lite_topic, body in got if lite_topic == name]
            assert bodies == [f"{name}-{number}" for number in range(5)]
    assert lites["push"][10:] == [["two", "somebody's"]]


@pytest.mark.timeout(300)
@with_lites
def test_a_lite_consumer_that_unsubscribes_gets_no_more(seen: dict[str, Any]) -> None:
    assert seen["lites"]["after"] == ["somebody's"]


@pytest.mark.timeout(300)
@with_lites
def test_the_clients_own_errors_tell_of_lite_quotas_and_names(seen: dict[str, Any]) -> None:
    lites = seen["lites"]
    assert lites["too_many_topics"] == ["LiteTopicQuotaExceededException", 42901]
    assert lites["too_many_here"] == ["LiteSubscriptionQuotaExceededException", 42902]
    assert lites["too_many_there"] == ["LiteSubscriptionQuotaExceededException", 42902]
    assert lites["bad_name"] == ["BadRequestException", 40020]


@pytest.mark.timeout(300)
@java_only
def test_a_lite_consumer_begins_at_a_time_and_forgets_what_has_ended(seen: dict[str, Any]) -> None:
    """The Python client has no word for a beginning, and neither it nor Node's hears of an end."""
    assert seen["lites"]["timed"] == ["late", "later"]
    assert seen["lites"]["forgotten"] == ["unborn"]
