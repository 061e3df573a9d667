"""REJECT makes dead letters; LIST_DEAD_LETTERS and REDRIVE take those of a group, in pieces."""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.operations.redrive_service import DeadLetterFilter, reason_of
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    AckResult,
    decode_ack,
    encode_ack_reply,
)
from popmq.common.record.message import StoredMessage, tag_hash
from popmq.common.record.timer_token import FiringToken
from popmq.common.record.transaction_token import TransactionEndToken
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb

LETTERS_A_STEP = 32
LETTERS_LIMIT = 1_000  # of one request
REPLY_BYTES = 8 << 20
SCANNED_LIMIT = 20_000  # a request looks through so many, and says where to go on


_SYSTEM_GROUPS = frozenset(
    name.removeprefix(topics.DLQ_PREFIX)
    for name in (topics.TIMER_DLQ_TOPIC, topics.TRANSACTION_DLQ_TOPIC)
)


class _Letters:
    """The dead letters that a request means: its group's at this broker, from an offset on."""

    def __init__(
        self, broker: Broker, *, group: str, at: str, from_offset: int, limit: int
    ) -> None:
        if not 0 <= limit <= LETTERS_LIMIT:
            raise Refused(Code.BAD_REQUEST, f"limit {limit}: a request takes 0 to {LETTERS_LIMIT}")
        if from_offset < 0:
            raise Refused(Code.BAD_REQUEST, f"offset {from_offset} is below 0")
        self.name = broker.settings.broker.name
        self.broker = broker
        self.meant = at in ("", self.name)
        self.topic = broker.registry.find_topic(topics.dlq_topic(group))
        self.offset = self.end = 0
        if self.meant and self.topic is not None:
            queue = broker.store.queue(self.topic.id, 0)
            self.end = queue.count
            self.offset = max(from_offset, queue.min_offset)

    def still_there(self) -> TopicConfig | None:
        """The topic, unless it was deleted since; what expired since is passed over."""
        if not self.meant or self.topic is None:
            return None
        topic = self.broker.registry.topic_by_id(self.topic.id)
        if topic is not None:
            queue = self.broker.store.queue(topic.id, 0)
            self.offset = max(self.offset, queue.min_offset)
        return topic


def reject(broker: Broker, request: Request) -> ResumableRead[bytes]:
    """Dead letters at once, by receipt handle; one result per handle, in order."""
    return _reject(broker, decode_ack(request.body))


def _reject(broker: Broker, rejected: AckRequest) -> ResumableRead[bytes]:
    results: list[AckResult] = []
    topic, group = rejected.topic, rejected.group
    for handle in rejected.handles:
        move = partial(broker.pop.acks.reject, topic=topic, group=group, handle=handle)
        try:
            yield from read_now(move)
            results.append(AckResult())
        except PopmqError as error:
            results.append(AckResult(error.code, str(error)))
    return encode_ack_reply(results)


def list_dead_letters(broker: Broker, request: Request) -> ResumableRead[bytes]:
    requested = pb.ListDeadLettersRequest.FromString(request.body)
    # Those of system groups too: operators have to see which messages were given up.
    if requested.group not in _SYSTEM_GROUPS:
        topics.check_group_name(requested.group)
    letters = _Letters(
        broker,
        group=requested.group,
        at=requested.broker,
        from_offset=requested.from_offset,
        limit=requested.limit,
    )
    return _list(broker, requested, letters)


def _list(
    broker: Broker, requested: pb.ListDeadLettersRequest, letters: _Letters
) -> ResumableRead[bytes]:
    reply = pb.ListDeadLettersReply(status=pb.Status(code=Code.OK, message="OK"))
    limit = requested.limit or LETTERS_LIMIT
    size = damaged = 0
    while True:
        cold = None
        for _ in range(LETTERS_A_STEP):
            topic = letters.still_there()
            full = len(reply.letters) >= limit or size >= REPLY_BYTES
            if topic is None or full or letters.offset >= letters.end:
                if damaged:
                    reply.incomplete = f"{damaged} dead letters are damaged"
                if letters.meant:
                    reply.ranges.add(
                        broker=letters.name, next_offset=letters.offset, end_offset=letters.end
                    )
                return reply.SerializeToString()
            try:
                letter = broker.operations.redrives.letter(topic, letters.offset)
            except ColdRead as error:
                cold = error
                break
            letters.offset += 1
            if letter is None:
                damaged += 1
                continue
            encoded = _to_wire(broker, topic, letter, body=requested.bodies)
            size += encoded.ByteSize()
            reply.letters.append(encoded)
        yield cold


