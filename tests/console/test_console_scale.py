"""A large cluster and a hundred open pages: the time to the first paint, memory, and CPU."""

import http.client
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from console.console_process import UpWithConsole, wait_for
from console.test_console_browser import chromium  # noqa: F401  # a fixture

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TOPICS, GROUPS, PAGES, PAINTS = 5_000, 500, 100, 100
PATHS = (
    *("/", "/groups", "/topics", "/topics/topic-0007", "/groups/group-007", "/timers"),
    *("/dead-letters", "/cluster", "/clients", "/settings"),
)
FIRST_PAINT_S, RSS_MIB = 1.5, 300
PAINT = "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)"


def fill(endpoint: str) -> None:
    with Client(endpoint) as client, ThreadPoolExecutor(16) as pool:

        def create(number: int) -> None:
            topic = admin.Topic(name=f"topic-{number:04}", type="normal", queues=1)
            client.call_admin(admin.CreateTopicRequest(topic=topic), admin.TopicReply)

        def read(number: int) -> None:
            group = admin.Group(name=f"group-{number:03}")
            client.call_admin(admin.CreateGroupRequest(group=group), admin.GroupReply)
            (queue,) = client.query_route(f"topic-{number:04}")
            client.receive(group.name, queue, limit=1, wait_ms=1, invisible_ms=60_000)

        list(pool.map(create, range(TOPICS)))
        list(pool.map(read, range(GROUPS)))


@contextmanager
def open_pages(url: str) -> Iterator[list[float]]:
    """Each asks as live.js does, a second after the last answer; the seconds of each answer."""
    ended, took = threading.Event(), list[float]()

    def follow(number: int) -> None:
        path = PATHS[number % len(PATHS)]
        while not ended.wait(1):
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
            began_s = time.monotonic()
            connection.request("GET", path, headers={"x-live": "1"})
            answer = connection.getresponse()
            answer.read()
            took.append(time.monotonic() - began_s)
            assert answer.status == 200, path
            connection.close()

    with ThreadPoolExecutor(PAGES) as pool:
        followers = [pool.submit(follow, number) for number in range(PAGES)]
        try:
            yield took
        finally:
            ended.set()
            for follower in followers:
                follower.result()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM")]
    return int(peak.split()[1]) / 1024


def test_the_first_paint_is_quick_with_a_hundred_open_pages(
    tmp_path: Path,
    chromium: Any,  # noqa: F811
) -> None:
    with UpWithConsole(tmp_path) as up:
        began_s = time.monotonic()
        fill(up.endpoint)
        print(f"\n{TOPICS} topics and {GROUPS} groups in {time.monotonic() - began_s:.0f} s")
        wait_for(up.url, "/", "Healthy")
        console, paints = up.console_pid(), []
        with open_pages(up.url) as took:
            at_s, before = time.monotonic(), (cpu_s(console), cpu_s(up.pid))
            context = chromium.new_context(base_url=up.url)
            for number in range(PAINTS):
                page = context.new_page()
                page.goto(PATHS[number % len(PATHS)])
                page.wait_for_function(f"() => {PAINT}.length > 0")
                paints.append((page.evaluate(PAINT)[0] / 1_000, PATHS[number % len(PATHS)]))
                page.close()
            passed_s = time.monotonic() - at_s
            used = [
                100 * (now - then) / passed_s
                for now, then in zip((cpu_s(console), cpu_s(up.pid)), before, strict=True)
            ]
            context.close()
        paints.sort()
        answers = sorted(took)
        p99_s, path = paints[len(paints) * 99 // 100 - 1]
        rss = rss_mib(console)
        print(
            f"first paint: p50 {paints[len(paints) // 2][0]:.2f} s, p99 {p99_s:.2f} s ({path}); "
            f"{len(answers)} live answers in {passed_s:.0f} s, p50 {answers[len(answers) // 2]:.2f}"
            f" s, p99 {answers[len(answers) * 99 // 100]:.2f} s; console {rss:.0f} MiB, "
            f"{used[0]:.0f} % of a core; broker and proxy {used[1]:.0f} %"
        )
        assert p99_s <= FIRST_PAINT_S
        assert rss <= RSS_MIB
