"""Kill -9 of master, proxy and console under open pages: what they show, and what is done once."""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from console.console_process import UpWithConsole, wait_for
from console.console_site import Parsed, until
from console.test_console_browser import Calls, chromium  # noqa: F401  # a fixture
from console.test_console_processes import master_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

WRONG_FOR_S = 5.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpWithConsole]:
    folder = tmp_path_factory.mktemp("up")
    with UpWithConsole(folder, "--replicas", "3", "--groups", "2") as started:
        for topic in ("steady", "once", "letters"):
            started.popmq("topic", "create", topic)
        started.popmq("group", "create", "failing", "--max-attempts", "1")
        wait_for(started.url, "/", "Healthy")
        yield started


@pytest.fixture(scope="module")
def calls(up: UpWithConsole) -> Calls:
    return Calls(up.endpoint)


def pids(up: UpWithConsole) -> dict[str, int]:
    state = json.loads((up.folder / "data" / "cluster.json").read_text())
    return {process["name"]: process["pid"] for process in state["processes"]}


def await_another(up: UpWithConsole, pid: int) -> None:
    """A proxy that is started in place of the one that was killed."""
    until(lambda: pids(up)["proxy"], lambda now: now not in (0, pid), 60)


class Producer:
    """Sends a number as often as it can; `stored` has when each was known to be stored."""

    def __init__(self, calls: Calls) -> None:
        self.stored: list[float] = []
        self._calls = calls
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer")

    def _run(self) -> None:
        while not self._ended.wait(0.5):
            try:
                self._calls.send("steady", f"number {len(self.stored)}")
            except Exception:  # the same number again: a person sees one of them
                continue
            self.stored.append(time.monotonic())

    def count(self) -> int:
        return len(self.stored)

    def due(self, now_s: float) -> int:
        """The number that a page must show by now; -1: none."""
        return sum(at_s < now_s - WRONG_FOR_S for at_s in self.stored) - 1

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join(60)


SHOWN = """() => ({
    says: !document.getElementById("state").hidden || !!document.querySelector("main .notice.bad"),
    numbers: [...document.querySelectorAll("main td code")].map((cell) => cell.textContent),
    leads: [...document.querySelectorAll("main tr")].filter((row) => row.querySelector(".good"))
        .map((row) => row.cells[0].textContent),
})"""


def test_no_page_is_wrong_for_more_than_five_seconds_without_saying_so(
    up: UpWithConsole,
    calls: Calls,
    chromium: Any,  # noqa: F811
) -> None:
    context = chromium.new_context(base_url=up.url)
    topic, cluster = context.new_page(), context.new_page()
    producer = Producer(calls)
    with producer.running():
        until(lambda: len(producer.stored), lambda count: count > 2)
        topic.goto("/topics/steady")
        cluster.goto("/cluster")
        dead, dead_since_s, lies = "", 0.0, []

        def look(*, until_s: float) -> None:
            """What both pages show, again and again."""
            while time.monotonic() < until_s:
                now_s, shown = time.monotonic(), topic.evaluate(SHOWN)
                numbers = {int(words.split()[1]) for words in shown["numbers"] if "number" in words}
                if not shown["says"] and producer.due(now_s) > max(numbers, default=-1):
                    lies.append(f"number {producer.due(now_s)} is not among {sorted(numbers)}")
                shown = cluster.evaluate(SHOWN)
                if not shown["says"] and dead in shown["leads"] and now_s > dead_since_s + 5:
                    lies.append(f"{dead} leads on the page, {now_s - dead_since_s:.1f} s dead")
                topic.wait_for_timeout(100)

        look(until_s=time.monotonic() + 3)
        for name in (master_of(up), "proxy", "console"):
            killed = up.console_pid() if name == "console" else pids(up)[name]
            os.kill(killed, signal.SIGKILL)
            before, dead_since_s = len(producer.stored), time.monotonic()
            dead = name
            look(until_s=dead_since_s + 8)
            until(producer.count, lambda count: count > before + 3, 60)  # noqa: B023  # at once
            dead = ""  # it may lead again
            look(until_s=time.monotonic() + WRONG_FOR_S + 2)
            for page in (topic, cluster):
                page.wait_for_function(f"() => !({SHOWN})().says", timeout=30_000)
    context.close()
    assert lies == []