def _to_wire(
    broker: Broker, topic: TopicConfig, letter: StoredMessage, *, body: bool
) -> pb.DeadLetter:
    header, token = letter.header, letter.token
    encoded = pb.DeadLetter(
        broker=broker.settings.broker.name,
        queue_offset=header.queue_offset,
        position=header.position,
        dead_ms=header.wall_ms,
        attempts=letter.attempt,
        redriven=broker.deliveries.redriven.has(topic.id, header.queue_offset),
        head=letter.head if body else b"",
        properties=letter.properties,
    )
    if isinstance(letter.any_token, TransactionEndToken):
        origin = broker.registry.topic_by_id(letter.any_token.topic_id)
        encoded.reason = "transaction without an end"
        encoded.origin_topic = origin.name if origin else ""
    elif isinstance(letter.any_token, FiringToken):
        encoded.reason = "topic deleted"
    elif token is not None:
        origin = broker.registry.topic_by_id(token.topic_id)
        encoded.reason = reason_of(token)
        encoded.origin_topic = origin.name if origin else ""
        encoded.origin_queue_id = token.queue_id
        encoded.origin_offset = token.queue_offset
        encoded.first_delivery_ms = broker.wall_ms_of(token.first_log_ms)
        encoded.last_delivery_ms = broker.wall_ms_of(token.last_log_ms)
    return encoded


def redrive(broker: Broker, request: Request) -> ResumableRead[bytes]:
    """Every step redrives some; what it did counts, whatever becomes of the reply."""
    requested = pb.RedriveRequest.FromString(request.body)
    if requested.group in _SYSTEM_GROUPS:
        raise Refused(
            Code.ILLEGAL_CONSUMER_GROUP,
            f"{requested.group} is a system group: no client consumes as that group, so its dead "
            "letters have nowhere to go back to",
        )
    group = broker.registry.group(requested.group)
    letters = _Letters(
        broker,
        group=requested.group,
        at=requested.broker,
        from_offset=requested.from_offset,
        limit=requested.limit,
    )
    if requested.end_offset:
        letters.end = min(letters.end, requested.end_offset)
    return _redrive(broker, group, letters, requested, _filter(broker, requested))


def _redrive(
    broker: Broker,
    group: SubscriptionGroup,
    letters: _Letters,
    requested: pb.RedriveRequest,
    accepted: DeadLetterFilter,
) -> ResumableRead[bytes]:
    progress = pb.Redriven(broker=letters.name, reason=requested.reason)
    limit = requested.limit or LETTERS_LIMIT
    scanned = 0
    while True:
        if not requested.dry_run:
            broker.store.check_admission()
        cold = None
        for _ in range(LETTERS_A_STEP):
            topic = letters.still_there()
            if broker.registry.group_by_id(group.id) is None:
                raise Refused(Code.CONSUMER_GROUP_NOT_FOUND, "the group was deleted meanwhile")
            full = progress.redriven >= limit or scanned >= SCANNED_LIMIT
            if topic is None or full or letters.offset >= letters.end:
                progress.next_offset, progress.end_offset = letters.offset, letters.end
                return pb.RedriveReply(
                    status=pb.Status(code=Code.OK, message="OK"),
                    progress=[progress] if letters.meant else [],
                ).SerializeToString()
            try:
                letter = _unredriven(broker, topic, letters.offset, progress)
            except ColdRead as error:
                cold = error
                break
            if letter is not None and not accepted.accepts(letter):
                progress.filtered += 1
            elif letter is not None and broker.operations.redrives.origin(letter) is None:
                progress.orphaned += 1
            elif letter is not None:
                if not requested.dry_run:
                    broker.operations.redrives.redrive(group, topic, letter)
                progress.redriven += 1
            scanned += 1
            letters.offset += 1
        yield cold


def _unredriven(
    broker: Broker, topic: TopicConfig, offset: int, progress: pb.Redriven
) -> StoredMessage | None:
    """The dead letter; None, counted, when it is damaged or was redriven before."""
    if broker.deliveries.redriven.has(topic.id, offset):
        progress.already += 1
        return None
    letter = broker.operations.redrives.letter(topic, offset)
    if letter is None:
        progress.damaged += 1
    return letter


def _filter(broker: Broker, request: pb.RedriveRequest) -> DeadLetterFilter:
    return DeadLetterFilter(
        topic_id=broker.registry.topic(request.topic).id if request.topic else None,
        tag_hash=tag_hash(request.tag) if request.HasField("tag") else None,
        key=request.key.encode() if request.HasField("key") else None,
        after_ms=request.after_ms,
        before_ms=request.before_ms or None,
        reason=request.reason,
    )
