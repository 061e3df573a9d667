"""`popmq send` and `popmq recv`: the first minutes with popmq, and a tool for scripts after that.

A received message is printed before it is acked, so that what nobody saw is delivered again.
"""

import argparse
import json
import sys
import time
import zlib
from base64 import b64encode
from datetime import UTC, datetime
from itertools import cycle
from typing import TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import MAX_REPLY_BYTES, RECEIVE_BATCH, Client
from popmq.cli.message_ids import MessageIds
from popmq.common.errors import Code, ConfigError, Refused
from popmq.common.quantities import DAY_MS, parse_duration_ms
from popmq.common.record.recall_handle import RecallHandle
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.delay import SPREAD_MS

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# The numbers of the protocol end somewhere; so do the commands', where people can read it.
MAX_DURATION_DAYS = 36_500
MAX_COUNT = (1 << 31) - 1
# Fewer digits are a date, as in 20300131.
EPOCH_MS_DIGITS = range(11, 16)

# With several brokers a receive waits at one of them, so each gets its turn this often.
TURN_MS = 2000
# A server may answer an empty receive without waiting; it is not asked again at once.
RETRY_PAUSE_S = 0.05


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    _add_send(subparsers, common)
    _add_recv(subparsers, common)


def duration_argument(text: str) -> int:
    """For argparse, which shows only the text of its own kind of error."""
    try:
        # Python refuses to read numbers of thousands of digits.
        milliseconds = parse_duration_ms(text) if len(text) < 100 else DAY_MS * DAY_MS
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if milliseconds > MAX_DURATION_DAYS * DAY_MS:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is over the limit of {MAX_DURATION_DAYS}d"
        )
    return milliseconds


def time_argument(text: str) -> int:
    """Milliseconds since 1970 of an ISO 8601 time, or written as such; a time without a zone is
    this machine's."""
    if text.isascii() and text.isdecimal() and len(text) in EPOCH_MS_DIGITS:
        return int(text)
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not a time: write 2030-01-31T12:00:00+01:00"
        ) from error


def count_argument(text: str) -> int:
    digits = text.lstrip("0") if text.isascii() and text.isdecimal() else ""
    if not digits:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not a count from 1")
    if len(digits) > 10 or int(digits) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is over the limit of {MAX_COUNT}")
    return int(digits)


