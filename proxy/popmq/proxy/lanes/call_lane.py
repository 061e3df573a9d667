"""CallLane: ordinary calls of one method that came together, from bytes to a broker and back.

The calls that one turn of the loop brought are one member of a broker's request, with one
callback; what is not ordinary, in a request or in its result, is for the method's general path.
An ordinary call that came alone (in pieces, signed by a user, or over grpcio) goes the same way.
A lane for a method says what is ordinary (`read`) and what the answers are (`answers`).
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.topics import TopicConfig
from popmq.proxy.brokers.request_batcher import TIMEOUT_SLACK, RequestBatcher
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.namespaces import HEADER as NAMESPACE
from popmq.proxy.rpc.rpc import BROKER_TIMEOUT_MS, REPLY_RESERVE_MS, Refusal, Rpc
from popmq.proxy.transport.interface import Call, Caller, GrpcStatus, LaneCalls, LaneRun

logger = logging.getLogger(__name__)

K = TypeVar("K")
R = TypeVar("R")


class LaneAccess(Protocol):
    """What a lane asks of auth/gate.py."""

    active: bool  # False: everybody may call everything


@dataclass(slots=True, eq=False)
class Way:
    """Where calls go, and what their request begins and ends with; calls of one way go together."""

    port: Port
    head: bytes
    tail: bytes
    topic: TopicConfig | None = None
    broker: str = ""


class LaneGroup(Generic[K, R]):
    """Calls of one turn of the loop that go one way, from any connections."""

    __slots__ = (
        "_calls",
        "_lane",
        "_left",
        "_on_cancelled",
        "_run",
        "_starts",
        "began_s",
        "entries",
        "kept",
        "least_ms",
        "timeout_ms",
        "way",
    )

    def __init__(self, lane: "CallLane[K, R]", way: Way, timeout_ms: int, began_s: float) -> None:
        self._lane = lane
        self.began_s = began_s
        self.way = way
        self.timeout_ms = self.least_ms = timeout_ms  # of the first, and the shortest
        self.entries: list[bytes] = []
        self.kept: list[K] = []  # what the answer to each is made of
        # Calls of each run of a connection, and the number of the first of them.
        self._calls: list[LaneCalls] = []
        self._starts: list[int] = []
        self._run: LaneRun | None = None  # the last one
        self._left = 0  # of `_calls`, those of which some are not cancelled
        self._on_cancelled: Callable[[], None] | None = None

    def calls_of(self, run: LaneRun) -> LaneCalls:
        """Where the next call of the run belongs."""
        if run is not self._run:
            self._run = run
            self._calls.append(run.new_calls())
            self._starts.append(len(self.entries))
        return self._calls[-1]

    def call(self, index: int) -> tuple[Call | None, bytes]:
        """A call, and its request; None once it has its answer."""
        number = bisect_right(self._starts, index) - 1
        calls, index = self._calls[number], index - self._starts[number]
        return calls.call(index), calls.request(index)

    def answer(self, answers: Sequence[bytes]) -> None:
        """Empty ones are not sent.  A connection that fails ends its own calls only."""
        ends = [*self._starts[1:], len(answers)]
        for calls, start, end in zip(self._calls, self._starts, ends, strict=True):
            try:
                calls.answer(answers[start:end])
            except Exception:
                self._fail(start, end)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self._on_cancelled = callback
        self._left = len(self._calls)
        for calls in self._calls:
            calls.on_cancelled(self._cancelled)

    def _cancelled(self) -> None:
        self._left -= 1
        if self._left == 0:
            assert self._on_cancelled is not None, "it waits for this"
            self._on_cancelled()

    def run(self, step: Callable[..., None], *arguments: object) -> None:
        """Call `step`; what it raises ends the calls that have no answer."""
        try:
            step(*arguments)
        except Exception:
            self._fail(0, len(self.kept))

    def _fail(self, start: int, end: int) -> None:
        logger.exception("a handler failed")
        for index in range(start, end):
            call, _ = self.call(index)
            if call is not None:
                call.finish(GrpcStatus.INTERNAL, "internal error")

    def settle(self, results: Sequence[R] | PopmqError, at_once: bool) -> None:
        self._lane.settle(self, results, at_once)


class SingleCall:
    """A call that is given by itself; implements LaneRun and LaneCalls."""

    __slots__ = ("_call", "client_id", "data", "peer")

    def __init__(self, rpc: Rpc) -> None:
        self._call = rpc.call
        self.data = rpc.data
        self.peer = rpc.call.peer
        self.client_id = rpc.client_id

    def new_calls(self) -> "SingleCall":
        return self

    def request(self, index: int) -> bytes:
        return self.data

    def call(self, index: int) -> Call:
        return self._call

    def answer(self, answers: Sequence[bytes]) -> None:
        (message,) = answers
        if message:
            self._call.send(message)
            self._call.finish()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self._call.on_cancelled(callback)


class CallLane(Generic[K, R]):
    """Implements `transport.interface.Lane`."""

    def __init__(
        self,
        name: str,
        batcher: RequestBatcher[R],
        metrics: ProxyMetrics,
        access: LaneAccess,
        on_client: Callable[[str, Caller], None],
        refusal: Refusal,
        general: Callable[[Rpc], None],
        enabled: bool,
    ) -> None:
        """`general` is the path of what the lane does not take: all, if it is not `enabled`."""
        self._paths = {path: (name, path) for path in ("lane", "single", "general")}
        self._general = general
        self._enabled = enabled
        self._batcher = batcher
        self._metrics = metrics
        self._access = access
        self.on_client = on_client
        self._refusal = refusal
        self._took = metrics.taken(name)
        batcher.on_turn_end = self._end_turn
        # Of the turn in progress.
        self._groups: dict[Way, LaneGroup[K, R]] = {}
        self._taken: list[LaneGroup[K, R]] = []

    @property
    def is_open(self) -> bool:
        """With users every call is checked by itself.  A transport asks where lanes are enabled."""
        return not self._access.active

    def start(self, rpc: Rpc) -> None:
        """Serve a call by itself."""
        if self._enabled:
            self._send_on("lane")  # what came before goes before
            call = SingleCall(rpc)
            taken = self.take(call, 0, len(rpc.data), rpc.call.remaining_ms())
            self._send_on("single")
            if taken is not None:
                return
        self._metrics.calls_by_path[self._paths["general"]] += 1
        self._general(rpc)

    def client_of(self, metadata: Mapping[str, str]) -> str:
        client_id = metadata.get("x-mq-client-id", "").strip()
        return client_id if client_id.isprintable() and not metadata.get(NAMESPACE) else ""

    def take(self, run: LaneRun, start: int, stop: int, timeout_ms: int | None) -> LaneCalls | None:
        left_ms = BROKER_TIMEOUT_MS
        if timeout_ms is not None and timeout_ms < BROKER_TIMEOUT_MS + REPLY_RESERVE_MS:
            left_ms = timeout_ms - REPLY_RESERVE_MS
            if left_ms <= 0:
                return None
        try:
            ordinary = self.read(run, start, stop)
        except (IndexError, ValueError, PopmqError):  # with UnicodeDecodeError: no text
            return None
        if ordinary is None:
            return None
        way, entry, kept = ordinary
        group = self._groups.get(way)
        if group is None or not self._takes(group, left_ms):
            group = self._groups[way] = LaneGroup(self, way, left_ms, self._metrics.now_s())
            self._taken.append(group)
        elif left_ms < group.least_ms:
            group.least_ms = left_ms
        calls = group.calls_of(run)
        group.entries.append(entry)
        group.kept.append(kept)
        return calls

    def end_run(self) -> None:
        if self._taken:
            self._batcher.expect()

    def _end_turn(self) -> None:
        self._send_on("lane")

    def _send_on(self, path: str) -> None:
        taken, self._taken = self._taken, []
        self._groups.clear()
        for group in taken:
            way, entries = group.way, group.entries
            self._metrics.calls_by_path[self._paths[path]] += len(entries)
            then, least_ms = group.settle, group.least_ms
            self._batcher.add(group, way.port, way.head, least_ms, entries, then, way.tail)

    def settle(
        self, group: LaneGroup[K, R], results: Sequence[R] | PopmqError, at_once: bool
    ) -> None:
        took_s = self._metrics.now_s() - group.began_s
        self._took.observe_each(int(took_s * 1_000), len(group.kept))
        if isinstance(results, PopmqError):
            for index in range(len(group.kept)):
                self._settle_one(group, index, results, at_once)
            return
        if len(results) != len(group.kept):
            raise Refused(Code.INTERNAL_ERROR, f"{len(results)} results, not {len(group.kept)}")
        answers = self.answers(group.kept, results)
        group.answer(answers)
        for index, answer in enumerate(answers):
            if not answer:
                self._settle_one(group, index, results[index], at_once)

    def _settle_one(
        self, group: LaneGroup[K, R], index: int, result: R | PopmqError, at_once: bool
    ) -> None:
        call, request = group.call(index)
        assert call is not None, "answered before its result came"
        rpc = Rpc(call, request, self._metrics, self._refusal)
        rpc.run(self.settle_unusual, rpc, group.way, result, at_once)

    def _takes(self, group: LaneGroup[K, R], timeout_ms: int) -> bool:
        slack_ms = group.timeout_ms * TIMEOUT_SLACK
        return (
            len(group.entries) < self._batcher.max_parts
            and abs(timeout_ms - group.timeout_ms) <= slack_ms
        )

    # -- what is a method's own

    def read(self, run: LaneRun, start: int, stop: int) -> tuple[Way, bytes, K] | None:
        """Way, entry, and what its answer is made of, of the request run.data[start:stop]; None,
        or one of the errors that `take` knows, if it is not ordinary."""
        raise NotImplementedError

    def answers(self, kept: Sequence[K], results: Sequence[R]) -> list[bytes]:
        """The answer of each call; empty for those that `settle_unusual` answers."""
        raise NotImplementedError

    def settle_unusual(self, rpc: Rpc, way: Way, result: R | PopmqError, at_once: bool) -> None:
        """Go on with a call on the general path."""
        raise NotImplementedError
