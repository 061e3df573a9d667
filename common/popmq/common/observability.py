"""What a process tells its operator: JSON log lines, metrics, and whether it is alive and ready.

Hot paths keep plain integers; a collector reads them when somebody asks.  The HTTP endpoint
answers small GET and HEAD requests, one per connection, and never holds up the loop it shares
(docs/reference/log-lines.md).
"""

import asyncio
import json
import logging
import platform
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from popmq.common.errors import ConfigError
from popmq.common.escaping import escaped, escaped_lines, json_text
from popmq.common.listener_close import stop_listening
from popmq.common.version import VERSION

logger = logging.getLogger(__name__)

HEAD_LIMIT_BYTES = 8192
CONNECTION_LIMIT = 64
HEAD_TIMEOUT_S = 1.0  # for a whole request head
REQUEST_TIMEOUT_S = 5.0
PIECE_S = 0.005  # of CPU for a page, between which the loop does other things

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One event per line: time, level, role, event, then the fields of `extra`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "event": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_text(line)


class TerminalFormatter(logging.Formatter):
    """The same for people: time, level, event, and the fields behind it.  What a changed object was
    before and after is left out."""

    def format(self, record: logging.LogRecord) -> str:
        fields = [
            f"{key}={escaped(str(value))}"
            for key, value in vars(record).items()
            if key not in _STANDARD_FIELDS and key not in ("before", "after")
        ]
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        event = escaped(record.getMessage())
        line = " ".join([when, record.levelname.lower(), event, *fields])
        if not record.exc_info:
            return line
        return f"{line}\n{escaped_lines(self.formatException(record.exc_info))}"


