"""TimerBody: a timer's message on the shortest way from its record to that of its firing.

A step that fires runs through here for each of its timers, so that is one loop, and the message
stays in one piece: head and properties stand side by side in both records (`message.py`).
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.record.message import MESSAGE_HEADER_SIZE, RECORD_VERSION, WITH_MESSAGE
from popmq.common.record.timer_token import TIMER_VERSION

# What a firing needs of a timer's record: its first 80 bytes, and the TimerToken behind them.
_TIMER_RECORD = struct.Struct(">IIBB6xQ24xQ8xIIH6xB3xII4xQ16x")
_HEADER_AND_TOKEN_SIZE = _TIMER_RECORD.size
_TOKEN_SIZE = _HEADER_AND_TOKEN_SIZE - MESSAGE_HEADER_SIZE
_new = tuple.__new__


class TimerBody(NamedTuple):
    queue_offset: int  # of its record in the timer queue
    topic_id: int  # where it goes
    queue_id: int
    tag_hash: int
    head_size: int
    content: bytes  # head and properties


def intact_bodies(
    data: bytes | memoryview, start: int, units: Sequence[tuple[int, int, int]]
) -> list[TimerBody | None]:
    """Of records of which position and size are known; `data` begins at `start`.

    None where `intact_message` has to look: what is not intact, or no timer's record.
    """
    unpack, size_of_data = _TIMER_RECORD.unpack_from, len(data)
    timer_bodies: list[TimerBody | None] = []
    for position, size, _ in units:
        at = position - start
        end = at + size
        if size < _HEADER_AND_TOKEN_SIZE or end > size_of_data:
            timer_bodies.append(None)
            continue
        (
            said_size, crc, version, kind, said_position, queue_offset, head_size, properties_size,
            token_size, token_version, topic_id, queue_id, tag_hash,
        ) = unpack(data, at)  # fmt: skip
        if (
            said_size == size
            and said_position == position
            and version == RECORD_VERSION
            and kind in WITH_MESSAGE
            and token_size == _TOKEN_SIZE
            and token_version == TIMER_VERSION
            and _HEADER_AND_TOKEN_SIZE + head_size + properties_size == size
            and crc32c(data[at + 8 : end]) == crc
        ):
            both = bytes(data[at + _HEADER_AND_TOKEN_SIZE : end])
            body = (queue_offset, topic_id, queue_id, tag_hash, head_size, both)
            timer_bodies.append(_new(TimerBody, body))
        else:
            timer_bodies.append(None)
    return timer_bodies
