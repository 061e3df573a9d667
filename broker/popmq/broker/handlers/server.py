"""BrokerServer: requests in frames' payloads, answers when they are confirmed.

Implements `hop.Port`, so a proxy in the same process calls it directly and frames serve it to
all others.  The only place where a broker's replies are released.
"""

import logging
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.handlers.lite_requests import SyncLiteJob, take_notices
from popmq.broker.handlers.meta_copies import ORDERED, MetaCopies
from popmq.broker.handlers.metadata_requests import ADMIN_KINDS, answer_admin
from popmq.broker.handlers.pop_notifications import PopNotifications
from popmq.broker.handlers.pop_requests import JOBS
from popmq.broker.handlers.pull_requests import PullRequests
from popmq.broker.handlers.request_runner import RequestRunner
from popmq.broker.handlers.transaction_requests import encode_checks
from popmq.broker.lite.lite_service import waiting_client
from popmq.broker.pop.long_polling import Waiter, WaiterResult
from popmq.broker.pop.pop_service import PopParams
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests, Unavailable
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.protocol.pop_reply import PopReplyBuilder
from popmq.common.step_loop import Done
from popmq.common.topics import Durability, MessageType
from popmq.common.wire import transaction_pb2

logger = logging.getLogger(__name__)

_LOOKS = 256  # times 800 units
_COLD_LIMIT = 1_024


