"""POP_MESSAGE, ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME: pop over Remoting.

These are receive, ack and change of popmq, so such a consumer and one that speaks gRPC may be in
one group.  A client keeps eight words about each delivery in a property and returns them with its
ack; the receipt handle goes as a ninth.
"""

from functools import partial

from popmq.common.clock import Clock
from popmq.common.errors import Code, InvalidReceiptHandle, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    ChangeRequest,
    Delivery,
    Kind,
    PopReply,
    PopRequest,
    decode_ack_reply,
    decode_pop_reply,
    encode_ack,
    encode_change,
    encode_pop,
)
from popmq.common.settings.settings import Settings
from popmq.common.topics import check_group_name, check_readable_topic_name
from popmq.common.wire.pull_pb2 import PulledMessage
from popmq.proxy.brokers.broker_ports import BrokerPorts, broker_of_handle
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.ack import group_id, handle_bytes
from popmq.proxy.remoting.message_conversion import stored_form
from popmq.proxy.remoting.pulling import BROKER_RESERVE_MS, MAX_BATCH, MAX_REPLY_BYTES
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.result_codes import ResultCode
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.sessions import expression_of
from popmq.proxy.remoting.stored_message import encode_stored
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.rpc.validate import change_invisible_ms, receive_invisible_ms

_HANDLE_WORD = 8  # after start offset, pop time, invisible time, 0, 0, broker, queue, offset


