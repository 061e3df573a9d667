"""BrokerServer: requests in frames' payloads, answers when they are confirmed.

Implements `hop.Port`, so a proxy in the same process calls it directly and frames serve it to
all others.  The only place where a broker's replies are released.
"""

import logging
from collections.abc import Sequence
from functools import partial

from google.protobuf.message import DecodeError

from popmq.broker.admin import ADMIN_KINDS, answer_admin
from popmq.broker.broker import Broker
from popmq.broker.jobs import JobRunner
from popmq.broker.pop.long_polling import Attempt, Key, Waiter
from popmq.broker.pop.pop_service import Want
from popmq.broker.pop_admin import JOBS
from popmq.broker.transaction_jobs import encode_checks
from popmq.common import hop
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.hop import Delivery, Kind, OnReply, PopReply
from popmq.common.steps import Done
from popmq.common.wire import transaction_pb2

logger = logging.getLogger(__name__)

_LOOKS = 32  # times 800 units
_COLD_LIMIT = 1_024


class BrokerServer:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._number = 0
        self._popped_ms = 0  # wall time of the newest pop
        self._waiting: dict[int, Waiter] = {}
        self._cold = 0  # receives that wait for the disk
        self._gone: set[int] = set()  # and those of them whose client left
        self._jobs = JobRunner(broker.store)
        self.refused_by_code: dict[int, int] = {}

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Serve one request; a refusal is answered before this returns."""
        self._number += 1
        try:
            self._serve(kind, body, on_reply, self._number)
        except DecodeError:
            self._refuse(Refused(Code.BAD_REQUEST, f"the request is no {kind.name}"), on_reply)
        except PopmqError as error:
            self._refuse(error, on_reply)
        return self._number

    def _refuse(self, error: PopmqError, on_reply: OnReply) -> None:
        self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
        on_reply(error)

    def cancel(self, request_id: int) -> None:
        waiter = self._waiting.pop(request_id, None)
        broker = self._broker
        if waiter is not None:
            broker.polling.remove(waiter)
        elif broker.undo.cancel(request_id) or broker.catch_up.cancel(request_id):
            return
        elif not broker.transactions.checks.cancel(request_id) and self._cold:
            self._gone.add(request_id)

    def _serve(self, kind: Kind, body: bytes, on_reply: OnReply, number: int) -> None:
        match kind:
            case Kind.PUT:
                results = self._broker.put(hop.decode_put(body))
                self._broker.catch_up.others_worked()
                self._reply(on_reply, hop.encode_put_reply(results))
            case Kind.POP:
                self._receive(hop.decode_pop(body), on_reply, number)
            case Kind.ACK:
                self._take_acks(hop.decode_ack(body), on_reply)
            case Kind.CHANGE:
                change = hop.decode_change(body)
                handle = self._broker.acks.change(
                    topic=change.topic,
                    group=change.group,
                    handle=change.handle,
                    invisible_ms=change.invisible_ms,
                )
                self._reply(on_reply, handle)
            case Kind.CLIENTS:
                self._broker.hear(hop.decode_clients(body))
                on_reply(b"")
            case Kind.CHECKS:
                self._wait_for_checks(
                    transaction_pb2.ChecksRequest.FromString(body), on_reply, number
                )
            case _ if kind in JOBS:
                self._jobs.run(JOBS[kind](self._broker, body), on_reply)
            case _ if kind in ADMIN_KINDS:
                reply = answer_admin(self._broker, kind, body)
                self._reply(on_reply, reply)
            case _:
                raise Refused(Code.UNSUPPORTED, f"a broker does not serve requests of kind {kind}")

    def _wait_for_checks(
        self, request: transaction_pb2.ChecksRequest, on_reply: OnReply, number: int
    ) -> None:
        deadline_ms = self._broker.waits_ms() + request.wait_ms
        checks = self._broker.transactions.checks
        checks.wait(
            number, request.topics, deadline_ms, lambda found: on_reply(encode_checks(found))
        )

    def _reply(self, on_reply: OnReply, reply: bytes) -> None:
        """Release the reply once everything it rests on is confirmed (D2)."""
        self._broker.when_confirmed(partial(on_reply, reply))

    def _take_acks(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        catch_up = self._broker.catch_up
        if catch_up.is_behind((request.topic, request.group)):
            catch_up.charge(lambda: self._ack(request, on_reply))
        else:
            self._ack(request, on_reply)

    def _ack(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        results = self._broker.acks.ack(
            topic=request.topic, group=request.group, handles=request.handles
        )
        self._reply(on_reply, hop.encode_ack_reply(results))

    def _receive(self, request: hop.PopRequest, on_reply: OnReply, number: int) -> None:
        """Pop now; or, for a group that reads far behind beside others, when it is its turn."""
        catch_up = self._broker.catch_up
        if catch_up.is_behind((request.topic, request.group)):
            catch_up.run(number, lambda: self._pop_later(request, on_reply, number))
        else:
            self._pop(request, on_reply, number)

    def _pop(self, request: hop.PopRequest, on_reply: OnReply, number: int) -> None:
        want = self._broker.want(request)
        try:
            deliveries, rest = self._take(want, number)
            if deliveries:
                self._reply_pop(on_reply, want, deliveries, rest, number)
            elif request.poll_ms > 0:
                self._park(request, want, on_reply, number, unfinished=rest > 0)
            else:
                self._look_through(want, on_reply, rest, number)
        except ColdRead as cold:
            if self._cold >= _COLD_LIMIT:
                raise TooManyRequests(
                    f"{_COLD_LIMIT} receives wait for old messages from the disk: try again"
                ) from None
            self._warm(cold, lambda error: self._pop_again(request, on_reply, number, error))

    def _take(self, want: Want, number: int) -> tuple[Sequence[Delivery], int]:
        """Pop for receive `number`, which can be undone until its answer has left."""
        first = self._broker.pops.sequence + 1
        self._popped_ms = self._broker.wall_ms()  # before the first check point counts
        deliveries, rest = self._broker.pop(want)
        if deliveries:
            end = self._broker.pops.sequence + 1
            self._broker.undo.popped(number, self._broker.store.epoch, first, end)
        return deliveries, rest

    def _warm(self, cold: ColdRead, then: Done) -> None:
        """Read from the disk on a thread that may wait; the loop goes on meanwhile (D3)."""
        self._cold += 1

        def done(error: BaseException | None) -> None:
            self._cold -= 1
            then(error)
            if not self._cold:
                self._gone.clear()

        self._broker.store.readers.submit(lambda: _read(cold), done)

    def _pop_again(
        self,
        request: hop.PopRequest,
        on_reply: OnReply,
        number: int,
        error: BaseException | None,
    ) -> None:
        if number in self._gone:
            return
        if error is not None:
            logger.error("cannot read from the disk", extra={"reason": str(error)})
            on_reply(Refused(Code.INTERNAL_ERROR, f"old messages cannot be read: {error}"))
            return
        self._pop_later(request, on_reply, number)

    def _pop_later(self, request: hop.PopRequest, on_reply: OnReply, number: int) -> None:
        try:
            self._pop(request, on_reply, number)
        except PopmqError as refusal:
            on_reply(refusal)

    def _look_again(self, key: Key, error: BaseException | None) -> None:
        if error is None:
            self._broker.polling.look_again(key)
        else:  # the waiting receive ends when its time is over
            logger.error("cannot read from the disk", extra={"reason": str(error)})

    def _look_through(self, want: Want, on_reply: OnReply, rest: int, number: int) -> None:
        """A receive that does not wait, with a filter: look on, but not for ever."""
        deliveries: Sequence[Delivery] = ()
        for _ in range(_LOOKS if rest else 0):
            deliveries, rest = self._take(want, number)
            if deliveries or not rest:
                break
        self._reply_pop(on_reply, want, deliveries, rest, number)

    def _park(
        self,
        request: hop.PopRequest,
        want: Want,
        on_reply: OnReply,
        number: int,
        *,
        unfinished: bool,
    ) -> None:
        def attempt() -> Attempt:
            try:
                # Looked up again: the topic may have got more queues meanwhile.
                deliveries, rest = self._take(self._broker.want(request), number)
            except ColdRead as cold:
                key = (want.topic.id, want.group.id)
                self._warm(cold, lambda error: self._look_again(key, error))
                return Attempt.EMPTY
            except PopmqError as error:
                self._waiting.pop(number, None)
                on_reply(error)
                return Attempt.ANSWERED
            if not deliveries:
                return Attempt.MORE if rest else Attempt.EMPTY
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, want, deliveries, rest, number)
            return Attempt.ANSWERED

        def give_up() -> None:
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, want, (), 0, number)

        waiter = Waiter(
            key=(want.topic.id, want.group.id),
            filter_key=(want.filter, want.queue_id),
            deadline_ms=self._broker.waits_ms() + request.poll_ms,
            attempt=attempt,
            give_up=give_up,
        )
        self._broker.polling.park(waiter)
        self._waiting[number] = waiter
        if unfinished:
            self._broker.polling.look_again(waiter.key)

    def _reply_pop(
        self,
        on_reply: OnReply,
        want: Want,
        deliveries: Sequence[Delivery],
        rest: int,
        number: int,
    ) -> None:
        reply = PopReply(deliveries, rest, self._popped_ms if deliveries else 0)

        def answer() -> None:
            on_reply(hop.encode_pop_reply(reply))

        def leave() -> None:
            if deliveries:
                self._broker.undo.release(number, answer)
            else:
                answer()

        if want.group.buffered and not self._broker.pops.wrote:
            leave()  # nothing was written: it rests on nothing new
        elif self._broker.catch_up.is_behind((want.topic.name, want.group.name)):
            charge = self._broker.catch_up.charge
            self._broker.when_confirmed(lambda: charge(leave))
        else:
            self._broker.when_confirmed(leave)


def _read(cold: ColdRead) -> None:
    cold.warm()
