"""Layouts of what brokers keep for reports: fixed-width records, big-endian, which DESCRIBE
returns.

A reader makes its decoder from what DESCRIBE says, so a field more does not break it
(docs/concepts/reports.md).  Records of the log are served as they lie there: `revive` is a record
of the revive topic, `head` the first bytes of a message's record with its token, padded with
zeros, `offset` a record that sets a group's offset.  Samples are made for reports alone.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from popmq.common.record.message import HEADER_SIZE, LARGEST_TOKEN, MESSAGE_HEADER_SIZE

UNSIGNED = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}
WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}


class LayoutField(NamedTuple):
    name: str
    type: str  # u8, u16, u32, u64
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`size` 0: records of any size one behind the other, each with its size in front."""

    name: str
    version: int
    size: int
    fields: tuple[LayoutField, ...]


def _fields(codes: str, names: str, start: int = 0) -> tuple[LayoutField, ...]:
    """One name for each code of a struct format without padding; `_` is left out."""
    layout_fields, offset = [], start
    for code, name in zip(codes, names.split(), strict=True):
        if name != "_":
            layout_fields.append(LayoutField(name, UNSIGNED[code], offset))
        offset += struct.calcsize(f">{code}")
    return tuple(layout_fields)


_HEADER = _fields(
    "IIBBHIQQQIIQ",
    "size _ version record_kind _ record_epoch position log_ms wall_ms "
    "log_topic_id log_queue_id log_offset",
)
HEAD_SIZE = MESSAGE_HEADER_SIZE + LARGEST_TOKEN

REVIVE = Layout(
    "revive",
    1,
    128,
    (
        *_HEADER,
        *_fields(
            "BBHIQQQIIIIQQQ",
            "_ kind flags epoch sequence members start_offset topic_id group_id queue_id "
            "old_epoch link revive_at_ms client",
            HEADER_SIZE,
        ),
    ),
)
# A token of the first version has no last_log_ms; of a firing, `token` begins another struct.
HEAD = Layout(
    "head",
    1,
    HEAD_SIZE,
    (
        *_HEADER,
        *_fields("QIIHHI", "tag_hash head_size properties_size token_size attempt _", HEADER_SIZE),
        *_fields(
            "BBHIQIIQQQ",
            "token member token_flags epoch sequence first_topic_id first_queue_id first_offset "
            "first_log_ms last_log_ms",
            MESSAGE_HEADER_SIZE,
        ),
        *_fields("BBHIQQQQ", "_ _ outcome _ due_ms identity _ _", MESSAGE_HEADER_SIZE),
    ),
)
RECORD = Layout("record", 1, 0, HEAD.fields)
# A record of rmq_sys_offsets: broker/meta/offset_record.py.
OFFSET = Layout(
    "offset",
    1,
    HEADER_SIZE + 24,
    (
        *_HEADER,
        *_fields("BBHIIIQ", "_ reason _ group_id topic_id queue_id queue_offset", HEADER_SIZE),
    ),
)


class OffsetFlag(IntEnum):
    FIFO = 1
    RETRY = 2  # read from the group's retry topic
    PARKED = 4  # from its parking topic
    NEWEST = 8  # the group begins at the newest message where it never read
    BUFFERED = 16  # its check points are no records
    FIRST = 32  # the pair's own counters stand on this row


OFFSET_SAMPLE = struct.Struct(">BBHIQQIIIIQQQQQQQQQQQQQQ")
TOPIC_SAMPLE = struct.Struct(">BBHIQQIIQQQQ")
TIMER_SAMPLE = struct.Struct(">BBHIQQIIQQ")
SAMPLE_VERSION = 1
_SAMPLE = "version kind flags epoch sample wall_ms"

OFFSETS = Layout(
    "offsets",
    SAMPLE_VERSION,
    OFFSET_SAMPLE.size,
    _fields(
        "BBHIQQIIIIQQQQQQQQQQQQQQ",
        f"{_SAMPLE} group_id topic_id read_topic_id queue_id min_offset max_offset "
        "next_offset committed_offset ready in_flight blocked expired filtered "
        "oldest_ready_ms delivered acked returned dead",
    ),
)
TOPICS = Layout(
    "topics",
    SAMPLE_VERSION,
    TOPIC_SAMPLE.size,
    _fields(
        "BBHIQQIIQQQQ",
        f"{_SAMPLE} topic_id queue_id min_offset max_offset stored pending_timers",
    ),
)


class TimerRow(IntEnum):
    """What a timer sample's `key` and `count` are."""

    DUE_WITHIN = 1  # milliseconds ahead, 0 for all that is later | timers
    LATENESS = 2  # milliseconds, 0 for any more | fired so late at most, since the start
    STATE = 3  # 1 enqueue lag ms, 2 dequeue lag ms, 3 late timers, 4 fired, 5 recalled


TIMERS = Layout(
    "timers",
    SAMPLE_VERSION,
    TIMER_SAMPLE.size,
    _fields("BBHIQQIIQQ", f"{_SAMPLE} _ _ key count"),
)
LAYOUTS = {
    layout.name: layout for layout in (REVIVE, HEAD, RECORD, OFFSET, OFFSETS, TOPICS, TIMERS)
}
# What DESCRIBE is asked for; retries and dead letters come with `revive`: they end deliveries.
TABLES = ("revive", "offsets", "topics", "timers", "fired", "messages")
