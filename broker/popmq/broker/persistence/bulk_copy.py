"""Many messages appended in one step: of producers, or those that the log has already.

A step that appends many messages spends its time in `put_copies`, so calls and checks that are the
same for all of them are made once; it does for each what `MessageStore.put_message` does for one.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.dispatch import Dispatch, PendingUnit
from popmq.broker.log.message_reader import DamagedMessage, MessageReader
from popmq.broker.log.queue_unit import QueueUnit, index_unit
from popmq.broker.persistence.retention import LiveBody
from popmq.common.record.message import (
    MESSAGE_HEADER_SIZE,
    RECORD_VERSION,
    RecordKind,
    Stamp,
    encode_message,
    message_size,
)

_FRONT = struct.Struct(">II")  # size, crc
_REST = struct.Struct(">BBHIQQQIIQQIIHHI")  # and what follows, up to the token (message.py)
_MESSAGE = int(RecordKind.MESSAGE)
_new = tuple.__new__

assert _FRONT.size + _REST.size == MESSAGE_HEADER_SIZE


class MessageCopy(NamedTuple):
    """A message for a queue: a new one, or one that the log has already."""

    topic_id: int
    queue_id: int
    tag_hash: int
    token: bytes
    head_size: int
    content: bytes  # head and properties, as they stand in a record


def put_copies(
    log: CommitLog,
    dispatch: Dispatch,
    index: KeyIndex,
    copies: Sequence[MessageCopy],
    stamp: Stamp,
    confirmed: int,
) -> tuple[list[PendingUnit], int]:
    """Append the copies, and let `dispatch` and `index` expect them; their units, and bytes."""
    queued: list[PendingUnit] = []
    named: list[tuple[int, int, int, int, bytes]] = []  # for the key index
    records: list[bytes] = []
    offsets: dict[tuple[int, int], int] = {}  # of the next record of each queue
    epoch, log_ms, wall_ms = stamp
    position = room_end = sizes = 0
    for topic_id, queue_id, tag_hash, token, head_size, both in copies:
        size = MESSAGE_HEADER_SIZE + len(token) + len(both)
        if position + size > room_end:
            log.append_all(records)
            records = []
            position = log.make_room(size, stamp)
            room_end = log.segment_end(position)
        queue = topic_id, queue_id
        queue_offset = offsets.get(queue, -1)
        if queue_offset < 0:
            queue_offset = dispatch.next_offset(topic_id, queue_id)
        offsets[queue] = queue_offset + 1
        rest = _REST.pack(
            RECORD_VERSION, _MESSAGE, 0, epoch, position, log_ms, wall_ms,
            topic_id, queue_id, queue_offset, tag_hash, head_size, len(both) - head_size,
            len(token), 1, min(position - confirmed, 0xFFFF_FFFF),
        )  # fmt: skip
        tail = b"".join((rest, token, both))
        records.append(_FRONT.pack(size, crc32c(tail)) + tail)
        unit = index_unit(position, size, tag_hash)
        end = position + size
        queued.append(_new(PendingUnit, (end, position, topic_id, queue_id, queue_offset, unit)))
        named.append((position, size, topic_id, wall_ms, both[head_size:]))
        sizes += size
        position = end
    log.append_all(records)
    dispatch.expect_all(queued, offsets)
    index.expect_all(named)
    return queued, sizes


def put_moved(
    log: CommitLog,
    index: KeyIndex,
    reader: MessageReader,
    body: LiveBody,
    stamp: Stamp,
    confirmed: int,
) -> LiveBody | None:
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
    position = log.make_room(size, stamp)
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
    return body._replace(unit=QueueUnit(position, size, message.tag_hash))
