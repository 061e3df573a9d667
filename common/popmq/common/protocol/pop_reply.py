"""Messages on the shortest way from their records to the reply of a pop.

A receive of 32 runs through here 32 times a piece, so each step is one loop over all of them, and
nothing is copied that the reply does not hold.  Everything else that reads messages wants them
taken apart: `message.py`.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.protocol.messaging_payloads import DELIVERY, FIRST_LOOK, POP_REPLY
from popmq.common.record.message import (
    MESSAGE_HEADER_SIZE,
    RECORD_VERSION,
    WITH_MESSAGE,
    StoredMessage,
)

# What a delivery needs of a record's first 80 bytes (message.py).
_CONTENT = struct.Struct(">IIBB2x4xQ8xQ4x4x8x8xII2xH4x")
assert _CONTENT.size == MESSAGE_HEADER_SIZE


class DeliveryContent(NamedTuple):
    """What a delivery has of a MESSAGE record; `both` is head and properties, as they stand."""

    stored_ms: int  # wall time
    attempt: int
    head_size: int
    content: bytes


def content_of(message: StoredMessage) -> DeliveryContent:
    head = message.head
    return DeliveryContent(
        message.header.wall_ms, message.attempt, len(head), head + message.properties
    )


def intact_contents(
    data: bytes | memoryview, start: int, units: Sequence[tuple[int, int, int]]
) -> list[DeliveryContent | None]:
    """The contents of records of which position and size are known; `data` begins at `start`.

    None where `intact_message` has to look: a record that is not intact, or that has a token, and
    so is longer than its head and properties.
    """
    unpack, size_of_data = _CONTENT.unpack_from, len(data)
    make = tuple.__new__
    contents: list[DeliveryContent | None] = []
    for position, size, _ in units:
        at = position - start
        end = at + size
        if size < MESSAGE_HEADER_SIZE or end > size_of_data:
            contents.append(None)
            continue
        (
            said_size,
            crc,
            version,
            kind,
            said_position,
            wall_ms,
            head_size,
            properties_size,
            attempt,
        ) = unpack(data, at)
        if (
            said_size == size
            and said_position == position
            and version == RECORD_VERSION
            and kind in WITH_MESSAGE
            and MESSAGE_HEADER_SIZE + head_size + properties_size == size
            and crc32c(data[at + 8 : end]) == crc
        ):
            both = bytes(data[at + MESSAGE_HEADER_SIZE : end])
            contents.append(make(DeliveryContent, (wall_ms, attempt, head_size, both)))
        else:
            contents.append(None)
    return contents


def recent_contents(records: Sequence[bytes]) -> list[DeliveryContent | None]:
    """The contents of records that this process wrote and has in memory; None for one that has a
    token, or is no message."""
    unpack, make = _CONTENT.unpack_from, tuple.__new__
    contents: list[DeliveryContent | None] = []
    for record in records:
        size, _, _, kind, _, wall_ms, head_size, properties_size, attempt = unpack(record)
        content: DeliveryContent | None = None
        if kind in WITH_MESSAGE and MESSAGE_HEADER_SIZE + head_size + properties_size == size:
            both = record[MESSAGE_HEADER_SIZE:]
            content = make(DeliveryContent, (wall_ms, attempt, head_size, both))
        contents.append(content)
    return contents


class PopReplyBuilder:
    """What a pop hands out, as it will stand in the reply: parts to be joined once."""

    __slots__ = ("count", "parts")

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[bytes] = []

    def __len__(self) -> int:
        return self.count

    def add(
        self,
        queue_id: int,
        attempt: int,
        handle: bytes,
        tails: Sequence[bytes],
        messages: Sequence[tuple[int, DeliveryContent]],
    ) -> None:
        """Messages by queue offset, delivered as this attempt; their handles have `handle` in
        common and the `tails`, of one length, of their own."""
        pack, add = DELIVERY.pack, self.parts.append
        handle_size = len(handle) + len(tails[0])
        for tail, (offset, (stored_ms, _, head_size, both)) in zip(tails, messages, strict=True):
            properties_size = len(both) - head_size
            add(pack(queue_id, offset, attempt, stored_ms, handle_size, head_size, properties_size))
            add(handle)
            add(tail)
            add(both)
        self.count += len(tails)

    def encode_reply(self, rest: int, popped_ms: int, *, first_look: bool = False) -> bytes:
        """As `encode_pop_reply`."""
        behind = FIRST_LOOK if first_look else b""
        return b"".join((POP_REPLY.pack(self.count, rest, popped_ms), *self.parts, behind))
