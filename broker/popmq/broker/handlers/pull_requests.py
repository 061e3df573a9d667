"""PULL: pulls wait for messages as receives do, but change nothing; and UPDATE_OFFSET, GET_OFFSET
and QUERY_OFFSET, the offsets of pull consumers (docs/concepts/pull.md).

A wait, a read from the disk and a turn of a group that reads far behind all lead back to `_look`,
which goes on at the offset that was reached.
"""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.filter.request_filter import compile_filter
from popmq.broker.handlers.request import Request, refuse
from popmq.broker.operations.group_members import MemberList
from popmq.broker.operations.pull_reader import PullParams, PullResult
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.broker.operations.send_back import ReturnedMessage
from popmq.broker.pop.long_polling import Waiter, WaiterResult
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests, TopicNotFound
from popmq.common.record.message import StoredMessage
from popmq.common.topics import TopicConfig, first_attempt, group_of_pull_retry, pull_retry_topic
from popmq.common.wire import pull_pb2 as pb

COLD_LIMIT = 1_024  # pulls that wait for the disk
_LOOKS = 32  # of a pull with a filter that does not wait, at most


def pull(broker: Broker, request: Request) -> bytes | None:
    requested = pb.PullRequest.FromString(request.body)
    topic, queue_id = readable_queue(
        broker, requested.topic, requested.queue_id, requested.topic_id
    )
    group = broker.metadata_resolver.group(requested.group, least_id=requested.group_id)
    limit = min(requested.limit, broker.settings.pop.max_batch) or broker.settings.pop.max_batch
    reply_bytes = min(requested.reply_bytes, broker.settings.pop.reply_bytes)
    accepted = compile_filter(broker.sql_filters, requested.filter_type, requested.expression)
    params = PullParams(topic, queue_id, limit, accepted, reply_bytes)
    metrics = broker.operations.pulls.metrics
    metrics.pulls += 1
    nearest = broker.operations.pulls.nearest(params, requested.offset)
    if nearest != requested.offset:
        metrics.illegal_offsets += 1
        why = broker.operations.pulls.why_illegal(params, requested.offset)
        low, high = broker.operations.pulls.bounds(params)
        return pb.PullReply(
            next_offset=nearest, illegal_offset=why, min_offset=low, max_offset=high
        ).SerializeToString()
    _Pull(broker, request, requested, params, nearest, (topic.id, group.id)).take_turn()
    return None


