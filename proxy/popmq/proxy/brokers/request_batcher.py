"""Requests of many calls that go to one broker as one: sends and acks of one turn of the loop.

A frame costs as much as several messages, on both ends, and acks of one delivery that arrive
together become one record.  Only requests that a broker would refuse for the same reasons go
together: the same kind, to the same names; each part has a result of its own.  The order in which
parts were added is the order in which the broker sees them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.loop_iteration import CallSoon
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.protocol.payload import U16

logger = logging.getLogger(__name__)

MAX_JOINT_BYTES = 16 << 20
# Of the time that the first has: others go with it if theirs is not further away.
TIMEOUT_SLACK = 1 / 8

R = TypeVar("R")
# The results of one member; `at_once` tells of a refusal that nothing was sent.
OnResults = Callable[[Sequence[R] | PopmqError, bool], None]


class Member(Protocol):
    """Whose parts they are: a call (rpc/rpc.py), or calls of a lane (lanes/call_lane.py)."""

    def run(self, step: Callable[..., None], *arguments: object) -> None: ...
    def on_cancelled(self, callback: Callable[[], None]) -> None: ...


class RequestBatcher(Generic[R]):
    """`decode` reads the results out of a reply; `soon` says when a turn is over."""

    def __init__(
        self, kind: Kind, decode: Callable[[bytes], Sequence[R]], max_parts: int, soon: CallSoon
    ) -> None:
        self._kind = kind
        self._decode = decode
        self.max_parts = max_parts
        self._soon = soon
        self._expects = False  # `_ask_all` will run
        # Brings what else was gathered in the turn, before brokers are asked.
        self.on_turn_end: Callable[[], None] = lambda: None
        self._joints: list[_Joint[R]] = []  # of this turn
        self._open: dict[tuple[int, bytes, bytes], _Joint[R]] = {}  # that may take more

    def add(
        self,
        member: Member,
        port: Port,
        head: bytes,
        timeout_ms: int,
        parts: Sequence[bytes],
        then: OnResults[R],
        tail: bytes = b"",
    ) -> None:
        """`then` gets a result for each of `parts`, or one refusal; it runs within `member`.

        `head` and `tail` are what all have in common: how the payload begins and ends.  The frame
        is given up when the clients of all its members are gone.
        """
        key = id(port), head, tail
        size = sum(map(len, parts))
        joint = self._open.get(key)
        if joint is None or not joint.takes(len(parts), size, timeout_ms, self.max_parts):
            joint = self._open[key] = _Joint(port, head, tail, timeout_ms)
            self._joints.append(joint)
        joint.add(member, parts, size, timeout_ms, then)
        self.expect()

    def expect(self) -> None:
        """Parts come before the end of this turn."""
        if not self._expects:
            self._expects = True
            self._soon(self._ask_all)

    def _ask_all(self) -> None:
        try:
            self.on_turn_end()
        finally:
            self._expects = False
        joints, self._joints = self._joints, []
        self._open.clear()
        for joint in joints:
            self._ask(joint)

    def _ask(self, joint: "_Joint[R]") -> None:
        if joint.left == 0:
            return  # all clients went away meanwhile
        body = b"".join((joint.head, U16.pack(len(joint.parts)), *joint.parts, joint.tail))
        sending = True

        def answered(answer: bytes | PopmqError) -> None:
            joint.request_id = _OVER
            joint.settle(self._results(joint, answer), at_once=sending)

        request_id = _NOT_ASKED
        try:
            request_id = joint.port.request(self._kind, body, joint.timeout_ms, answered)
        except Exception:  # of a broker in this process; the other frames of the turn go out
            logger.exception("a joint request failed", extra={"kind": self._kind.name})
            sending = False
            if joint.request_id != _OVER:
                answered(Refused(Code.INTERNAL_ERROR, "internal error"))
        sending = False
        if joint.request_id != _OVER:
            joint.request_id = request_id

    def _results(self, joint: "_Joint[R]", answer: bytes | PopmqError) -> Sequence[R] | PopmqError:
        if isinstance(answer, PopmqError):
            return answer
        try:
            results = self._decode(answer)
        except PopmqError as error:
            return error
        # Results cannot be matched to members, so all fail.
        return results if len(results) == len(joint.parts) else ()


_NOT_ASKED, _OVER = -1, -2


class _Joint(Generic[R]):
    __slots__ = (
        "first_timeout_ms",
        "head",
        "left",
        "members",
        "parts",
        "port",
        "request_id",
        "size",
        "tail",
        "timeout_ms",
    )

    def __init__(self, port: Port, head: bytes, tail: bytes, timeout_ms: int) -> None:
        self.port = port
        self.head, self.tail = head, tail
        self.first_timeout_ms = self.timeout_ms = timeout_ms
        self.parts: list[bytes] = []
        self.members: list[tuple[Member, int, OnResults[R]]] = []
        self.size = 0
        self.left = 0  # members whose client is there
        self.request_id = _NOT_ASKED

    def takes(self, parts: int, size: int, timeout_ms: int, max_parts: int) -> bool:
        slack_ms = self.first_timeout_ms * TIMEOUT_SLACK
        return (
            len(self.parts) + parts <= max_parts
            and self.size + size <= MAX_JOINT_BYTES
            and abs(timeout_ms - self.first_timeout_ms) <= slack_ms
        )

    def add(
        self, member: Member, parts: Sequence[bytes], size: int, timeout_ms: int, then: OnResults[R]
    ) -> None:
        self.parts.extend(parts)
        self.members.append((member, len(parts), then))
        self.size += size
        self.left += 1
        if timeout_ms < self.timeout_ms:
            self.timeout_ms = timeout_ms
        member.on_cancelled(self.one_gone)

    def one_gone(self) -> None:
        self.left -= 1
        if self.left == 0 and self.request_id >= 0:
            self.port.cancel(self.request_id)
            self.request_id = _OVER

    def settle(self, results: Sequence[R] | PopmqError, *, at_once: bool) -> None:
        members, self.members = self.members, []
        start = 0
        for member, count, then in members:
            if isinstance(results, PopmqError):
                member.run(then, results, at_once)
            else:
                member.run(then, results[start : start + count], at_once)
            start += count
