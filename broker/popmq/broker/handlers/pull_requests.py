"""Pulls: PULL requests, which wait for messages as receives do, but change nothing.

A wait, a read from the disk and a turn of a group that reads far behind all lead back to `_look`,
which goes on at the offset that was reached.
"""

import logging
from dataclasses import dataclass

from popmq.broker.core.broker import Broker
from popmq.broker.filter.request_filter import compile_filter
from popmq.broker.operations.pull_reader import PullParams, PullResult
from popmq.broker.pop.long_polling import Waiter, WaiterResult
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.protocol.messaging_payloads import OnReply
from popmq.common.topics import MessageType, TopicConfig
from popmq.common.wire import pull_pb2

logger = logging.getLogger(__name__)

COLD_LIMIT = 1_024  # pulls that wait for the disk
_LOOKS = 32  # of a pull with a filter that does not wait, at most


@dataclass(slots=True, eq=False)
class _Pull:
    request: pull_pb2.PullRequest
    want: PullParams
    number: int
    on_reply: OnReply
    offset: int  # reached so far
    deadline_ms: int
    key: tuple[int, int]
    looks: int = 0
    cold: bool = False
    waiter: Waiter | None = None

    @property
    def place(self) -> tuple[str, str]:
        return self.request.topic, self.request.group


