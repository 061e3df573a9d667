"""RESET_OFFSET: all queues of a request are looked up first, then set at one go."""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.operations.offset_reset import QueueReset, ResetTarget, ResetTo
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb

_QUEUES_A_STEP = 16


def reset_offset(broker: Broker, request: Request) -> ResumableRead[bytes]:
    requested = pb.ResetOffsetRequest.FromString(request.body)
    target = _target(requested)
    topics.check_readable_topic_name(requested.topic)
    topic = broker.registry.topic(requested.topic)
    group = broker.registry.group(requested.group)
    queue_id = requested.queue_id if requested.HasField("queue_id") else None
    broker.operations.offset_reset.check(topic, target, queue_id)
    queue_ids = list(broker.registry.queue_ids(topic)) if queue_id is None else [queue_id]
    # Without a word about them, pending retries are skipped with everything else only.
    skip_retries = target.to is ResetTo.NEWEST and queue_id is None
    if requested.HasField("skip_retries"):
        if requested.skip_retries and queue_id is not None:
            raise Refused(
                Code.BAD_REQUEST,
                "pending retries are of all queues together: they cannot be skipped for one",
            )
        skip_retries = requested.skip_retries
    reset = _Reset(broker, group, topic, queue_ids, skip_retries, requested.dry_run)
    return reset.look_up_and_apply(target)


class _Reset:
    def __init__(
        self,
        broker: Broker,
        group: SubscriptionGroup,
        topic: TopicConfig,
        queue_ids: list[int],
        skip_retries: bool,
        dry_run: bool,
    ) -> None:
        self._broker = broker
        self._group = group
        self._topic = topic
        self._queue_ids = queue_ids
        self._skip_retries = skip_retries
        self._dry_run = dry_run

    def look_up_and_apply(self, target: ResetTarget) -> ResumableRead[bytes]:
        offsets: list[int] = []
        for queue_id in self._queue_ids:
            if offsets and len(offsets) % _QUEUES_A_STEP == 0:
                yield None
            offset_of = self._broker.operations.offset_reset.offset_of
            look = partial(offset_of, self._topic, queue_id, target)
            offsets.append((yield from read_now(look)))
        return pb.ResetOffsetReply(
            status=pb.Status(code=Code.OK, message="OK"),
            queues=[
                pb.ResetQueue(
                    broker=self._broker.settings.broker.name,
                    topic=reset.topic.name,
                    queue_id=reset.queue_id,
                    before=reset.before,
                    after=reset.after,
                    in_flight=reset.in_flight,
                )
                for reset in self._apply(offsets)
            ],
        ).SerializeToString()

    def _apply(self, offsets: list[int]) -> list[QueueReset]:
        reset = self._broker.operations.offset_reset
        group = self._broker.registry.group_by_id(self._group.id)
        topic = self._broker.registry.topic_by_id(self._topic.id)
        if group is None or topic is None:
            raise Refused(Code.NOT_FOUND, "the group or the topic was deleted meanwhile")
        there = set(self._broker.registry.queue_ids(topic))  # lite topics may have ended
        places: list[tuple[TopicConfig, int, int]] = [
            (topic, queue_id, offset)
            for queue_id, offset in zip(self._queue_ids, offsets, strict=True)
            if queue_id in there
        ]
        side = reset.side_topic(group, topic)
        if side is not None and self._skip_retries:
            # Those that are not confirmed yet are pending too, and stand in front of the reset.
            places.append((side, 0, self._broker.store.dispatch.next_offset(side.id, 0)))
        if self._dry_run:
            return [reset.plan(group, *place) for place in places]
        done = [reset.apply(group, *place) for place in places]
        polling = self._broker.polling
        if topic.type is MessageType.LITE:
            for queue_id in self._queue_ids:
                self._broker.lites.on_unblocked(topic, queue_id, group.id)
        self._broker.buffer.when_acks_confirmed(lambda: polling.wake(topic.id, group.id))
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