class BrokerServer:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._number = 0
        self._popped_ms = 0  # wall time of the newest pop
        self._waiting: dict[int, Waiter] = {}
        self._cold = 0  # receives that wait for the disk
        self._gone: set[int] = set()  # and those of them whose client left
        self._looking: set[int] = set()  # receives that do not wait, and go on looking
        self._jobs = RequestRunner(broker.store, broker.buffer.flush_acks)
        self._pulls = PullRequests(broker)
        self._clients = ClientRequests(broker)
        self._notifications = PopNotifications(broker, self._clients)
        self._copies = MetaCopies(broker, self._reply)
        self.refused_by_code: dict[int, int] = {}
        # With replicas (ha/memory_confirmation.py): once all of the set hold what was appended;
        # once all of them spoke, as only slaves of this epoch do.
        self.when_received: Callable[[Callable[[], None]], None] = _at_once
        self.when_heard: Callable[[Callable[[], None]], None] = _at_once

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Serve one request; a refusal that rests on confirmed records is answered at once."""
        self._number += 1
        try:
            self._serve(kind, body, on_reply, self._number)
        except DecodeError:
            self._refuse(Refused(Code.BAD_REQUEST, f"the request is no {kind.name}"), on_reply)
        except PopmqError as error:
            self._refuse(error, on_reply)
        return self._number

    def _refuse(self, error: PopmqError, on_reply: OnReply) -> None:
        """A refusal rests on what was read, which may not be confirmed yet either (rule 8): a topic
        that exists already may be gone with this master. That there is no room is said at once."""
        self.refused_by_code[error.code] = self.refused_by_code.get(error.code, 0) + 1
        if isinstance(error, (TooManyRequests, Unavailable)):
            on_reply(error)
        else:
            self._broker.store.when_confirmed(partial(on_reply, error))

    def cancel(self, request_id: int) -> None:
        if self._pulls.cancel(request_id) or self._notifications.cancel(request_id):
            return
        if self._copies.cancel(request_id):
            return
        waiter = self._waiting.pop(request_id, None)
        broker = self._broker
        self._looking.discard(request_id)
        if waiter is not None:
            broker.polling.remove(waiter)
        elif broker.undo.cancel(request_id) or broker.catch_up.cancel(request_id):
            return
        elif not broker.transactions.checks.cancel(request_id) and self._cold:
            self._gone.add(request_id)

    def _serve(self, kind: Kind, body: bytes, on_reply: OnReply, number: int) -> None:
        match kind:
            case Kind.PUT:
                self._put(hop.decode_put(body), on_reply)
            case Kind.POP:
                self._receive(hop.decode_pop(body), on_reply, number)
            case Kind.ACK:
                self._take_acks(hop.decode_ack(body), on_reply)
            case _:
                self._broker.buffer.flush_acks()  # what follows may ask what is acked
                self._serve_rare(kind, body, on_reply, number)

    def _serve_rare(self, kind: Kind, body: bytes, on_reply: OnReply, number: int) -> None:
        match kind:
            case Kind.CHANGE:
                change = hop.decode_change(body)
                self._broker.directory.check_group_copied(change.group, change.group_id)
                handle = self._broker.acks.change(
                    topic=change.topic,
                    group=change.group,
                    handle=change.handle,
                    invisible_ms=change.invisible_ms,
                )
                self._reply(on_reply, handle)
            case Kind.CLIENTS:
                report = hop.decode_clients(body)
                self._clients.on_clients_report(report)
                if notices := take_notices(self._broker, report):
                    self._reply(on_reply, notices)
                else:
                    on_reply(b"")
            case Kind.SYNC_LITE:
                job = SyncLiteJob(self._broker, body)
                if job.reads:
                    self._jobs.run(job, on_reply)
                else:
                    self._reply(on_reply, job.step() or b"")
            case Kind.CHECKS:
                self._wait_for_checks(
                    transaction_pb2.ChecksRequest.FromString(body), on_reply, number
                )
            case Kind.PULL:
                self._pulls.serve(body, on_reply, number)
            case _ if kind in JOBS:
                self._jobs.run(JOBS[kind](self._broker, body), on_reply)
            case Kind.COPY_META:
                self._copies.serve(body, on_reply, number)
            case _ if kind in ORDERED:
                reply = answer_admin(self._broker, kind, body)
                self._copies.answer_in_order(kind, body, on_reply, reply)
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
        checks.add_waiting_proxy(
            number, request.topics, deadline_ms, lambda found: on_reply(encode_checks(found))
        )

    def _reply(self, on_reply: OnReply, reply: bytes) -> None:
        """Release the reply once everything it rests on is confirmed (D2)."""
        self._broker.when_confirmed(partial(on_reply, reply))

    def _put(self, request: hop.PutRequest, on_reply: OnReply) -> None:
        results = self._clients.put(request)
        self._broker.catch_up.on_fresh_traffic()
        reply = hop.encode_put_reply(results)
        topic = self._broker.registry.topic(request.topic)
        if topic.durability is Durability.MEMORY and not any(map(_is_half, request.entries)):
            self.when_received(partial(on_reply, reply))
        else:
            self._reply(on_reply, reply)

    def _take_acks(self, request: hop.AckRequest, on_reply: OnReply) -> None:
        self._broker.directory.check_group_copied(request.group, request.group_id)
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
        want = self._clients.resolve_pop(request)
        if not want.limit:
            self._notifications.notify_or_wait(request, want, on_reply, number)
            return
        try:
            deliveries, rest = self._take(want, number)
            if self._notifications.notified_until_ms:
                self._notifications.on_popped(want, found=bool(deliveries))
            if deliveries:
                self._broker.polling.hits += request.poll_ms > 0
                self._reply_pop(on_reply, want, deliveries, rest, number)
            elif request.poll_ms > 0:
                self._park(request, want, on_reply, number, unfinished=rest > 0)
            else:
                self._look_through(request, want, on_reply, rest, number, _LOOKS)
        except ColdRead as cold:
            if self._cold >= _COLD_LIMIT:
                raise TooManyRequests(
                    f"{_COLD_LIMIT} receives wait for old messages from the disk: try again"
                ) from None
            self._warm(cold, lambda error: self._pop_again(request, on_reply, number, error))

    def _take(self, want: PopParams, number: int) -> tuple[PopReplyBuilder, int]:
        """Pop for receive `number`, which can be undone until its answer has left."""
        first = self._broker.pops.sequence + 1
        self._popped_ms = self._broker.wall_ms()  # before the first check point counts
        deliveries, rest = self._clients.pop(want)
        if deliveries:
            end = self._broker.pops.sequence + 1
            self._broker.undo.track(number, self._broker.store.epoch, first, end)
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

    def _look_again(self, waiter: Waiter, error: BaseException | None) -> None:
        if error is None:
            self._broker.polling.retry_client_waiters(waiter.key, waiter.client)
        else:  # the waiting receive ends when its time is over
            logger.error("cannot read from the disk", extra={"reason": str(error)})

    def _look_through(
        self,
        request: hop.PopRequest,
        want: PopParams,
        on_reply: OnReply,
        rest: int,
        number: int,
        looks: int,
    ) -> None:
        """A receive that does not wait, with a filter: look on, in turns of the loop, but not for
        ever."""
        if not rest or not looks:
            self._reply_pop(on_reply, want, PopReplyBuilder(), rest, number)
            return
        self._looking.add(number)
        self._broker.store.call_soon(lambda: self._look_on(request, on_reply, number, looks - 1))

    def _look_on(self, request: hop.PopRequest, on_reply: OnReply, number: int, looks: int) -> None:
        if number not in self._looking:
            return
        self._looking.discard(number)
        try:
            want = self._clients.resolve_pop(request)
            deliveries, rest = self._take(want, number)
        except ColdRead as cold:
            self._warm(cold, lambda error: self._pop_again(request, on_reply, number, error))
        except PopmqError as refusal:
            on_reply(refusal)
        else:
            if deliveries:
                self._reply_pop(on_reply, want, deliveries, rest, number)
            else:
                self._look_through(request, want, on_reply, rest, number, looks)

    def end(self) -> None:
        """This broker leads no more: nothing goes on by itself."""
        self._looking.clear()

    def _park(
        self,
        request: hop.PopRequest,
        want: PopParams,
        on_reply: OnReply,
        number: int,
        *,
        unfinished: bool,
    ) -> None:
        def attempt() -> WaiterResult:
            try:
                # Looked up again: the topic may have got more queues meanwhile.
                deliveries, rest = self._take(self._clients.resolve_pop(request), number)
            except ColdRead as cold:
                self._warm(cold, lambda error: self._look_again(waiter, error))
                return WaiterResult.EMPTY
            except PopmqError as error:
                self._waiting.pop(number, None)
                on_reply(error)
                return WaiterResult.ANSWERED
            if not deliveries:
                return WaiterResult.MORE if rest else WaiterResult.EMPTY
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, want, deliveries, rest, number)
            return WaiterResult.ANSWERED

        def give_up() -> None:
            self._waiting.pop(number, None)
            self._reply_pop(on_reply, want, PopReplyBuilder(), 0, number)

        waiter = Waiter(
            key=(want.topic.id, want.group.id),
            filter_key=(want.filter, want.queue_id, waiting_client(want)),
            deadline_ms=self._broker.waits_ms() + request.poll_ms,
            attempt=attempt,
            give_up=give_up,
            client=waiting_client(want),
        )
        self._broker.polling.add_waiter(waiter)
        self._waiting[number] = waiter
        if unfinished:
            self._broker.polling.retry_client_waiters(waiter.key, waiter.client)

    def _reply_pop(
        self,
        on_reply: OnReply,
        want: PopParams,
        deliveries: PopReplyBuilder,
        rest: int,
        number: int,
    ) -> None:
        popped_ms = self._popped_ms if deliveries else 0

        def answer() -> None:
            on_reply(deliveries.encode_reply(rest, popped_ms))

        def leave() -> None:
            if deliveries:
                self._broker.undo.send_unless_cancelled(number, answer)
            else:
                answer()

        if want.group.buffered and not self._broker.pops.has_written:
            # Nothing was written: it rests on nothing but this broker's being the master.
            self.when_heard(leave) if deliveries else leave()
        elif self._broker.catch_up.is_behind((want.topic.name, want.group.name)):
            charge = self._broker.catch_up.charge
            self._broker.when_confirmed(lambda: charge(leave))
        else:
            self._broker.when_confirmed(leave)


def _at_once(then: Callable[[], None]) -> None:
    then()


def _is_half(entry: hop.PutEntry) -> bool:
    """A half message is on disks before its sender acts on it."""
    return entry.type == MessageType.TRANSACTION


def _read(cold: ColdRead) -> None:
    cold.warm()
