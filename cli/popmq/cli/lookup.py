"""`popmq message show`: stored messages by id, by key, by queue and offset, or by time.

It looks and changes nothing: what is shown stays where it is, for every group.
"""

import json
import time

import click

from popmq.cli.client import Client
from popmq.cli.messages import as_line, message_fields
from popmq.cli.resource_names import TOPIC, client_of, nearest_named
from popmq.cli.terminal.arguments import COUNT, OFFSET, QUEUE, TIME
from popmq.cli.terminal.command_line import Args, argument, command, group, option
from popmq.cli.terminal.output import Row, format_ago, print_note, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.quantities import iso_time
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api


def run_show(args: Args) -> int:
    with client_of(args) as client, nearest_named(client, topic=args.topic):
        if not args.topic and args.id:
            return _show_by_id_alone(client, args)
        reply = client.call_admin(request_of(args), admin.FindMessagesReply)
        check_found(reply, f"no such message in topic {args.topic}")
    return _print(args, reply)


def check_found(reply: admin.FindMessagesReply, text: str) -> None:
    """Name the brokers that did not answer, and refuse when the others have no message."""
    if reply.incomplete:
        print_note(f"there may be more: {reply.incomplete}")
    if not reply.messages:
        raise Refused(Code.MESSAGE_NOT_FOUND, text)


def _show_by_id_alone(client: Client, args: Args) -> int:
    """Ask in which topics there is a message of this id first."""
    explained = client.call_admin(admin.ExplainRequest(message_id=args.id), admin.ExplainReply)
    messages_reply = admin.FindMessagesReply(incomplete=explained.incomplete)
    for topic in sorted({message.topic for message in explained.messages}):
        request = admin.FindMessagesRequest(topic=topic, message_id=args.id, limit=args.limit)
        reply = client.call_admin(request, admin.FindMessagesReply)
        messages_reply.messages.extend(reply.messages)
        messages_reply.incomplete = messages_reply.incomplete or reply.incomplete
    check_found(messages_reply, f"no message {args.id} in any topic")
    return _print(args, messages_reply)


def _print(args: Args, reply: admin.FindMessagesReply) -> int:
    print_rows(args, map(found_fields, reply.messages), map(found_lines, reply.messages))
    return 0


def _check(args: Args) -> None:
    """What is to be found is named in one way."""
    ways = [args.id, args.key, args.offset, args.time]
    if sum(way is not None for way in ways) != 1:
        raise click.UsageError(
            "name one thing to find: ID, --key K, --queue Q --offset N, or --queue Q --time TIME"
        )
    in_queue = args.offset is not None or args.time is not None
    if in_queue != (args.queue is not None):
        raise click.UsageError("--queue Q goes with --offset N or --time TIME")
    if args.key is None and (args.begin is not None or args.end is not None):
        raise click.UsageError("--begin and --end go with --key K")
    if not args.topic and args.id is None:
        raise click.UsageError("--topic T is missing: only an ID is enough alone")


def request_of(args: Args) -> admin.FindMessagesRequest:
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


def message_of(match: admin.FoundMessage) -> api.Message:
    """The message as a consumer would get it, without a receipt handle; a dead letter does not
    say when it was stored first."""
    message = api.Message.FromString(match.head)
    properties = message.system_properties
    properties.MergeFromString(match.properties)
    properties.queue_id = match.queue_id
    properties.queue_offset = match.queue_offset
    properties.delivery_attempt = match.attempt
    if match.stored_ms:
        properties.store_timestamp.FromMilliseconds(match.stored_ms)
    return message


def found_lines(match: admin.FoundMessage) -> str:
    """The message as `recv` shows it, and below it where it is."""
    ago = format_ago(match.stored_ms, time.time_ns() // 1_000_000)
    return (
        f"{match.record or as_line(message_of(match))}\n"
        f"    topic={match.topic} broker={match.broker} queue={match.queue_id} "
        f"offset={match.queue_offset} position={match.position}\n"
        f"    stored={iso_time(match.stored_ms)} ({ago})"
    )


def found_fields(match: admin.FoundMessage) -> Row:
    place = {
        "topic": match.topic,
        "broker": match.broker,
        "position": match.position,
    }
    if match.record:
        place |= {
            "queue_id": match.queue_id,
            "queue_offset": match.queue_offset,
            "stored_ms": match.stored_ms,
        }
        return {"fields": json.loads(match.record)} | place
    fields = message_fields(message_of(match))
    del fields["receipt_handle"]
    return fields | place


message = group(
    "message",
    [
        command(
            "show",
            run_show,
            argument("id", required=False),
            option("--topic", default="", type=TOPIC, metavar="T", help="Look in this topic."),
            option("--key", metavar="K", help="Messages with this key, newest first."),
            option("--queue", type=QUEUE, metavar="Q", help="With --offset or --time."),
            option("--offset", type=OFFSET, metavar="N", help="From this place on."),
            option(
                "--time", type=TIME, metavar="TIME", help="From the first stored then or later."
            ),
            option("--begin", type=TIME, metavar="TIME", help="With --key: not older."),
            option("--end", type=TIME, metavar="TIME", help="With --key: not newer."),
            option(
                "--limit",
                type=COUNT,
                metavar="N",
                help="At most N of each broker.  [default: 64, in a queue 1]",
            ),
            help="Find messages and print them: by id, by key, or by their place in a queue.",
            examples=(
                "popmq message show 01ABCDEF",
                "popmq message show --topic orders --key order-7 --begin '1h ago'",
                "popmq message show --topic orders --queue 0 --offset 100 --limit 10",
            ),
            namespaced=True,
            check=_check,
        )
    ],
    help="Look at stored messages; nothing is changed by it.",
)
