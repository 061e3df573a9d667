"""Half messages whose producers forgot them are checked, also when what held them was restarted.

The producers are official clients of each language, and the same ones before and after; each has a
topic of its own, so that nobody else can answer for it.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from e2e.many import Up
from e2e.official import (
    START_S,
    OfficialClient,
    ensure_node_client,
    launch_node,
    launch_python,
)
from e2e.official_java import launch_java
from e2e.processes import Cluster, Served
from e2e.replicated import GroupClient, ReplicatedGroup

from popmq.cli.client import Client
from popmq.common.wire.controller_pb2 import GroupState
from popmq.proxy.api import definition_pb2 as api

LANGUAGES = pytest.mark.parametrize(
    "languages",
    [
        pytest.param(("python", "node"), marks=pytest.mark.heavy, id="python-and-node"),
        pytest.param(("java",), marks=pytest.mark.long, id="java"),
    ],
)
NAMES = ("commit 1", "rollback 1", "commit 2")
FIRST_CHECK_MS, INTERVAL_MS = 4_000, 1_000
SETTINGS = {
    "POPMQ_TRANSACTION_FIRST_CHECK_MS": f"{FIRST_CHECK_MS}",
    "POPMQ_TRANSACTION_CHECK_INTERVAL_MS": f"{INTERVAL_MS}",
    "POPMQ_TRANSACTION_MAX_CHECKS": "1000",
}
CHECKED_S = 30.0
PYTHON_CHECKED_S = 660.0

pytestmark = pytest.mark.timeout(1_000)  # the first run may install a client


@LANGUAGES
def test_orphans_are_checked_after_their_broker_was_killed(
    tmp_path: Path, languages: tuple[str, ...]
) -> None:
    cluster = Cluster(tmp_path, settings=SETTINGS)
    with cluster, orphans(cluster, tmp_path, languages) as producers:
        cluster.broker.kill9()
        cluster.broker.restart()
        wait_checked(producers, within_s=CHECKED_S)
        judge(cluster, producers)


@LANGUAGES
def test_orphans_are_checked_by_the_broker_that_took_over(
    tmp_path: Path, languages: tuple[str, ...]
) -> None:
    with ReplicatedGroup(tmp_path, proxies=1, settings=SETTINGS) as group:
        state = asyncio.run(in_sync(group))
        with orphans(group, tmp_path, languages) as producers:
            group.master(state).kill9()
            wait_checked(producers, within_s=CHECKED_S)
            judge(group, producers)


@pytest.mark.long
def test_orphans_are_checked_after_the_whole_server_was_killed(tmp_path: Path) -> None:
    """The Python client opens its telemetry stream again after 5 min at most, and names its topics
    on it after 10: it can be asked nothing before."""
    up = Up(tmp_path, SETTINGS)
    with up, orphans(up, tmp_path, ("python", "node", "java")) as producers:
        up.kill9()
        up.restart()
        others = [producer for producer in producers if producer.name != "halves-python"]
        wait_checked(others, within_s=CHECKED_S)
        wait_checked(producers, within_s=PYTHON_CHECKED_S)
        judge(up, producers)


@contextmanager
def orphans(
    served: Served, folder: Path, languages: tuple[str, ...]
) -> Iterator[list[OfficialClient]]:
    """A producer of each language that sent its half messages, and was asked about none."""
    with ExitStack() as stack:
        producers = []
        for language in languages:
            served.popmq("topic", "create", f"halves-{language}", "--type", "transaction")
            producer = OfficialClient(f"halves-{language}", launched(language), folder=folder)
            producers.append(stack.enter_context(producer))
            endpoint, topic = served.endpoints[0], producer.name
            producer.tell(op="start", endpoint=endpoint, topic=topic)
        for producer in producers:
            producer.wait(partial(has, producer, "ready", 1), "being ready", within_s=2 * START_S)
        for producer in producers:
            for name in NAMES:
                producer.tell(op="half", name=name)
        for producer in producers:
            expected = partial(has, producer, "sent", len(NAMES))
            producer.wait(expected, "the half messages", within_s=START_S)
        assert [producer.of("checked") for producer in producers] == [[]] * len(producers)
        yield producers


def launched(language: str) -> list[str]:
    if language == "java":
        return launch_java("plain")("orphans")
    if language == "python":
        return launch_python("orphans")
    ensure_node_client()
    return launch_node("orphans")


def wait_checked(producers: Sequence[OfficialClient], *, within_s: float) -> None:
    """Print when each producer was asked about the last of its own."""
    began_s = time.monotonic()
    for producer in producers:
        left_s = max(began_s + within_s - time.monotonic(), 0.1)
        producer.wait(partial(all_checked, producer), "every check", within_s=left_s)
        print(f"\n{producer.name}: checked {time.monotonic() - began_s:.1f} s after")


def judge(served: Served, producers: Sequence[OfficialClient]) -> None:
    """What was committed came once, and what was rolled back did not."""
    expected = sorted(name for name in NAMES if name.startswith("commit"))
    with Client(served.endpoints[0]) as client:
        for producer in producers:
            assert sorted(received(client, producer.name, len(expected))) == expected


def received(client: Client, topic: str, count: int) -> list[str]:
    queue = api.MessageQueue(topic=api.Resource(name=topic))
    results: list[str] = []
    deadline_s = time.monotonic() + CHECKED_S
    while len(results) < count and time.monotonic() < deadline_s:
        got = client.receive("ends", queue, limit=32, wait_ms=1_000, invisible_ms=60_000)
        assert [message.system_properties.delivery_attempt for message in got] == [1] * len(got)
        results += [message.body.decode() for message in got]
    more = client.receive("ends", queue, limit=32, wait_ms=1_000, invisible_ms=60_000)
    return results + [message.body.decode() for message in more]


def has(client: OfficialClient, kind: str, count: int) -> bool:
    return client.count(kind) >= count


def all_checked(producer: OfficialClient) -> bool:
    return {manifest["name"] for manifest in producer.of("checked")} == set(NAMES)


async def in_sync(group: ReplicatedGroup) -> GroupState:
    async with GroupClient(group.address) as client:
        return await client.in_sync(3)