class PullRequests:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reader = broker.pulls
        self._open: dict[int, _Pull] = {}
        self._cold = 0

    def serve(self, body: bytes, on_reply: OnReply, number: int) -> None:
        """Raises what refuses it at once; else `on_reply` hears, and everything is confirmed."""
        request = pull_pb2.PullRequest.FromString(body)
        broker = self._broker
        topic, queue_id = readable_queue(broker, request.topic, request.queue_id, request.topic_id)
        group = broker.directory.group(request.group, least_id=request.group_id)
        limit = min(request.limit, broker.settings.pop.max_batch) or broker.settings.pop.max_batch
        reply_bytes = broker.settings.pop.reply_bytes
        wanted = compile_filter(broker.sql_filters, request.filter_type, request.expression)
        want = PullParams(topic, queue_id, limit, wanted, min(request.reply_bytes, reply_bytes))
        self._reader.metrics.pulls += 1
        nearest = self._reader.nearest(want, request.offset)
        if nearest != request.offset:
            self._reader.metrics.illegal_offsets += 1
            why = self._reader.why_illegal(want, request.offset)
            reply = pull_pb2.PullReply(next_offset=nearest, illegal_offset=why)
            self._confirmed(on_reply, reply)
            return
        deadline_ms = broker.waits_ms() + request.poll_ms
        pull = _Pull(request, want, number, on_reply, nearest, deadline_ms, (topic.id, group.id))
        self._open[number] = pull
        self._take_turn(pull)

    def cancel(self, number: int) -> bool:
        """The asker is gone; whether it was a pull's."""
        pull = self._open.pop(number, None)
        if pull is None:
            return False
        if pull.waiter is not None:
            self._broker.polling.remove(pull.waiter)
        else:
            self._broker.catch_up.cancel(number)
        return True

    def _take_turn(self, pull: _Pull) -> None:
        catch_up = self._broker.catch_up
        try:
            if catch_up.is_behind(pull.place):
                catch_up.run(pull.number, lambda: self._turn(pull))
            else:
                self._turn(pull)
        except PopmqError as error:
            self._refuse(pull, error)

    def _turn(self, pull: _Pull) -> None:
        """Look until there is an answer, or something to wait for."""
        if pull.number not in self._open:
            return
        try:
            outcome = self._look(pull)
            while outcome is WaiterResult.MORE and self._may_look_on(pull):
                outcome = self._look(pull)
            if outcome is not WaiterResult.ANSWERED:
                self._wait_or_end(pull, outcome)
        except ColdRead as cold:
            self._warm(pull, cold)
        except PopmqError as error:
            self._refuse(pull, error)

    def _may_look_on(self, pull: _Pull) -> bool:
        pull.looks += 1
        return not pull.request.poll_ms and pull.looks < _LOOKS

    def _look(self, pull: _Pull) -> WaiterResult:
        """One bounded look; answers when it found something."""
        found = self._reader.read(pull.want, pull.offset)
        pull.offset = found.next_offset
        catch_up = self._broker.catch_up
        if found.messages:
            last = found.messages[-1][1].header
            catch_up.delivered(pull.place, last.position, self._broker.store.end)
            self._answer(pull, found)
            return WaiterResult.ANSWERED
        if found.more:
            return WaiterResult.MORE
        catch_up.on_queue_end(pull.place)
        return WaiterResult.EMPTY

    def _wait_or_end(self, pull: _Pull, outcome: WaiterResult) -> None:
        polling = self._broker.polling
        if self._broker.waits_ms() >= pull.deadline_ms:
            self._answer(pull, PullResult([], pull.offset, more=False))
            return
        pull.waiter = Waiter(
            key=pull.key,
            filter_key=pull,  # each waits at an offset of its own
            deadline_ms=pull.deadline_ms,
            attempt=lambda: self._attempt(pull),
            give_up=lambda: self._answer(pull, PullResult([], pull.offset, more=False)),
        )
        polling.add_waiter(pull.waiter)
        if outcome is WaiterResult.MORE:
            polling.retry_waiters(pull.key)

    def _attempt(self, pull: _Pull) -> WaiterResult:
        try:
            return self._look(pull)
        except ColdRead as cold:
            self._warm(pull, cold)
            return WaiterResult.EMPTY if pull.number in self._open else WaiterResult.ANSWERED
        except PopmqError as error:
            self._refuse(pull, error)
            return WaiterResult.ANSWERED

    def _warm(self, pull: _Pull, cold: ColdRead) -> None:
        """Read on a thread that may wait, then look again (D3); one read at a time for a pull."""
        if pull.cold:
            return
        if self._cold >= COLD_LIMIT:
            why = f"{COLD_LIMIT} pulls wait for old messages from the disk: try again"
            self._refuse(pull, TooManyRequests(why))
            return
        self._cold += 1
        pull.cold = True

        def read() -> None:
            cold.warm()

        def done(error: BaseException | None) -> None:
            self._cold -= 1
            pull.cold = False
            if error is not None:
                self._failed(pull, error)
            elif pull.waiter is not None:
                self._broker.polling.retry_waiters(pull.key)
            else:
                self._take_turn(pull)

        self._broker.store.readers.submit(read, done)

    def _failed(self, pull: _Pull, error: BaseException) -> None:
        logger.error("cannot read from the disk", extra={"reason": str(error)})
        if pull.waiter is not None:
            self._broker.polling.remove(pull.waiter)
        self._refuse(pull, Refused(Code.INTERNAL_ERROR, f"old messages cannot be read: {error}"))

    def _refuse(self, pull: _Pull, error: PopmqError) -> None:
        if self._open.pop(pull.number, None) is not None:
            pull.on_reply(error)

    def _answer(self, pull: _Pull, found: PullResult) -> None:
        if self._open.pop(pull.number, None) is None:
            return
        reply = pull_pb2.PullReply(next_offset=found.next_offset)
        for offset, message in found.messages:
            reply.messages.add(
                queue_offset=offset,
                stored_ms=message.header.wall_ms,
                head=message.head,
                properties=message.properties,
            )
        self._confirmed(pull.on_reply, reply)

    def _confirmed(self, on_reply: OnReply, reply: pull_pb2.PullReply) -> None:
        """What it read is confirmed already; a group that was made for it is, then (D2)."""
        body = reply.SerializeToString()
        self._broker.when_confirmed(lambda: on_reply(body))


def readable_queue(
    broker: Broker, name: str, queue_id: int, least_id: int
) -> tuple[TopicConfig, int]:
    """The topic of a queue that a pull consumer names, or the refusal."""
    topic = broker.directory.topic(name, least_id=least_id)
    if not topic.readable:
        raise Refused(Code.FORBIDDEN, f"topic {topic.name} is not readable")
    if topic.type is MessageType.LITE:
        raise Refused(
            Code.UNSUPPORTED, f"topic {topic.name} is LITE: its messages cannot be pulled"
        )
    if queue_id >= topic.queues:
        raise Refused(
            Code.BAD_REQUEST, f"queue {queue_id} of topic {topic.name}, which has {topic.queues}"
        )
    return topic, queue_id
