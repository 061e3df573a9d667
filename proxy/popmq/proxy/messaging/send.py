"""SendMessage: every message of a request is stored, or refused, by itself.

RocketMQ makes one batch of several messages and answers for one of them; here each gets its own
entry and its own code.  A NORMAL message goes elsewhere while its broker cannot be reached, a
FIFO message never does (D11): its group's order is worth more than one send; nor does one of a
lite topic.  A message with a
delivery time comes back with a recall handle, unless it is visible at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from popmq.common.address import host_of
from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.loop_iteration import CallSoon, at_once
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutResult,
    decode_put_reply,
    encode_put_head,
    id_tail,
    put_entry,
)
from popmq.common.record.message import tag_hash
from popmq.common.record.message_deadline import with_deadline
from popmq.common.record.send_fingerprint import sender_hash
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, TopicConfig, check_topic_name
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.brokers.request_batcher import RequestBatcher
from popmq.proxy.messaging.delay import deadline_of, delay_of
from popmq.proxy.messaging.placement import choose_queue
from popmq.proxy.messaging.publishers import Publishers, Sender
from popmq.proxy.messaging.send_batch import SendBatch, send_reply
from popmq.proxy.rpc.convert import (
    SentMessage,
    sent_messages,
    status_only,
)
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.rpc.validate import (
    check_message,
    check_stored_size,
    check_type,
    check_writable,
)

MAX_PUT_BYTES = 16 << 20
MAX_PUT_ENTRIES = 4_096

Results = Sequence[PutResult] | PopmqError


class _Placed(NamedTuple):
    """A message that passed every check; `number` is its place in the request."""

    number: int
    key: str
    entry: PutEntry
    broker: str
    movable: bool


class SendMessage:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        clock: Clock,
        publishers: Publishers,
        soon: CallSoon = at_once,
    ) -> None:
        self._brokers = brokers
        self.puts = RequestBatcher(Kind.PUT, decode_put_reply, MAX_PUT_ENTRIES, soon)
        self._publishers = publishers
        self._routes = routes
        self._limits = settings.message
        self._timer_limits = settings.timer
        self._auto_create = settings.topic.auto_create
        self._clock = clock

    def put(
        self,
        rpc: Rpc,
        topic: TopicConfig,
        broker: str,
        entries: Sequence[PutEntry],
        then: Callable[[Sequence[PutResult]], None],
    ) -> None:
        """Store checked messages at that broker group and no other: their client placed them."""

        def answered(answer: Results, _at_once: bool) -> None:
            if isinstance(answer, PopmqError):
                if answer.code in (Code.TOPIC_NOT_FOUND, Code.OTHER_INCARNATION):
                    self._routes.forget_topic(topic.name)
                raise answer
            rpc.metrics.sends += sum(result.code == Code.OK for result in answer)
            then(answer)

        port, timeout_ms = self._brokers.port(broker), rpc.timeout_ms()
        if not self._brokers.has_master(broker):
            raise Unavailable(f"broker {broker} has no master now")
        head, tail = self.head(topic), id_tail(topic.id)
        parts = [put_entry(entry) for entry in entries]
        self.puts.add(rpc, port, head, timeout_ms, parts, answered, tail)

    def settle_one(
        self,
        rpc: Rpc,
        topic: TopicConfig,
        broker: str,
        result: PutResult | PopmqError,
        at_once: bool,
    ) -> None:
        """What came of the one message of a call that its lane had placed."""
        sent = sent_messages(rpc.data)
        batch = SendBatch(rpc, topic, sent)
        if not isinstance(result, PopmqError):
            batch.settle(0, result, broker)
            return
        brokers = tuple(self._brokers.names()) or (broker,)  # at least the one that refused it
        outcome = self._checked(0, sent[0], topic, brokers, rpc)
        if isinstance(outcome, PopmqError):
            batch.settle(0, outcome)
        else:
            self._answered(batch, broker, (outcome,), brokers, topic.id, result, at_once)

    def head(self, topic: TopicConfig) -> bytes:
        return encode_put_head(topic.name, self._auto_create)

    def start(self, rpc: Rpc) -> None:
        sent = sent_messages(rpc.data)
        topic = _one_topic(sent)
        check_topic_name(topic)
        self._routes.topic_of_send(topic, rpc.guard(partial(self._put, rpc, sent, False)))

    def _put(
        self, rpc: Rpc, sent: Sequence[SentMessage], asked_again: bool, topic: TopicConfig
    ) -> None:
        check_writable(topic)
        brokers = tuple(self._brokers.names())
        outcomes = [
            self._checked(index, message, topic, brokers, rpc) for index, message in enumerate(sent)
        ]
        refused = [
            (i, outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, PopmqError)
        ]
        conflict = any(
            error.code is Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE for _, error in refused
        )
        if conflict and not asked_again:
            # The topic may have been altered since it was described.
            self._routes.forget_topic(topic.name)
            self._routes.topic_of_send(topic.name, rpc.guard(partial(self._put, rpc, sent, True)))
            return
        batch = SendBatch(rpc, topic, sent)
        for index, error in refused:
            batch.settle(index, error)
        placed = [outcome for outcome in outcomes if isinstance(outcome, _Placed)]
        if any(placed_message.entry.type == MessageType.TRANSACTION for placed_message in placed):
            self._publishers.add_topic(Sender(rpc.client_id, host_of(rpc.call.peer)), topic.name)
        self._dispatch(batch, placed, brokers)

    def _checked(
        self,
        index: int,
        message: SentMessage,
        topic: TopicConfig,
        brokers: Sequence[str],
        rpc: Rpc,
    ) -> _Placed | PopmqError:
        try:
            return self._place(index, message, topic, brokers, rpc)
        except PopmqError as error:
            return error

    def _place(
        self,
        index: int,
        message: SentMessage,
        topic: TopicConfig,
        brokers: Sequence[str],
        rpc: Rpc,
    ) -> _Placed:
        facts = message.facts()
        now_ms = self._clock.wall_ms()
        check_message(facts, self._limits)
        kind = check_type(facts, topic)
        delay = delay_of(facts, self._timer_limits, now_ms=now_ms)
        deadline_ms = deadline_of(facts, delay, now_ms=now_ms)
        sender, peer = sender_hash(rpc.client_id), rpc.call.peer
        head, properties = message.slices(kind, sender=sender, peer=peer, now_ms=now_ms)
        due_ms = delay.due_ms
        if deadline_ms:
            properties = with_deadline(properties, deadline_ms)
            due_ms = due_ms or 1  # one that is over: the broker looks for a deadline too
        check_stored_size(len(head) + len(properties), self._limits)
        if not brokers:
            raise Unavailable("no broker is known yet")
        stays = facts.message_group or facts.lite_topic
        key = stays or facts.message_id
        places = self.places(topic, stays, brokers)
        broker, queue = choose_queue(key, places, topic.queues)
        if kind is MessageType.PRIORITY:
            queue = min(facts.priority, topic.queues - 1)
        entry = PutEntry(
            kind,
            head,
            properties,
            tag_hash=tag_hash(facts.tag),
            queue_id=queue,
            due_ms=facts.recovery_ms or 0 if kind is MessageType.TRANSACTION else due_ms,
            message_id=facts.message_id,
            spread_ms=delay.spread_ms,
        )
        return _Placed(index, key, entry, broker, not stays)

    def places(self, topic: TopicConfig, group: str, brokers: Sequence[str]) -> Sequence[str]:
        """The broker groups that the message is placed over; `brokers` are those known now.

        Message groups and lite topics are placed over the topic's own list, also over groups of it
        that are absent, so that a key never moves.  The list is empty only for a topic that an
        older broker owns.  Other messages go to any known group that takes messages.
        """
        if group and topic.brokers:
            return topic.brokers
        if len(brokers) == 1:
            return brokers
        return [name for name in brokers if self._brokers.accepts_sends(name)] or brokers

    def _dispatch(
        self, batch: SendBatch, placed: Sequence[_Placed], brokers: Sequence[str]
    ) -> None:
        by_broker: dict[str, list[_Placed]] = {}
        for placed_message in placed:
            by_broker.setdefault(placed_message.broker, []).append(placed_message)
        for broker, group in by_broker.items():
            for part in _parts(group):
                self._ask(batch, broker, part, brokers)

    def _ask(
        self, batch: SendBatch, broker: str, part: Sequence[_Placed], brokers: Sequence[str]
    ) -> None:
        others = [name for name in brokers if name != broker]
        if not self._brokers.has_master(broker) and any(map(self._brokers.has_master, others)):
            part = self._without_movable(batch, broker, part, others)
            if not part:
                return

        answered = partial(self._answered, batch, broker, part, brokers, batch.topic.id)
        try:
            port = self._brokers.awaited_port(broker)
            timeout_ms = batch.rpc.timeout_ms()
        except PopmqError as error:
            answered(error, True)
            return
        entries = [put_entry(placed_message.entry) for placed_message in part]
        topic = batch.topic
        head, tail = self.head(topic), id_tail(topic.id)
        self.puts.add(batch.rpc, port, head, timeout_ms, entries, answered, tail)

    def _answered(
        self,
        batch: SendBatch,
        broker: str,
        part: Sequence[_Placed],
        brokers: Sequence[str],
        placed_for: int,
        answer: Results,
        at_once: bool,
    ) -> None:
        """What the broker said of messages that were placed there, over those `brokers`, for the
        topic of that id."""
        if not isinstance(answer, PopmqError):
            self._stored(batch, part, answer)
        elif answer.code is Code.OTHER_INCARNATION:
            self._place_again(batch, part, placed_for)
        elif at_once and answer.code is Code.HA_NOT_AVAILABLE:
            self._elsewhere(batch, answer, part, [name for name in brokers if name != broker])
        else:
            self._stored(batch, part, answer)

    def _place_again(self, batch: SendBatch, part: Sequence[_Placed], placed_for: int) -> None:
        """The topic was deleted and made again: place these for the new one."""
        rpc, name = batch.rpc, batch.topic.name

        def described(topic: TopicConfig | PopmqError) -> None:
            if isinstance(topic, TopicConfig) and topic.id == placed_for:
                topic = Unavailable(f"topic {name} is being made again: try again")
            if isinstance(topic, PopmqError):
                self._stored(batch, part, topic)
                return
            batch.topic = topic
            brokers = tuple(self._brokers.names())
            placed: list[_Placed] = []
            for placed_message in part:
                outcome = self._checked(
                    placed_message.number,
                    batch.sent[placed_message.number],
                    topic,
                    brokers,
                    rpc,
                )
                if isinstance(outcome, PopmqError):
                    batch.settle(placed_message.number, outcome)
                else:
                    placed.append(outcome)
            self._dispatch(batch, placed, brokers)

        if batch.topic.id == placed_for:  # else another part has asked already
            self._routes.forget_topic(name)
        self._routes.topic_of_send(name, lambda topic: rpc.run(described, topic))

    def _without_movable(
        self, batch: SendBatch, broker: str, part: Sequence[_Placed], others: Sequence[str]
    ) -> Sequence[_Placed]:
        """Send elsewhere what may go there; the rest waits for this broker's next master."""
        error = Unavailable(f"broker {broker} has no master now")
        self._elsewhere(
            batch,
            error,
            [placed_message for placed_message in part if placed_message.movable],
            others,
        )
        return [placed_message for placed_message in part if not placed_message.movable]

    def _elsewhere(
        self, batch: SendBatch, error: PopmqError, part: Sequence[_Placed], brokers: Sequence[str]
    ) -> None:
        moved: list[_Placed] = []
        for placed_message in part:
            if not placed_message.movable or not brokers:
                batch.settle(placed_message.number, error)
                continue
            broker, queue = choose_queue(placed_message.key, brokers, batch.topic.queues)
            if placed_message.entry.type == MessageType.PRIORITY:
                queue = placed_message.entry.queue_id
            moved.append(_moved(placed_message, broker, queue))
        self._dispatch(batch, moved, brokers)

    def _stored(self, batch: SendBatch, part: Sequence[_Placed], answer: Results) -> None:
        if isinstance(answer, PopmqError):
            if answer.code is Code.TOPIC_NOT_FOUND:
                self._routes.forget_topic(batch.topic.name)
            for placed_message in part:
                batch.settle(placed_message.number, answer)
            return
        for placed_message, result in zip(part, answer, strict=True):
            batch.settle(placed_message.number, result, placed_message.broker)


