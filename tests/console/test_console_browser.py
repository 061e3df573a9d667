"""Tasks of a person, by clicks alone in Debian's Chromium, verified through the public API.

`tools/setup-browser.sh` installs the browser and playwright; `make test-heavy` calls it.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from console.console_process import UpWithConsole, wait_for
from console.console_site import until
from console.test_console_safety import hostile_texts

from popmq.testing.broker_calls import BrokerCalls

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]

# Without these Chromium asks hosts of its maker at each start.
SWITCHES = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PAGES = (
    *("/", "/groups", "/groups/billing", "/topics", "/topics/orders", "/timers"),
    *("/dead-letters", "/dead-letters?group=failing", "/cluster", "/clients", "/settings?q=group"),
    *("/timers?key=k", "/reports", "/?hours=24"),
)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpWithConsole]:
    folder = tmp_path_factory.mktemp("up")
    (folder / "lag.html").write_text("<h1>lag</h1>")
    settings = {
        "POPMQ_CONSOLE_REPORTS": str(folder),
        "POPMQ_CONSOLE_PROMETHEUS": "http://127.0.0.1:9",  # nobody listens there
    }
    with UpWithConsole(folder, settings=settings) as started:
        started.popmq("topic", "create", "orders", "--type", "mixed")
        started.popmq("group", "create", "failing", "--max-attempts", "1")
        wait_for(started.url, "/", "Healthy")
        yield started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="tools/setup-browser.sh")
    binary = shutil.which("chromium")
    assert binary is not None, "no chromium on PATH: tools/setup-browser.sh installs it"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=binary, args=list(SWITCHES), chromium_sandbox=False
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, up: UpWithConsole) -> Iterator[Any]:
    """A page that must not log an error: one of them would be a script that the policy stopped."""
    context = chromium.new_context(base_url=up.url)
    context.set_default_timeout(20_000)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
    page.on("console", lambda m: errors.append(m.text) if "Content Security" in m.text else None)
    yield page
    context.close()
    assert errors == []


class Calls(BrokerCalls):
    """The public API."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint

    def _address(self) -> str:
        return self._endpoint


def received_again(calls: Calls, topic: str, group: str, count: int) -> list[str]:
    """The ids of so many redriven messages, sorted; each is acked."""
    ids: list[str] = []
    while len(ids) < count:
        messages = calls.receive(topic, group, wait="10s")
        assert messages, "the redriven messages come back"
        calls.ack(*messages)
        ids += [message.message_id for message in messages]
    return sorted(ids)


@pytest.fixture(scope="module")
def calls(up: UpWithConsole) -> Calls:
    return Calls(up.endpoint)


def test_why_did_order_7_come_twice(calls: Calls, page: Any) -> None:
    message_id = calls.send("orders", "seven", keys=["order-7"])
    assert calls.receive("orders", "billing", invisible="1s", wait="5s")
    calls.ack(*calls.receive("orders", "billing", wait="15s"))
    page.goto("/")
    page.get_by_role("link", name="Topics", exact=True).first.click()
    page.get_by_role("link", name="orders", exact=True).click()
    page.get_by_label("Key", exact=True).first.fill("order-7")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("link", name=message_id).click()
    page.get_by_text("acked as attempt 2").wait_for()
    steps = page.locator(".timeline li strong").all_inner_texts()
    assert (steps[0], steps[-1]) == ("stored", "acked")


def test_which_group_is_behind_and_why(calls: Calls, page: Any) -> None:
    calls.send("letters", "one")
    calls.ack(*calls.receive("letters", "readers", wait="5s"))
    for _ in range(3):
        calls.send("letters", "more")
    page.goto("/groups?q=readers")
    page.get_by_role("link", name="readers", exact=True).click()
    page.get_by_text("Stopped: no member is connected, and 3 messages are ready.").wait_for()


