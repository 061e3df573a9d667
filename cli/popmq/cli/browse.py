"""Stored messages in the order of their times, looked at without any group: `recv --latest`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from popmq.cli.client import CallFailed, CallRefused, Client
from popmq.cli.lookup import message_of
from popmq.common.errors import Code, PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

PAGE = 64  # the most that a look-up returns
LOOK_PAUSE_S = 0.2
NO_ANSWER = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)

# (broker group, queue) -> the first offset that was not shown yet
Ends = dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Browsed:
    message: api.Message
    stored_ms: int


class Browser:
    """Looks at the stored messages of a topic; a broker group that does not answer is left out."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic
        self.missing: dict[str, PopmqError] = {}  # why, by broker group
        self._ends: Ends = {}

    def latest(self, count: int) -> list[Browsed]:
        """The last `count` messages of all queues, oldest first."""
        # A queue may have deleted its oldest messages: what is there of these offsets is taken.
        return self._look(lambda _, end: max(0, end - count))[-count:]

    def from_time(self, stored_ms: int) -> list[Browsed]:
        """All messages stored then or later, oldest first."""
        return self._look(lambda queue, _: self._client.offset_at(queue, stored_ms))

    def _look(self, start_of: Callable[[api.MessageQueue, int], int]) -> list[Browsed]:
        """Raises the first refusal when no broker group answers."""
        messages: list[Browsed] = []
        for queue in self._client.query_route(self._topic):
            name = queue.broker.name
            if name in self.missing:
                continue
            try:
                end = self._client.end_offset(queue)
                messages += self._range(queue, start_of(queue, end), end)
            except (CallFailed, CallRefused) as error:
                if isinstance(error, CallRefused) and error.number not in NO_ANSWER:
                    raise
                self.missing[name] = error
            else:
                self._ends[name, queue.id] = end
        if self.missing and not self._ends:
            raise next(iter(self.missing.values()))
        return sorted(messages, key=_age)

    def follow(self) -> Iterator[list[Browsed]]:
        """What comes after that, for ever, of the broker groups that answered."""
        queues = [
            queue
            for queue in self._client.query_route(self._topic)
            if queue.broker.name not in self.missing
        ]
        while True:
            batch: list[Browsed] = []
            for queue in queues:
                key = queue.broker.name, queue.id
                end = self._client.end_offset(queue)
                batch += self._range(queue, self._ends.get(key, end), end)
                self._ends[key] = end
            if batch:
                yield sorted(batch, key=_age)
            time.sleep(LOOK_PAUSE_S)

    def _range(self, queue: api.MessageQueue, start: int, end: int) -> Iterator[Browsed]:
        """The messages of a queue from offset `start` to below `end`."""
        broker = queue.broker.name
        while start < end:
            request = admin.FindMessagesRequest(
                topic=self._topic,
                broker=broker,
                queue_id=queue.id,
                queue_offset=start,
                limit=min(PAGE, end - start),
            )
            reply = self._client.call_admin(request, admin.FindMessagesReply)
            # A proxy of a version without `broker` asks every broker group.
            messages = [message for message in reply.messages if message.broker == broker]
            yield from (
                Browsed(message_of(message), message.stored_ms)
                for message in messages
                if message.queue_offset < end
            )
            start += PAGE


def _age(browsed: Browsed) -> int:
    return browsed.stored_ms
