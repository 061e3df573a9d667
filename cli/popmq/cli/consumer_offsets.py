"""`popmq lag` and `popmq reset-offset`: where consumer groups are, and where they shall be."""

import argparse
import json

from google.protobuf.json_format import MessageToDict

from popmq.cli.client import Client
from popmq.cli.lookup import offset_argument, queue_argument
from popmq.cli.messages import Subparsers, time_argument
from popmq.cli.metadata import columns, format_duration, say_incomplete
from popmq.cli.namespace_option import belongs
from popmq.common.errors import Code, Refused
from popmq.common.wire import admin_pb2 as admin

LAG_COLUMNS = (
    *("GROUP", "TOPIC", "LAG", "READY", "IN-FLIGHT", "DELAYED"),
    *("BLOCKED", "RETRIES", "EXPIRED", "OLDEST"),
)
SUMS = ("ready", "in_flight", "delayed", "blocked", "retries", "expired", "unknown_ages")


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    lag = subparsers.add_parser(
        "lag", parents=[common], help="what each group has still to do in each topic"
    )
    lag.set_defaults(run=run_lag)
    lag.add_argument("--group", default="", metavar="G")
    lag.add_argument("--topic", default="", metavar="T")
    reset = subparsers.add_parser(
        "reset-offset", parents=[common], help="set where a group reads on, also a running one"
    )
    reset.set_defaults(run=run_reset)
    reset.add_argument("--group", required=True, metavar="G")
    reset.add_argument("--topic", required=True, metavar="T")
    reset.add_argument(
        "--to", required=True, type=target_argument, metavar="oldest|newest|OFFSET|TIME"
    )
    reset.add_argument("--queue", type=queue_argument, metavar="Q", help="this queue alone")
    retries = reset.add_mutually_exclusive_group()
    for name, value in (("skip", True), ("keep", False)):
        retries.add_argument(
            f"--{name}-retries",
            dest="skip_retries",
            action="store_const",
            const=value,
            help=f"{name} pending retries and what is parked (without a word: skip them with "
            "`--to newest` only)",
        )
    reset.add_argument("--dry-run", action="store_true", help="only say what would be done")


def target_argument(text: str) -> tuple[str, int]:
    """The field of the request, and its value."""
    if text in ("oldest", "newest"):
        return text, 1
    if text.isascii() and text.isdecimal():
        return "offset", offset_argument(text)
    return "stored_ms", time_argument(text)


def run_lag(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        reply = client.call_admin(
            admin.LagRequest(group=args.group, topic=args.topic), admin.LagReply
        )
    say_incomplete(reply.incomplete)
    keep_of_namespace(args, reply)
    for line in lag_json(reply) if args.json else lag_lines(reply):
        print(line)
    return 0


def keep_of_namespace(args: argparse.Namespace, reply: admin.LagReply) -> None:
    """Its groups in any topic, and any group in its topics."""
    lags = [one for one in reply.lags if belongs(args, one.group, one.topic)]
    dead = [one for one in reply.dead_letters if belongs(args, one.group)]
    del reply.lags[:], reply.dead_letters[:]
    reply.lags.extend(lags)
    reply.dead_letters.extend(dead)


def joined(reply: admin.LagReply) -> list[admin.Lag]:
    """One row for each group and topic, whatever the number of brokers."""
    rows: dict[tuple[str, str], admin.Lag] = {}
    for lag in reply.lags:
        row = rows.setdefault((lag.group, lag.topic), admin.Lag(group=lag.group, topic=lag.topic))
        for name in SUMS:
            setattr(row, name, getattr(row, name) + getattr(lag, name))
        known = [ms for ms in (row.oldest_ready_ms, lag.oldest_ready_ms) if ms]
        row.oldest_ready_ms = min(known, default=0)
    return [rows[key] for key in sorted(rows)]


def total_of(lag: admin.Lag) -> int:
    return lag.ready + lag.in_flight + lag.blocked


def lag_lines(reply: admin.LagReply) -> list[str]:
    """The rows, their total when there are several, and dead letters by group."""
    rows = joined(reply)
    cells = [_cells(row, reply.now_ms) for row in rows]
    if len(rows) > 1:
        total = admin.Lag(group="total", topic="")
        for name in SUMS:
            setattr(total, name, sum(getattr(row, name) for row in rows))
        total.unknown_ages = 0  # the total has no age
        cells.append(_cells(total, reply.now_ms))
    lines = [columns(LAG_COLUMNS, cells)]
    dead = _dead_letters(reply)
    if dead:
        lines += [
            "",
            columns(
                ("GROUP", "DEAD-LETTERS", "REDRIVEN"),
                [(group, *counts) for group, counts in sorted(dead.items())],
            ),
        ]
    return lines


def lag_json(reply: admin.LagReply) -> list[str]:
    lines = []
    for row in joined(reply):
        age_ms = max(0, reply.now_ms - row.oldest_ready_ms) if row.oldest_ready_ms else None
        values = {name: getattr(row, name) for name in SUMS}
        names = {"group": row.group, "topic": row.topic, "lag": total_of(row)}
        lines.append(json.dumps(names | values | {"oldest_ready_age_ms": age_ms}))
    for group, (stored, redriven) in sorted(_dead_letters(reply).items()):
        lines.append(json.dumps({"group": group, "dead_letters": stored, "redriven": redriven}))
    return lines


def run_reset(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        reply = client.call_admin(reset_request(args), admin.ResetOffsetReply)
    say_incomplete(reply.incomplete)
    if args.json:
        for queue in reply.queues:
            row = MessageToDict(
                queue,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            numbers = {name: int(row[name]) for name in ("before", "after", "in_flight")}
            print(json.dumps(row | numbers | {"dry_run": args.dry_run}))
    else:
        print(reset_lines(reply, dry_run=args.dry_run))
    # A broker that was not reached still reads on where it was.
    return 1 if reply.incomplete else 0


def reset_request(args: argparse.Namespace) -> admin.ResetOffsetRequest:
    name, value = args.to
    request = admin.ResetOffsetRequest(
        group=args.group,
        topic=args.topic,
        queue_id=args.queue,
        dry_run=args.dry_run,
        skip_retries=args.skip_retries,
    )
    if value < 0:
        raise Refused(Code.BAD_REQUEST, "--to names a time before 1970")
    setattr(request, name, bool(value) if name in ("oldest", "newest") else value)
    return request


def reset_lines(reply: admin.ResetOffsetReply, *, dry_run: bool) -> str:
    rows = [
        (one.broker, one.topic, one.queue_id, one.before, one.after, one.in_flight)
        for one in reply.queues
    ]
    ended = "WOULD-END" if dry_run else "ENDED"
    return columns(("BROKER", "TOPIC", "QUEUE", "BEFORE", "AFTER", ended), rows)


def _dead_letters(reply: admin.LagReply) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for one in reply.dead_letters:
        stored, redriven = counts.get(one.group, (0, 0))
        counts[one.group] = (stored + one.stored, redriven + one.redriven)
    return counts


def _cells(lag: admin.Lag, now_ms: int) -> tuple[object, ...]:
    age = "unknown" if lag.unknown_ages else "-"
    if lag.oldest_ready_ms:
        seconds = max(0, now_ms - lag.oldest_ready_ms) // 1000
        age = format_duration(seconds * 1000)
        age = f">={age}" if lag.unknown_ages else age
    return (
        lag.group,
        lag.topic,
        total_of(lag),
        lag.ready,
        lag.in_flight,
        lag.delayed,
        lag.blocked,
        lag.retries,
        lag.expired,
        age,
    )
