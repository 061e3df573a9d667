"""What the official Python client can ask for beside plain sends and receives, judged strictly."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import Cluster, role_environment

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

AWAITS_S = (0, 1, 5, 20, 29)
REQUEST_TIMEOUT_S = 3.0
LATE_S = 1.5  # of the client, on two busy processors
LARGE_BYTES = (4 << 20) * 39 // 40  # 3.9 MiB
RUN = [
    *("awaits", "large", "gzip", "many_topics", "filters"),
    *("transactions", "ranks", "expiring", "lites"),
]
TYPES = {"halves": "transaction", "ranked": "priority", "chats": "lite"}
LITE_QUOTA = 6

pytestmark = [pytest.mark.heavy, pytest.mark.alone]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each scenario saw; one client process and one cluster for all."""
    folder = tmp_path_factory.mktemp("scenarios")
    settings = {
        "POPMQ_TRANSACTION_FIRST_CHECK_MS": "2000",
        "POPMQ_TOPIC_AUTO_CREATE": "false",
        "POPMQ_LITE_MAX_TOPICS": "10",
        "POPMQ_LITE_MAX_CLIENT_SUBSCRIPTIONS": str(LITE_QUOTA),
        "POPMQ_LITE_MAX_SUBSCRIPTIONS": str(2 * LITE_QUOTA - 2),
    }
    with Cluster(folder, settings=settings) as cluster:
        with Client(cluster.endpoints[0]) as client:
            named = ("quiet", "large", "gzip", "filtered", "expiring", "halves", "ranked")
            for name in (*named, *(f"many-{number}" for number in range(200))):
                topic = admin.Topic(name=name, type=TYPES.get(name, "normal"), queues=4)
                client.topic("CreateTopic", admin.CreateTopicRequest(topic=topic))
            topic = admin.Topic(name="chats", type=TYPES["chats"])
            client.topic("CreateTopic", admin.CreateTopicRequest(topic=topic))
            client.send(compressed("gzip", b"what was packed"))
        start = {
            "endpoint": cluster.endpoints[0],
            "run": RUN,
            "awaits": AWAITS_S,
            "large_bytes": LARGE_BYTES,
            "check_s": 60,
            "lite_quota": LITE_QUOTA,
        }
        done = subprocess.run(
            [sys.executable, "-m", "e2e.scenario_client"],
            input=json.dumps(start) + "\n",
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env=role_environment(
                {"HOME": str(folder), "PYTHONPATH": str(Path(__file__).parent.parent)}
            ),
        )
    lines = map(json.loads, done.stdout.splitlines())
    found = {one["scenario"]: one for one in lines}
    print(f"\n{json.dumps(found, indent=1)}")
    assert list(found) == RUN, done.stderr
    return found


def compressed(topic: str, body: bytes) -> api.Message:
    message = api.Message(topic=api.Resource(name=topic), body=gzip.compress(body))
    properties = api.SystemProperties(
        message_id="packed", body_encoding=api.GZIP, message_type=api.NORMAL
    )
    message.system_properties.MergeFrom(properties)
    return message


@pytest.mark.timeout(300)
@pytest.mark.parametrize("await_s", AWAITS_S)
def test_a_wait_of_any_length_ends_with_nothing_at_its_time(
    seen: dict[str, Any], await_s: int
) -> None:
    took_s = seen["awaits"]["took_s"][str(await_s)]
    if await_s:
        assert await_s - 0.1 <= took_s <= await_s + LATE_S
    else:
        # This client leaves the field out then, which asks for the server's own wait; that ends
        # before the deadline of the call.
        assert took_s <= REQUEST_TIMEOUT_S


@pytest.mark.timeout(300)
def test_a_body_of_3_9_mib_comes_as_it_was_sent(seen: dict[str, Any]) -> None:
    assert seen["large"]["received"] == [seen["large"]["sent"]]


@pytest.mark.timeout(300)
def test_a_compressed_body_is_unpacked_by_the_client(seen: dict[str, Any]) -> None:
    assert seen["gzip"]["received"] == ["what was packed"]


@pytest.mark.timeout(300)
def test_a_producer_of_200_topics_starts_and_sends_to_each(seen: dict[str, Any]) -> None:
    assert seen["many_topics"]["sent"] == 200


@pytest.mark.timeout(300)
def test_filters_by_tag_and_in_sql_let_through_what_they_say(seen: dict[str, Any]) -> None:
    assert seen["filters"]["tags"] == list(range(1, 20, 2))
    assert seen["filters"]["sql"] == [6, 8]


@pytest.mark.timeout(300)
def test_transactions_are_committed_rolled_back_and_checked(seen: dict[str, Any]) -> None:
    assert seen["transactions"]["received"] == ["kept", "orphan"]
    assert seen["transactions"]["checked"] == ["orphan"]


@pytest.mark.timeout(300)
def test_priorities_come_from_the_highest_on(seen: dict[str, Any]) -> None:
    assert seen["ranks"]["received"] == [3, 2, 1]


@pytest.mark.timeout(300)
def test_what_expired_is_not_received(seen: dict[str, Any]) -> None:
    assert seen["expiring"]["received"] == ["stays"]


@pytest.mark.timeout(300)
def test_lite_consumers_get_what_is_in_their_lite_topics_in_order(seen: dict[str, Any]) -> None:
    lites = seen["lites"]
    for got, wanted in ((lites["simple"], ("one", "two")), (lites["push"][:10], ("two", "three"))):
        assert {name for name, _ in got} == set(wanted)
        for name in wanted:
            bodies = [body for lite_topic, body in got if lite_topic == name]
            assert bodies == [f"{name}-{number}" for number in range(5)]
    assert lites["push"][10:] == [["two", "somebody's"]]


@pytest.mark.timeout(300)
def test_a_lite_consumer_that_unsubscribes_gets_no_more(seen: dict[str, Any]) -> None:
    assert seen["lites"]["after"] == ["somebody's"]


@pytest.mark.timeout(300)
def test_the_clients_own_errors_tell_of_lite_quotas_and_names(seen: dict[str, Any]) -> None:
    lites = seen["lites"]
    assert lites["too_many_topics"] == ["LiteTopicQuotaExceededException", 42901]
    assert lites["too_many_here"] == ["LiteSubscriptionQuotaExceededException", 42902]
    assert lites["too_many_there"] == ["LiteSubscriptionQuotaExceededException", 42902]
    assert lites["bad_name"] == ["BadRequestException", 40020]
