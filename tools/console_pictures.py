"""The pictures of docs/console.md: `make console-pictures`.

Starts three brokers with a console, gives them some traffic, and takes pictures of the pages.
`python -m tools.console_pictures FOLDER` takes every page in both themes and at both widths, to
be looked at one by one.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from popmq.cli.client import Client
from popmq.testing.broker_calls import BrokerCalls

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
MAX_BYTES = 150 << 10
# Without these Chromium asks hosts of its maker at each start.
SWITCHES = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
LIST_PAGES = (
    *("/groups", "/topics", "/timers", "/timers?key=order-3", "/dead-letters", "/clients"),
    *("/settings?only=set", "/reports"),
)
HISTORY_S = 55  # a plot needs some readings


class Traffic(BrokerCalls):
    """Some of everything; `order_7` is a message that came twice."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.order_7 = ""

    def _address(self) -> str:
        return self.endpoint

    def make(self) -> None:
        self.create_topic("orders", type="mixed")
        self.create_group("emails", max_attempts=1)
        for number in range(1, 31):
            body = f'{{"order": {number}, "customer": "c-{number % 7}", "total": {number * 17}}}'
            sent = self.send(
                "orders", body, tag="eu" if number % 3 else "us", keys=[f"order-{number}"]
            )
            self.order_7 = sent if number == 7 else self.order_7
        held = 0
        while held < 30:
            received = self.receive("orders", "billing", invisible="1s", wait="5s")
            held += len(received)
            self.ack(*(each for each in received if each.message_id != self.order_7))
        self.ack(*self.receive("orders", "billing", wait="20s"))
        for number in range(31, 43):
            self.send("orders", f'{{"order": {number}}}', tag="eu", keys=[f"order-{number}"])
        self.receive("orders", "billing", limit=3, wait="5s", invisible="10m")
        for number in range(4):
            self.send("mails", f"to customer {number}: no such address", keys=[f"mail-{number}"])
        self.receive("mails", "emails", invisible="1s", wait="5s")
        for number in range(24):
            self.send("orders", "a reminder", keys=[f"order-{number}"], delay=f"{number * 25 + 3}m")

    def order(self, number: int) -> None:
        """One more, and an ack of what is ready at times."""
        self.send("orders", f'{{"order": {100 + number}}}', tag="eu")
        if number % 2 == 0:
            self.ack(*self.receive("orders", "billing", limit=1, wait="1s"))

    def heartbeat(self) -> None:
        """A member of a group, as a consumer is one."""
        with Client(self.endpoint, "worker-1@4711@0@1a2b3c") as client:
            client.heartbeat("billing")


@contextmanager
def cluster(*, every: bool) -> Iterator[tuple[str, str]]:
    """Endpoint and URL of a cluster of three brokers with its console."""
    ports = [str(free_port()) for _ in range(2)]
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as reports:
        for name in ("lag", "revive"):
            Path(reports, f"{name}-2026-11-28.html").write_text(f"<h1>{name}</h1>")
        settings = os.environ | {
            "POPMQ_CONSOLE_REPORTS": reports,
            # Nobody listens there: the pages say so.
            "POPMQ_CONSOLE_PROMETHEUS": "http://127.0.0.1:9" if every else "",
        }
        command = [sys.executable, "-m", "popmq", "up", "--replicas", "3", "--data", data]
        command += ["--port", ports[0], "--http-port", "0", "--console-port", ports[1]]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settings
        ) as up:
            assert up.stdout is not None
            for line in up.stdout:
                if line.startswith("console: "):
                    break
            try:
                yield f"127.0.0.1:{ports[0]}", line.split()[1].rstrip("/")
            finally:
                up.send_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def for_the_docs(browser: Any, url: str, traffic: Traffic) -> None:
    """Six pictures, none larger than MAX_BYTES."""
    shots = (
        ("overview", "light", 1280, 620, "/"),
        ("group", "dark", 1280, 760, "/groups/billing"),
        ("message", "light", 1280, 760, f"/messages/{traffic.order_7}"),
        ("timers", "dark", 1280, 660, "/timers"),
        ("phone", "light", 390, 760, "/"),
    )
    for name, theme, width, height, path in shots:
        traffic.heartbeat()
        page = opened(browser, url, theme, width, height)
        page.goto(path)
        take(page, PICTURES / f"console-{name}.png")
    page = opened(browser, url, "light", 1280, 360)
    page.goto("/dead-letters?group=emails")
    page.get_by_role("button", name="Count all").click()
    page.get_by_role("heading", name="Redrive 4").wait_for()
    take(page, PICTURES / "console-redrive.png")


def every_page(browser: Any, url: str, traffic: Traffic, folder: Path) -> None:
    paths = ["/", *LIST_PAGES, "/groups/billing", "/topics/orders", "/cluster"]
    paths += ["/dead-letters?group=emails", f"/messages/{traffic.order_7}", "/topics/nothing"]
    for theme in ("light", "dark"):
        for width in (1280, 390):
            page = opened(browser, url, theme, width, 800)
            for number, path in enumerate(paths):
                traffic.heartbeat()
                page.goto(path)
                name = path.split("?")[0].strip("/").replace("/", "-")[:20] or "overview"
                page.screenshot(
                    path=folder / f"{number:02}-{name}-{theme}-{width}.png", full_page=True
                )
            for button, path in (
                ("Preview the failover", "/cluster"),
                ("Preview the reset", "/groups/billing"),
            ):
                page.goto(path)
                page.get_by_role("button", name=button).click()
                page.locator(".answer").wait_for()
                name = button.rpartition(" ")[2]
                page.screenshot(path=folder / f"ask-{name}-{theme}-{width}.png", full_page=True)


def opened(browser: Any, url: str, theme: str, width: int, height: int) -> Any:
    return browser.new_page(
        base_url=url, color_scheme=theme, viewport={"width": width, "height": height}
    )


def take(page: Any, path: Path) -> None:
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size >> 10} KiB")
    assert size <= MAX_BYTES, f"{path.name} has {size} bytes, over the limit of {MAX_BYTES}"


def main(arguments: Sequence[str]) -> int:
    binary = shutil.which("chromium")
    assert binary is not None, "no chromium on PATH: tools/setup-browser.sh installs it"
    with cluster(every=bool(arguments)) as (endpoint, url), sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=binary, args=list(SWITCHES), chromium_sandbox=False
        )
        traffic = Traffic(endpoint)
        traffic.make()
        page = opened(browser, url, "light", 1180, 600)
        page.goto("/")
        for number in range(HISTORY_S):
            if number % 3 == 0:
                traffic.order(number)
            page.wait_for_timeout(1000)
        if arguments:
            folder = Path(arguments[0])
            folder.mkdir(parents=True, exist_ok=True)
            every_page(browser, url, traffic, folder)
        else:
            for_the_docs(browser, url, traffic)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
