"""RESET_OFFSET: all queues of a request are looked up first, then set at one go."""

from popmq.broker.core.broker import Broker
from popmq.broker.operations.offset_reset import QueueReset, ResetTarget, ResetTo
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.topics import MessageType, TopicConfig
from popmq.common.wire import admin_pb2 as pb

_QUEUES_A_STEP = 16


class ResetJob:
    def __init__(self, broker: Broker, request: pb.ResetOffsetRequest) -> None:
        self._broker = broker
        self._reset = broker.offset_reset
        self._dry_run = request.dry_run
        self._target = _target(request)
        topics.check_readable_topic_name(request.topic)
        self._topic = broker.registry.topic(request.topic)
        self._group = broker.registry.group(request.group)
        queue_id = request.queue_id if request.HasField("queue_id") else None
        self._reset.check(self._topic, self._target, queue_id)
        every = broker.registry.queue_ids(self._topic)
        self._queue_ids = list(every) if queue_id is None else [queue_id]
        # Without a word about them, pending retries are skipped with everything else only.
        self._skip_retries = self._target.to is ResetTo.NEWEST and queue_id is None
        if request.HasField("skip_retries"):
            if request.skip_retries and queue_id is not None:
                raise Refused(
                    Code.BAD_REQUEST,
                    "pending retries are of all queues together: they cannot be skipped for one",
                )
            self._skip_retries = request.skip_retries
        self._offsets: list[int] = []

    def step(self) -> bytes | None:
        looked_up = len(self._offsets)
        for queue_id in self._queue_ids[looked_up : looked_up + _QUEUES_A_STEP]:
            self._offsets.append(self._reset.offset_of(self._topic, queue_id, self._target))
        if len(self._offsets) < len(self._queue_ids):
            return None
        return pb.ResetOffsetReply(
            status=pb.Status(code=Code.OK, message="OK"),
            queues=[
                pb.ResetQueue(
                    broker=self._broker.settings.broker.name,
                    topic=one.topic.name,
                    queue_id=one.queue_id,
                    before=one.before,
                    after=one.after,
                    in_flight=one.in_flight,
                )
                for one in self._apply()
            ],
        ).SerializeToString()

    def _apply(self) -> list[QueueReset]:
        group = self._broker.registry.group_by_id(self._group.id)
        topic = self._broker.registry.topic_by_id(self._topic.id)
        if group is None or topic is None:
            raise Refused(Code.NOT_FOUND, "the group or the topic was deleted meanwhile")
        there = set(self._broker.registry.queue_ids(topic))  # lite topics may have ended
        places: list[tuple[TopicConfig, int, int]] = [
            (topic, queue_id, offset)
            for queue_id, offset in zip(self._queue_ids, self._offsets, strict=True)
            if queue_id in there
        ]
        side = self._reset.side_topic(group, topic)
        if side is not None and self._skip_retries:
            # Those that are not confirmed yet are pending too, and stand in front of the reset.
            places.append((side, 0, self._broker.store.dispatch.next_offset(side.id, 0)))
        if self._dry_run:
            return [self._reset.plan(group, *place) for place in places]
        done = [self._reset.apply(group, *place) for place in places]
        polling = self._broker.polling
        if topic.type is MessageType.LITE:
            for queue_id in self._queue_ids:
                self._broker.lites.on_unblocked(topic, queue_id, group.id)
        self._broker.when_confirmed(lambda: polling.wake(topic.id, group.id))
        return done


def _target(request: pb.ResetOffsetRequest) -> ResetTarget:
    match request.WhichOneof("to"):
        case "oldest":
            return ResetTarget(ResetTo.OLDEST)
        case "newest":
            return ResetTarget(ResetTo.NEWEST)
        case "offset":
            return ResetTarget(ResetTo.OFFSET, request.offset)
        case "stored_ms":
            return ResetTarget(ResetTo.TIME, request.stored_ms)
        case _:
            raise Refused(
                Code.BAD_REQUEST, "a reset is to one of oldest, newest, offset and stored_ms"
            )
