"""UPDATE_OFFSET, GET_OFFSET and QUERY_OFFSET: offsets of pull consumers (docs/concepts/pull.md)."""

from collections.abc import Callable

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.pull_requests import readable_queue
from popmq.broker.handlers.request_runner import Job
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import pull_pb2 as pb


class UpdateOffsetJob:
    def __init__(self, broker: Broker, body: bytes) -> None:
        self._broker = broker
        self._request = pb.UpdateOffsetRequest.FromString(body)

    def step(self) -> bytes | None:
        broker, request = self._broker, self._request
        topic, queue_id = readable_queue(broker, request.topic, request.queue_id, request.topic_id)
        group = broker.directory.group(request.group, least_id=request.group_id)
        if broker.pull_offsets.set(group, topic, queue_id, request.offset):
            broker.pulls.metrics.offsets_set += 1
            polling = broker.polling
            broker.when_confirmed(lambda: polling.wake(topic.id, group.id))
        return pb.OffsetReply(offset=request.offset).SerializeToString()


class GetOffsetJob:
    def __init__(self, broker: Broker, body: bytes) -> None:
        self._broker = broker
        self._request = pb.GetOffsetRequest.FromString(body)

    def step(self) -> bytes | None:
        broker, request = self._broker, self._request
        topic, queue_id = readable_queue(broker, request.topic, request.queue_id, request.topic_id)
        broker.directory.check_group_copied(request.group, request.group_id)
        group = broker.registry.find_group(request.group)
        offset = broker.pull_offsets.get(group, topic, queue_id)
        return pb.OffsetReply(offset=offset).SerializeToString()


class QueryOffsetJob:
    """A time is looked up by reading messages: ColdRead until they are in memory."""

    def __init__(self, broker: Broker, body: bytes) -> None:
        self._broker = broker
        self._request = pb.QueryOffsetRequest.FromString(body)

    def step(self) -> bytes | None:
        broker, request = self._broker, self._request
        topic, queue_id = readable_queue(broker, request.topic, request.queue_id, request.topic_id)
        queue = broker.store.queue(topic.id, queue_id)
        match request.WhichOneof("place"):
            case "beginning":
                offset = queue.min_offset
            case "stored_ms":
                wall_ms = request.stored_ms
                offset = broker.lookup.by_time(topic.id, queue_id, wall_ms, wait=False)
            case _:
                offset = queue.count
        return pb.OffsetReply(offset=offset).SerializeToString()


OFFSET_JOBS: dict[Kind, Callable[[Broker, bytes], Job]] = {
    Kind.UPDATE_OFFSET: UpdateOffsetJob,
    Kind.GET_OFFSET: GetOffsetJob,
    Kind.QUERY_OFFSET: QueryOffsetJob,
}
