"""LIST_DEAD_LETTERS and REDRIVE: pieces of a group's dead letters, from an offset on."""

from popmq.broker.core.broker import Broker
from popmq.broker.operations.redrive_service import DeadLetterFilter
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.record.message import StoredMessage, tag_hash
from popmq.common.record.timer_token import FiringToken
from popmq.common.record.transaction_token import TransactionEndToken
from popmq.common.topics import TopicConfig
from popmq.common.wire import admin_pb2 as pb

LETTERS_A_STEP = 32
LETTERS_LIMIT = 1_000  # of one request
REPLY_BYTES = 8 << 20
SCANNED_LIMIT = 20_000  # a request looks through so many, and says where to go on


_SYSTEM_GROUPS = frozenset(
    one.removeprefix(topics.DLQ_PREFIX)
    for one in (topics.TIMER_DLQ_TOPIC, topics.TRANSACTION_DLQ_TOPIC)
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
        found = self.broker.registry.topic_by_id(self.topic.id)
        if found is not None:
            queue = self.broker.store.queue(found.id, 0)
            self.offset = max(self.offset, queue.min_offset)
        return found


class ListDeadLettersJob:
    def __init__(self, broker: Broker, request: pb.ListDeadLettersRequest) -> None:
        # Those of system groups too: somebody has to see what was given up.
        if request.group not in _SYSTEM_GROUPS:
            topics.check_group_name(request.group)
        self._letters = _Letters(
            broker,
            group=request.group,
            at=request.broker,
            from_offset=request.from_offset,
            limit=request.limit,
        )
        self._limit = request.limit or LETTERS_LIMIT
        self._bodies = request.bodies
        self._found: list[pb.DeadLetter] = []
        self._size = 0
        self._damaged = 0
        self._broker = broker

    def step(self) -> bytes | None:
        letters = self._letters
        for _ in range(LETTERS_A_STEP):
            topic = letters.still_there()
            full = len(self._found) >= self._limit or self._size >= REPLY_BYTES
            if topic is None or full or letters.offset >= letters.end:
                return self._reply()
            letter = self._broker.redrives.letter(topic, letters.offset)
            letters.offset += 1
            if letter is None:
                self._damaged += 1
                continue
            told = self._to_wire(topic, letter)
            self._size += told.ByteSize()
            self._found.append(told)
        return None

    def _reply(self) -> bytes:
        letters = self._letters
        ranges = [
            pb.DeadLetterRange(
                broker=letters.name, next_offset=letters.offset, end_offset=letters.end
            )
        ]
        damaged = f"{self._damaged} dead letters are damaged" if self._damaged else ""
        return pb.ListDeadLettersReply(
            status=pb.Status(code=Code.OK, message="OK"),
            letters=self._found,
            ranges=ranges if letters.meant else [],
            incomplete=damaged,
        ).SerializeToString()

    def _to_wire(self, topic: TopicConfig, letter: StoredMessage) -> pb.DeadLetter:
        broker, header, token = self._broker, letter.header, letter.token
        told = pb.DeadLetter(
            broker=self._letters.name,
            queue_offset=header.queue_offset,
            position=header.position,
            dead_ms=header.wall_ms,
            attempts=letter.attempt,
            redriven=broker.redriven.has(topic.id, header.queue_offset),
            head=letter.head if self._bodies else b"",
            properties=letter.properties,
        )
        if isinstance(letter.any_token, TransactionEndToken):
            origin = broker.registry.topic_by_id(letter.any_token.topic_id)
            told.reason = "transaction without an end"
            told.origin_topic = origin.name if origin else ""
        elif isinstance(letter.any_token, FiringToken):
            told.reason = "topic deleted"
        elif token is not None:
            origin = broker.registry.topic_by_id(token.topic_id)
            told.reason = token.reason.name.lower().replace("_", " ")
            told.origin_topic = origin.name if origin else ""
            told.origin_queue_id = token.queue_id
            told.origin_offset = token.queue_offset
            told.first_delivery_ms = broker.wall_ms_of(token.first_log_ms)
            told.last_delivery_ms = broker.wall_ms_of(token.last_log_ms)
        return told


class RedriveJob:
    """Every step redrives some; what it did counts, whatever becomes of the reply."""

    def __init__(self, broker: Broker, request: pb.RedriveRequest) -> None:
        self._broker = broker
        if request.group in _SYSTEM_GROUPS:
            raise Refused(
                Code.ILLEGAL_CONSUMER_GROUP,
                f"{request.group} is a system group: nobody consumes as that group, so its dead "
                "letters have nowhere to go back to",
            )
        self._group = broker.registry.group(request.group)
        self._letters = _Letters(
            broker,
            group=request.group,
            at=request.broker,
            from_offset=request.from_offset,
            limit=request.limit,
        )
        if request.end_offset:
            self._letters.end = min(self._letters.end, request.end_offset)
        self._limit = request.limit or LETTERS_LIMIT
        self._dry_run = request.dry_run
        self._filter = _filter(broker, request)
        self._scanned = 0
        self._progress = pb.Redriven(broker=self._letters.name)

    def step(self) -> bytes | None:
        letters, progress = self._letters, self._progress
        if not self._dry_run:
            self._broker.store.check_admission()
        for _ in range(LETTERS_A_STEP):
            topic = letters.still_there()
            if self._broker.registry.group_by_id(self._group.id) is None:
                raise Refused(Code.CONSUMER_GROUP_NOT_FOUND, "the group was deleted meanwhile")
            full = progress.redriven >= self._limit or self._scanned >= SCANNED_LIMIT
            if topic is None or full or letters.offset >= letters.end:
                return self._reply()
            self._take(topic)
            self._scanned += 1
            letters.offset += 1
        return None

    def _take(self, topic: TopicConfig) -> None:
        """One dead letter; ColdRead before anything was done with it."""
        broker, progress = self._broker, self._progress
        if broker.redriven.has(topic.id, self._letters.offset):
            progress.already += 1
            return
        letter = broker.redrives.letter(topic, self._letters.offset)
        if letter is None:
            progress.damaged += 1
        elif not self._filter.accepts(letter):
            progress.filtered += 1
        elif broker.redrives.origin(letter) is None:
            progress.orphaned += 1
        else:
            if not self._dry_run:
                broker.redrives.redrive(self._group, topic, letter)
            progress.redriven += 1

    def _reply(self) -> bytes:
        progress = self._progress
        progress.next_offset, progress.end_offset = self._letters.offset, self._letters.end
        return pb.RedriveReply(
            status=pb.Status(code=Code.OK, message="OK"),
            progress=[progress] if self._letters.meant else [],
        ).SerializeToString()


def _filter(broker: Broker, request: pb.RedriveRequest) -> DeadLetterFilter:
    return DeadLetterFilter(
        topic_id=broker.registry.topic(request.topic).id if request.topic else None,
        tag_hash=tag_hash(request.tag) if request.HasField("tag") else None,
        key=request.key.encode() if request.HasField("key") else None,
        after_ms=request.after_ms,
        before_ms=request.before_ms or None,
    )
