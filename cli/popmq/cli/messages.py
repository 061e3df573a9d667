"""Messages as commands print them: as a line, as an object, or as --format says."""

import json
import re
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING

import click

from popmq.cli.client import MAX_REPLY_BYTES
from popmq.cli.terminal.output import terminal_width
from popmq.common.escaping import escaped, escaped_lines
from popmq.common.quantities import iso_time
from popmq.proxy.api import definition_pb2 as api

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

_FIELD = re.compile(r"\{([^{}]*)\}")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\0": "\0"}
SHOWN_BINARY = 64  # characters on a terminal, of a body that is no text
FIELDS = (
    *("message_id", "body", "tag", "keys", "group_key", "properties", "attempt", "queue_id"),
    *("queue_offset", "born_ms", "stored_ms", "receipt_handle", "due_ms", "late_ms"),
)


def as_line(message: api.Message, *, wide: bool = False) -> str:
    """The body, then what is known of the message; one line whatever the body holds.  With `wide`
    its user properties, too."""
    properties = message.system_properties
    text = body_text(message)
    if text is None:
        shown = "base64:" + b64encode(message.body).decode()
        if len(shown) > SHOWN_BINARY and terminal_width() is not None:
            size = len(message.body)
            shown = f"{shown[:SHOWN_BINARY]}... ({size} bytes; -o json has all)"
    else:
        shown = text if text.isprintable() else json.dumps(text)
    parts = [shown, f"id={properties.message_id}"]
    if properties.tag:
        parts.append(f"tag={properties.tag}")
    if properties.keys:
        parts.append("keys=" + ",".join(properties.keys))
    if properties.message_group:
        parts.append(f"group_key={properties.message_group}")
    if wide:
        parts += [f"{name}={value}" for name, value in sorted(message.user_properties.items())]
    parts.append(f"attempt={properties.delivery_attempt}")
    if properties.HasField("delivery_timestamp"):
        parts.append(f"due={iso_time(_milliseconds(properties.delivery_timestamp))}")
    if (late_ms := lateness_ms(properties)) is not None:
        parts.append(f"late={late_ms / 1000:.3f}s")
    return "  ".join(map(escaped, parts))


def message_fields(message: api.Message) -> dict[str, object]:
    """`body` is text; a body that is none comes as `body_base64`, as it was sent."""
    properties = message.system_properties
    text = body_text(message)
    fields: dict[str, object] = {"message_id": properties.message_id}
    if text is None:
        fields["body_base64"] = b64encode(message.body).decode()
    else:
        fields["body"] = text
    fields |= {
        "tag": properties.tag,
        "keys": list(properties.keys),
        "group_key": properties.message_group,
        "properties": dict(message.user_properties),
        "attempt": properties.delivery_attempt,
        "queue_id": properties.queue_id,
        "queue_offset": properties.queue_offset,
        "born_ms": _milliseconds(properties.born_timestamp),
        "stored_ms": _milliseconds(properties.store_timestamp),
        "receipt_handle": properties.receipt_handle,
    }
    if properties.HasField("delivery_timestamp"):
        fields["due_ms"] = _milliseconds(properties.delivery_timestamp)
        fields["late_ms"] = lateness_ms(properties)
    return fields


def format_argument(text: str) -> str:
    """`{body} {tag}\\n`, checked; the escapes are written out."""
    for name in _FIELD.findall(text):
        if name not in FIELDS:
            raise click.BadParameter(f"{{{name}}} is no field: there are {', '.join(FIELDS)}")
    if "{" in _FIELD.sub("", text):
        raise click.BadParameter("a { has no } with a field's name before it: write {body}")
    for escape, char in _ESCAPES.items():
        text = text.replace(escape, char)
    return text


def formatted(template: str, message: api.Message, *, escape: bool) -> str:
    """Fields that a message does not have are empty; keys are joined with commas.  For a terminal
    what fields say is escaped; a program gets them as they are."""
    fields = message_fields(message)
    fields.setdefault("body", fields.get("body_base64", ""))
    fields["keys"] = ",".join(message.system_properties.keys)
    fields["properties"] = json.dumps(fields["properties"], ensure_ascii=False)

    def value(result: "re.Match[str]") -> str:
        known = fields.get(result[1])
        text = "" if known is None else str(known)
        return escaped_lines(text) if escape else text

    return _FIELD.sub(value, template)


def lateness_ms(properties: api.SystemProperties) -> int | None:
    """From the due time to the moment at which the message became visible.

    None if it has no due time, and after its first delivery: a retry is stored anew.
    """
    due, stored = properties.delivery_timestamp, properties.store_timestamp
    known = properties.HasField("delivery_timestamp") and properties.HasField("store_timestamp")
    if not known or properties.delivery_attempt > 1:
        return None
    return _milliseconds(stored) - _milliseconds(due)


def body_text(message: api.Message) -> str | None:
    """The body as text, unpacked when its sender packed it; None when it is not UTF-8."""
    body = message.body
    if message.system_properties.body_encoding == api.GZIP:
        try:
            # 47: gzip or zlib, whichever the header says; clients differ.
            body = zlib.decompressobj(47).decompress(body, MAX_REPLY_BYTES)
        except zlib.error:
            return None
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _milliseconds(value: "Timestamp") -> int:
    """Of any time that a sender made up; protobuf's own refuses some."""
    return value.seconds * 1000 + value.nanos // 1_000_000
