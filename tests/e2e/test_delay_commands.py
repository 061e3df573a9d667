"""`popmq send --delay` and `popmq timers` on a real `popmq up`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.processes import Role, free_port, role_environment
from programs import run_program

pytestmark = pytest.mark.more

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def popmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The command line against a `popmq up` without any timers."""
    ports = ["--port", str(free_port()), "--http-port", str(free_port())]
    with Role(
        "up",
        ["up", "--data", "data", *ports],
        folder=tmp_path_factory.mktemp("delays"),
        settings={},
    ) as role:

        def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
            return run_program(
                [sys.executable, "-m", "popmq.cli", *arguments],
                env=role_environment({"POPMQ_ENDPOINT": role.ready.endpoint}),
                stdin=subprocess.DEVNULL,
                timeout=30,
            )

        yield run


def objects(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_delayed_messages_are_sent_shown_moved_and_cancelled(popmq: Run) -> None:
    before_ms = time.time_ns() // 1_000_000
    (soon,) = objects(popmq("send", "orders", "soon", "--delay", "59m", "--json"))
    (far,) = objects(popmq("send", "orders", "far", "--delay", "200d", "--json"))
    assert before_ms + 3_540_000 <= soon["due_ms"] < before_ms + 3_640_000
    listed = objects(popmq("timers", "list", "--json"))
    assert [message["message_id"] for message in listed] == [soon["message_id"], far["message_id"]]
    assert [manifest["due_ms"] for manifest in listed] == [soon["due_ms"], far["due_ms"]]
    assert soon["message_id"] in popmq("timers", "list", "--topic", "orders").stdout
    (shown,) = objects(popmq("timers", "show", soon["recall_handle"], "--json"))
    assert (shown["state"], shown["topic"]) == ("PENDING", "orders")
    output = popmq("explain", soon["message_id"]).stdout
    assert "every group: DELAYED" in output
    assert "timer at" in output

    forecast = objects(popmq("timers", "forecast", "--json"))
    assert {"topic": "orders", "pending": 2} in forecast
    assert {"within_ms": 3_600_000, "timers": 1} in forecast
    assert {"within_ms": None, "timers": 1} in forecast

    by_id = (soon["message_id"], "--topic", "orders")
    moved = popmq("timers", "reschedule", *by_id, "--delay", "2s")
    assert moved.returncode == 0, moved.stderr
    (got,) = objects(popmq("recv", "orders", "--group", "g", "--ack", "--wait", "15s", "--json"))
    assert got["message_id"] == soon["message_id"]
    assert got["due_ms"] < before_ms + 3_600_000
    assert got["late_ms"] >= 0
    late = popmq("timers", "cancel", soon["recall_handle"], "--yes")
    assert late.returncode != 0
    assert "visible already" in late.stderr

    cancelled = popmq("timers", "cancel", far["recall_handle"], "--yes")
    assert "cancelled" in cancelled.stdout
    gone = popmq("timers", "show", far["recall_handle"])
    assert gone.returncode != 0
    assert "waits" in gone.stderr
    assert "every group: RECALLED" in popmq("explain", far["message_id"]).stdout
    assert "no message waits" in popmq("timers").stdout


def test_a_delay_beyond_the_limit_is_refused_with_the_limit(popmq: Run) -> None:
    refused = popmq("send", "orders", "far", "--delay", "367d")
    assert refused.returncode != 0
    assert "timer.max_delay_ms" in refused.stderr
    assert "over the limit of 366d" in refused.stderr


def test_a_spread_puts_timers_into_its_window(popmq: Run) -> None:
    at_ms = time.time_ns() // 1_000_000 + 3_600_000
    args = ("--at", str(at_ms), "--spread", "10m", "--count", "5", "--json")
    sent = objects(popmq("send", "orders", "spread", *args))
    due_ms = {manifest["due_ms"] for manifest in sent}
    assert len(due_ms) > 1
    assert all(at_ms <= item <= at_ms + 600_000 for item in due_ms)
