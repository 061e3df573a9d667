"""Official consumers that start before their topic exists, and keep running when it is deleted."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from e2e.many import Many
from e2e.official import (
    Launch,
    OfficialClient,
    RoleName,
    ensure_node_client,
    launch_node,
    launch_python,
)
from e2e.official_java import launch_java

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def node() -> Launch:
    ensure_node_client()
    return launch_node


LAUNCHES: dict[str, Callable[[], Launch]] = {
    "python": lambda: launch_python,
    "node": node,
    "java": lambda: launch_java("plain"),
}
GROUPS: dict[str, RoleName] = {"simple": "simple", "push": "push"}
ROUTES_S = 35  # clients ask for their routes every 30 s
MESSAGES = list(range(3))


def has_ready(client: OfficialClient) -> bool:
    return client.count("ready") > 0


def has_seen(client: OfficialClient, messages: int) -> bool:
    return len(client.distinct) >= messages


def is_done(client: OfficialClient, portions: int) -> bool:
    return client.count("done") >= portions


def send(producer: OfficialClient, portion: int) -> None:
    producer.tell(op="send", numbers=MESSAGES, seed=portion, max_body=1_000)
    producer.wait(partial(is_done, producer, portion), "sent", within_s=60)
    assert producer.count("sent") == portion * len(MESSAGES), producer.of("send_failed")


@pytest.mark.parametrize("language", sorted(LAUNCHES))
def test_consumers_may_start_first_and_a_deleted_topic_stays_deleted(
    tmp_path: Path, language: str
) -> None:
    launch = LAUNCHES[language]()
    rows = []
    with Many(tmp_path) as up, ExitStack() as stack:

        def start(name: str, role: RoleName) -> OfficialClient:
            client = OfficialClient(name, launch(role), folder=tmp_path)
            client.start()
            stack.callback(client.stop)
            settings = {"endpoint": up.endpoints[0], "topic": "orders", "group": name}
            client.tell(op="start", **settings, namespace="", invisible_s=5)
            client.wait(partial(has_ready, client), "being ready", within_s=60)
            return client

        consumers = {name: start(name, role) for name, role in GROUPS.items()}
        producer = start("producer", "producer")
        assert "orders" not in up.popmq("topic", "list")
        rows.append(("consumers, then producer started", "no topic"))
        for portion in (1, 2):
            send(producer, portion)
            for name, client in consumers.items():
                seen = partial(has_seen, client, portion * len(MESSAGES))
                began_s = time.monotonic()
                client.wait(seen, f"{portion} portions received", within_s=60)
                took_ms = round(1_000 * (time.monotonic() - began_s))
                rows.append((f"portion {portion}: {name} consumer", f"all, {took_ms} ms"))
            if portion == 1:
                output = up.popmq("topic", "delete", "orders", "--yes")
                assert "connected clients that use it: " in output
                time.sleep(ROUTES_S)
                assert "orders" not in up.popmq("topic", "list")
                rows.append((f"deleted, after {ROUTES_S} s", "still deleted"))
    print(f"\n{language}")
    for what, outcome in rows:
        print(f"  {what:34} {outcome}")
