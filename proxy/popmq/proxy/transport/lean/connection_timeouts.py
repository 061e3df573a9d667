"""What only time tells of a connection: handshakes, silence, age, deadlines, readers that stop.

`check` is called about once a second with the time; it decides, the connection acts.
"""

from collections.abc import Mapping
from typing import Protocol

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode
from popmq.proxy.transport.lean.inbox import Inbox
from popmq.proxy.transport.lean.outbox import Outbox
from popmq.proxy.transport.lean.stream import Stream

_ALIVE = b"alive?\0\0"
_RETIRING = b"retiring"
RETIRING_MS = 5_000  # for the answer to the PING between the two GOAWAYs

REQUEST_MS = 30_000  # for a request to be complete, and more for its size
REQUEST_BYTES_PER_MS = 64


class TimedConnection(Protocol):
    """What the timeouts read of their connection, and `drain`, its orderly end."""

    limits: LeanSettings
    counters: LeanCounters
    outbox: Outbox
    inbox: Inbox
    settled: bool
    draining: bool
    closing: bool

    @property
    def streams(self) -> Mapping[int, Stream]: ...
    @property
    def is_whole(self) -> bool: ...
    def drain(self, why: str) -> None: ...


class ConnectionTimeouts:
    """Of one connection; `max_age_ms` 0 is none."""

    __slots__ = (
        "_connection",
        "_max_age_ms",
        "_moved",
        "_moved_ms",
        "_pinged_ms",
        "_retired_ms",
        "_since_ms",
        "_whole_ms",
        "_why",
        "heard_ms",
        "quiet_ms",
    )

    def __init__(self, connection: TimedConnection, now_ms: int, max_age_ms: int) -> None:
        self._connection = connection
        self._max_age_ms = max_age_ms
        self._since_ms = self._whole_ms = self._moved_ms = now_ms
        self.heard_ms = now_ms  # the last time that anything came
        self.quiet_ms = now_ms  # the last time that a call was over
        self._moved = 0
        self._pinged_ms: int | None = None
        self._retired_ms: int | None = None
        self._why = "the connection is old (lean.max_age_ms)"

    def check(self, now_ms: int) -> None:
        """Raises ConnectionFault for a connection that has passed a bound of time."""
        self._check_handshake(now_ms)
        self._check_reader(now_ms)
        self._check_silence(now_ms)
        self._check_deadlines(now_ms)
        self._check_requests(now_ms)
        self._check_idle(now_ms)
        self._check_age(now_ms)

    def answered(self, content: bytes) -> None:
        """The client acknowledged a PING."""
        if content == _RETIRING and self._retired_ms is not None:
            self._connection.drain(self._why)

    def retire(self, now_ms: int, why: str) -> None:
        """End the connection in two steps, so that no call is lost that was on its way (RFC 9113,
        section 6.8): a GOAWAY that names no stream, and when the client has read it, as its answer
        to a PING says, one that names the last.  Who does not answer: `drain`."""
        connection = self._connection
        if not connection.settled:
            connection.drain(why)
        elif self._retired_ms is None and not (connection.draining or connection.closing):
            self._retired_ms, self._why = now_ms, why
            say = frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR, why)
            connection.outbox.control(say + frames.ping(_RETIRING))

    def _check_handshake(self, now_ms: int) -> None:
        connection = self._connection
        if connection.is_whole:
            self._whole_ms = now_ms
        elif now_ms - self._whole_ms > connection.limits.handshake_ms and not connection.closing:
            raise _passed("no SETTINGS came, or no end of a header block", "handshake")

    def _check_reader(self, now_ms: int) -> None:
        outbox, limit_ms = self._connection.outbox, self._connection.limits.stall_ms
        if outbox.unsent_bytes == 0 or outbox.sent_frames != self._moved:
            self._moved, self._moved_ms = outbox.sent_frames, now_ms
        elif now_ms - self._moved_ms > limit_ms:
            raise _passed(f"a client has not read for {limit_ms} ms (lean.stall_ms)", "stalled")

    def _check_silence(self, now_ms: int) -> None:
        """Ask who says nothing whether it is there, unless its answers wait: that is a stall."""
        connection, limits = self._connection, self._connection.limits
        if now_ms - self.heard_ms < limits.ping_ms or not limits.ping_ms or not connection.settled:
            self._pinged_ms = None
        elif self._pinged_ms is None:
            if connection.outbox.writable:
                self._pinged_ms = now_ms
                connection.outbox.control(frames.ping(_ALIVE))
        elif now_ms - self._pinged_ms > limits.ping_answer_ms:
            why = f"no answer to a PING within {limits.ping_answer_ms} ms (lean.ping_answer_ms)"
            raise _passed(why, "silent")

    def _check_deadlines(self, now_ms: int) -> None:
        connection = self._connection
        over = [
            stream
            for stream in connection.streams.values()
            if stream.deadline_ms is not None
            and stream.deadline_ms < now_ms
            and not stream.finished
        ]
        for stream in over:
            connection.inbox.refuse(
                stream, GrpcStatus.DEADLINE_EXCEEDED, "the client's deadline has passed"
            )

    def _check_requests(self, now_ms: int) -> None:
        """A request has to be complete in its time, whatever deadline the client names: what came
        of it is held until then."""
        connection = self._connection
        late = [
            stream
            for stream in connection.streams.values()
            if not (stream.remote_closed or stream.finished or stream.method.open is not None)
            and now_ms - stream.opened_ms
            > REQUEST_MS + stream.content_bytes // REQUEST_BYTES_PER_MS
        ]
        for stream in late:
            connection.counters.cut_off["slow_request"] += 1
            connection.inbox.refuse(
                stream,
                GrpcStatus.DEADLINE_EXCEEDED,
                f"the request was not complete within {REQUEST_MS} ms and its size at 64 KiB/s",
            )

    def _check_idle(self, now_ms: int) -> None:
        connection = self._connection
        if connection.streams or not connection.settled or connection.draining:
            return
        if now_ms - self.quiet_ms > connection.limits.idle_ms:
            connection.counters.idle_closed += 1
            connection.drain("no call for a long time (lean.idle_ms)")

    def _check_age(self, now_ms: int) -> None:
        connection = self._connection
        if not self._max_age_ms or not connection.settled or connection.closing:
            return
        if self._retired_ms is None:
            if now_ms - self._since_ms > self._max_age_ms and not connection.draining:
                connection.counters.aged += 1
                self.retire(now_ms, self._why)
        elif now_ms - self._retired_ms > connection.limits.max_age_grace_ms:
            self._end_calls()
        elif now_ms - self._retired_ms > RETIRING_MS:
            connection.drain(self._why)

    def _end_calls(self) -> None:
        """What is left are calls without an end; their clients open them elsewhere."""
        connection = self._connection
        connection.drain(self._why)
        detail = "the connection is old and its grace is over (lean.max_age_grace_ms)"
        for stream in tuple(connection.streams.values()):
            connection.inbox.refuse(stream, GrpcStatus.UNAVAILABLE, detail)


def _passed(why: str, bound: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, bound)
