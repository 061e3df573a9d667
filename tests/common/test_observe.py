"""Log lines, metrics and the HTTP pages, over real sockets."""

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from programs import run_program
from prometheus_client import CollectorRegistry, generate_latest

from popmq.common.errors import ConfigError
from popmq.common.observability import (
    HEAD_TIMEOUT_S,
    HttpEndpoint,
    JsonFormatter,
    Metric,
    MetricKind,
    MetricsRegistry,
    Ready,
    TerminalFormatter,
    counters_collector,
    new_registry,
    setup_logging,
)


def formatted(message: str, **extra: object) -> dict[str, object]:
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", "created": 0.5, **extra})
    line = JsonFormatter("broker").format(record)
    assert "\n" not in line
    fields: dict[str, object] = json.loads(line)
    return fields


def test_a_log_line_says_when_how_bad_who_and_what() -> None:
    assert formatted("became master", epoch=3) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "role": "broker",
        "event": "became master",
        "epoch": 3,
    }


def test_a_field_cannot_replace_the_role_or_the_event() -> None:
    line = formatted("started", role="impostor", event="other")
    assert (line["role"], line["event"]) == ("broker", "started")


def test_a_field_that_json_does_not_know_is_written_as_text() -> None:
    assert formatted("opened", path=Exception("odd"))["path"] == "odd"


def test_an_exception_stays_on_the_line_of_its_event() -> None:
    try:
        raise ValueError("torn")
    except ValueError:
        line = formatted("recovery failed", exc_info=sys.exc_info())
    assert "ValueError: torn" in str(line["exception"])


def test_log_lines_go_to_stderr() -> None:
    program = (
        "import logging; from popmq.common.observability import setup_logging;"
        "setup_logging('proxy', 'warning');"
        "logging.info('too quiet'); logging.warning('heard', extra={'port': 7})"
    )
    done = run_program([sys.executable, "-c", program], check=True)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "heard"
    assert json.loads(line)["port"] == 7


def test_an_unknown_log_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log level loud is unknown"):
        setup_logging("broker", "loud")


def test_counters_are_read_when_somebody_asks() -> None:
    sent = {"orders": 1}
    registry = CollectorRegistry()

    def read() -> list[Metric]:
        return [
            Metric("messages_in_total", "Sent.", sent["orders"], labels={"topic": "orders"}),
            Metric("messages_in_total", "Sent.", 7, labels={"topic": "other"}),
            Metric("waiters", "Parked receives.", 2, MetricKind.GAUGE),
        ]

    registry.register(counters_collector("popmq_", read))
    sent["orders"] = 5
    page = generate_latest(registry).decode()
    assert 'popmq_messages_in_total{topic="orders"} 5.0' in page
    assert 'popmq_messages_in_total{topic="other"} 7.0' in page
    assert "popmq_waiters 2.0" in page
    assert page.count("# TYPE popmq_messages_in_total counter") == 1


def test_registering_a_collector_reads_nothing() -> None:
    def read() -> list[Metric]:
        raise AssertionError("read too early")

    CollectorRegistry().register(counters_collector("popmq_", read))


def test_a_page_in_pieces_is_the_whole_page_and_has_a_pause_after_each_reading() -> None:
    def read() -> Iterator[Metric | None]:
        yield Metric("messages_in_total", "Sent.", 1, labels={"topic": "orders"})
        yield None
        yield Metric("waiters", "Parked receives.", 2, MetricKind.GAUGE)
        yield Metric("messages_in_total", "Sent.", 7, labels={"topic": "other"})

    registry = MetricsRegistry()
    registry.register(counters_collector("popmq_", read))
    pieces = list(registry.page_pieces())
    assert pieces[:4] == [b"", b"", b"", b""]
    assert b"".join(pieces) == generate_latest(registry)


