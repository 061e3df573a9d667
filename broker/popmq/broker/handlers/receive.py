"""Receives: POP requests. Most are answered at once; one that is not becomes a `Receive`.

A receive is answered at once when it gets messages, and when it has nothing to wait for.  Else it
waits: for a topic that does not exist yet, for its turn (a group that reads far behind beside
others), for bytes that come from the
disk, for the next turn of the loop (a filter that has not looked at everything), or for messages.
After each wait it looks up its names and pops again.
"""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.handlers.pop_notifications import NOTHING, PopNotifications
from popmq.broker.handlers.request import MemoryReplies, WaitingRequests, refuse
from popmq.broker.lite.lite_service import waiting_client
from popmq.broker.log.cold_read_retry import ColdReadRetry, log_failure
from popmq.broker.pop.long_polling import Waiter, WaiterResult
from popmq.broker.pop.pop_service import PopParams, PopResult
from popmq.common.disk import ColdRead
from popmq.common.errors import PopmqError, TooManyRequests, TopicNotFound
from popmq.common.protocol.messaging_payloads import OnReply, PopRequest
from popmq.common.protocol.pop_reply import PopReplyBuilder

_LOOKS = 256  # times 800 units
_COLD_LIMIT = 1_024  # receives that wait for the disk


class Receives:
    def __init__(
        self,
        broker: Broker,
        clients: ClientRequests,
        memory: MemoryReplies,
        waiting: WaitingRequests,
    ) -> None:
        self.broker = broker
        self._memory = memory
        self.clients = clients
        self.waiting = waiting  # the receives that wait are among these
        self.cold = ColdReadRetry(broker.store.readers)
        self.ended = False  # this broker leads no more
        self._notifications = PopNotifications(broker, clients, waiting)
        self._popped_ms = 0  # wall time of the newest pop

    def serve(self, request: PopRequest, on_reply: OnReply, number: int) -> None:
        """Pop now; or, for a group that reads far behind beside others, when it is its turn."""
        if self.broker.pop.catch_up.is_behind((request.group, request.topic)):
            Receive(self, request, on_reply, number).wait_for_turn()
        else:
            self.pop(request, on_reply, number)

    def pop(
        self,
        request: PopRequest,
        on_reply: OnReply,
        number: int,
        receive: "Receive | None" = None,  # of one that has waited already
    ) -> None:
        try:
            params = self.clients.resolve_pop(request)
        except TopicNotFound:
            if not self.broker.metadata_resolver.may_come(request.topic):
                raise
            if request.poll_ms > 0:
                (receive or Receive(self, request, on_reply, number)).wait_for_topic()
            else:
                on_reply(NOTHING)
            return
        if not params.limit:
            self._notifications.notify_or_wait(request, params, on_reply, number)
            return
        try:
            popped = self.take(params, number)
            deliveries, rest = popped.deliveries, popped.remaining
            if self._notifications.notified_until_ms:
                self._notifications.on_popped(params, has_messages=bool(deliveries))
        except ColdRead as cold:
            if self.cold.waiting >= _COLD_LIMIT:
                raise TooManyRequests(
                    f"{_COLD_LIMIT} receives wait for old messages from the disk: try again"
                ) from None
            (receive or Receive(self, request, on_reply, number)).read_from_disk(cold)
            return
        if deliveries:
            first_look = request.poll_ms > 0
            self.broker.polling.hits += first_look
            self.reply(on_reply, params, popped, number, first_look=first_look)
        elif request.poll_ms > 0:
            receive = receive or Receive(self, request, on_reply, number)
            receive.wait_for_messages(params, unfinished=rest > 0)
        elif rest:
            (receive or Receive(self, request, on_reply, number)).look_on_later()
        else:
            self.reply(on_reply, params, popped, number)

    def take(self, params: PopParams, number: int) -> PopResult:
        """Pop for receive `number`, which can be undone until its answer has left."""
        broker = self.broker
        first = broker.pop.service.sequence + 1
        self._popped_ms = broker.clock.wall_ms()  # before the first check point counts
        popped = self.clients.pop(params)
        if popped.deliveries:
            end = broker.pop.service.sequence + 1
            broker.pop.pop_rollback.track(number, broker.store.epoch, first, end)
        return popped

    def reply(
        self,
        on_reply: OnReply,
        params: PopParams,
        popped: PopResult,
        number: int,
        *,
        first_look: bool = False,
    ) -> None:
        """Answer once everything that the reply rests on is confirmed (D2)."""
        deliveries = popped.deliveries
        popped_ms = self._popped_ms if deliveries else 0
        broker = self.broker

        def answer() -> None:
            on_reply(deliveries.encode_reply(popped.remaining, popped_ms, first_look=first_look))

        def leave() -> None:
            if deliveries:
                broker.pop.pop_rollback.send_unless_cancelled(number, answer)
            else:
                answer()

        if params.group.buffered and not popped.appended:
            # Nothing was written: it rests on nothing but this broker's being the master.
            self._memory.when_leadership_confirmed(leave) if deliveries else leave()
        elif broker.pop.catch_up.is_behind((params.group.name, params.topic.name)):
            charge = broker.pop.catch_up.charge
            broker.buffer.when_acks_confirmed(lambda: charge(leave))
        else:
            broker.buffer.when_acks_confirmed(leave)