class Pops:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        addresses: Addresses,
        clock: Clock,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._settings = settings
        self._addresses = addresses
        self._clock = clock
        self._waiting: dict[Rpc, Request] = {}
        self._draining = False

    def pop(self, request: Request) -> None:
        """Of all queues of the broker group that is named, whatever queue is."""
        topic, group = _topic_and_group(request)
        limits = self._settings.pop
        kind, expression = request.text("expType", "TAG"), request.text("exp", "*")
        filter_type, checked = expression_of(kind, expression or "*")
        poll_ms = 0 if self._draining else max(0, request.number("pollTime", 0))
        invisible_ms = request.number("invisibleTime")
        asked = PopRequest(
            topic=topic,
            group=group,
            client_id=request.rpc.client_id,
            limit=min(max(1, request.number("maxMsgNums", MAX_BATCH)), MAX_BATCH, limits.max_batch),
            invisible_ms=receive_invisible_ms(invisible_ms, auto_renew=False, limits=limits),
            poll_ms=min(poll_ms, self._settings.poll.max_ms),
            filter_type=filter_type,
            expression=checked,
            reply_bytes=min(MAX_REPLY_BYTES, limits.reply_bytes),
        )
        broker = request.broker(self._brokers.names(), "")
        rpc = request.rpc
        rpc.metrics.receives += 1
        self._waiting[rpc] = request
        rpc.on_cancelled(partial(self._forget, rpc))
        then = partial(self._popped, request, broker, self._clock.boot_ms())

        def ask(topic_id: int, group_id: int) -> None:
            if rpc not in self._waiting:
                return  # it was answered when this proxy began to drain
            body = encode_pop(asked._replace(topic_id=topic_id, group_id=group_id))
            port, timeout_ms = self._brokers.port(broker), asked.poll_ms + BROKER_RESERVE_MS
            rpc.send_request(port, Kind.POP, body, timeout_ms, then)

        self._routes.ids(topic, group, partial(rpc.run, ask))

    def ack(self, request: Request) -> None:
        topic, group = _topic_and_group(request)
        handle = _handle(request)
        asked = AckRequest(topic, group, [handle], group_id(self._brokers, self._routes, group))

        def acked(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            (result,) = decode_ack_reply(answer)
            if result.code != Code.OK:
                raise Refused(Code(result.code), result.message)
            request.rpc.metrics.acks += 1
            request.ok()

        _, port = broker_of_handle(self._brokers, handle)
        rpc = request.rpc
        rpc.send_request(port, Kind.ACK, encode_ack(asked), rpc.timeout_ms(), acked)

    def change(self, request: Request) -> None:
        """A consumer that failed gives its message another invisible time, and forgets it."""
        topic, group = _topic_and_group(request)
        handle = _handle(request)
        invisible_ms = change_invisible_ms(request.number("invisibleTime"), self._settings.pop)
        known = group_id(self._brokers, self._routes, group)
        asked = ChangeRequest(topic, group, handle, invisible_ms, known)

        def changed(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            request.rpc.metrics.changes += 1
            pop_time = str(self._clock.wall_ms())
            request.ok({"popTime": pop_time, "invisibleTime": str(invisible_ms), "reviveQid": "0"})

        _, port = broker_of_handle(self._brokers, handle)
        rpc = request.rpc
        rpc.send_request(port, Kind.CHANGE, encode_change(asked), rpc.timeout_ms(), changed)

    def drain(self) -> None:
        """Answer the held pops with nothing; their clients pop elsewhere."""
        self._draining = True
        for rpc, request in list(self._waiting.items()):
            self._forget(rpc)
            rpc.cancel_requests()
            request.end(ResultCode.POLLING_TIMEOUT, "the server stops")

    def _forget(self, rpc: Rpc) -> None:
        self._waiting.pop(rpc, None)

    def _popped(self, request: Request, broker: str, began_ms: int, answer: Answer) -> None:
        self._forget(request.rpc)
        if isinstance(answer, PopmqError):
            raise answer
        reply = decode_pop_reply(answer)
        if not reply.deliveries:
            request.end(ResultCode.POLLING_TIMEOUT, "no new message")
            return
        request.rpc.metrics.received += len(reply.deliveries)
        # By the client's clock: it drops what has been invisible for its time.
        took_ms = self._clock.boot_ms() - began_ms
        popped_ms = request.number("bornTime", self._clock.wall_ms()) + took_ms
        self._answer(request, broker, popped_ms, reply)

    def _answer(self, request: Request, broker: str, popped_ms: int, reply: PopReply) -> None:
        invisible_ms = request.number("invisibleTime")
        offsets: dict[int, list[int]] = {}
        parts = []
        for delivery in reply.deliveries:
            offsets.setdefault(delivery.queue_id, []).append(delivery.queue_offset)
            words = (
                *(delivery.queue_offset, popped_ms, invisible_ms, 0, 0),
                *(broker, delivery.queue_id, delivery.queue_offset, delivery.handle.decode()),
            )
            parts.append(self._stored(request, delivery, " ".join(map(str, words))))
        starts = (f"0 {queue} {min(queue_offsets)}" for queue, queue_offsets in offsets.items())
        lists = (
            f"0 {queue} {','.join(map(str, queue_offsets))}"
            for queue, queue_offsets in offsets.items()
        )
        fields = {
            "popTime": str(popped_ms),
            "invisibleTime": str(invisible_ms),
            "reviveQid": "0",
            "restNum": str(reply.remaining),
            # With them the client takes the words of each message and makes none by itself.
            "startOffsetInfo": ";".join(starts),
            "msgOffsetInfo": ";".join(lists),
        }
        request.ok(fields, b"".join(parts))

    def _stored(self, request: Request, delivery: Delivery, words: str) -> bytes:
        form = stored_form(
            PulledMessage(
                queue_offset=delivery.queue_offset,
                stored_ms=delivery.stored_ms,
                head=delivery.head,
                properties=delivery.properties,
                attempt=delivery.attempt,
            ),
            delivery.queue_id,
            store_host=self._addresses.of(request.connection),
            cluster=self._settings.cluster.name,
            body_limit=self._settings.lean.max_inflated_bytes,
        )
        # Before the user's own, of which the last do not leave when there is no room.
        return encode_stored(form._replace(properties={"POP_CK": words, **form.properties}))


def _topic_and_group(request: Request) -> tuple[str, str]:
    topic, group = request.text("topic"), request.text("consumerGroup")
    check_readable_topic_name(topic)
    check_group_name(group)
    return topic, group


def _handle(request: Request) -> bytes:
    words = request.text("extraInfo").split(" ")
    if len(words) <= _HANDLE_WORD:
        raise InvalidReceiptHandle(
            f"extraInfo of {len(words)} words has no receipt handle: it is not of a pop here"
        )
    return handle_bytes(words[_HANDLE_WORD])