def test_a_message_is_sent_with_a_key(calls: Calls, page: Any) -> None:
    page.goto("/topics")
    page.get_by_role("link", name="orders", exact=True).click()
    form = page.locator("form", has=page.get_by_role("button", name="Send"))
    form.get_by_label("Body").fill('{"from": "a person"}')
    form.get_by_label("Key").fill("by-hand")
    form.get_by_role("button", name="Send").click()
    page.get_by_text("Sent message").wait_for()
    received = calls.receive("orders", "by-hand-readers", wait="5s")
    while not (sent := [item for item in received if item.keys == ("by-hand",)]):
        received = calls.receive("orders", "by-hand-readers", wait="5s")
        assert received, "the message is in the topic"
    assert [item.body for item in sent] == [b'{"from": "a person"}']


def test_a_timer_is_cancelled_and_another_is_moved_to_now(
    up: UpWithConsole, calls: Calls, page: Any
) -> None:
    gone = calls.send("orders", "gone", delay="2h")
    moved = calls.send("orders", "moved", delay="3h")
    page.goto("/timers")
    page.get_by_label(f"select {gone}").check()
    page.get_by_role("button", name="Cancel the selected").click()
    page.get_by_role("button", name="Cancel 1 timer").click()
    page.get_by_text("1 of 1 cancelled").wait_for()
    page.get_by_role("link", name="Go on").click()
    page.get_by_label(f"select {moved}").check()
    page.get_by_label("or deliver them after").fill("1s")
    page.get_by_role("button", name="Reschedule the selected").click()
    page.get_by_role("button", name="Reschedule 1 timer").click()
    page.get_by_text("1 of 1 rescheduled").wait_for()
    until(lambda: up.popmq("timers", "list", "-o", "json"), lambda text: json.loads(text) == [])
    page.goto(f"/messages/{moved}")
    page.get_by_text("In topic").wait_for()


def test_the_selected_dead_letters_are_sent_back(calls: Calls, page: Any) -> None:
    ids = [calls.send("bills", f"bill {number}") for number in range(3)]
    received = 0
    while received < 3:
        received += len(calls.receive("bills", "failing", invisible="1s", wait="5s"))
    page.goto("/dead-letters")
    page.get_by_role("cell", name="failing").first.get_by_role("link").click()
    for message_id in ids[:2]:
        page.get_by_label(f"select {message_id}").check()
    page.get_by_label("At most a second").fill("10")
    page.get_by_role("button", name="Count the selected").click()
    page.get_by_role("heading", name="Redrive 2 dead letters of failing?").wait_for()
    page.get_by_role("button", name="Redrive 2 at 10 a second").click()
    page.get_by_role("cell", name="done").wait_for()
    assert received_again(calls, "bills", "failing", 2) == sorted(ids[:2])


def test_a_group_reads_a_topic_again_after_a_reset(calls: Calls, page: Any) -> None:
    calls.send("history", "read me twice")
    calls.ack(*calls.receive("history", "archive", wait="5s"))
    page.goto("/groups/archive")
    page.get_by_role("button", name="Preview the reset").click()
    page.get_by_text("queues move").wait_for()
    page.get_by_role("button", name="Reset").click()
    page.get_by_text("The group reads on").first.wait_for()
    (again,) = calls.receive("history", "archive", wait="10s")
    assert again.body == b"read me twice"


def test_a_topic_is_created_and_deleted_with_its_name_typed(up: UpWithConsole, page: Any) -> None:
    page.goto("/topics")
    page.get_by_label("Name", exact=True).fill("short-lived")
    page.get_by_role("button", name="Create").click()
    page.get_by_role("heading", name="Topic short-lived").wait_for()
    assert "short-lived" in up.popmq("topic", "list")
    page.get_by_label("Its name, to be sure").fill("short-lived")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the topic and its 0 messages").click()
    page.get_by_text("Topic short-lived is deleted.").wait_for()
    assert "short-lived" not in up.popmq("topic", "list")


