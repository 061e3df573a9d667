"""The console as a process: it starts with `up`, ends with it, and comes back when it is killed."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from console.console_process import UpWithConsole, get, post, wait_for
from console.console_site import until
from e2e.many import Up
from e2e.processes import LOCAL, Role, role_environment

pytestmark = pytest.mark.more


def test_up_serves_a_console_that_is_started_again_and_ends_with_it(tmp_path: Path) -> None:
    with UpWithConsole(tmp_path) as up:
        wait_for(up.url, "/", "Healthy")
        killed = up.console_pid()
        assert killed != up.pid
        os.kill(killed, signal.SIGKILL)
        until(up.console_pid, lambda pid: pid not in (0, killed))
        up.popmq("send", "orders", "still here")
        wait_for(up.url, "/topics/orders", "still here")
    assert up.console_pid() == 0


def test_a_page_says_that_its_proxy_is_away_and_shows_all_when_it_is_back(tmp_path: Path) -> None:
    with Up(tmp_path, {}) as up:
        arguments = ["console", "--endpoint", up.endpoints[0], "--listen", f"{LOCAL}:0"]
        with Role("console", arguments, folder=tmp_path, settings={}) as console:
            url = console.ready.console
            wait_for(url, "/cluster", "Broker group broker-a")
            up.kill9()
            wait_for(url, "/cluster", "This page tries again by itself.")
            assert get(url, "/cluster")[0] == 503
            up.restart()
            wait_for(url, "/cluster", "Broker group broker-a")


def test_a_planned_failover_asks_first_and_pages_follow_a_master_that_is_killed(
    tmp_path: Path,
) -> None:
    with UpWithConsole(tmp_path, "--replicas", "3") as up:
        wait_for(up.url, "/cluster", "broker-a-2")
        first = master_of(up)
        other = next(node for node in NODES if node != first)
        fields = [("do", "failover"), ("group", "broker-a"), ("node", other)]
        asked = post(up.url, "/cluster", fields)
        assert f"Make {other} the master of broker-a?" in asked
        assert "Nothing is lost" in asked
        assert master_of(up) == first  # it only asked
        assert f"{other} leads broker-a" in post(up.url, "/cluster", [*fields, ("sure", "yes")])
        until(lambda: master_of(up), lambda node: node == other)
        state = json.loads((up.folder / "data" / "cluster.json").read_text())
        pids = {process["name"]: process["pid"] for process in state["processes"]}
        os.kill(pids[other], signal.SIGKILL)
        until(lambda: master_of(up), lambda node: node not in ("", other))
        wait_for(up.url, "/", "3 of 3")


NODES = ("broker-a-0", "broker-a-1", "broker-a-2")


def master_of(up: UpWithConsole) -> str:
    """As the page says it; empty while nobody leads, or no answer comes."""
    _, text = get(up.url, "/cluster")
    return next((node for node in NODES if f"{node} master yes" in text), "")


def test_a_console_port_that_is_taken_makes_no_store(tmp_path: Path) -> None:
    with UpWithConsole(tmp_path / "first") as up:
        port = up.console.rpartition(":")[2]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "popmq", "up", "--data", str(tmp_path / "data")),
                *("--port", "0", "--http-port", "0", "--console-port", port),
            ],
            env=role_environment({}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on {up.console}" in done.stderr
    assert "--console-port" in done.stderr
    assert not (tmp_path / "data").exists()


def test_with_users_on_a_console_asks_for_a_login_and_keeps_no_secret(tmp_path: Path) -> None:
    """Whatever user the environment of its process names."""
    with UpWithConsole(tmp_path / "up", "--auth") as up:
        admin = json.loads((up.folder / "data" / "admin.json").read_text())
        arguments = ["console", "--endpoint", up.endpoint, "--listen", f"{LOCAL}:0"]
        keys = {"POPMQ_ACCESS_KEY": admin["access_key"], "POPMQ_SECRET": admin["secret"]}
        with Role("console", arguments, folder=tmp_path / "own", settings=keys) as console:
            for url in (console.ready.console, up.url):
                assert exchange(url, "GET", "/cluster")[0] == 303
        status, headers = exchange(up.url, "POST", "/login", admin)
        assert status == 303
        session = headers["set-cookie"].partition(";")[0]
        assert exchange(up.url, "GET", "/cluster", cookie=session)[0] == 200
        holders = {
            path.name
            for path in up.folder.rglob("*")
            if path.is_file() and admin["secret"].encode() in path.read_bytes()
        }
        assert holders == {"admin.json"}
        shown = Path(f"/proc/{up.console_pid()}")
        for name in ("environ", "cmdline"):
            assert admin["secret"].encode() not in (shown / name).read_bytes()


def exchange(
    url: str, method: str, path: str, fields: dict[str, str] | None = None, **headers: str
) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, urlencode(fields or {}), {"origin": url, **headers})
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()