def test_a_form_that_is_repeated_while_the_proxy_is_killed_sends_one_message(
    up: UpWithConsole, calls: Calls
) -> None:
    status, page = exchange(up.url, "GET", "/topics/once")
    assert status == 200
    form = page.form(do="send")
    fields = [*((n, v) for n, v in form.fields if n != "key"), ("body", "only once")]

    def kills() -> None:
        for _ in range(2):
            old = pids(up)["proxy"]
            os.kill(old, signal.SIGKILL)
            await_another(up, old)

    killer = threading.Thread(target=kills)
    killer.start()
    answers: list[int] = []
    while killer.is_alive() or answers.count(303) < 3:
        answers.append(exchange(up.url, "POST", form.action, fields)[0])
        assert len(answers) < 2_000, answers[-5:]
    killer.join(60)
    received = []
    while messages := calls.receive("once", "readers", wait="3s"):
        received += [message.body for message in messages]
        calls.ack(*messages)
    assert received == [b"only once"]


def test_a_redrive_that_ends_with_its_console_is_continued_and_sends_nothing_twice(
    up: UpWithConsole, calls: Calls
) -> None:
    ids = [calls.send("letters", f"letter {number}") for number in range(12)]
    taken: list[str] = []
    while len(taken) < 12:
        taken += [m.message_id for m in calls.receive("letters", "failing", invisible="1s")]
    path = "/dead-letters?group=failing"
    wait_for(up.url, path, "12 dead letters")
    sure = [("do", "all"), ("rate", "2"), ("sure", "yes")]
    assert exchange(up.url, "POST", path, sure)[0] == 303
    wait_for(up.url, path, "redriven")
    killed = up.console_pid()
    os.kill(killed, signal.SIGKILL)
    until(up.console_pid, lambda pid: pid not in (0, killed), 60)
    wait_for(up.url, path, "dead letters")
    assert (
        exchange(up.url, "POST", path, [("do", "all"), ("rate", "50"), ("sure", "yes")])[0] == 303
    )
    wait_for(up.url, path, "done")
    back: list[str] = []
    while messages := calls.receive("letters", "failing", wait="3s"):
        back += [message.message_id for message in messages]
        calls.ack(*messages)
    assert sorted(back) == sorted(ids)


def test_a_hidden_page_asks_for_nothing_and_asks_once_a_second_afterwards(
    up: UpWithConsole,
    chromium: Any,  # noqa: F811
) -> None:
    context = chromium.new_context(base_url=up.url)
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/cluster")
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.get_by_text("Paused while hidden.").wait_for(state="attached")
    page.wait_for_load_state("networkidle")
    asked.clear()
    page.wait_for_timeout(3_000)
    assert asked == []
    for _ in range(20):  # a person who goes through tabs
        page.evaluate(hide, False)
        page.evaluate(hide, True)
    page.evaluate(hide, False)
    page.get_by_text("Live.").wait_for(state="attached")
    asked.clear()
    page.wait_for_timeout(4_000)
    assert 1 <= len(asked) <= 5
    context.close()


def exchange(
    url: str, method: str, path: str, fields: Sequence[tuple[str, str]] = ()
) -> tuple[int, Parsed]:
    """Status and page; 0 while the console does not answer."""
    headers: Mapping[str, str] = {
        "origin": url,
        "content-type": "application/x-www-form-urlencoded",
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, urlencode(fields), dict(headers))
        answer = connection.getresponse()
        return answer.status, Parsed(answer.read().decode())
    except OSError:
        return 0, Parsed("")
    finally:
        connection.close()