def iso_time(milliseconds: int) -> str:
    """In UTC; what no calendar holds stays a number."""
    try:
        found = datetime.fromtimestamp(milliseconds // 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds}ms"
    return found.replace(microsecond=milliseconds % 1000 * 1000).isoformat(timespec="milliseconds")


def shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."


def property_argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not a property: write NAME=VALUE")
    return name, value


def _add_send(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("send", parents=[common], help="send a message")
    parser.set_defaults(run=run_send)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("body", metavar="BODY", help="the text to send; - reads standard input")
    parser.add_argument("--key", action="append", default=[], metavar="K", help="to find it by")
    parser.add_argument("--tag", metavar="T", help="to filter by")
    parser.add_argument(
        "--property", action="append", default=[], type=property_argument, metavar="NAME=VALUE"
    )
    parser.add_argument(
        "--count", type=count_argument, default=1, metavar="N", help="send it N times (default 1)"
    )
    # A message is ordered or delayed, never both.
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--group-key", metavar="G", help="messages of one key keep their order")
    kind.add_argument("--lite", metavar="NAME", help="into this lite topic of a topic of type lite")
    kind.add_argument(
        "--delay", type=duration_argument, metavar="90s", help="deliver after this time"
    )
    kind.add_argument("--at", type=time_argument, metavar="TIME", help="deliver at this time")
    parser.add_argument(
        "--spread",
        type=duration_argument,
        metavar="1m",
        help="with --delay or --at: at some time within this window after it",
    )


def _add_recv(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("recv", parents=[common], help="receive messages")
    parser.set_defaults(run=run_recv)
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--group", required=True, metavar="G", help="the consumer group")
    parser.add_argument("--ack", action="store_true", help="ack each message once it is printed")
    parser.add_argument(
        "--lite",
        action="append",
        default=[],
        metavar="NAME",
        help="of a topic of type lite: from this lite topic; may be repeated",
    )
    parser.add_argument(
        "--count", type=count_argument, default=1, metavar="N", help="stop after N (default 1)"
    )
    parser.add_argument(
        "--wait",
        type=duration_argument,
        default="20s",
        metavar="20s",
        help="stop when this time is over (default 20s)",
    )
    parser.add_argument(
        "--invisible",
        type=duration_argument,
        default="60s",
        metavar="60s",
        help="nobody else gets the message for this time (default 60s)",
    )


def run_send(args: argparse.Namespace) -> int:
    body = body_of(args)
    ids = MessageIds()
    with Client(args.endpoint) as client:
        for _ in range(args.count):
            now_ms = time.time_ns() // 1_000_000
            entry = client.send(built(args, body, ids.next(now_ms // 1000), now_ms))
            if args.json:
                sent: dict[str, object] = {
                    "message_id": entry.message_id,
                    "queue_offset": entry.offset,
                }
                if entry.recall_handle:
                    sent["recall_handle"] = entry.recall_handle
                    sent["due_ms"] = RecallHandle.decode(entry.recall_handle).due_ms
                print(json.dumps(sent), flush=True)
            else:
                print(sent_line(entry), flush=True)
    return 0


def sent_line(entry: service.SendResultEntry) -> str:
    line = f"{entry.message_id} queue_offset={entry.offset}"
    if not entry.recall_handle:
        return line
    due_ms = RecallHandle.decode(entry.recall_handle).due_ms
    return f"{line} due={iso_time(due_ms)} recall_handle={entry.recall_handle}"


def body_of(args: argparse.Namespace) -> bytes:
    """A body may be any bytes; Python hands those that are no text over as surrogates."""
    if args.body == "-":
        return sys.stdin.buffer.read()
    given: str = args.body
    return given.encode(errors="surrogateescape")


def built(args: argparse.Namespace, body: bytes, message_id: str, now_ms: int) -> api.Message:
    """The message that the arguments of `send` describe. Raises BAD_REQUEST for a contradiction."""
    properties = api.SystemProperties(
        keys=args.key,
        message_id=message_id,
        body_encoding=api.IDENTITY,
        message_type=api.NORMAL,
        born_timestamp=_timestamp(now_ms),
    )
    if args.tag is not None:
        properties.tag = args.tag
    due_ms = args.at if args.delay is None else now_ms + args.delay
    if args.group_key is not None:
        properties.message_type = api.FIFO
        properties.message_group = args.group_key
    elif args.lite is not None:
        properties.message_type = api.LITE
        properties.lite_topic = args.lite
    elif due_ms is not None:
        properties.message_type = api.DELAY
        properties.delivery_timestamp.CopyFrom(_timestamp(due_ms))
    user_properties = dict(args.property)
    if args.spread is not None:
        if due_ms is None:
            raise Refused(Code.BAD_REQUEST, "--spread goes with --delay or --at")
        user_properties[SPREAD_MS] = str(args.spread)
    return api.Message(
        topic=api.Resource(name=args.topic),
        user_properties=user_properties,
        system_properties=properties,
        body=body,
    )


def run_recv(args: argparse.Namespace) -> int:
    deadline_ms = _monotonic_ms() + args.wait
    received = 0
    with Client(args.endpoint) as client:
        queues = one_per_broker(client.query_route(args.topic))
        if not queues:
            raise Refused(Code.FORBIDDEN, f"topic {args.topic} has no readable queue")
        for turn, queue in enumerate(cycle(queues)):
            left_ms = max(0, deadline_ms - _monotonic_ms())
            if args.lite:  # each time: brokers forget those who say nothing
                client.subscribe_lite(args.group, args.topic, args.lite)
            messages = client.receive(
                args.group,
                queue,
                limit=min(args.count - received, RECEIVE_BATCH),
                wait_ms=left_ms if len(queues) == 1 else min(left_ms, TURN_MS),
                invisible_ms=args.invisible,
            )
            for message in messages:
                print(as_json(message) if args.json else as_line(message), flush=True)
            if messages and args.ack:
                client.ack(args.group, args.topic, messages)
            received += len(messages)
            # Every broker is asked once, however short the wait.
            over = turn + 1 >= len(queues) and _monotonic_ms() >= deadline_ms
            if received >= args.count or over:
                break
            if not messages:
                time.sleep(RETRY_PAUSE_S)
    if not received:
        print(f"popmq: no message in {args.topic} for group {args.group}", file=sys.stderr)
    return 0


def one_per_broker(queues: list[api.MessageQueue]) -> list[api.MessageQueue]:
    """One readable queue of each broker: a receive on any of them serves all the broker's."""
    readable = (api.READ, api.READ_WRITE)
    firsts: dict[str, api.MessageQueue] = {}
    for queue in queues:
        if queue.permission in readable:
            firsts.setdefault(queue.broker.name, queue)
    return list(firsts.values())


def as_line(message: api.Message) -> str:
    """The body, then what is known of the message; one line whatever the body holds."""
    properties = message.system_properties
    text = body_text(message)
    if text is None:
        shown = "base64:" + b64encode(message.body).decode()
    else:
        shown = text if text.isprintable() else json.dumps(text)
    parts = [shown, f"id={properties.message_id}"]
    if properties.tag:
        parts.append(f"tag={properties.tag}")
    if properties.keys:
        parts.append("keys=" + ",".join(properties.keys))
    parts.append(f"attempt={properties.delivery_attempt}")
    if properties.HasField("delivery_timestamp"):
        parts.append(f"due={iso_time(_milliseconds(properties.delivery_timestamp))}")
    if (late_ms := lateness_ms(properties)) is not None:
        parts.append(f"late={late_ms / 1000:.3f}s")
    return "  ".join(parts)


def as_json(message: api.Message) -> str:
    """`body` is text; a body that is none comes as `body_base64`, as it was sent."""
    properties = message.system_properties
    text = body_text(message)
    value: dict[str, object] = {"message_id": properties.message_id}
    if text is None:
        value["body_base64"] = b64encode(message.body).decode()
    else:
        value["body"] = text
    value |= {
        "tag": properties.tag,
        "keys": list(properties.keys),
        "group_key": properties.message_group,
        "properties": dict(message.user_properties),
        "attempt": properties.delivery_attempt,
        "queue_id": properties.queue_id,
        "queue_offset": properties.queue_offset,
        "born_ms": properties.born_timestamp.ToMilliseconds(),
        "stored_ms": properties.store_timestamp.ToMilliseconds(),
        "receipt_handle": properties.receipt_handle,
    }
    if properties.HasField("delivery_timestamp"):
        value["due_ms"] = _milliseconds(properties.delivery_timestamp)
        value["late_ms"] = lateness_ms(properties)
    return json.dumps(value, ensure_ascii=False)


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


def _timestamp(milliseconds: int) -> Timestamp:
    seconds, rest = divmod(milliseconds, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def _milliseconds(value: Timestamp) -> int:
    """Of any time that a sender made up; protobuf's own refuses some."""
    return value.seconds * 1000 + value.nanos // 1_000_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
