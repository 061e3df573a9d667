"""Stored messages in the order of their times, looked at without any group: `recv --latest`."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from popmq.cli.client import Client
from popmq.cli.lookup import message_of
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

PAGE = 64  # the most that a look-up returns
LOOK_PAUSE_S = 0.2

# (broker group, queue) -> the first offset that was not shown yet
Ends = dict[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class Browsed:
    message: api.Message
    stored_ms: int


def latest(client: Client, topic: str, count: int) -> tuple[list[Browsed], Ends]:
    """The last `count` messages of all queues, oldest first, and where each queue ends."""
    ends = {
        (queue.broker.name, queue.id): client.end_offset(queue)
        for queue in client.query_route(topic)
    }
    messages: list[Browsed] = []
    for (broker, queue_id), end in ends.items():
        # A queue may have deleted its oldest messages: what is there of these offsets is taken.
        messages += _range(client, topic, broker, queue_id, max(0, end - count), end)
    messages.sort(key=lambda browsed: browsed.stored_ms)
    return messages[-count:], ends


def from_time(client: Client, topic: str, stored_ms: int) -> tuple[list[Browsed], Ends]:
    """All messages stored then or later, oldest first, and where each queue ends."""
    ends: Ends = {}
    messages: list[Browsed] = []
    for queue in client.query_route(topic):
        key = (queue.broker.name, queue.id)
        ends[key] = client.end_offset(queue)
        start = client.offset_at(queue, stored_ms)
        messages += _range(client, topic, *key, start, ends[key])
    messages.sort(key=lambda browsed: browsed.stored_ms)
    return messages, ends


def follow(client: Client, topic: str, ends: Ends) -> Iterator[list[Browsed]]:
    """What comes after `ends`, for ever."""
    queues = {(queue.broker.name, queue.id): queue for queue in client.query_route(topic)}
    while True:
        batch: list[Browsed] = []
        for key, queue in queues.items():
            end = client.end_offset(queue)
            batch += _range(client, topic, *key, ends.get(key, end), end)
            ends[key] = end
        if batch:
            yield sorted(batch, key=lambda browsed: browsed.stored_ms)
        time.sleep(LOOK_PAUSE_S)


def _range(
    client: Client, topic: str, broker: str, queue_id: int, start: int, end: int
) -> Iterable[Browsed]:
    """The messages of a queue from offset `start` to below `end`."""
    while start < end:
        request = admin.FindMessagesRequest(
            topic=topic, queue_id=queue_id, queue_offset=start, limit=min(PAGE, end - start)
        )
        reply = client.call_admin(request, admin.FindMessagesReply)
        # Every broker group is asked and answers for its own queue of that number.
        messages = [message for message in reply.messages if message.broker == broker]
        yield from (
            Browsed(message_of(message), message.stored_ms)
            for message in messages
            if message.queue_offset < end
        )
        start += PAGE
