"""ClientRelay: requests of one proxy to a client that is connected to another one.

Only the proxies know where a client is, so each of them that has such clients waits here, and a
request is offered to all of them; the first that has an answer of its client ends it.  This is
memory only: what is lost with a master or a proxy ends when its time is over.

Invariant: an open request is offered to a proxy at most once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from popmq.common.errors import TooManyRequests
from popmq.common.quantities import MIB

ABSENT_MS = 5_000  # a proxy that did not ask for so long is gone
OPEN_LIMIT = 1_024
OPEN_BYTES_LIMIT = 64 * MIB
WAITING_LIMIT = 1_024
_ANSWER_BYTES = 8 * MIB  # of requests in one answer, beyond the first


class ClientRequest(NamedTuple):
    """`number` is that of the relay, which its outcome has to name."""

    number: int
    client_id: str
    request: bytes


class Outcome(NamedTuple):
    """`answer` is None where the proxy does not have the client."""

    number: int
    answer: bytes | None


OnOutcome = Callable[[bytes | None], None]
OnRequests = Callable[[list[ClientRequest]], None]


@dataclass(slots=True)
class _Open:
    request: ClientRequest
    asker: int
    deadline_ms: int
    on_outcome: OnOutcome
    undecided: set[str] = field(default_factory=set)
    offered: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Proxy:
    heard_ms: int
    queue: list[int] = field(default_factory=list)


class _Waiter(NamedTuple):
    number: int
    deadline_ms: int
    answer: OnRequests


class ClientRelay:
    def __init__(self) -> None:
        self._proxies: dict[str, _Proxy] = {}
        self._waiting: dict[str, _Waiter] = {}  # by proxy, its newest wait
        self._open: dict[int, _Open] = {}
        self._bytes = 0
        self._numbers = count(1)

    def ask(
        self,
        asker: int,
        client_id: str,
        request: bytes,
        *,
        deadline_ms: int,
        on_outcome: OnOutcome,
    ) -> None:
        """`on_outcome` gets the client's answer; None once every proxy said that it is not there,
        or at the deadline."""
        if len(self._open) >= OPEN_LIMIT or self._bytes + len(request) > OPEN_BYTES_LIMIT:
            raise TooManyRequests(
                f"{len(self._open)} requests of {self._bytes} bytes wait for clients, "
                f"{OPEN_LIMIT} of {OPEN_BYTES_LIMIT} may"
            )
        number = next(self._numbers)
        opened = _Open(ClientRequest(number, client_id, request), asker, deadline_ms, on_outcome)
        self._open[number] = opened
        self._bytes += len(request)
        for name in self._proxies:
            self._offer(opened, name)
        self._answer_waiting()

    def cancel_ask(self, asker: int) -> None:
        for number, opened in list(self._open.items()):
            if opened.asker == asker:
                self._close(number)

    def wait(
        self,
        number: int,
        proxy: str,
        outcomes: Iterable[Outcome],
        *,
        wait_ms: int,
        now_ms: int,
        answer: OnRequests,
    ) -> None:
        """A proxy brings outcomes, and waits for requests; a former wait of it is over."""
        if len(self._waiting) >= WAITING_LIMIT and proxy not in self._waiting:
            raise TooManyRequests(f"{WAITING_LIMIT} proxies wait for requests to clients already")
        for outcome in outcomes:
            self._decide(proxy, outcome)
        known = self._proxies.get(proxy)
        if known is None:
            known = self._proxies[proxy] = _Proxy(now_ms)
            for opened in self._open.values():
                self._offer(opened, proxy)
        known.heard_ms = now_ms
        if not wait_ms:
            answer([])
            return
        if former := self._waiting.pop(proxy, None):
            former.answer([])
        self._waiting[proxy] = _Waiter(number, now_ms + wait_ms, answer)
        self._answer_waiting()

    def cancel_wait(self, number: int) -> None:
        for name, waiter in list(self._waiting.items()):
            if waiter.number == number:
                del self._waiting[name]

    def step(self, now_ms: int) -> None:
        for name, waiter in list(self._waiting.items()):
            if now_ms >= waiter.deadline_ms:
                del self._waiting[name]
                self._proxies[name].heard_ms = now_ms
                waiter.answer([])
        for name, proxy in list(self._proxies.items()):
            if name not in self._waiting and now_ms - proxy.heard_ms > ABSENT_MS:
                del self._proxies[name]
                for number, opened in list(self._open.items()):
                    if name in opened.undecided:
                        self._decide(name, Outcome(number, None))
        for number, opened in list(self._open.items()):
            if now_ms >= opened.deadline_ms:
                self._close(number)
                opened.on_outcome(None)

    def dismiss(self) -> None:
        """The broker stops: everybody is answered with nothing."""
        for waiter in self._waiting.values():
            waiter.answer([])
        self._waiting.clear()
        for number, opened in list(self._open.items()):
            self._close(number)
            opened.on_outcome(None)

    def check_invariants(self) -> None:
        assert self._bytes == sum(len(opened.request.request) for opened in self._open.values())
        assert all(opened.undecided <= opened.offered for opened in self._open.values())
        assert self._waiting.keys() <= self._proxies.keys()

    def _offer(self, opened: _Open, proxy: str) -> None:
        if proxy not in opened.offered:
            opened.offered.add(proxy)
            opened.undecided.add(proxy)
            self._proxies[proxy].queue.append(opened.request.number)

    def _answer_waiting(self) -> None:
        for name, waiter in list(self._waiting.items()):
            if requests := self._taken(self._proxies[name]):
                del self._waiting[name]
                waiter.answer(requests)

    def _taken(self, proxy: _Proxy) -> list[ClientRequest]:
        taken: list[ClientRequest] = []
        size = 0
        while proxy.queue and size < _ANSWER_BYTES:
            opened = self._open.get(proxy.queue.pop(0))
            if opened is not None:
                taken.append(opened.request)
                size += len(opened.request.request)
        return taken

    def _decide(self, proxy: str, outcome: Outcome) -> None:
        opened = self._open.get(outcome.number)
        if opened is None:
            return
        opened.undecided.discard(proxy)
        if outcome.answer is not None or not opened.undecided:
            self._close(outcome.number)
            opened.on_outcome(outcome.answer)

    def _close(self, number: int) -> None:
        self._bytes -= len(self._open.pop(number).request.request)
