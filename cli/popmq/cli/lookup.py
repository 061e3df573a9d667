"""`popmq message show`: stored messages by id, by key, by queue and offset, or by time.

It looks and changes nothing: what is shown stays where it is, for every group.
"""

import argparse
import json
import sys
from datetime import UTC, datetime

from popmq.cli.client import Client
from popmq.cli.messages import (
    MAX_COUNT,
    Subparsers,
    as_json,
    as_line,
    count_argument,
    time_argument,
)
from popmq.common.errors import Code, Refused
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

MAX_OFFSET = (1 << 63) - 1


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    actions = subparsers.add_parser("message", help="look at stored messages").add_subparsers(
        required=True, metavar="ACTION"
    )
    show = actions.add_parser("show", parents=[common], help="find messages and print them")
    show.set_defaults(run=run_show)
    show.add_argument("id", nargs="?", metavar="ID", help="the message's id")
    show.add_argument("--topic", required=True, metavar="T")
    show.add_argument("--key", metavar="K", help="messages with this key, newest first")
    show.add_argument("--queue", type=queue_argument, metavar="Q", help="with --offset or --time")
    show.add_argument("--offset", type=offset_argument, metavar="N", help="from this place on")
    show.add_argument(
        "--time", type=time_argument, metavar="TIME", help="from the first stored then or later"
    )
    show.add_argument("--begin", type=time_argument, metavar="TIME", help="with --key: not older")
    show.add_argument("--end", type=time_argument, metavar="TIME", help="with --key: not newer")
    show.add_argument(
        "--limit",
        type=count_argument,
        metavar="N",
        help="at most N of each broker (default 64, in a queue 1)",
    )


def offset_argument(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return _at_most(MAX_OFFSET, text)


def queue_argument(text: str) -> int:
    return _at_most(MAX_COUNT, str(offset_argument(text)))


def _at_most(limit: int, text: str) -> int:
    if len(text) > 20 or int(text) > limit:
        raise argparse.ArgumentTypeError(f"{text[:40]} is more than {limit}")
    return int(text)


def run_show(args: argparse.Namespace) -> int:
    request = request_of(args)
    with Client(args.endpoint) as client:
        reply = client.call_admin(request, admin.FindMessagesReply)
    for found in reply.messages:
        print(found_json(found) if args.json else found_lines(found), flush=True)
    if reply.incomplete:
        print(f"popmq: there may be more: {reply.incomplete}", file=sys.stderr)
    if not reply.messages:
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no such message in topic {args.topic}")
    return 0


def request_of(args: argparse.Namespace) -> admin.FindMessagesRequest:
    """What the arguments ask for. Raises BAD_REQUEST when that is not one thing."""
    ways = [args.id, args.key, args.offset, args.time]
    if sum(way is not None for way in ways) != 1:
        raise Refused(
            Code.BAD_REQUEST,
            "name one thing to find: ID, --key K, --queue Q --offset N, or --queue Q --time TIME",
        )
    in_queue = args.offset is not None or args.time is not None
    if in_queue != (args.queue is not None):
        raise Refused(Code.BAD_REQUEST, "--queue Q goes with --offset N or --time TIME")
    if args.key is None and (args.begin is not None or args.end is not None):
        raise Refused(Code.BAD_REQUEST, "--begin and --end go with --key K")
    return admin.FindMessagesRequest(
        topic=args.topic,
        message_id=args.id,
        key=args.key,
        queue_id=args.queue,
        queue_offset=args.offset,
        stored_ms=args.time,
        begin_ms=args.begin,
        end_ms=args.end,
        limit=args.limit,
    )


def message_of(found: admin.FoundMessage) -> api.Message:
    """The message as a consumer would get it, without a receipt handle; a dead letter does not
    say when it was stored first."""
    message = api.Message.FromString(found.head)
    properties = message.system_properties
    properties.MergeFromString(found.properties)
    properties.queue_id = found.queue_id
    properties.queue_offset = found.queue_offset
    properties.delivery_attempt = found.attempt
    if found.stored_ms:
        properties.store_timestamp.FromMilliseconds(found.stored_ms)
    return message


def found_lines(found: admin.FoundMessage) -> str:
    """The message as `recv` shows it, and below it where it is."""
    stored = datetime.fromtimestamp(found.stored_ms / 1000, UTC)
    return (
        f"{found.record or as_line(message_of(found))}\n"
        f"    topic={found.topic} broker={found.broker} queue={found.queue_id} "
        f"offset={found.queue_offset} position={found.position} "
        f"stored={stored.isoformat(timespec='milliseconds')}"
    )


def found_json(found: admin.FoundMessage) -> str:
    place = {"topic": found.topic, "broker": found.broker, "position": found.position}
    if found.record:
        value = json.loads(found.record)
        place |= {
            "queue_id": found.queue_id,
            "queue_offset": found.queue_offset,
            "stored_ms": found.stored_ms,
        }
        return json.dumps({"fields": value} | place, ensure_ascii=False)
    value = json.loads(as_json(message_of(found)))
    del value["receipt_handle"]
    return json.dumps(value | place, ensure_ascii=False)
