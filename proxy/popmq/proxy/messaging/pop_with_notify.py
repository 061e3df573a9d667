"""PopWithNotify: one receive that waits, at every broker group at once (pop with notify).

One pop first.  If that finds nothing and time is left, every broker group is asked to say when
there is something; what they say is queued, and the receive pops at one of them at a time.  A miss
(another receive was faster) tries the next one that spoke, and waits on.  So nothing is popped
that this client does not get, and a message at any broker group ends the wait.

While many receives of a group wait at this proxy, some of them do so, which is enough to hear of
every message, and each of the others waits with a plain pop at one broker group.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.clock import Clock
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PopReply,
    PopRequest,
    decode_pop_reply,
    encode_pop,
)
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.rpc.rpc import Answer, Rpc

BROKER_RESERVE_MS = 5_000  # beyond the poll, for a broker that is busy when it ends

Popped = PopReply | PopmqError
OnEnd = Callable[[str, Popped], None]  # the broker group's name, and what it said


class PopWithNotify:
    def __init__(
        self,
        rpc: Rpc,
        pop: PopRequest,
        names: Sequence[str],
        brokers: BrokerPorts,
        clock: Clock,
        on_end: OnEnd,
    ) -> None:
        """`names` are the broker groups to wait at, the first one to begin with; `on_end` hears
        messages, else a reply without any, else the first refusal."""
        self._rpc = rpc
        self._pop = pop
        self._names = names
        self._brokers = brokers
        self._clock = clock
        self._on_end = on_end
        self._began_ms = clock.boot_ms()
        self._waits_at: set[str] = set()
        self._hits: deque[str] = deque()
        self._popping = False
        self._turn = 0  # answers of an earlier one come too late
        self._over = False
        self._last: tuple[str, Popped] | None = None
        self.plain = False

    def start(self, *, many: bool) -> None:
        if many:
            self.plain = True
            self._rpc.metrics.plain_polls += 1
            self._ask_pop(self._names[0], self._left_ms(), self._plainly_popped)
        else:
            self._consume(self._names[0], self._first_popped)

    def switch_to_notify(self) -> None:
        """Wait with notifications from now on: this receive alone does not cover all groups."""
        if self._over or not self.plain:
            return
        self.plain = self._popping = False
        self._turn += 1
        self._rpc.cancel_requests()
        self._notify_all()

    def stop(self) -> None:
        """The receive has ended in another way."""
        self._over = True

    def _left_ms(self) -> int:
        return max(0, self._pop.poll_ms - (self._clock.boot_ms() - self._began_ms))

    def _first_popped(self, name: str, popped: Popped) -> None:
        if isinstance(popped, PopReply) and popped.deliveries:
            self._rpc.metrics.short_polling_hits += 1
        if not self._took(name, popped):
            self._notify_all()

    def _notify_all(self) -> None:
        self._rpc.metrics.pops_with_notify += 1
        self._waits_at.update(self._names if self._left_ms() else ())  # some answer at once
        for name in self._names:
            self._notify(name)
        self._go_on()

    def _plainly_popped(self, name: str, popped: Popped) -> None:
        """Messages or the end of the wait; a refusal alone leaves the others."""
        if self._took(name, popped):
            return
        if isinstance(popped, PopmqError):
            self.switch_to_notify()
        else:
            self._end(name, popped)

    def _missed(self, name: str, popped: Popped) -> None:
        """Somebody else was faster: wait there again, and go on with who else spoke."""
        if self._took(name, popped):
            return
        if isinstance(popped, PopReply):
            self._notify(name)
        self._go_on()

    def _notify(self, name: str) -> None:
        if self._over or not self._left_ms():
            return
        self._waits_at.add(name)
        asked = self._pop._replace(limit=0, poll_ms=self._left_ms())
        self._ask(name, asked, partial(self._notified, self._turn, name))

    def _notified(self, turn: int, name: str, answer: Answer) -> None:
        if self._over or turn != self._turn:
            return
        self._waits_at.discard(name)
        messages = _popped(answer)
        if isinstance(messages, PopReply) and messages.remaining:
            self._hits.append(name)
        else:
            self._keep(name, messages)
        self._go_on()

    def _go_on(self) -> None:
        """Pop where something is, one at a time; end when nobody is waited for."""
        if self._over or self._popping:
            return
        if self._hits:
            self._consume(self._hits.popleft(), self._missed)
        elif not self._waits_at:
            self._end(*(self._last or (self._names[0], PopReply([], 0, 0))))

    def _consume(self, name: str, then: Callable[[str, Popped], None]) -> None:
        self._popping = True
        self._ask_pop(name, 0, then)

    def _ask_pop(self, name: str, poll_ms: int, then: Callable[[str, Popped], None]) -> None:
        def answered(turn: int, answer: Answer) -> None:
            if not self._over and turn == self._turn:
                self._popping = False
                then(name, _popped(answer))

        self._ask(name, self._pop._replace(poll_ms=poll_ms), partial(answered, self._turn))

    def _ask(self, name: str, pop: PopRequest, then: Callable[[Answer], None]) -> None:
        try:
            port = self._brokers.port(name)
        except PopmqError as error:
            then(error)
            return
        timeout_ms = pop.poll_ms + BROKER_RESERVE_MS
        self._rpc.send_request(port, Kind.POP, encode_pop(pop), timeout_ms, then)

    def _took(self, name: str, popped: Popped) -> bool:
        """Whether there are messages: then this is the end."""
        if isinstance(popped, PopReply) and popped.deliveries:
            self._end(name, popped)
            return True
        self._keep(name, popped)
        return False

    def _keep(self, name: str, popped: Popped) -> None:
        """For the end: that there was nothing, rather than a refusal."""
        better = isinstance(popped, PopReply)
        if self._last is None or (better and isinstance(self._last[1], PopmqError)):
            self._last = (name, popped)

    def _end(self, name: str, popped: Popped) -> None:
        if not self._over:
            self._over = True
            self._rpc.cancel_requests()
            self._on_end(name, popped)


class PopWithNotifySet:
    """Those of one group for one topic at this proxy: up to `limit` of them are notified."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._notified: dict[Rpc, PopWithNotify] = {}
        self._plain: dict[Rpc, PopWithNotify] = {}

    def __bool__(self) -> bool:
        return bool(self._notified or self._plain)

    def start(self, rpc: Rpc, poll: PopWithNotify) -> None:
        many = len(self._notified) >= self._limit
        (self._plain if many else self._notified)[rpc] = poll
        poll.start(many=many)

    def end(self, rpc: Rpc) -> None:
        """The receive is over. Where it was notified, another one is from now on."""
        poll = self._plain.pop(rpc, None)
        if poll is not None:
            poll.stop()
            return
        poll = self._notified.pop(rpc, None)
        if poll is None:
            return
        poll.stop()
        if self._plain:
            other = next(iter(self._plain))
            turned = self._notified[other] = self._plain.pop(other)
            turned.switch_to_notify()

    def stop(self) -> None:
        for poll in (*self._notified.values(), *self._plain.values()):
            poll.stop()


def _popped(answer: Answer) -> Popped:
    return answer if isinstance(answer, PopmqError) else decode_pop_reply(answer)