def refuse_send(request: bytes, error: PopmqError) -> Sequence[bytes]:
    """Every message of the request is refused alike; clients read the entries too."""
    try:
        ids = [message.message_id for message in sent_messages(request)]
    except PopmqError:
        ids = []
    if not ids:
        return (status_only(error),)
    refused = [PutResult(error.code, str(error))] * len(ids)
    return (send_reply(refused, ids, [""] * len(ids)),)


def _one_topic(sent: Sequence[SentMessage]) -> str:
    if not sent:
        raise Refused(Code.MESSAGE_CORRUPTED, "the request has no message to send")
    if len(sent) == 1:
        return sent[0].topic
    topics = sorted({message.topic for message in sent})
    if len(topics) > 1:
        raise Refused(
            Code.MESSAGE_CORRUPTED,
            f"one request has messages of topics {topics[0]!r} and {topics[1]!r}: "
            "all must have the same",
        )
    return topics[0]


def _moved(placed_message: _Placed, broker: str, queue: int) -> _Placed:
    there = placed_message.entry._replace(queue_id=queue)
    return _Placed(placed_message.number, placed_message.key, there, broker, placed_message.movable)


def _parts(group: Sequence[_Placed]) -> Iterator[Sequence[_Placed]]:
    """The messages for one broker in their order, in requests that fit a frame."""
    part: list[_Placed] = []
    size = 0
    for placed_message in group:
        own = len(placed_message.entry.head) + len(placed_message.entry.properties)
        if part and (size + own > MAX_PUT_BYTES or len(part) >= MAX_PUT_ENTRIES):
            yield part
            part, size = [], 0
        part.append(placed_message)
        size += own
    if part:
        yield part
