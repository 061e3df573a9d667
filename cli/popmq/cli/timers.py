"""`popmq timers`: what waits for its delivery time; cancel one, or move it.

A message is named by its id and its topic, or by the recall handle that its send gave.  Every
broker is asked, so an id that was sent twice is cancelled or moved everywhere.
"""

import re
import time
from collections.abc import Sequence

import click
from google.protobuf.json_format import MessageToDict

from popmq.cli.client import Client
from popmq.cli.resource_names import TOPIC, client_of, nearest_named
from popmq.cli.terminal.arguments import COUNT, DUE_TIME, DURATION
from popmq.cli.terminal.command_line import Args, argument, command, group, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.namespace_option import need_topic
from popmq.cli.terminal.output import (
    Row,
    columns,
    format_ago,
    format_due,
    print_incomplete,
    print_note,
    print_rows,
)
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.quantities import format_duration, iso_time
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.wire import admin_pb2 as admin

LIST_COLUMNS = ("DUE", "ID", "TOPIC", "QUEUE", "STATE", "STORED", "BROKER", "POSITION", "OFFSET")
# Left out on narrow terminals, the last one first.
OPTIONAL = ("STORED", "STATE", "QUEUE", "BROKER", "OFFSET", "POSITION")
# Handles are longer; other ids than those of the official clients need --topic.
_MESSAGE_ID = re.compile("[0-9A-Fa-f]{1,40}")
DEFAULT_LIMIT = 100
BAR = 30  # characters of the longest one


def named(args: Args) -> tuple[str, str, int]:
    """Topic, message id and due time (0: whichever) that the arguments name; of an id alone the
    topic is empty."""
    if args.topic:
        return args.topic, args.message, 0
    if _MESSAGE_ID.fullmatch(args.message):
        return "", args.message, 0
    try:
        handle = RecallHandle.decode(args.message)
    except Refused as error:
        raise Refused(
            error.code, f"{error}: name the message by its recall handle, or by its id"
        ) from error
    return handle.topic, handle.message_id, handle.due_ms


def run_forecast(args: Args) -> int:
    need_topic(args)
    with client_of(args) as client, nearest_named(client, topic=args.topic):
        request = admin.ForecastTimersRequest(topic=args.topic)
        reply = client.call_admin(request, admin.ForecastTimersReply)
    print_incomplete(reply.incomplete)
    print_rows(args, forecast_rows(reply), forecast_lines(reply))
    return 0