class _Pull:
    """One request until it is answered, or its client leaves."""

    __slots__ = (
        "_broker", "_cold", "_deadline_ms", "_follows_reset", "_key", "_looks", "_offset",
        "_place", "_request", "_waiter", "_waits", "_want",
    )  # fmt: skip

    def __init__(
        self,
        broker: Broker,
        request: Request,
        requested: pb.PullRequest,
        params: PullParams,
        offset: int,
        key: tuple[int, int],
    ) -> None:
        self._broker = broker
        self._request = request
        self._want = params
        self._offset = offset  # reached so far
        self._waits = bool(requested.poll_ms)
        self._deadline_ms = broker.waits.boot_ms() + requested.poll_ms
        self._key = key
        self._follows_reset = requested.follows_reset
        self._place = (requested.group, requested.topic)
        self._looks = 0
        self._cold = False
        self._waiter: Waiter | None = None
        request.wait(self._cancel)

    def take_turn(self) -> None:
        catch_up = self._broker.pop.catch_up
        try:
            if catch_up.is_behind(self._place):
                catch_up.run(self._request.number, self._turn)
            else:
                self._turn()
        except PopmqError as error:
            self._refuse(error)

    def _turn(self) -> None:
        """Look until there is an answer, or something to wait for."""
        if not self._request.waits:
            return
        try:
            outcome = self._look()
            while outcome is WaiterResult.MORE and self._may_look_on():
                outcome = self._look()
            if outcome is not WaiterResult.ANSWERED:
                self._wait_or_end(outcome)
        except ColdRead as cold:
            self._warm(cold)
        except PopmqError as error:
            self._refuse(error)

    def _may_look_on(self) -> bool:
        self._looks += 1
        return not self._waits and self._looks < _LOOKS

    def _look(self) -> WaiterResult:
        """One bounded look; answers when it found something, or the group was reset."""
        if self._follows_reset:
            topic_id, group_id = self._key
            place = (group_id, topic_id, self._want.queue_id)
            target = self._broker.operations.pull_offsets.after_reset(place, self._offset)
            if target != self._offset:
                why = f"the group's offset was reset to {target}"
                self._answer(PullResult([], target, more=False), why)
                return WaiterResult.ANSWERED
        result = self._broker.operations.pulls.read(self._want, self._offset)
        self._offset = result.next_offset
        catch_up = self._broker.pop.catch_up
        if result.messages:
            last = result.messages[-1][1].header
            catch_up.delivered(self._place, last.position, self._broker.store.end)
            self._answer(result)
            return WaiterResult.ANSWERED
        if result.more:
            return WaiterResult.MORE
        catch_up.on_queue_end(self._place)
        return WaiterResult.EMPTY

    def _wait_or_end(self, outcome: WaiterResult) -> None:
        polling = self._broker.polling
        if self._broker.waits.boot_ms() >= self._deadline_ms:
            self._answer_empty()
            return
        self._waiter = Waiter(
            key=self._key,
            filter_key=self,  # each waits at an offset of its own
            deadline_ms=self._deadline_ms,
            attempt=self._attempt,
            give_up=self._answer_empty,
        )
        polling.add_waiter(self._waiter)
        if outcome is WaiterResult.MORE:
            polling.retry_waiters(self._key)

    def _attempt(self) -> WaiterResult:
        try:
            return self._look()
        except ColdRead as cold:
            self._warm(cold)
            return WaiterResult.EMPTY if self._request.waits else WaiterResult.ANSWERED
        except PopmqError as error:
            self._refuse(error)
            return WaiterResult.ANSWERED

    def _warm(self, cold: ColdRead) -> None:
        """One read from the disk at a time, then look again."""
        if self._cold:
            return
        retry = self._broker.operations.pulls.cold
        if retry.waiting >= COLD_LIMIT:
            why = f"{COLD_LIMIT} pulls wait for old messages from the disk: try again"
            self._refuse(TooManyRequests(why))
            return
        self._cold = True
        retry.retry(cold, self._warmed, self._unreadable)

    def _warmed(self) -> None:
        self._cold = False
        if self._waiter is not None:
            self._broker.polling.retry_waiters(self._key)
        else:
            self.take_turn()

    def _unreadable(self, refusal: PopmqError) -> None:
        self._cold = False
        if self._waiter is not None:
            self._broker.polling.remove(self._waiter)
        self._refuse(refusal)

    def _cancel(self) -> None:
        if self._waiter is not None:
            self._broker.polling.remove(self._waiter)
        else:
            self._broker.pop.catch_up.cancel(self._request.number)

    def _refuse(self, error: PopmqError) -> None:
        if self._request.stop_waiting():
            refuse(error, self._request.on_reply, self._broker.store)

    def _answer_empty(self) -> None:
        self._answer(PullResult([], self._offset, more=False))

    def _answer(self, result: PullResult, why_illegal: str = "") -> None:
        """What it read is confirmed already; a group that was made for it is, then (D2)."""
        if not self._request.stop_waiting():
            return
        try:
            low, high = self._broker.operations.pulls.bounds(self._want)
        except TopicNotFound:  # it was deleted, which ends the pulls that wait
            low = high = result.next_offset
        reply = pb.PullReply(
            next_offset=result.next_offset,
            illegal_offset=why_illegal,
            min_offset=low,
            max_offset=high,
        )
        for offset, message in result.messages:
            reply.messages.append(_pulled(self._want.topic, offset, message))
        body = reply.SerializeToString()
        self._broker.buffer.when_acks_confirmed(partial(self._request.on_reply, body))