def test_a_page_follows_the_cluster_and_keeps_what_is_typed(calls: Calls, page: Any) -> None:
    calls.send("live", "first")
    page.goto("/topics/live")
    page.get_by_label("Body").fill("not yet sent")
    page.evaluate("window.isTheSamePage = true")
    calls.send("live", "it came while the page was open")
    page.get_by_text("it came while the page was open").wait_for(timeout=10_000)
    assert page.get_by_label("Body").input_value() == "not yet sent"
    assert page.evaluate("window.isTheSamePage")


def test_a_page_says_that_the_console_is_away_and_recovers(
    up: UpWithConsole, calls: Calls, page: Any
) -> None:
    calls.send("away", "before")
    page.goto("/topics/away")
    os.kill(up.console_pid(), signal.SIGSTOP)
    try:
        page.get_by_text("What is below may be old. Trying again.").wait_for(timeout=15_000)
    finally:
        os.kill(up.console_pid(), signal.SIGKILL)
    calls.send("away", "sent meanwhile")
    page.get_by_text("sent meanwhile").wait_for(timeout=30_000)
    assert page.locator("#state").is_hidden()


def test_hostile_texts_run_nothing_and_break_no_layout(calls: Calls, page: Any) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    calls.create_topic("hostile", queues=1)
    for words in hostile_texts(20, seed):
        key = words.replace(" ", "")[:100]
        calls.send("hostile", words, keys=[key], tag=words[:40].replace("|", ""))
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto("/topics/hostile")
        assert page.locator("main tbody tr").count() > 20
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_pages_are_accessible_and_fit_both_widths_in_both_themes(
    chromium: Any, up: UpWithConsole
) -> None:
    """No serious finding of axe's rules; the policy of the pages would stop axe, too."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    findings = []
    for theme, width in (("light", 1280), ("dark", 390)):
        context = chromium.new_context(
            base_url=up.url,
            bypass_csp=True,
            color_scheme=theme,
            viewport={"width": width, "height": 800},
        )
        page = context.new_page()
        for path in PAGES:
            page.goto(path)
            if page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0:
                findings.append(f"{path} at {width}: wider than its window")
            for violation in axe.run(page).response["violations"]:
                if violation["impact"] in ("serious", "critical"):
                    nodes = [node["html"][:120] for node in violation["nodes"][:2]]
                    findings.append(f"{path} {theme}: {violation['id']} {nodes}")
        context.close()
    assert findings == []


def test_a_keyboard_alone_reaches_the_content_and_the_pages(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(4):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Topics"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Topics", exact=True).wait_for()


def test_a_person_logs_in_sees_what_the_user_may_and_logs_out(
    chromium: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with UpWithConsole(tmp_path_factory.mktemp("users"), "--auth") as up:
        first = json.loads((up.folder / "data" / "admin.json").read_text())
        wait_for(up.url, "/login", "Log in")
        context = chromium.new_context(base_url=up.url)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.goto("/cluster")
        page.get_by_label("Access key").fill(first["access_key"])
        page.get_by_label("Secret").fill("wrong")
        page.get_by_role("main").get_by_role("button", name="Log in").click()
        page.get_by_text("UNAUTHORIZED (40100)").wait_for()

        def logged_in() -> bool:
            """Again after the wait that a failure brings."""
            page.get_by_label("Access key").fill(first["access_key"])
            page.get_by_label("Secret").fill(first["secret"])
            page.get_by_role("main").get_by_role("button", name="Log in").click()
            page.wait_for_load_state()
            return bool(page.get_by_role("heading", name="Broker group broker-a").count())

        until(logged_in, bool)
        assert page.url == f"{up.url}/cluster"
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert page.evaluate("document.cookie") == ""
        other = context.new_page()
        other.goto("/topics")
        other.get_by_role("heading", name="Topics").wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_role("heading", name="Log in").wait_for()
        other.get_by_role("heading", name="Log in").wait_for()  # by itself
        context.close()