class Receive:
    """One that waits. It is in `Receives.waiting` exactly as long as it does."""

    __slots__ = ("_looks", "_number", "_on_reply", "_receives", "_request", "_waiter")

    def __init__(
        self, receives: Receives, request: PopRequest, on_reply: OnReply, number: int
    ) -> None:
        self._receives = receives
        self._request = request
        self._on_reply = on_reply
        self._number = number
        self._looks = _LOOKS
        self._waiter: Waiter | None = None

    def wait_for_turn(self) -> None:
        self._wait()
        try:
            self._receives.broker.pop.catch_up.run(self._number, self.pop_again)
        except TooManyRequests:
            self._end_wait()
            raise

    def read_from_disk(self, cold: ColdRead) -> None:
        self._wait()
        self._receives.cold.retry(cold, self.pop_again, self._refuse)

    def pop_again(self) -> None:
        if not self._end_wait():
            return
        self._looks = _LOOKS
        try:
            self._receives.pop(self._request, self._on_reply, self._number, self)
        except PopmqError as refusal:
            refuse(refusal, self._on_reply, self._receives.broker.store)

    def look_on_later(self) -> None:
        """A receive that does not wait, with a filter: look on, in turns of the loop, but not for
        ever."""
        self._wait()
        self._looks -= 1
        self._receives.broker.store.call_soon(self._look_on)

    def _look_on(self) -> None:
        receives = self._receives
        if receives.ended or not self._end_wait():
            return
        try:
            params = receives.clients.resolve_pop(self._request)
            popped = receives.take(params, self._number)
        except ColdRead as cold:
            self.read_from_disk(cold)
        except PopmqError as refusal:
            refuse(refusal, self._on_reply, receives.broker.store)
        else:
            if popped.deliveries or not popped.remaining or not self._looks:
                receives.reply(self._on_reply, params, popped, self._number)
            else:
                self.look_on_later()

    def wait_for_messages(self, params: PopParams, *, unfinished: bool) -> None:
        polling = self._receives.broker.polling
        waiter = Waiter(
            key=(params.topic.id, params.group.id),
            filter_key=(params.filter, params.queue_id, waiting_client(params)),
            deadline_ms=self._receives.broker.waits.boot_ms() + self._request.poll_ms,
            attempt=self._attempt,
            give_up=partial(self._give_up, params),
            client=waiting_client(params),
        )
        polling.add_waiter(waiter)
        self._waiter = waiter
        self._wait()
        if unfinished:
            polling.retry_client_waiters(waiter.key, waiter.client)

    def wait_for_topic(self) -> None:
        """It may be made yet; then wait for its messages, as long as is left."""
        polling, waits = self._receives.broker.polling, self._receives.broker.waits
        deadline_ms = waits.boot_ms() + self._request.poll_ms

        def attempt() -> WaiterResult:
            polling.remove(waiter)
            left_ms = max(0, deadline_ms - waits.boot_ms())
            self._request = self._request._replace(poll_ms=left_ms)
            self.pop_again()
            return WaiterResult.ANSWERED

        def give_up() -> None:
            self._end_wait()
            self._on_reply(NOTHING)

        key, alone = (self._request.topic, 0), self._number
        waiter = self._waiter = Waiter(key, alone, deadline_ms, attempt, give_up)
        polling.add_waiter(waiter)
        self._wait()

    def _attempt(self) -> WaiterResult:
        receives = self._receives
        try:
            # Looked up again: the topic may have got more queues meanwhile.
            params = receives.clients.resolve_pop(self._request)
            popped = receives.take(params, self._number)
        except ColdRead as cold:
            receives.cold.warm(cold, self._look_again)
            return WaiterResult.EMPTY
        except PopmqError as error:
            self._refuse(error)
            return WaiterResult.ANSWERED
        if not popped.deliveries:
            return WaiterResult.MORE if popped.remaining else WaiterResult.EMPTY
        self._end_wait()
        receives.reply(self._on_reply, params, popped, self._number)
        return WaiterResult.ANSWERED

    def _look_again(self, error: BaseException | None) -> None:
        assert self._waiter is not None, "only a receive that waits for messages looks again"
        if error is None:
            polling = self._receives.broker.polling
            polling.retry_client_waiters(self._waiter.key, self._waiter.client)
        else:  # the waiting receive ends when its time is over
            log_failure(error)

    def _give_up(self, params: PopParams) -> None:
        self._end_wait()
        nothing = PopResult(PopReplyBuilder(), 0, appended=False)
        self._receives.reply(self._on_reply, params, nothing, self._number)

    # -- inside

    def _wait(self) -> None:
        self._receives.waiting[self._number] = self._cancel

    def _end_wait(self) -> bool:
        """Whether it waited until now, and its client has not left."""
        return self._receives.waiting.pop(self._number, None) is not None

    def _cancel(self) -> None:
        if self._waiter is not None:
            self._receives.broker.polling.remove(self._waiter)
        else:
            self._receives.broker.pop.catch_up.cancel(self._number)

    def _refuse(self, refusal: PopmqError) -> None:
        if self._end_wait():
            refuse(refusal, self._on_reply, self._receives.broker.store)