async def test_two_that_ask_for_metrics_at_once_get_one_page_and_others_are_served_meanwhile() -> (
    None
):
    made = 0

    def read() -> Iterator[Metric | None]:
        nonlocal made
        made += 1
        for _ in range(20):
            began_s = time.thread_time()
            while time.thread_time() - began_s < 0.01:
                pass
            yield None
        yield Metric("waiters", "Parked receives.", made, MetricKind.GAUGE)

    registry = MetricsRegistry()
    registry.register(counters_collector("popmq_", read))
    endpoint = HttpEndpoint("127.0.0.1", 0, registry, always_ready, "broker")
    port = await endpoint.start()
    order: list[str] = []

    async def get(path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        order.append(path)
        return answer

    first, second, alive = await asyncio.gather(get("/metrics"), get("/metrics"), get("/livez"))
    await endpoint.stop()
    assert order[0] == "/livez"
    assert b"200 OK" in alive
    assert first == second
    assert b"popmq_waiters 1.0" in first
    assert made == 1


def test_a_new_registry_tells_about_the_process() -> None:
    page = generate_latest(new_registry()).decode()
    assert "process_cpu_seconds_total" in page
    assert "python_gc_collections_total" in page


def always_ready() -> tuple[bool, dict[str, object]]:
    return True, {}


def ask(raw: bytes, *, ready: Ready = always_ready, read: Callable[[], list[Metric]] = list) -> str:
    async def exchange() -> str:
        registry = new_registry()
        registry.register(counters_collector("popmq_", read))
        endpoint = HttpEndpoint("127.0.0.1", 0, registry, ready, "broker")
        port = await endpoint.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            writer.write_eof()
            reply = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            await writer.wait_closed()
            return reply.decode()
        finally:
            await endpoint.stop()

    return asyncio.run(exchange())


def get(path: str, *, ready: Ready = always_ready) -> tuple[str, str]:
    head, _, body = ask(
        f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode(), ready=ready
    ).partition("\r\n\r\n")
    return head.split(" ", 1)[1].splitlines()[0], body


def test_metrics_are_served_as_text() -> None:
    status, body = get("/metrics?name=ignored")
    assert status == "200 OK"
    assert "process_cpu_seconds_total" in body


def test_a_process_that_answers_is_alive() -> None:
    assert get("/livez") == ("200 OK", "ok\n")


def test_readiness_comes_with_its_reason() -> None:
    status, body = get("/readyz", ready=lambda: (False, {"reason": "recovering"}))
    assert status == "503 Service Unavailable"
    assert json.loads(body) == {"ready": False, "reason": "recovering"}
    assert get("/readyz")[0] == "200 OK"


def test_the_version_page_names_the_role() -> None:
    status, body = get("/version")
    assert status == "200 OK"
    assert json.loads(body)["role"] == "broker"
    assert set(json.loads(body)) == {"version", "python", "role"}


def test_another_page_is_not_found() -> None:
    assert get("/admin")[0] == "404 Not Found"


@pytest.mark.parametrize("page", ["/metrics", "/livez", "/readyz", "/version"])
def test_head_is_answered_as_get_without_the_body(page: str) -> None:
    head, _, body = ask(f"HEAD {page} HTTP/1.1\r\n\r\n".encode()).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    length = re.search(r"Content-Length: (\d+)", head)
    assert (body, length is not None and int(length[1]) > 0) == ("", True)


def test_other_methods_are_refused() -> None:
    reply = ask(b"POST /metrics HTTP/1.1\r\n\r\n")
    assert reply.startswith("HTTP/1.1 405 ")
    assert "\r\nAllow: GET, HEAD\r\n" in reply


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/2\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n",
        b"GET /livez HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_a_small_http_request_is_refused(raw: bytes) -> None:
    assert ask(raw).startswith("HTTP/1.1 400 ")


def test_a_broken_counter_fails_its_page_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> list[Metric]:
        raise ValueError("counter went backwards")

    assert ask(b"GET /metrics HTTP/1.1\r\n\r\n", read=read).startswith("HTTP/1.1 500 ")
    assert "counter went backwards" in caplog.text


async def pages_beside(idle: int, *pages: bytes) -> list[bytes]:
    """The first lines of answers that come while so many sockets say nothing."""
    endpoint = HttpEndpoint("127.0.0.1", 0, new_registry(), always_ready, "broker")
    port = await endpoint.start()
    sockets = [await asyncio.open_connection("127.0.0.1", port) for _ in range(idle)]
    answers = []
    for page in pages:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET " + page + b" HTTP/1.1\r\n\r\n")
        answers.append((await reader.read()).split(b"\r\n")[0])
        writer.close()
    await endpoint.stop()
    for _, writer in sockets:
        writer.close()
    return answers


async def test_health_pages_are_answered_beside_eighty_idle_sockets() -> None:
    pages = [b"/livez", b"/readyz", b"/version", b"/metrics"] * 5
    assert await pages_beside(80, *pages) == [b"HTTP/1.1 200 OK"] * 20


async def test_a_request_head_that_does_not_come_is_not_waited_for() -> None:
    endpoint = HttpEndpoint("127.0.0.1", 0, new_registry(), always_ready, "broker")
    port = await endpoint.start()
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = loop.time()
    writer.write(b"GET /livez HTTP/1.1\r\n")
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    assert loop.time() - began_s >= HEAD_TIMEOUT_S
    assert HEAD_TIMEOUT_S == 1
    writer.close()
    await endpoint.stop()


async def test_an_endpoint_for_health_alone_has_no_metrics() -> None:
    endpoint = HttpEndpoint("127.0.0.1", 0, None, always_ready, "broker")
    port = await endpoint.start()
    for page, status in ((b"/livez", b"200"), (b"/metrics", b"404")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET " + page + b" HTTP/1.1\r\n\r\n")
        assert (await reader.read()).split()[1] == status
        writer.close()
    await endpoint.stop()


def test_stopping_breaks_off_a_request_that_never_ends() -> None:
    async def hang_and_stop() -> bytes:
        endpoint = HttpEndpoint("127.0.0.1", 0, new_registry(), always_ready, "broker")
        port = await endpoint.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HT")
        await writer.drain()
        await asyncio.wait_for(endpoint.stop(), 2)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    assert asyncio.run(hang_and_stop()) == b""


def test_on_a_terminal_logs_are_lines_for_people() -> None:
    record = logging.makeLogRecord({"msg": "became master", "levelname": "INFO", "epoch": 3})
    line = TerminalFormatter().format(record)
    assert re.fullmatch(r"\d\d:\d\d:\d\d info became master epoch=3", line)
