"""RecallMessage: a message whose time has not come is never delivered.

Official clients take MESSAGE_NOT_FOUND for a success, so no refusal here has that code.
"""

from collections.abc import Callable
from functools import partial

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.topics import MessageType, TopicConfig, check_topic_name
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.recall_fan_out import RecallFanOut
from popmq.proxy.rpc.convert import name_of, ok, parse
from popmq.proxy.rpc.rpc import Rpc


class RecallMessage:
    """The broker that the handle names is asked, and those that its timers were moved to; what they
    did survives a crash."""

    def __init__(self, brokers: BrokerPorts, routes: MetadataCache) -> None:
        self._brokers = brokers
        self._routes = routes

    def start(self, rpc: Rpc) -> None:
        request = parse(service.RecallMessageRequest, rpc.data)

        def done(message_id: str) -> None:
            reply = service.RecallMessageResponse(status=ok(), message_id=message_id)
            rpc.reply(reply.SerializeToString())

        self.recall(rpc, name_of(request.topic), request.recall_handle, done)

    def recall(self, rpc: Rpc, topic: str, text: str, done: Callable[[str], None]) -> None:
        """`done` gets the id of the message that is never delivered."""
        check_topic_name(topic)
        handle = RecallHandle.decode(text)
        if handle.topic != topic:
            raise Refused(
                Code.BAD_REQUEST,
                f"the recall handle is of topic {handle.topic!r}, not of {topic!r}",
            )
        self._routes.topic(topic, rpc.guard(partial(self._topic_known, rpc, handle, done)))

    def _topic_known(
        self, rpc: Rpc, handle: RecallHandle, done: Callable[[str], None], topic: TopicConfig
    ) -> None:
        if not topic.type.accepts(MessageType.DELAY):
            raise Refused(
                Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                f"topic {topic.name} takes {topic.type.name} messages: none of them is delayed",
            )
        then = partial(_answered, handle, done)
        RecallFanOut(self._brokers, rpc, handle, then).start()


def _answered(handle: RecallHandle, done: Callable[[str], None], outcome: str) -> None:
    message = f"message {handle.message_id} of topic {handle.topic}"
    match outcome:
        case RecallResult.DONE:
            done(handle.message_id)
        case RecallResult.ALREADY_VISIBLE:
            raise Refused(
                Code.ILLEGAL_DELIVERY_TIME,
                f"{message} is visible already: its time was {handle.due_ms}",
            )
        case RecallResult.NOT_FOUND:
            raise Refused(
                Code.NOT_FOUND,
                f"broker {handle.broker} has no {message} that waits for {handle.due_ms}",
            )
        case other:
            raise Refused(Code.INTERNAL_ERROR, f"broker {handle.broker} answered {other!r}")
