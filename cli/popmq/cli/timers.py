"""`popmq timers`: what waits for its delivery time; cancel one, or move it.

A message is named by its id and its topic, or by the recall handle that its send gave.  Every
broker is asked, so an id that was sent twice is cancelled or moved everywhere.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict

from popmq.cli.client import Client
from popmq.cli.messages import (
    Subparsers,
    count_argument,
    duration_argument,
    iso_time,
    time_argument,
)
from popmq.cli.metadata import columns, format_duration, say_incomplete
from popmq.cli.namespace_option import need_topic
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.wire import admin_pb2 as admin

LIST_COLUMNS = ("DUE", "ID", "TOPIC", "QUEUE", "STATE", "STORED", "BROKER", "POSITION", "OFFSET")
DEFAULT_LIMIT = 100
BAR = 30  # characters of the longest one


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "timers", help="messages that wait for their delivery time (alone: `timers forecast`)"
    )
    # An option before the action would be lost to the action's default; so it has none.
    parser.set_defaults(
        run=run_forecast,
        endpoint=common.get_default("endpoint"),
        json=False,
        namespace="",
        topic="",
    )
    actions = parser.add_subparsers(metavar="ACTION")
    forecast = actions.add_parser(
        "forecast", parents=[common], help="how many wait, by topic and by due time"
    )
    forecast.set_defaults(run=run_forecast)
    every = actions.add_parser("list", parents=[common], help="them, the next one first")
    every.set_defaults(run=run_list)
    for one in (forecast, every):
        one.add_argument("--topic", default="", metavar="T")
    every.add_argument(
        "--from",
        type=time_argument,
        default=0,
        metavar="TIME",
        dest="begin",
        help="due then or later",
    )
    every.add_argument(
        "--to", type=time_argument, default=0, metavar="TIME", dest="end", help="due before"
    )
    every.add_argument("--limit", type=count_argument, default=DEFAULT_LIMIT, metavar="100")
    show = actions.add_parser("show", parents=[common], help="one message's timers")
    show.set_defaults(run=run_show)
    cancel = actions.add_parser("cancel", parents=[common], help="never deliver a message")
    cancel.set_defaults(run=run_cancel)
    move = actions.add_parser("reschedule", parents=[common], help="deliver it at another time")
    move.set_defaults(run=run_reschedule)
    for one in (show, cancel, move):
        one.add_argument("message", metavar="MESSAGE_ID", help="or its recall handle, alone")
        one.add_argument("--topic", metavar="T")
    when = move.add_mutually_exclusive_group(required=True)
    when.add_argument("--delay", type=duration_argument, metavar="90s", help="after this time")
    when.add_argument("--at", type=time_argument, metavar="TIME", help="at this time")


def named(args: argparse.Namespace) -> tuple[str, str, int]:
    """Topic, message id and due time (0: whichever) that the arguments name."""
    if args.topic is not None:
        return args.topic, args.message, 0
    try:
        handle = RecallHandle.decode(args.message)
    except Refused as error:
        raise Refused(
            error.code, f"{error}: name the message by its recall handle, or its id with --topic T"
        ) from error
    return handle.topic, handle.message_id, handle.due_ms


def run_forecast(args: argparse.Namespace) -> int:
    need_topic(args)
    with Client(args.endpoint) as client:
        reply = client.call_admin(
            admin.ForecastTimersRequest(topic=args.topic), admin.ForecastTimersReply
        )
    say_incomplete(reply.incomplete)
    for line in forecast_json(reply) if args.json else forecast_lines(reply):
        print(line)
    return 0


def forecast_lines(reply: admin.ForecastTimersReply) -> list[str]:
    total = sum(one.count for one in reply.pending)
    if not total:
        return ["no message waits for its delivery time"]
    rows: list[Sequence[object]] = [(one.topic, one.count) for one in reply.pending]
    if len(rows) > 1:
        rows.append(("total", total))
    longest = max((one.count for one in reply.buckets), default=0) or 1
    bars = [
        (_within(one.within_ms), one.count, "#" * -(-one.count * BAR // longest))
        for one in reply.buckets
    ]
    lines = [f"next due: {iso_time(reply.next_due_ms)}", "", columns(("TOPIC", "PENDING"), rows)]
    if bars:
        lines += ["", columns(("DUE-WITHIN", "TIMERS", ""), bars)]
    return lines


def forecast_json(reply: admin.ForecastTimersReply) -> list[str]:
    """One object with the next due time, one a topic, one a bucket."""
    values: list[dict[str, object]] = [{"next_due_ms": reply.next_due_ms or None}]
    values += [{"topic": one.topic, "pending": one.count} for one in reply.pending]
    for bucket in reply.buckets:
        within_ms = bucket.within_ms if bucket.within_ms >= 0 else None
        values.append({"within_ms": within_ms, "timers": bucket.count})
    return list(map(json.dumps, values))


def run_list(args: argparse.Namespace) -> int:
    need_topic(args)
    request = admin.ListTimersRequest(
        topic=args.topic, begin_ms=args.begin, end_ms=args.end, limit=args.limit
    )
    with Client(args.endpoint) as client:
        reply = client.call_admin(request, admin.ListTimersReply)
    _print(reply.timers[: args.limit], as_json=args.json)
    if reply.incomplete:
        print(f"popmq: there may be more: {reply.incomplete}", file=sys.stderr)
    return 0


def run_show(args: argparse.Namespace) -> int:
    topic, message_id, _ = named(args)
    with Client(args.endpoint) as client:
        reply = client.call_admin(
            admin.ListTimersRequest(topic=topic, message_id=message_id), admin.ListTimersReply
        )
    say_incomplete(reply.incomplete)
    if not reply.timers:
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {message_id} of topic {topic} waits")
    _print(reply.timers, as_json=args.json)
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    topic, message_id, due_ms = named(args)
    request = admin.RecallRequest(topic=topic, message_id=message_id, due_ms=due_ms)
    with Client(args.endpoint) as client:
        reply = client.call_admin(request, admin.RecallReply)
    check_outcome(reply, topic, message_id)
    if args.json:
        print(json.dumps({"message_id": message_id, "topic": topic, "cancelled": True}))
    else:
        print(f"cancelled {message_id}")
    return 0


def run_reschedule(args: argparse.Namespace) -> int:
    request = reschedule_request(args)
    with Client(args.endpoint) as client:
        reply = client.call_admin(request, admin.RescheduleReply)
    check_outcome(reply, request.topic, request.message_id)
    if args.json:
        moved = {"message_id": request.message_id, "topic": request.topic, "due_ms": reply.due_ms}
        print(json.dumps(moved))
    else:
        print(f"{request.message_id} due={iso_time(reply.due_ms)}")
    return 0


def reschedule_request(args: argparse.Namespace) -> admin.RescheduleRequest:
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
        say_incomplete(reply.incomplete)
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


def timer_json(timer: admin.Timer) -> str:
    return json.dumps(
        {
            name: int(value) if name in ("due_ms", "stored_ms", "position", "offset") else value
            for name, value in MessageToDict(
                timer,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            ).items()
        }
    )


def timer_cells(timer: admin.Timer) -> tuple[object, ...]:
    return (
        iso_time(timer.due_ms),
        timer.message_id or "-",
        timer.topic,
        timer.queue_id,
        timer.state,
        iso_time(timer.stored_ms),
        timer.broker,
        timer.position,
        timer.offset,
    )


def _print(timers: Sequence[admin.Timer], *, as_json: bool) -> None:
    if as_json:
        for timer in timers:
            print(timer_json(timer))
    else:
        print(columns(LIST_COLUMNS, list(map(timer_cells, timers))))


def _within(milliseconds: int) -> str:
    return "later" if milliseconds < 0 else format_duration(milliseconds)
