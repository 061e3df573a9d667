"""BrokerServer: requests in frames' payloads, answers when they are confirmed.

Implements `hop.Port`, so a proxy in the same process calls it directly and frames serve it to
all others.  The only place where a broker's replies are released.
"""

from collections.abc import Callable, Sequence

from popmq.broker.admin import ADMIN_KINDS, answer_admin
from popmq.broker.broker import Broker
from popmq.broker.pop.long_polling import Waiter
from popmq.broker.pop.pop_service import Want
from popmq.common import hop
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.hop import AckResult, Delivery, Kind, OnReply, PopReply


class BrokerServer:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._number = 0
        self._waiting: dict[int, Waiter] = {}
        self.refused_by_code: dict[int, int] = {}

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Serve one request; a refusal is answered before this returns."""
        self._number += 1
        try:
            self._serve(kind, body, on_reply, self._number)
        except PopmqError as error:
            self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
            on_reply(error)
        return self._number

    def cancel(self, request_id: int) -> None:
        waiter = self._waiting.pop(request_id, None)
        if waiter is not None:
            self._broker.polling.remove(waiter)

    def _serve(self, kind: Kind, body: bytes, on_reply: OnReply, number: int) -> None:
        match kind:
            case Kind.PUT:
                results = self._broker.put(hop.decode_put(body))
                self._reply(on_reply, lambda: hop.encode_put_reply(results))
            case Kind.POP:
                self._pop(hop.decode_pop(body), on_reply, number)
            case Kind.ACK:
                self._ack(hop.decode_ack(body), on_reply)
            case Kind.CHANGE:
                change = hop.decode_change(body)
                handle = self._broker.acks.change(
                    topic=change.topic,
                    group=change.group,
                    handle=change.handle,
                    invisible_ms=change.invisible_ms,
                )
                self._reply(on_reply, lambda: handle)
            case _ if kind in ADMIN_KINDS:
                reply = answer_admin(self._broker, kind, body)
                self._reply(on_reply, lambda: reply)
            case _:
                raise Refused(Code.UNSUPPORTED, f"a broker does not serve requests of kind {kind}")

    def _reply(self, on_reply: OnReply, encode: Callable[[], bytes]) -> None:
        """Release the reply once everything it rests on is confirmed (D2)."""
        self._broker.when_confirmed(lambda: on_reply(encode()))

    def _ack(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        results = []
        for handle in request.handles:
            try:
                self._broker.acks.ack(topic=request.topic, group=request.group, handle=handle)
                results.append(AckResult())
            except PopmqError as error:
                results.append(AckResult(error.code, str(error)))
        self._reply(on_reply, lambda: hop.encode_ack_reply(results))

    def _pop(self, request: hop.PopRequest, on_reply: OnReply, number: int) -> None:
        want = self._broker.want(request)
        deliveries, rest = self._broker.pops.pop(want)
        if deliveries or request.poll_ms <= 0:
            self._reply_pop(on_reply, deliveries, rest)
            return
        deadline_ms = self._broker.store.log_ms() + request.poll_ms
        self._park(want, deadline_ms, on_reply, number)

    def _park(self, want: Want, deadline_ms: int, on_reply: OnReply, number: int) -> None:
        def attempt() -> bool:
            try:
                deliveries, rest = self._broker.pops.pop(want)
            except PopmqError as error:
                self._waiting.pop(number, None)
                on_reply(error)
                return True
            if not deliveries:
                return False
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, deliveries, rest)
            return True

        def give_up() -> None:
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, (), 0)

        waiter = Waiter(
            key=(want.topic.id, want.group.id),
            filter_key=(want.tags, want.queue_id),
            deadline_ms=deadline_ms,
            attempt=attempt,
            give_up=give_up,
        )
        self._broker.polling.park(waiter)
        self._waiting[number] = waiter

    def _reply_pop(self, on_reply: OnReply, deliveries: Sequence[Delivery], rest: int) -> None:
        self._reply(on_reply, lambda: hop.encode_pop_reply(PopReply(deliveries, rest)))
