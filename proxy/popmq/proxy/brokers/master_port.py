"""The way to a broker group's master, which may change: a request survives a change of masters.

A request that the broker refused because it is not the master, or that found no connection, was
not done: it is asked again on the route of that moment, until its time is over.  One whose
connection broke may have been done, and is asked again only if that does no harm
(docs/reference/proxy.md, "A change of masters").
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from popmq.common.clock import Clock
from popmq.common.errors import (
    Code,
    DeadlineExceeded,
    PopmqError,
    TooManyRequests,
    Unavailable,
)
from popmq.common.protocol.frame_kinds import LOOKS
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port, decode_pop, encode_pop
from popmq.common.topics import is_internal_topic
from popmq.common.wire.pull_pb2 import PullRequest

RETRY_MS = (10, 20, 50, 100)  # the last one again and again
WAITING_LIMIT = 10_000  # requests that wait for a master, of one group
WAITING_BYTES_LIMIT = 64 << 20
COPY_MS = 3_000  # after which a name that a copy does not have is unknown

_UNKNOWN_NAME = (Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)
_PULLS = (Kind.PULL, Kind.UPDATE_OFFSET, Kind.GET_OFFSET, Kind.QUERY_OFFSET)
_BY_NAME = (Kind.PUT, Kind.POP, Kind.SYNC_LITE, *_PULLS)

# To be done twice does no harm: a PUT is recognised by its message ids (that of a Remoting client
# has none: at least once is its promise), a lost POP is undone or comes back, an ack or a change is
# answered by what became of the delivery, the others only look, or say what was done already.
REPEATED = frozenset(
    {
        Kind.PUT,
        Kind.POP,
        Kind.ACK,
        Kind.CHANGE,
        Kind.REJECT,
        Kind.CLIENTS,
        Kind.DESCRIBE_TOPIC,
        Kind.RECALL,
        Kind.END_TRANSACTION,
        Kind.REDRIVE,
        Kind.SYNC_LITE,
        *_PULLS,
        *LOOKS,
    }
)


class UsablePort(Port, Protocol):
    """An open way to one address."""

    @property
    def usable(self) -> bool:
        """A request would leave, now or when the first attempt to connect has ended."""
        ...


Later = Callable[[float, Callable[[], None]], object]


def _on_the_loop(seconds: float, then: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, then)


class MasterPort:
    """A `messaging_payloads.Port` of one broker group; `follow` names the way to its master."""

    def __init__(
        self,
        group: str,
        clock: Clock,
        *,
        later: Later = _on_the_loop,
        has_copies: Callable[[], bool] = lambda: False,
        owner_is_away: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_copies`: its topics and groups are another's, and may come a little later, or
        when that one is back."""
        self._group = group
        self._clock = clock
        self._later = later
        self._has_copies = has_copies
        self._owner_is_away = owner_is_away
        self._way: UsablePort | None = None
        self._tries: dict[int, _PendingRequest] = {}
        self._number = 0
        self._refused = False  # the way's last word was NOT_MASTER
        self._waiting = 0
        self._waiting_bytes = 0
        self._closed = ""
        self.retries = 0

    @property
    def has_master(self) -> bool:
        """Somebody is known who would take a request now."""
        return self._way is not None and self._way.usable and not self._refused

    @property
    def waiting(self) -> int:
        """Requests that wait for a master."""
        return self._waiting

    def use(self, way: UsablePort | None) -> None:
        """From now on this one.  What was asked on the other is not waited for: a master that was
        replaced can confirm nothing any more."""
        before, self._way = self._way, way
        self._refused = False
        for number, request in list(self._tries.items()):
            if request.asked_of is before and before is not None:
                before.cancel(request.request_id)
                self._lost(number, request)
            if number in self._tries and request.asked_of is None:
                self._ask(number, request)

    def close(self, reason: str) -> None:
        """Refuse everything, for good."""
        self._closed = reason
        for number, request in list(self._tries.items()):
            if request.asked_of is not None:
                request.asked_of.cancel(request.request_id)
            self._end(number, request, self._refusal(request, reason))

    # -- messaging_payloads.Port

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._number = number = self._number + 1
        now_ms = self._clock.boot_ms()
        request = _PendingRequest(kind, body, now_ms, now_ms + timeout_ms, on_reply)
        self._tries[number] = request
        self._ask(number, request)
        return number

    def cancel(self, request_id: int) -> None:
        request = self._tries.pop(request_id, None)
        if request is None:
            return
        if request.asked_of is not None:
            request.asked_of.cancel(request.request_id)
        else:
            self._no_longer_waits(request)

    # -- tries

    def _ask(self, number: int, request: "_PendingRequest") -> None:
        """Ask now if there is somebody to ask, else when there is."""
        left_ms = request.due_ms - self._clock.boot_ms()
        if self._closed or left_ms <= 0:
            why = self._closed or request.why or "no time was left to ask it"
            self._end(number, request, self._refusal(request, why))
            return
        way = self._way
        if way is None or not way.usable:
            self._wait(
                number, request, f"broker group {self._group} has no master that can be reached"
            )
            return
        self._no_longer_waits(request)
        request.asked_of = way
        body = request.body if request.tries == 0 else _for_the_rest(request, left_ms)
        request.tries += 1
        request_id = way.request(
            request.kind, body, left_ms, partial(self._heard, number, request, way)
        )
        request.request_id = request_id

    def _heard(
        self, number: int, request: "_PendingRequest", way: UsablePort, answer: bytes | PopmqError
    ) -> None:
        if self._tries.get(number) is not request or request.asked_of is not way:
            return
        if not isinstance(answer, PopmqError):
            self._refused = False
            self._end(number, request, answer)
        elif answer.code is Code.NOT_MASTER:
            request.asked_of = None
            self._refused = self._refused or way is self._way
            self._wait(number, request, f"broker group {self._group} has no master now: {answer}")
        elif isinstance(answer, Unavailable) and answer.unknown:
            request.why = str(answer)
            self._lost(number, request)
        elif self._may_come(request, answer):
            request.asked_of = None
            self._wait(number, request, str(answer))
        elif answer.code in _UNKNOWN_NAME and self._owner_is_away():
            self._end(
                number,
                request,
                Unavailable(f"{answer}; or its owner has it, which cannot be reached"),
            )
        elif (
            answer.code is Code.TOPIC_NOT_FOUND and request.kind is Kind.PUT and self._has_copies()
        ):
            # The owner has described it to this proxy: the copy is late, or it was deleted since.
            self._end(
                number, request, Unavailable(f"broker group {self._group} has no copy: {answer}")
            )
        else:
            self._end(number, request, answer)

    def _may_come(self, request: "_PendingRequest", refusal: PopmqError) -> bool:
        """Another try may do it: there was no connection, or the copy of what the request names is
        on its way; the owner knows that name perhaps."""
        code = refusal.code
        if isinstance(refusal, Unavailable) or code is Code.NOT_COPIED:
            return True
        if code not in _UNKNOWN_NAME or request.kind not in _BY_NAME or not self._has_copies():
            return False
        if self._clock.boot_ms() - request.began_ms >= COPY_MS:
            return False
        return request.kind is not Kind.POP or not is_internal_topic(decode_pop(request.body).topic)

    def _lost(self, number: int, request: "_PendingRequest") -> None:
        """It may have been done."""
        request.asked_of = None
        request.unknown = True
        why = request.why or f"the master of broker group {self._group} changed before its answer"
        if request.kind in REPEATED:
            self._wait(number, request, why)
        else:
            self._end(number, request, self._refusal(request, why))

    def _wait(self, number: int, request: "_PendingRequest", why: str) -> None:
        request.why = why
        if not request.waits and not self._may_wait(request):
            self._end(
                number,
                request,
                TooManyRequests(
                    f"{self._waiting} requests ({self._waiting_bytes} bytes) wait for a master of "
                    f"broker group {self._group}, no more are taken: {why}"
                ),
            )
            return
        if not request.waits:
            request.waits = True
            self._waiting += 1
            self._waiting_bytes += len(request.body)
        left_ms = request.due_ms - self._clock.boot_ms()
        pause_ms = RETRY_MS[min(request.pauses, len(RETRY_MS) - 1)]
        request.pauses += 1
        request.turn += 1
        again = partial(self._again, number, request, request.turn)
        self._later(max(0, min(pause_ms, left_ms)) / 1000, again)

    def _may_wait(self, request: "_PendingRequest") -> bool:
        full = self._waiting >= WAITING_LIMIT
        return not full and self._waiting_bytes + len(request.body) <= WAITING_BYTES_LIMIT

    def _again(self, number: int, request: "_PendingRequest", turn: int) -> None:
        if self._tries.get(number) is request and request.asked_of is None and request.turn == turn:
            self.retries += 1
            self._ask(number, request)

    def _no_longer_waits(self, request: "_PendingRequest") -> None:
        if request.waits:
            request.waits = False
            self._waiting -= 1
            self._waiting_bytes -= len(request.body)

    def _end(self, number: int, request: "_PendingRequest", answer: bytes | PopmqError) -> None:
        del self._tries[number]
        self._no_longer_waits(request)
        request.on_reply(answer)

    def _refusal(self, request: "_PendingRequest", why: str) -> PopmqError:
        if request.kind in LOOKS:
            return Unavailable(why)
        if request.unknown:
            return DeadlineExceeded(f"{why}; whether {request.kind.name} was done is unknown")
        return Unavailable(f"{why}; nothing was done")


