"""Asks one peer over frames: the `Port` of a process that is elsewhere.

Every request ends once: with the reply, with the peer's refusal, or with a refusal made here
(deadline, connection lost, a bound), unless the asker cancels it (ARCHITECTURE D5).
"""

import asyncio
import heapq
import logging
from collections.abc import Callable

from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import (
    Code,
    DeadlineExceeded,
    PopmqError,
    Refused,
    TooManyRequests,
    Unavailable,
)
from popmq.common.loop_iteration import LoopIteration
from popmq.common.protocol.frame_kinds import LOOKS
from popmq.common.protocol.frames import (
    CANCEL,
    DEFAULT_SETTINGS,
    ERROR,
    REPLY,
    REQUEST_OVERHEAD,
    Address,
    FrameConnection,
    FrameSettings,
    Hello,
    read_error,
)
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.unhandled import report_if_failed, report_unhandled

logger = logging.getLogger(__name__)

_POP = Kind.POP  # an attribute of an enum class is a slow look-up
SWEEP_MS = 20  # how late a deadline may be noticed
QUIET_SWEEP_MS = 200  # from sweep to sweep, at most, while nobody asks and nothing is due
FIRST_BACK_OFF_MS = 50
MAX_BACK_OFF_MS = 1_000
MAX_TIMEOUT_MS = 0xFFFF_FFFF  # what four bytes hold: 49 days


