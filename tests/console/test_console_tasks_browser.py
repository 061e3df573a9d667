"""More tasks of a person by clicks alone in Debian's Chromium, on two broker groups."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from console.console_process import UpWithConsole, wait_for
from console.console_site import until
from console.test_console_browser import (  # fixtures
    Calls,
    calls,  # noqa: F401
    chromium,  # noqa: F401
    page,  # noqa: F401
    received_again,
)

from popmq.cli.client import Client

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpWithConsole]:
    settings = {"POPMQ_POP_FIFO_OPEN_OFFSETS": "4", "POPMQ_POP_FIFO_PARK_AFTER_MS": "1"}
    folder = tmp_path_factory.mktemp("up")
    with UpWithConsole(folder, "--groups", "2", settings=settings) as started:
        for topic, kind in (("orders", "normal"), ("later", "delay"), ("steps", "fifo")):
            started.popmq("topic", "create", topic, "--type", kind, "--queues", "1")
        started.popmq("group", "create", "failing", "--max-attempts", "1")
        started.popmq("group", "create", "ordered", "--type", "fifo")
        wait_for(started.url, "/", "Healthy")
        yield started


def test_timers_of_a_key_are_cancelled(
    up: UpWithConsole,
    calls: Calls,  # noqa: F811
    page: Any,  # noqa: F811
) -> None:
    kept = calls.send("later", "kept", keys=["other"], delay="24h")
    for _ in range(3):
        calls.send("later", "gone", keys=["k"], delay="24h")
    page.goto("/")
    page.get_by_role("link", name="Timers", exact=True).first.click()
    page.get_by_label("Key", exact=True).fill("k")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("button", name="Cancel all 3 shown").click()
    page.get_by_role("button", name="Cancel 3 timers").click()
    page.get_by_text("3 of 3 cancelled").wait_for()
    rows = json.loads(up.popmq("timers", "list", "-o", "json"))
    assert [row["message_id"] for row in rows] == [kept]


def test_dead_letters_of_a_reason_are_redriven_at_ten_a_second(
    up: UpWithConsole,
    calls: Calls,  # noqa: F811
    page: Any,  # noqa: F811
) -> None:
    ids = [calls.send("orders", f"bill {number}") for number in range(3)]
    received = 0
    while received < 3:
        received += len(calls.receive("orders", "failing", invisible="1s", wait="5s"))
    wait_for(up.url, "/dead-letters?group=failing", "3 dead letters")
    page.goto("/dead-letters")
    page.get_by_role("cell", name="failing").first.get_by_role("link").click()
    page.get_by_label("At most a second").fill("10")
    page.get_by_text("Which of all are meant").click()
    form = page.locator("#redrive")
    form.get_by_label("Reason").select_option("max attempts")
    form.get_by_label("Dead since").fill("24h ago")
    form.get_by_role("button", name="Count all").click()
    page.get_by_role("button", name="Redrive 3 at 10 a second").click()
    page.get_by_role("cell", name="done").wait_for()
    assert received_again(calls, "orders", "failing", 3) == sorted(ids)


def test_the_client_that_holds_a_queue_is_found(
    up: UpWithConsole,
    calls: Calls,  # noqa: F811
    page: Any,  # noqa: F811
) -> None:
    calls.send("orders", "one to hold")
    with Client(up.endpoint, "worker-7@4711@0@1") as worker:
        queues = worker.query_route("orders")

        def takes() -> bool:
            return any(
                worker.receive("billing", queue, limit=1, wait_ms=100, invisible_ms=60_000)
                for queue in queues
            )

        until(takes, bool)
        page.goto("/groups")
        page.get_by_role("link", name="billing", exact=True).click()
        row = page.locator("tr", has=page.get_by_text("worker-7@4711@0@1: 1"))
        row.wait_for()
        assert row.locator("td").nth(1).inner_text() == "0"


def test_a_topic_is_altered_after_its_changes_were_shown(up: UpWithConsole, page: Any) -> None:  # noqa: F811
    page.goto("/topics")
    page.get_by_role("link", name="later", exact=True).click()
    form = page.locator("form", has=page.get_by_role("button", name="Alter"))
    form.get_by_label("Queues").fill("4")
    form.get_by_label("Retention").fill("12h")
    form.get_by_role("button", name="Alter").click()
    page.get_by_text("queues: 1 becomes 4").wait_for()
    page.get_by_text("retention: the broker's becomes 12h").wait_for()
    page.get_by_role("button", name="Alter 2 of its settings").click()
    page.get_by_role("heading", name="Topic later").wait_for()
    (topic,) = json.loads(up.popmq("topic", "show", "later", "-o", "json"))
    assert (topic["queues"], topic["retention"]) == (4, "12h")


def test_a_stuck_message_group_is_unparked(
    up: UpWithConsole,
    calls: Calls,  # noqa: F811
    page: Any,  # noqa: F811
) -> None:
    def send(body: str) -> None:
        up.popmq("send", "steps", body, "--group-key", body[:1])

    send("a1")
    assert [item.body for item in calls.receive("steps", "ordered", wait="5s")] == [b"a1"]
    for body in ("a2", "a3", "a4"):
        send(body)
    page.goto("/groups/ordered")
    parked = page.get_by_role("button", name="Unpark")
    until(lambda: (calls.receive("steps", "ordered", wait="1s"), parked.count())[1], bool)
    page.locator("form", has=parked).get_by_label("How").select_option("skip")
    parked.click()
    page.get_by_role("button", name="Skip them").click()
    page.get_by_text("It was about").wait_for()
    until(
        lambda: json.loads(up.popmq("group", "show", "ordered", "-o", "json")),
        lambda shown: (shown[0] if isinstance(shown, list) else shown)["parked_keys"] == 0,
    )


def test_a_broker_group_is_drained_and_taken_back(up: UpWithConsole, page: Any) -> None:  # noqa: F811
    def draining() -> list[bool]:
        rows = json.loads(up.popmq("broker", "list", "-o", "json"))
        return [
            member["broker"]["draining"]
            for row in rows
            for member in row["members"]
            if row["group"] == "broker-b"
        ]

    page.goto("/cluster")
    section = page.locator("section", has=page.get_by_role("heading", name="Broker group broker-b"))
    section.get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Drain 1 broker group").click()
    section.get_by_text("This group is drained").wait_for()
    section.get_by_text("broker-b still has").or_(
        section.get_by_text("broker-b is drained")
    ).wait_for()
    assert True in draining()
    section.get_by_role("button", name="End the drain").click()
    page.get_by_role("button", name="End the drain").click()
    section.get_by_role("button", name="Drain", exact=True).wait_for()
    until(draining, lambda states: True not in states)
