"""Notifications: receives of proxies that ask only whether there is something to receive.

A front poll waits at every broker group like this and pops where something came (RocketMQ: pop
with notify).  Of all that wait for a group's messages one is told at a time: the others would
come for nothing.  The next one is notified when a receive of the group got something, or
NOTIFY_AGAIN_MS later: a notification whose receiver does not pop delays the message by that time.
"""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.handlers.request import WaitingRequests
from popmq.broker.lite.lite_service import waiting_client
from popmq.broker.pop.long_polling import Waiter, WaiterResult
from popmq.broker.pop.pop_service import PopParams
from popmq.common.protocol.messaging_payloads import OnReply, PopReply, PopRequest, encode_pop_reply

NOTIFY_AGAIN_MS = 100
# Topic, group, and of lite topics the client: each client has lite topics of its own.
NotifyKey = tuple[int, int, int]
SOMETHING = encode_pop_reply(PopReply([], 1, 0))
NOTHING = encode_pop_reply(PopReply([], 0, 0))


class PopNotifications:
    def __init__(self, broker: Broker, clients: ClientRequests, waiting: WaitingRequests) -> None:
        self._broker = broker
        self._clients = clients
        self._waiting = waiting
        self.notified_until_ms: dict[NotifyKey, int] = {}  # until when nobody else is told

    def notify_or_wait(
        self, request: PopRequest, params: PopParams, on_reply: OnReply, number: int
    ) -> None:
        """Answer now, or when something comes, or with nothing when `request.poll_ms` are over."""
        if self._is_ready(params):
            self._tell(params, on_reply)
        elif request.poll_ms <= 0:
            on_reply(NOTHING)
        else:
            self._park(request, params, on_reply, number)

    def on_popped(self, params: PopParams, *, has_messages: bool) -> None:
        """A receive of the group has looked: what it left is for the next one to be told of.

        While messages seem to wait, one receive is notified every NOTIFY_AGAIN_MS.
        """
        key = _notify_key(params)
        if key not in self.notified_until_ms or not (
            has_messages or not self._clients.has_ready(params)
        ):
            return
        del self.notified_until_ms[key]
        topic_id, group_id, client = key
        if has_messages and client:
            self._broker.polling.wake_client((topic_id, group_id), client)
        elif has_messages:
            self._broker.polling.wake(topic_id, group_id)

    def _is_ready(self, params: PopParams) -> bool:
        quiet_ms = self.notified_until_ms.get(_notify_key(params), 0)
        return self._broker.waits.boot_ms() >= quiet_ms and self._clients.has_ready(params)

    def _tell(self, params: PopParams, on_reply: OnReply) -> None:
        key = _notify_key(params)
        self.notified_until_ms[key] = until_ms = self._broker.waits.boot_ms() + NOTIFY_AGAIN_MS
        self._broker.polling.retry_at(key[:2], until_ms, partial(self._forget, key, until_ms))
        on_reply(SOMETHING)

    def _forget(self, key: NotifyKey, until_ms: int) -> None:
        if self.notified_until_ms.get(key) == until_ms:
            del self.notified_until_ms[key]

    def _park(self, request: PopRequest, params: PopParams, on_reply: OnReply, number: int) -> None:
        def attempt() -> WaiterResult:
            if not self._is_ready(params):
                return WaiterResult.EMPTY
            self._waiting.pop(number, None)
            self._tell(params, on_reply)
            return WaiterResult.ANSWERED

        def give_up() -> None:
            self._waiting.pop(number, None)
            on_reply(NOTHING)

        waiter = Waiter(
            key=(params.topic.id, params.group.id),
            filter_key=(PopNotifications, params.queue_id, waiting_client(params)),
            deadline_ms=self._broker.waits.boot_ms() + request.poll_ms,
            attempt=attempt,
            give_up=give_up,
            client=waiting_client(params),
        )
        self._broker.polling.add_waiter(waiter)
        self._waiting[number] = partial(self._broker.polling.remove, waiter)


def _notify_key(params: PopParams) -> NotifyKey:
    return params.topic.id, params.group.id, waiting_client(params)