def setup_logging(role: str, level: str = "info") -> None:
    """Send every logger of the process to stderr, as JSON unless that is a terminal; replaces
    handlers set before."""
    known = ("debug", "info", "warning", "error")
    if level not in known:
        raise ConfigError(f"log level {level} is unknown: one of {', '.join(known)}")
    handler = logging.StreamHandler()
    for_people = sys.stderr.isatty()
    handler.setFormatter(TerminalFormatter() if for_people else JsonFormatter(role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class MetricKind(Enum):
    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily
    HISTOGRAM = HistogramMetricFamily


class Histogram:
    """Counts values by bounds, the last of which is none. Cheap enough for each message.

    Values and bounds are whole numbers; the page shows them divided by `divisor`, so that what is
    counted in milliseconds is shown in seconds.
    """

    def __init__(self, bounds: Sequence[int], divisor: int = 1) -> None:
        self._bounds = tuple(bounds)
        self._divisor = divisor
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int, *, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def observe_each(self, value: int, times: int) -> None:
        """The same value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    @property
    def sum(self) -> float:
        return self.total / self._divisor

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """How many are at most so large, by bound as text."""
        names = [*(f"{bound / self._divisor:.10g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self._counts)), strict=True))


@dataclass(frozen=True, slots=True)
class Metric:
    """One reading. Unit last in the name; a counter's name ends in `_total` on the page.

    A histogram has `buckets`, and the sum of what it counted as its value.
    """

    name: str
    help: str
    value: float
    kind: MetricKind = MetricKind.COUNTER
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: Sequence[tuple[str, float]] = ()


# The readings of a role for a page. None marks a pause: a piece of work is done, and the maker of
# the page may let other work run before it continues.
Readings: TypeAlias = Iterable[Metric | None]


def counters_collector(prefix: str, read: Callable[[], Readings]) -> Collector:
    """A collector that calls `read` for each scrape and puts `prefix` before every name."""
    return _ReadCollector(prefix, read)


class _ReadCollector(Collector):
    def __init__(self, prefix: str, read: Callable[[], Readings]) -> None:
        self._prefix = prefix
        self._read = read

    def describe(self) -> list[CounterMetricFamily]:
        """Nothing, so that registering does not read before the owner is ready."""
        return []

    def collect(self) -> Iterator[_Family]:
        return (family for family in self.pieces() if family is not None)

    def pieces(self) -> Iterator[_Family | None]:
        """The families, and before them a None after each piece of work."""
        families: dict[str, _Family] = {}
        for metric in self._read():
            yield None
            if metric is None:
                continue
            name = self._prefix + metric.name
            if name not in families:
                families[name] = metric.kind.value(name, metric.help, labels=list(metric.labels))
            family, labels = families[name], list(metric.labels.values())
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, metric.buckets, metric.value)
            else:
                family.add_metric(labels, metric.value)
        yield from families.values()


class MetricsRegistry(CollectorRegistry):
    """One whose page can be made in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Collector] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self._parts.append(collector)

    def page_pieces(self) -> Iterator[bytes]:
        """The parts of the page, some of them empty; each is a bounded piece of work."""
        shown = _Shown()
        alone = CollectorRegistry()
        alone.register(shown)
        for part in self._parts:
            families = part.pieces() if isinstance(part, _ReadCollector) else part.collect()
            for family in families:
                if family is None:
                    yield b""
                else:
                    shown.family = family
                    yield generate_latest(alone)


class _Shown(Collector):
    family: MetricFamily | None = None

    def collect(self) -> Iterator[MetricFamily]:
        if self.family is not None:
            yield self.family


def new_registry() -> MetricsRegistry:
    """A registry of one process, with what the interpreter and the kernel say about it."""
    registry = MetricsRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


# Whether the role does its work now, and why not, for a person.
Ready = Callable[[], tuple[bool, Mapping[str, object]]]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    has_body: bool = True  # of HEAD: the length alone

    @classmethod
    def of_json(cls, status: str, value: Mapping[str, object]) -> "_Answer":
        body = json.dumps(value, default=str).encode() + b"\n"
        return cls(status, body, "application/json")

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Allow: GET, HEAD\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (self.body if self.has_body else b"")


_BAD_REQUEST = _Answer("400 Bad Request", b"this is not a GET request of HTTP/1.1\n")


class HttpEndpoint:
    """/metrics, /livez, /readyz and /version of one role; without `registry` no /metrics.

    At the limit of connections the oldest one whose request has not come yet is closed, so that
    idle sockets cannot make health checks fail.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: MetricsRegistry | None,
        ready: Ready,
        role: str,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._alive = alive
        self._host = host
        self._port = port
        self._registry = registry
        self._ready = ready
        self._role = role
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._making: asyncio.Task[bytes] | None = None  # the page of metrics
        self._idle: dict[asyncio.StreamWriter, None] = {}  # no request came yet; oldest first

    async def start(self) -> int:
        """Listen; the port in use, which is a free one when port 0 was asked for."""
        self._server = await asyncio.start_server(
            self._accept, self._host, self._port, limit=HEAD_LIMIT_BYTES
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop listening and break off requests that are still going on."""
        if self._server is None:
            return
        await stop_listening(self._server)
        tasks = [*self._tasks, *([self._making] if self._making is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTION_LIMIT:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                writer.transport.abort()
                return
            del self._idle[oldest]
            oldest.transport.abort()
        self._idle[writer] = None
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await self._head(reader)
                self._idle.pop(writer, None)
                writer.write((await self._answer(head)).encode())
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # the asker went away or was too slow; it asks again
        except Exception:
            logger.exception("a request over HTTP failed")
        finally:
            self._idle.pop(writer, None)
            writer.transport.abort()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        """Of a request; empty when it is none."""
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return b""

    async def _answer(self, head: bytes) -> _Answer:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _BAD_REQUEST
        method, target, _ = words
        if method == "HEAD":
            answer = await self._answer(b"GET" + head.removeprefix(b"HEAD"))
            return replace(answer, has_body=False)
        if method != "GET":
            return _Answer("405 Method Not Allowed", b"only GET and HEAD are answered here\n")
        try:
            path = target.partition("?")[0]
            if path == "/metrics" and self._registry is not None:
                page = await self._shared_page(self._registry)
                return _Answer("200 OK", page, CONTENT_TYPE_LATEST)
            return self._page(path)
        except Exception:
            # A broken collector must not take the health checks or the role with it.
            logger.exception("page failed", extra={"path": target})
            return _Answer("500 Internal Server Error", b"the log says why\n")

    async def _shared_page(self, registry: MetricsRegistry) -> bytes:
        """Who asks while a page is made gets the same one."""
        if self._making is None:
            self._making = asyncio.get_running_loop().create_task(_metrics_page(registry))
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def _made(self, task: asyncio.Task[bytes]) -> None:
        self._making = None
        if not task.cancelled():
            task.exception()  # those that wait for it have it

    def _page(self, path: str) -> _Answer:
        match path:
            case "/livez":
                if self._alive():
                    return _Answer("200 OK", b"ok\n")
                return _Answer("503 Service Unavailable", b"something hangs\n")
            case "/readyz":
                ready, details = self._ready()
                status = "200 OK" if ready else "503 Service Unavailable"
                return _Answer.of_json(status, {"ready": ready, **details})
            case "/version":
                build = {"version": VERSION, "python": platform.python_version()}
                return _Answer.of_json("200 OK", {**build, "role": self._role})
        pages = b"there are /metrics, /livez, /readyz and /version\n"
        return _Answer("404 Not Found", pages)


async def _metrics_page(registry: MetricsRegistry) -> bytes:
    """Made in pieces, so that it does not hold up the loop."""
    parts: list[bytes] = []
    began_s = time.thread_time()
    for part in registry.page_pieces():
        parts.append(part)
        if time.thread_time() - began_s > PIECE_S:
            await asyncio.sleep(0)
            began_s = time.thread_time()
    return b"".join(parts)
