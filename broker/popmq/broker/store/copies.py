"""Messages that the log has already, appended once more: for another queue, or as they are.

A step that moves thousands of messages into their topics spends its time in `put_copies`, so calls
and checks that are the same for all of them are made once; it does for each what
`MessageStore.put_message` does for one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from popmq.broker.store.commit_log import CommitLog
from popmq.broker.store.dispatch import Dispatch, Queued
from popmq.broker.store.key_index import KeyIndex
from popmq.broker.store.message_reader import DamagedMessage, MessageReader
from popmq.broker.store.retention import Body
from popmq.broker.store.unit_check import Unit, index_unit
from popmq.common.message import (
    MESSAGE_HEADER_SIZE,
    RecordKind,
    Stamp,
    encode_message,
    message_size,
)


class Copy(NamedTuple):
    """A message that the log has already, for another queue."""

    topic_id: int
    queue_id: int
    tag_hash: int
    token: bytes
    head: bytes
    properties: bytes


def put_copies(
    log: CommitLog,
    dispatch: Dispatch,
    index: KeyIndex,
    copies: Sequence[Copy],
    stamp: Stamp,
    confirmed: int,
) -> tuple[list[int], int]:
    """Append the copies, and let `dispatch` and `index` expect them; positions, and bytes."""
    positions: list[int] = []
    sizes, wall_ms = 0, stamp.wall_ms
    for topic_id, queue_id, tag_hash, token, head, properties in copies:
        size = MESSAGE_HEADER_SIZE + len(token) + len(head) + len(properties)
        queue_offset = dispatch.next_offset(topic_id, queue_id)
        position = log.place(size, stamp)
        log.append(
            encode_message(
                stamp=stamp,
                position=position,
                topic_id=topic_id,
                queue_id=queue_id,
                queue_offset=queue_offset,
                tag_hash=tag_hash,
                head=head,
                properties=properties,
                token=token,
                unconfirmed=position - confirmed,
            )
        )
        unit = index_unit(position, size, tag_hash)
        dispatch.expect(Queued(position + size, position, topic_id, queue_id, queue_offset, unit))
        index.expect(position, size, topic_id, wall_ms, properties)
        positions.append(position)
        sizes += size
    return positions, sizes


def put_moved(
    log: CommitLog,
    index: KeyIndex,
    reader: MessageReader,
    body: Body,
    stamp: Stamp,
    confirmed: int,
) -> Body | None:
    """Append a live body again, under its old identity and as of when it was stored; it has no unit
    of its own.  Returns it with its new place, None when it is damaged.

    ColdRead, with nothing changed, instead of a wait for the disk.
    """
    (message,) = reader.read([body.unit], wait=False)
    if isinstance(message, DamagedMessage):
        return None
    token = message.any_token.encode() if message.any_token else b""
    stamp = stamp._replace(wall_ms=message.header.wall_ms)
    size = message_size(message.head, message.properties, token)
    position = log.place(size, stamp)
    log.append(
        encode_message(
            stamp=stamp,
            position=position,
            topic_id=body.topic_id,
            queue_id=body.queue_id,
            queue_offset=body.queue_offset,
            tag_hash=message.tag_hash,
            head=message.head,
            properties=message.properties,
            token=token,
            attempt=message.attempt,
            kind=RecordKind.MOVED,
            unconfirmed=position - confirmed,
        )
    )
    index.expect(position, size, body.topic_id, stamp.wall_ms, message.properties)
    return body._replace(unit=Unit(position, size, message.tag_hash))