class FramePort:
    """Keeps one connection to `address` and opens it again when it is lost.

    While there is none a request is refused at once; only those made during the very first
    attempt wait for its end.  `on_state` hears True after the peer's HELLO and False when that
    connection is lost.  An exception in a request's `on_reply` is logged and harms only that
    request; with `critical_replies` it counts as one that nothing handled.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        clock: Clock | None = None,
        settings: FrameSettings = DEFAULT_SETTINGS,
        on_state: Callable[[bool], None] | None = None,
        peer_name: str = "peer",
        turn: LoopIteration | None = None,
        critical_replies: bool = False,
    ) -> None:
        self.hello = hello
        self.settings = settings
        self._critical_replies = critical_replies
        self.peer: Hello | None = None  # the last one that was connected
        self._address = Address.parse(address)
        self._clock = clock or SystemClock()
        self._on_state = on_state
        self._peer_name = peer_name
        self.turn = turn
        self._reason = "not started"
        self._max_body = settings.max_frame_bytes - REQUEST_OVERHEAD

        self._task: asyncio.Task[None] | None = None
        self._opening: _PortConnection | None = None
        self._connection: _PortConnection | None = None  # only after both HELLOs
        self._waiting: dict[int, tuple[Kind, bytes, int]] | None = None  # first attempt only
        self._waiting_bytes = 0

        self._last_id = 0
        self._pending: dict[int, OnReply] = {}
        self._pops: set[int] = set()  # those of them that may wait for a message
        self._deadlines: list[tuple[int, int, Kind, int]] = []  # due, id, kind, timeout
        self._sweeper: asyncio.TimerHandle | None = None
        self._quiet = False  # the sweeper comes later than a new request's deadline may
        self._swept_id = 0

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def usable(self) -> bool:
        """A request would leave, now or when the first attempt to connect has ended."""
        return self._connection is not None or self._waiting is not None

    def start(self) -> None:
        assert self._task is None, "a port is started once"
        self._waiting = {}
        self._task = asyncio.get_running_loop().create_task(self._keep_connected())
        self._task.add_done_callback(report_if_failed)

    async def close(self) -> None:
        """Refuse what is pending and let the connection go, for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._opening is not None:
            self._opening.close("the port was closed")
            if self._opening.opened:
                await asyncio.wait([self._opening.lost])
        self.on_disconnected("the port was closed")

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        request_id = self._last_id = self._last_id + 1
        refusal = self._refusal(kind, body, timeout_ms)
        if refusal is not None:
            on_reply(refusal)
            return request_id
        timeout_ms = min(timeout_ms, MAX_TIMEOUT_MS)
        due_ms = self._clock.boot_ms() + timeout_ms
        self._pending[request_id] = on_reply
        if kind is _POP:
            self._pops.add(request_id)
        heapq.heappush(self._deadlines, (due_ms, request_id, kind, timeout_ms))
        if self._sweeper is None or self._quiet:
            self._start_sweeper(SWEEP_MS)
        if self._connection is not None:
            self._connection.send_request(kind, request_id, timeout_ms, body)
        elif self._waiting is not None:
            self._waiting[request_id] = (kind, body, due_ms)
            self._waiting_bytes += len(body)
        return request_id

    def cancel(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is not None:
            self._pops.discard(request_id)
            self._tell_cancelled(request_id)

    def _refusal(self, kind: Kind, body: bytes, timeout_ms: int) -> PopmqError | None:
        connection, settings = self._connection, self.settings
        if connection is not None:
            full = connection.paused
        elif self._waiting is not None:
            full = self._waiting_bytes > settings.max_buffered_bytes
        else:
            return Unavailable(f"{self._who()} is not connected: {self._reason}")
        if full:
            return TooManyRequests(
                f"{settings.max_buffered_bytes} bytes wait for {self._who()} to read them "
                "(frames.max_buffered_bytes)"
            )
        pops = len(self._pops)
        if kind is _POP and pops >= settings.max_waiting:
            return TooManyRequests(
                f"{pops} receives wait for messages of {self._who()}, and more may not (fixed)"
            )
        if kind is not _POP and len(self._pending) - pops >= settings.max_pending:
            return TooManyRequests(
                f"{settings.max_pending} requests wait for an answer of {self._who()}, "
                "and more may not (fixed)"
            )
        if len(body) > self._max_body:
            return Refused(
                Code.PAYLOAD_TOO_LARGE,
                f"the request of {len(body)} bytes is over the limit of {self._max_body} bytes "
                "(frames.max_frame_bytes)",
            )
        if timeout_ms <= 0:
            return DeadlineExceeded(f"no time was left to ask {self._who()}; nothing was done")
        return None

    def _who(self) -> str:
        name = f"{self.peer.role} {self.peer.name}" if self.peer else self._peer_name
        return f"{name} at {self._address}"

    def answer(self, request_id: int, answer: bytes | PopmqError) -> None:
        """End a request. An answer that comes after its deadline or cancel is passed over."""
        on_reply = self._pending.pop(request_id, None)
        if on_reply is None:
            return
        self._pops.discard(request_id)
        try:
            on_reply(answer)
        except Exception as error:
            if self._critical_replies:
                report_unhandled(f"the asker failed on the answer of {self._who()}", error)
            else:
                logger.exception("the asker failed on its answer", extra={"peer": self._who()})

    def _tell_cancelled(self, request_id: int) -> None:
        if self._connection is not None:
            self._connection.send(CANCEL, request_id, b"")
        elif self._waiting is not None and request_id in self._waiting:
            _, body, _ = self._waiting.pop(request_id)
            self._waiting_bytes -= len(body)

    def _start_sweeper(self, wait_ms: int) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._quiet = wait_ms > SWEEP_MS
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(wait_ms / 1000, self._sweep)

    def _sweep(self) -> None:
        """End what is due; runs only while something is pending."""
        deadlines, now_ms = self._deadlines, self._clock.boot_ms()
        self._quiet = False  # who asks from in here need not start another
        while deadlines and deadlines[0][0] <= now_ms:
            _, request_id, kind, timeout_ms = heapq.heappop(deadlines)
            if request_id in self._pending:
                self._tell_cancelled(request_id)
                self.answer(
                    request_id,
                    DeadlineExceeded(
                        f"{self._who()} did not answer {kind.name} within {timeout_ms} ms"
                        + ("" if kind in LOOKS else "; whether it was done is unknown")
                    ),
                )
        # Answered requests stay in the heap until they are due. Rebuilding it once they are
        # the majority costs each of them a constant and bounds what they hold.
        if len(deadlines) > 1_024 + 2 * len(self._pending):
            deadlines[:] = [deadline for deadline in deadlines if deadline[1] in self._pending]
            heapq.heapify(deadlines)
        self._sweeper = None
        if not self._pending:
            deadlines.clear()
        elif self._last_id != self._swept_id:
            self._start_sweeper(SWEEP_MS)
        else:
            nearest_ms = deadlines[0][0] - now_ms
            self._start_sweeper(max(SWEEP_MS, min(QUIET_SWEEP_MS, nearest_ms)))
        self._swept_id = self._last_id

    async def _keep_connected(self) -> None:
        back_off_ms = FIRST_BACK_OFF_MS
        plain = False
        while True:
            connection = self._opening = _PortConnection(self, plain=plain)
            try:
                async with asyncio.timeout(self.settings.connect_timeout_ms / 1000):
                    await self._open(connection)
            except TimeoutError:
                limit_ms = self.settings.connect_timeout_ms
                connection.abort(f"no HELLO within {limit_ms} ms, the fixed limit")
            except (OSError, UnicodeError) as error:  # the latter: no possible host name
                connection.abort(str(error))
            if connection.peer is not None:
                back_off_ms = FIRST_BACK_OFF_MS
            if connection.opened:
                await asyncio.wait([connection.lost])
            plain = connection.falls_back
            if plain:
                continue
            await asyncio.sleep(back_off_ms / 1000)
            back_off_ms = min(2 * back_off_ms, MAX_BACK_OFF_MS)

    async def _open(self, connection: "_PortConnection") -> None:
        """Returns once the peer accepted us or the connection is over."""
        loop, where = asyncio.get_running_loop(), self._address
        if where.path:
            await loop.create_unix_connection(lambda: connection, where.path)
        else:
            await loop.create_connection(lambda: connection, where.host, where.port)
        await connection.decided.wait()

    def on_connected(self, connection: "_PortConnection") -> None:
        self._connection = connection
        self.peer = connection.peer
        waiting, self._waiting = self._waiting or {}, None
        now_ms = self._clock.boot_ms()
        for request_id, (kind, body, due_ms) in waiting.items():
            if due_ms > now_ms:  # the others are ended by the next sweep
                connection.send_request(kind, request_id, due_ms - now_ms, body)
        logger.info("connected", extra={"peer": self._who()})
        if self._on_state is not None:
            self._on_state(True)

    def on_disconnected(self, reason: str) -> None:
        was_connected = self._connection is not None
        self._connection = self._waiting = None
        self._reason = reason
        if was_connected:
            logger.info("connection lost", extra={"peer": self._who(), "why": reason})
            text = (
                f"{self._who()}: connection lost before the answer; "
                f"whether it was done is unknown ({reason})"
            )
        else:
            text = f"{self._who()} is not connected: {reason}"
        for request_id in list(self._pending):
            self.answer(request_id, Unavailable(text, unknown=was_connected))
        self._deadlines.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if was_connected and self._on_state is not None:
            self._on_state(False)


class _PortConnection(FrameConnection):
    def __init__(self, port: FramePort, *, plain: bool) -> None:
        super().__init__(port.hello, port.settings, port.turn, plain=plain)
        self._port = port
        self.opened = False  # a transport exists, so `lost` will come
        self.decided = asyncio.Event()  # accepted, refused or lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened = True
        super().connection_made(transport)
        self.send_hello()

    @property
    def falls_back(self) -> bool:
        """The peer has no TLS yet, and need not: the next attempt, at once, is in plain text."""
        return self.no_tls and self._tls is not None and not self._tls.required

    def on_hello(self, peer: Hello) -> None:
        self.decided.set()
        self._port.on_connected(self)

    def on_connection_lost(self, reason: str) -> None:
        self.decided.set()
        if not self.falls_back:
            self._port.on_disconnected(reason)

    def frame(self, kind: int, request_id: int, timeout_ms: int, body: bytes) -> None:
        if kind == REPLY:
            self._port.answer(request_id, body)
        elif kind == ERROR and request_id != 0:
            self._port.answer(request_id, read_error(body))
        else:
            self.other_frame(kind, request_id, body)


async def call(port: Port, kind: Kind, body: bytes, timeout_ms: int) -> bytes:
    """Await one answer; cancelling the awaiting task cancels the request."""
    future: asyncio.Future[bytes | PopmqError] = asyncio.get_running_loop().create_future()

    def on_reply(answer: bytes | PopmqError) -> None:
        if not future.done():
            future.set_result(answer)

    request_id = port.request(kind, body, timeout_ms, on_reply)
    try:
        answer = await future
    except asyncio.CancelledError:
        port.cancel(request_id)
        raise
    if isinstance(answer, PopmqError):
        raise answer
    return answer