def _for_the_rest(pending: "_PendingRequest", left_ms: int) -> bytes:
    """A receive that waited here or at another master waits so much less at this one."""
    if pending.kind not in (Kind.POP, Kind.PULL):
        return pending.body
    passed_ms = pending.due_ms - pending.began_ms - left_ms
    if pending.kind is Kind.PULL:
        pull = PullRequest.FromString(pending.body)
        pull.poll_ms = max(0, pull.poll_ms - passed_ms)
        return pull.SerializeToString()
    request = decode_pop(pending.body)
    return encode_pop(request._replace(poll_ms=max(0, request.poll_ms - passed_ms)))


class _PendingRequest:
    """A request that has not ended. `asked_of` is the way it is asked on; None: it waits."""

    __slots__ = (
        "asked_of",
        "began_ms",
        "body",
        "due_ms",
        "kind",
        "on_reply",
        "pauses",
        "request_id",
        "tries",
        "turn",
        "unknown",
        "waits",
        "why",
    )

    def __init__(
        self, kind: Kind, body: bytes, began_ms: int, due_ms: int, on_reply: OnReply
    ) -> None:
        self.kind, self.body, self.on_reply = kind, body, on_reply
        self.began_ms, self.due_ms = began_ms, due_ms
        self.asked_of: UsablePort | None = None
        self.request_id = 0
        self.tries = self.pauses = self.turn = 0
        self.unknown = self.waits = False
        self.why = ""
