"""Stored messages to columns: the client's bytes are read as far as a report needs them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from popmq.common.record.message import BadRecord, RecordKind, check_record, decode_message
from popmq.common.varint import read_varint
from popmq.reports.records.id_names import IdNames
from popmq.reports.records.record_layout import RecordLayout
from popmq.reports.records.tables import TableSchema

# Fields of the public protocol's Message and SystemProperties.
_BODY = 4
_TAG, _KEYS, _MESSAGE_ID, _MESSAGE_GROUP = 1, 2, 3, 17


@dataclass(frozen=True, slots=True)
class Source:
    """Where records came from: what is the same for all of one piece."""

    broker: str
    topic: str
    queue: int
    names: IdNames
    end_position: int = 0  # records of the log from there on are left out; 0: none


def message_columns(
    schema: TableSchema, layout: RecordLayout, data: bytes, source: Source
) -> dict[str, list[Any]]:
    """One value for each message that can be read, by column."""
    requested = [name for name, _ in schema.columns]
    columns: dict[str, list[Any]] = {name: [] for name in requested}
    for row in _messages(data, source):
        for name in requested:
            columns[name].append(row[name])
    return columns


def _messages(data: bytes, source: Source) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        record = data[at : at + size]
        at += size
        try:
            header = check_record(record, 0, int.from_bytes(record[16:24], "big"))
            if header.kind not in (RecordKind.MESSAGE, RecordKind.MOVED):
                continue
            message = decode_message(record, 0, header)
            system = dict_of(message.properties)
            body = dict_of(message.head).get(_BODY, [b""])[-1]
        except (BadRecord, IndexError, ValueError):
            continue  # damaged: the broker counts those
        if source.end_position and header.position >= source.end_position:
            continue
        yield {
            "broker": source.broker,
            "topic": source.topic,
            "queue": source.queue,
            "offset": header.queue_offset,
            "position": header.position,
            "wall_time": header.wall_ms * 1_000,
            "log_ms": header.log_ms,
            "attempt": message.attempt,
            "message_id": _text(system, _MESSAGE_ID),
            "tag": _text(system, _TAG),
            "keys": " ".join(key.decode(errors="replace") for key in system.get(_KEYS, ())) or None,
            "message_group": _text(system, _MESSAGE_GROUP),
            "body": body,
        }


def dict_of(data: bytes) -> dict[int, list[bytes]]:
    """The length-delimited fields of a protobuf message, by number.

    IndexError and ValueError when it is none.
    """
    fields: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        wire = tag & 7
        if wire == 2:
            size, at = read_varint(data, at)
            if at + size > len(data):
                raise ValueError("a field is longer than its message")
            fields.setdefault(tag >> 3, []).append(data[at : at + size])
            at += size
        elif wire == 0:
            _, at = read_varint(data, at)
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
    return fields


def _text(fields: dict[int, list[bytes]], number: int) -> str | None:
    values = fields.get(number)
    return values[-1].decode(errors="replace") if values else None
