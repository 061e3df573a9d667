"""A change at every broker group, of what each has for itself: parked messages, dead letters.

The brokers are asked in turn.  One that does not have what is to be changed is passed over; any
other refusal ends the change and says where.  The reply is the sum of those of the brokers that
changed, which is the last one unless the command counts something; when none did, the first
refusal.  Done again, it is completed.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.proxy.brokers.broker_ports import BrokerPorts, all_groups
from popmq.proxy.rpc.rpc import Answer, Rpc

TIMEOUT_MS = 10_000
# For the next master of a broker group that has none: a person waits.
AWAY_MS = 1_000
AWAY_OWNER_MS = 2_500  # the same for the one that topics are changed at; an election takes less

_NOT_FOUND = (Code.NOT_FOUND, Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND)

# Makes one reply of what was said so far and what the next broker says.
Sum: TypeAlias = Callable[[bytes, bytes], bytes]


def last(_said: bytes, reply: bytes) -> bytes:
    return reply


def left_ms(brokers: BrokerPorts, rpc: Rpc, name: str, away_ms: int = AWAY_MS) -> int:
    """How long that broker group may take: what is known by then has to reach the client in time.

    Raises DeadlineExceeded when there is no time left.
    """
    given_ms = TIMEOUT_MS if rpc.call.remaining_ms() is None else rpc.timeout_ms()
    return given_ms if brokers.has_master(name) else min(given_ms, away_ms)


def named(broker: str, answer: PopmqError) -> str:
    """What that broker group answered, with its name."""
    text = str(answer)
    known = text.startswith((f"broker {broker} ", f"broker group {broker} "))
    return text if known else f"broker {broker}: {text}"


class BroadcastChange:
    """One command on its way from broker to broker; `then` gets its end."""

    def __init__(
        self,
        brokers: BrokerPorts,
        rpc: Rpc,
        kind: Kind,
        then: Callable[[Answer], None],
        *,
        sums: Sum = last,
    ) -> None:
        self._brokers = brokers
        self._rpc = rpc
        self._kind = kind
        self._then = then
        self._sum = sums
        self._names: Sequence[str] = ()
        self._at = 0
        self._done: list[str] = []
        self._reply = b""
        self._passed_over: PopmqError | None = None

    def start(self) -> None:
        self._names = tuple(all_groups(self._brokers))
        if not self._names:
            raise Unavailable("no broker is known yet")
        self._next()

    @property
    def _name(self) -> str:
        return self._names[self._at]

    def _next(self) -> None:
        if self._at < len(self._names):
            self._ask()
        elif self._done:
            self._then(self._reply)
        else:
            assert self._passed_over is not None, "a broker changed, was passed over, or refused"
            self._then(self._passed_over)

    def _ask(self) -> None:
        try:
            port = self._brokers.port(self._name)
            timeout_ms = left_ms(self._brokers, self._rpc, self._name)
        except PopmqError as error:
            self._answered(error)
            return
        self._rpc.send_request(port, self._kind, self._rpc.data, timeout_ms, self._answered)

    def _answered(self, answer: Answer) -> None:
        if not isinstance(answer, PopmqError):
            self._reply = self._sum(self._reply, answer) if self._done else answer
            self._done.append(self._name)
        elif answer.code in _NOT_FOUND:
            self._passed_over = self._passed_over or answer
        else:
            self._end(answer)
            return
        self._at += 1
        self._next()

    def _end(self, refusal: PopmqError) -> None:
        if len(self._names) == 1:
            self._then(refusal)
            return
        done = f"; done at {', '.join(self._done)}" if self._done else ""
        self._then(Refused(refusal.code, f"{named(self._name, refusal)}{done}"))