def update_offset(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return read_now(partial(_update, broker, pb.UpdateOffsetRequest.FromString(request.body)))


def get_offset(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return read_now(partial(_get, broker, pb.GetOffsetRequest.FromString(request.body)))


def query_offset(broker: Broker, request: Request) -> ResumableRead[bytes]:
    """A time is looked up by reading messages: ColdRead until they are in memory."""
    return read_now(partial(_query, broker, pb.QueryOffsetRequest.FromString(request.body)))


def _update(broker: Broker, requested: pb.UpdateOffsetRequest) -> bytes:
    topic, queue_id = readable_queue(
        broker, requested.topic, requested.queue_id, requested.topic_id
    )
    group = broker.metadata_resolver.group(requested.group, least_id=requested.group_id)
    offsets = broker.operations.pull_offsets
    only_forward = requested.only_forward
    if offsets.set(group, topic, queue_id, requested.offset, only_forward=only_forward):
        broker.operations.pulls.metrics.offsets_set += 1
        polling = broker.polling
        broker.buffer.when_acks_confirmed(lambda: polling.wake(topic.id, group.id))
    return pb.OffsetReply(offset=requested.offset).SerializeToString()


def _get(broker: Broker, requested: pb.GetOffsetRequest) -> bytes:
    topic, queue_id = readable_queue(
        broker, requested.topic, requested.queue_id, requested.topic_id
    )
    broker.metadata_resolver.check_group_copied(requested.group, requested.group_id)
    group = broker.registry.find_group(requested.group)
    if group is None and requested.group_id and broker.registry.owner:
        # A write that was sent before this waits for the copy of the group, too.
        group = broker.metadata_resolver.group(requested.group, least_id=requested.group_id)
    offset = broker.operations.pull_offsets.get(group, topic, queue_id)
    return pb.OffsetReply(offset=offset).SerializeToString()


def _query(broker: Broker, requested: pb.QueryOffsetRequest) -> bytes:
    topic, queue_id = readable_queue(
        broker, requested.topic, requested.queue_id, requested.topic_id
    )
    queue = broker.store.queue(topic.id, queue_id)
    match requested.WhichOneof("place"):
        case "beginning":
            offset = queue.min_offset
        case "stored_ms":
            wall_ms = requested.stored_ms
            offset = broker.lookup.by_time(topic.id, queue_id, wall_ms, wait=False)
        case _:
            offset = queue.count
    return pb.OffsetReply(offset=offset).SerializeToString()


def read_message(broker: Broker, request: Request) -> ResumableRead[bytes]:
    wanted = pb.ReadMessageRequest.FromString(request.body)

    def read() -> bytes:
        topic, message = broker.remoting.send_back.read(wanted.position)
        header = message.header
        reply = pb.ReadMessageReply(topic=topic.name, queue_id=header.queue_id)
        reply.message.CopyFrom(_pulled(topic, header.queue_offset, message))
        return reply.SerializeToString()

    return read_now(read)


def send_back(broker: Broker, request: Request) -> bytes:
    wanted = pb.SendBackRequest.FromString(request.body)
    group = broker.metadata_resolver.group(wanted.group)
    returned = ReturnedMessage(
        topic=broker.metadata_resolver.topic(wanted.topic),
        queue_id=wanted.queue_id,
        queue_offset=wanted.queue_offset,
        head=wanted.head,
        properties=wanted.properties,
        tag_hash=wanted.tag_hash,
        attempt=wanted.attempt,
        position=wanted.position,
    )
    ordered = wanted.dead_if_ordered and broker.remoting.leases.is_ordered(
        group.name, broker.waits.boot_ms()
    )
    if wanted.dead or ordered:
        broker.remoting.send_back.dead_letter(group, returned)
    else:
        broker.remoting.send_back.retry(group, returned, wanted.delay_ms)
    return b""


def members(broker: Broker, request: Request) -> None:
    wanted = pb.MembersRequest.FromString(request.body)
    groups = {group.name: list(group.client_ids) for group in wanted.groups}
    request.wait(partial(broker.remoting.members.cancel, request.number))
    try:
        broker.remoting.members.ask(
            request.number,
            wanted.proxy,
            groups if wanted.changed else None,
            wanted.version,
            wait_ms=wanted.wait_ms,
            now_ms=broker.waits.boot_ms(),
            answer=lambda member_list: request.answer(_encode_members(member_list)),
        )
    except PopmqError:
        request.stop_waiting()
        raise


def lease(broker: Broker, body: bytes) -> bytes:
    """The reply leaves once this broker is known to lead still: two masters never both grant."""
    wanted = pb.LeaseRequest.FromString(body)
    queues = [(queue.topic, queue.queue_id) for queue in wanted.queues]
    reply = pb.LeaseReply()
    if wanted.unlock:
        broker.remoting.leases.unlock(wanted.group, wanted.client_id, queues)
        return reply.SerializeToString()
    held = broker.remoting.leases.lock(
        wanted.group,
        wanted.client_id,
        queues,
        now_ms=broker.waits.boot_ms(),
        first_master=broker.store.epoch <= 1,
    )
    for topic, queue_id in held:
        reply.queues.add(topic=topic, queue_id=queue_id)
    return reply.SerializeToString()


def _encode_members(member_list: MemberList) -> bytes:
    reply = pb.MembersReply(
        version=member_list.version, settled=member_list.settled, unknown=member_list.unknown
    )
    for name, client_ids in member_list.groups.items():
        reply.groups.add(name=name, client_ids=client_ids)
    return reply.SerializeToString()


def _pulled(topic: TopicConfig, offset: int, message: StoredMessage) -> pb.PulledMessage:
    return pb.PulledMessage(
        queue_offset=offset,
        stored_ms=message.header.wall_ms,
        head=message.head,
        properties=message.properties,
        position=message.header.position,
        attempt=first_attempt(topic.name, message.attempt),
    )


def readable_queue(
    broker: Broker, name: str, queue_id: int, least_id: int
) -> tuple[TopicConfig, int]:
    """The topic of a queue that a pull consumer names, or the refusal."""
    if owner := group_of_pull_retry(name):
        # Before its first message, so that a pull of it can wait.
        group = broker.metadata_resolver.group(owner)
        topic = broker.registry.internal_topic(pull_retry_topic(group.name))
    else:
        topic = broker.metadata_resolver.topic(name, least_id=least_id)
    if not topic.readable:
        raise Refused(Code.FORBIDDEN, f"topic {topic.name} is not readable")
    if not topic.kind.can_be_pulled:
        raise Refused(
            Code.UNSUPPORTED,
            f"topic {topic.name} is {topic.type.name}: its messages cannot be pulled",
        )
    if queue_id >= topic.queues:
        raise Refused(
            Code.BAD_REQUEST, f"queue {queue_id} of topic {topic.name}, which has {topic.queues}"
        )
    return topic, queue_id