def forecast_lines(reply: admin.ForecastTimersReply) -> list[str]:
    total = sum(topic.count for topic in reply.pending)
    if not total:
        return ["no message waits for its delivery time"]
    rows: list[Sequence[object]] = [(topic.topic, topic.count) for topic in reply.pending]
    if len(rows) > 1:
        rows.append(("total", total))
    longest = max((bucket.count for bucket in reply.buckets), default=0) or 1
    bars = [
        (_within(bucket.within_ms), bucket.count, "#" * -(-bucket.count * BAR // longest))
        for bucket in reply.buckets
    ]
    due = format_due(reply.next_due_ms, _now_ms())
    lines = [
        f"next due: {iso_time(reply.next_due_ms)} ({due})",
        "",
        columns(("TOPIC", "PENDING"), rows),
    ]
    if bars:
        lines += ["", columns(("DUE-WITHIN", "TIMERS", ""), bars)]
    return lines


def forecast_rows(reply: admin.ForecastTimersReply) -> list[Row]:
    """One object with the next due time, one a topic, one a bucket."""
    rows: list[Row] = [{"next_due_ms": reply.next_due_ms or None}]
    rows += [{"topic": item.topic, "pending": item.count} for item in reply.pending]
    for bucket in reply.buckets:
        within_ms = bucket.within_ms if bucket.within_ms >= 0 else None
        rows.append({"within_ms": within_ms, "timers": bucket.count})
    return rows


def run_list(args: Args) -> int:
    need_topic(args)
    request = admin.ListTimersRequest(
        topic=args.topic, begin_ms=args.begin, end_ms=args.end, limit=args.limit
    )
    with client_of(args) as client, nearest_named(client, topic=args.topic):
        reply = client.call_admin(request, admin.ListTimersReply)
    _print(args, reply.timers[: args.limit])
    if reply.incomplete:
        print_note(f"there may be more: {reply.incomplete}")
    return 0


def run_show(args: Args) -> int:
    topic, message_id, _ = named(args)
    with client_of(args) as client, nearest_named(client, topic=topic):
        request = admin.ListTimersRequest(topic=topic, message_id=message_id)
        reply = client.call_admin(request, admin.ListTimersReply)
    print_incomplete(reply.incomplete)
    if not reply.timers:
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {message_id} of {_of(topic)} waits")
    _print(args, reply.timers)
    return 0


def run_cancel(args: Args) -> int:
    topic, message_id, due_ms = named(args)
    with client_of(args) as client, nearest_named(client, topic=topic):
        topic = topic or _topic_of(client, message_id)
        confirm(args, f"message {message_id} of topic {topic} is never delivered")
        request = admin.RecallRequest(topic=topic, message_id=message_id, due_ms=due_ms)
        reply = client.call_admin(request, admin.RecallReply)
    check_outcome(reply, topic, message_id)
    row = {"message_id": message_id, "topic": topic, "cancelled": True}
    print_rows(args, [row], [f"cancelled {message_id}"])
    return 0


def _check_time(args: Args) -> None:
    if (args.delay is None) == (args.at is None):
        raise click.UsageError("name one of --delay and --at")


def run_reschedule(args: Args) -> int:
    topic, message_id, _ = named(args)
    with client_of(args) as client, nearest_named(client, topic=topic):
        args.topic = args.topic or topic or _topic_of(client, message_id)
        request = reschedule_request(args)
        reply = client.call_admin(request, admin.RescheduleReply)
    check_outcome(reply, request.topic, request.message_id)
    row = {"message_id": request.message_id, "topic": request.topic, "due_ms": reply.due_ms}
    print_rows(args, [row], [f"{request.message_id} due={iso_time(reply.due_ms)}"])
    return 0


def reschedule_request(args: Args) -> admin.RescheduleRequest:
    """A time that is over means at once."""
    topic, message_id, due_ms = named(args)
    # 0 would be no time, and the sign tells a duration from a time.
    new_due_ms = max(1, args.at) if args.delay is None else -max(1, args.delay)
    return admin.RescheduleRequest(
        topic=topic, message_id=message_id, due_ms=due_ms, new_due_ms=new_due_ms
    )


def check_outcome(
    reply: admin.RecallReply | admin.RescheduleReply, topic: str, message_id: str
) -> None:
    """Raise unless it was done."""
    if reply.outcome == RecallResult.DONE:
        print_incomplete(reply.incomplete)
        return
    missing = f"; not everything: {reply.incomplete}" if reply.incomplete else ""
    if reply.outcome == RecallResult.ALREADY_VISIBLE:
        raise Refused(
            Code.ILLEGAL_DELIVERY_TIME,
            f"message {message_id} of topic {topic} is visible already{missing}",
        )
    raise Refused(
        Code.MESSAGE_NOT_FOUND, f"no message {message_id} of topic {topic} waits{missing}"
    )


def timer_fields(timer: admin.Timer) -> Row:
    return {
        name: int(value) if name in ("due_ms", "stored_ms", "position", "offset") else value
        for name, value in MessageToDict(
            timer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ).items()
        if name != "has_key"  # about the request
    }


def timer_cells(timer: admin.Timer, now_ms: int) -> tuple[object, ...]:
    return (
        format_due(timer.due_ms, now_ms),
        timer.message_id or "-",
        timer.topic,
        timer.queue_id,
        timer.state,
        format_ago(timer.stored_ms, now_ms),
        timer.broker,
        timer.position,
        timer.offset,
    )


def _print(args: Args, timers: Sequence[admin.Timer]) -> None:
    text = "no message waits for its delivery time"
    if timers:
        cells = [timer_cells(timer, _now_ms()) for timer in timers]
        text = columns(LIST_COLUMNS, cells, optional=OPTIONAL, wide=args.output == "wide")
    print_rows(args, map(timer_fields, timers), [text])


def _topic_of(client: Client, message_id: str) -> str:
    """Of a message that waits.  Raises MESSAGE_NOT_FOUND, or BAD_REQUEST for an id of several."""
    request = admin.ListTimersRequest(message_id=message_id)
    reply = client.call_admin(request, admin.ListTimersReply)
    print_incomplete(reply.incomplete)
    topics = sorted({timer.topic for timer in reply.timers})
    if not topics:
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {message_id} of any topic waits")
    if len(topics) > 1:
        names = ", ".join(topics)
        raise Refused(Code.BAD_REQUEST, f"{message_id} waits in topics {names}: name one (--topic)")
    return topics[0]


def _of(topic: str) -> str:
    return f"topic {topic}" if topic else "any topic"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _within(milliseconds: int) -> str:
    return "later" if milliseconds < 0 else format_duration(milliseconds)


_TOPIC = option("--topic", default="", type=TOPIC, metavar="T")
_MESSAGE = argument("message", metavar="MESSAGE_ID|RECALL_HANDLE")

forecast = command(
    "forecast",
    run_forecast,
    _TOPIC,
    help="Show how many messages wait, by topic and by due time.",
    examples=("popmq timers", "popmq timers forecast --topic orders"),
    namespaced=True,
)
timers = group(
    "timers",
    [
        forecast,
        command(
            "list",
            run_list,
            _TOPIC,
            option(
                "--from",
                "begin",
                type=DUE_TIME,
                default=0,
                metavar="TIME",
                help="Due then or later.",
            ),
            option("--to", "end", type=DUE_TIME, default=0, metavar="TIME", help="Due before."),
            option(
                "--limit", type=COUNT, default=DEFAULT_LIMIT, metavar="N", help="[default: 100]"
            ),
            help="List messages that wait, the next one first.",
            examples=("popmq timers list --topic orders --limit 20",),
            namespaced=True,
        ),
        command(
            "show",
            run_show,
            _MESSAGE,
            _TOPIC,
            help="Show when a message is due, and where it waits.",
            examples=("popmq timers show 01ABCDEF",),
            namespaced=True,
        ),
        command(
            "cancel",
            run_cancel,
            _MESSAGE,
            _TOPIC,
            YES,
            help="Never deliver a message that waits. Asks on a terminal.",
            examples=("popmq timers cancel 01ABCDEF --yes",),
            namespaced=True,
        ),
        command(
            "reschedule",
            run_reschedule,
            _MESSAGE,
            _TOPIC,
            option("--delay", type=DURATION, metavar="1h30m", help="After this time."),
            option("--at", type=DUE_TIME, metavar="TIME", help="At this time."),
            help="Deliver a message that waits at another time.",
            examples=("popmq timers reschedule 01ABCDEF --delay 1h30m",),
            namespaced=True,
            check=_check_time,
        ),
    ],
    help="Messages that wait for their delivery time. Alone: the same as `timers forecast`.",
    alone=forecast,
)
