"""The sends: SEND_MESSAGE (10), SEND_MESSAGE_V2 (310), SEND_BATCH_MESSAGE (320), one-way or not.

A message goes into the queue that its client names.  No message id is given to the broker, which
would take a second send of the same Message object for a resend: these clients reuse an id on
purpose.  A half message is one with the property TRAN_MSG.
"""

import secrets
from collections.abc import Sequence
from functools import partial

from popmq.common.clock import Clock
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import PutEntry, PutResult
from popmq.common.record.message import tag_hash
from popmq.common.record.message_deadline import with_deadline
from popmq.common.record.producer_group import with_producer_group
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.settings.settings import Settings
from popmq.common.topics import (
    MessageType,
    TopicConfig,
    check_topic_name,
    group_of_pull_retry,
)
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.delay import deadline_of, delay_of
from popmq.proxy.messaging.send import SendMessage
from popmq.proxy.remoting.message_conversion import RemotingMessage, unpacked
from popmq.proxy.remoting.request import Request
from popmq.proxy.remoting.returns import Returns
from popmq.proxy.remoting.routes import Addresses
from popmq.proxy.remoting.stored_message import (
    joined_ids,
    parse_batch,
    parse_properties,
)
from popmq.proxy.rpc.validate import (
    MessageFacts,
    check_sizes,
    check_stored_size,
    check_type,
    check_writable,
    type_of,
)

# What the letters of SEND_MESSAGE_V2 stand for.
_NAMES = {
    "producerGroup": "a",
    "topic": "b",
    "defaultTopic": "c",
    "defaultTopicQueueNums": "d",
    "queueId": "e",
    "sysFlag": "f",
    "bornTimestamp": "g",
    "flag": "h",
    "properties": "i",
    "reconsumeTimes": "j",
    "unitMode": "k",
    "maxReconsumeTimes": "l",
    "batch": "m",
    "bname": "n",
}


class Sends:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        send: SendMessage,
        settings: Settings,
        clock: Clock,
        addresses: Addresses,
        returns: Returns,
    ) -> None:
        self._returns = returns
        self._brokers = brokers
        self._routes = routes
        self._send = send
        self._limits = settings.message
        self._timer_limits = settings.timer
        self._clock = clock
        self._addresses = addresses

    def send_v1(self, request: Request) -> None:
        self._start(SendHeader(request, short=False))

    def send_v2(self, request: Request) -> None:
        self._start(SendHeader(request, short=True))

    def _start(self, header: "SendHeader") -> None:
        topic = header.text("topic")
        messages = self._messages(header)
        if group_of_pull_retry(topic) and len(messages) == 1:
            request = header.request
            self._returns.send_to_retry_topic(
                request,
                request.broker(self._brokers.names(), header.text("bname", "")),
                topic,
                messages[0],
                max(0, header.number("reconsumeTimes", 0)),
                header.number("maxReconsumeTimes", -1),
            )
            return
        check_topic_name(topic)
        then = partial(self._topic_known, header, messages)
        self._routes.topic_of_send(topic, header.request.rpc.guard(then))

    def _messages(self, header: "SendHeader") -> list[RemotingMessage]:
        body, sys_flag = header.request.command.body, header.number("sysFlag", 0)
        born_ms = header.number("bornTimestamp", 0, bits=64)
        if header.is_batch:
            return [
                RemotingMessage(message.body, _named(message.properties), message.flag, born_ms)
                for message in parse_batch(body)
            ]
        properties = _named(parse_properties(header.text("properties", "")))
        if properties.get("TRAN_MSG") == "true":
            properties.setdefault("PGROUP", header.text("producerGroup", ""))
        body = unpacked(body, sys_flag, self._limits.max_body_bytes)
        return [RemotingMessage(body, properties, header.number("flag", 0), born_ms)]

    def _topic_known(
        self, header: "SendHeader", messages: Sequence[RemotingMessage], topic: TopicConfig
    ) -> None:
        check_writable(topic)
        broker = header.request.broker(self._brokers.names(), header.text("bname", ""))
        queue = header.number("queueId")
        if queue >= topic.queues:
            raise Refused(
                Code.BAD_REQUEST, f"queue {queue} of topic {topic.name}, which has {topic.queues}"
            )
        peer = header.request.rpc.call.peer
        entries = [self._entry(message, topic, max(queue, -1), peer) for message in messages]
        if not entries:
            raise Refused(Code.MESSAGE_BODY_EMPTY, "the batch has no message")
        then = partial(self._stored, header.request, topic, broker, messages)
        self._send.put(header.request.rpc, topic, broker, entries, then)

    def _entry(
        self, message: RemotingMessage, topic: TopicConfig, queue: int, peer: str
    ) -> PutEntry:
        facts, now_ms = message.facts(), self._clock.wall_ms()
        check_sizes(facts, self._limits)
        kind = _kind(facts, topic)
        delay = delay_of(facts, self._timer_limits, now_ms=now_ms)
        head, properties = message.slices(topic.name, kind, facts, peer)
        due_ms = delay.due_ms
        if kind is MessageType.TRANSACTION:
            properties = with_producer_group(properties, message.producer_group())
            due_ms = message.first_check_ms()
        if deadline_ms := deadline_of(facts, delay, now_ms=now_ms):
            properties, due_ms = with_deadline(properties, deadline_ms), due_ms or 1
        check_stored_size(len(head) + len(properties), self._limits)
        tag = tag_hash(facts.tag)
        return PutEntry(kind, head, properties, tag, queue, due_ms, spread_ms=delay.spread_ms)

    def _stored(
        self,
        request: Request,
        topic: TopicConfig,
        broker: str,
        messages: Sequence[RemotingMessage],
        results: Sequence[PutResult],
    ) -> None:
        """A batch whose messages had different results failed; its client sends all of it again."""
        for result in results:
            if result.code != Code.OK:
                raise Refused(Code(result.code), result.message)
        first, ids = results[0], [message.properties["UNIQ_KEY"] for message in messages]
        host = self._addresses.of(request.connection)
        places = [item.queue_id << 48 | item.queue_offset for item in results]
        fields = {
            "msgId": joined_ids(host, places),
            "queueId": str(first.queue_id),
            "queueOffset": str(first.queue_offset),
            "transactionId": first.message or ids[0],
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
        }
        if first.due_ms:
            handle = RecallHandle(topic.name, broker, first.due_ms, ids[0])
            fields["recallHandle"] = handle.encode()
        request.ok(fields)


class SendHeader:
    """The fields of a send by their long names."""

    def __init__(self, request: Request, *, short: bool) -> None:
        self.request = request
        self._names = _NAMES if short else {name: name for name in _NAMES}

    @property
    def is_batch(self) -> bool:
        return self.request.flag(self._names["batch"])

    def text(self, name: str, default: str | None = None) -> str:
        return self.request.text(self._names[name], default)

    def number(self, name: str, default: int | None = None, *, bits: int = 32) -> int:
        return self.request.number(self._names[name], default, bits=bits)


def _named(properties: dict[str, str]) -> dict[str, str]:
    """With a message id: the client's, or one of ours (ali-ons sends none)."""
    properties.setdefault("UNIQ_KEY", secrets.token_hex(16).upper())
    return properties


def _kind(facts: MessageFacts, topic: TopicConfig) -> MessageType:
    """A message without an order key may go into a FIFO topic: its client keeps order by naming the
    queue, as its queue selector says."""
    if topic.type is MessageType.FIFO and type_of(facts) is MessageType.NORMAL:
        return MessageType.FIFO
    return check_type(facts, topic)
