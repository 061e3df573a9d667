"""CONSUMER_SEND_MSG_BACK and what belongs to it: messages that a consumer could not process.

They come again from `%RETRY%<group>` after the delay of their level, and become dead letters when
they were consumed often enough.  A client whose send-back fails sends the message to the retry
topic by itself; that is served here too.  VIEW_MESSAGE_BY_ID reads a message by the same number.
"""

from collections.abc import Callable
from functools import partial

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import tag_hash
from popmq.common.settings.settings import Settings
from popmq.common.topics import (
    MessageType,
    SubscriptionGroup,
    check_group_name,
    group_of_pull_retry,
)
from popmq.common.wire import pull_pb2 as wire
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.remoting.message_conversion import (
    DELAY_LEVELS_MS,
    RemotingMessage,
    ReturnedCopy,
    returned_copy,
    stored_form,
)
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.stored_message import encode_stored, offset_message_id
from popmq.proxy.rpc.convert import read_reply
from popmq.proxy.rpc.rpc import Answer
from popmq.proxy.rpc.validate import check_sizes, check_stored_size

FIRST_LEVEL = 3  # of a message that was consumed once, if its client names none


class Returns:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        addresses: Addresses,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._settings = settings
        self._addresses = addresses

    def send_back(self, request: Request) -> None:
        """By the number that its delivery had."""
        group = request.text("group")
        check_group_name(group)
        broker = request.broker(self._brokers.names(), "")
        self._read(request, broker, partial(self._read_to_return, request, broker, group))

    def _read_to_return(
        self, request: Request, broker: str, group: str, stored: wire.ReadMessageReply
    ) -> None:
        copy = returned_copy(stored.message, stored.topic, stored.queue_id)
        asked = wire.SendBackRequest(
            group=group,
            topic=copy.origin_topic,
            queue_id=copy.first_place[0],
            queue_offset=copy.first_place[1],
            head=stored.message.head,
            tag_hash=tag_hash(copy.tag),
            attempt=copy.reconsume_times + 1,
            position=stored.message.position,
        )
        limit = request.number("maxReconsumeTimes", -1, bits=32)
        if limit >= 0:
            self._return(request, broker, copy, limit, asked)
        else:
            known = partial(self._group_known, request, broker, copy, asked)
            self._routes.group(group, request.rpc.guard(known))

    def _group_known(
        self,
        request: Request,
        broker: str,
        copy: ReturnedCopy,
        asked: wire.SendBackRequest,
        group: SubscriptionGroup,
    ) -> None:
        self._return(request, broker, copy, group.max_attempts - 1, asked)

    def _return(
        self,
        request: Request,
        broker: str,
        copy: ReturnedCopy,
        limit: int,
        asked: wire.SendBackRequest,
    ) -> None:
        level = request.number("delayLevel", 0, bits=32)
        asked.dead = level < 0 or copy.reconsume_times >= limit
        asked.delay_ms = level_ms(level or FIRST_LEVEL + copy.reconsume_times)
        asked.properties = copy.properties(dead=asked.dead)
        self._ask(
            request, broker, Kind.SEND_BACK, asked.SerializeToString(), lambda _: request.ok()
        )

    def send_to_retry_topic(
        self,
        request: Request,
        broker: str,
        topic: str,
        message: RemotingMessage,
        times: int,
        limit: int,
    ) -> None:
        """A client's own send of a message that it could not send back."""
        group = group_of_pull_retry(topic)
        check_group_name(group)
        facts = message.facts()
        check_sizes(facts, self._settings.message)
        origin = message.properties.get("RETRY_TOPIC", "")
        if not origin:
            raise Refused(
                Code.ILLEGAL_TOPIC, f"a message to {topic} has to name its topic as RETRY_TOPIC"
            )
        dead = 0 <= limit < times
        counted = 0 if dead else times  # a dead letter begins to count anew when it is redriven
        head, properties = message.slices(
            origin, MessageType.NORMAL, facts, request.rpc.call.peer, counted
        )
        check_stored_size(len(head) + len(properties), self._settings.message)
        level = message.properties.get("DELAY", "")
        asked = wire.SendBackRequest(
            group=group,
            topic=origin,
            head=head,
            properties=properties,
            tag_hash=tag_hash(facts.tag),
            attempt=max(1, times),
            delay_ms=level_ms(int(level) if level.isdecimal() else FIRST_LEVEL),
            dead=dead,
            dead_if_ordered=True,
        )
        host = self._addresses.of(request.connection)
        fields = {"msgId": offset_message_id(host, 0), "queueId": "0", "queueOffset": "0"}
        body = asked.SerializeToString()
        self._ask(request, broker, Kind.SEND_BACK, body, lambda _: request.ok(fields))

    def view(self, request: Request) -> None:
        """VIEW_MESSAGE_BY_ID: one message, as a pull has it."""
        broker = request.broker(self._brokers.names(), "")
        self._read(request, broker, partial(self._viewed, request))

    def _viewed(self, request: Request, stored: wire.ReadMessageReply) -> None:
        form = stored_form(
            stored.message,
            stored.queue_id,
            store_host=self._addresses.of(request.connection),
            cluster=self._settings.cluster.name,
            body_limit=self._settings.lean.max_inflated_bytes,
        )
        request.ok(body=encode_stored(form))

    def _read(
        self, request: Request, broker: str, then: Callable[[wire.ReadMessageReply], None]
    ) -> None:
        position = request.number("offset")
        if position < 0:
            raise Refused(Code.MESSAGE_NOT_FOUND, f"no message has the number {position}")
        body = wire.ReadMessageRequest(position=position).SerializeToString()
        self._ask(
            request,
            broker,
            Kind.READ_MESSAGE,
            body,
            lambda reply: then(read_reply(wire.ReadMessageReply, reply)),
        )

    def _ask(
        self, request: Request, broker: str, kind: Kind, body: bytes, then: Callable[[bytes], None]
    ) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            then(answer)

        port = self._brokers.port(broker)
        request.rpc.send_request(port, kind, body, request.rpc.timeout_ms(), answered)


def level_ms(level: int) -> int:
    """The delay of a level from 1; a higher one than the last is the last."""
    return DELAY_LEVELS_MS[min(max(level, 1), len(DELAY_LEVELS_MS)) - 1]
