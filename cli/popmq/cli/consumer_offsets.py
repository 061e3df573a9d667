"""`popmq lag` and `popmq reset-offset`: the offsets of consumer groups, and a change of them."""

from collections.abc import Sequence

import click
from google.protobuf.json_format import MessageToDict

from popmq.cli.client import CallFailed, CallRefused, Client
from popmq.cli.clients import list_clients, member_lines
from popmq.cli.resource_names import GROUP, TOPIC, check_names, client_of
from popmq.cli.terminal.arguments import (
    EPOCH_MS_DIGITS,
    NEWEST,
    OLDEST,
    POSITIVE_DURATION,
    QUEUE,
    Parsed,
    offset_argument,
    shortened,
    time_argument,
)
from popmq.cli.terminal.command_line import Args, command, flag, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.live_screen import watch
from popmq.cli.terminal.namespace_option import belongs
from popmq.cli.terminal.output import Row, columns, format_age, print_incomplete, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.metric_table.verdicts import worst_verdict
from popmq.common.wire import admin_pb2 as admin

LAG_COLUMNS = (
    *("GROUP", "TOPIC", "LAG", "READY", "IN-FLIGHT", "DELAYED"),
    *("BLOCKED", "RETRIES", "EXPIRED", "OLDEST", "VERDICT"),
)
# Left out on narrow terminals, the last one first.
LAG_OPTIONAL = ("RETRIES", "DELAYED", "BLOCKED", "EXPIRED")
SHOWN_QUEUES = 8  # of `--watch`, those with the oldest unread message first
SUMS = ("ready", "in_flight", "delayed", "blocked", "retries", "expired", "unknown_ages")


def target_argument(text: str) -> tuple[str, int]:
    """The field of the request, and its value."""
    if text in OLDEST:
        return "oldest", 1
    if text in ("now", *NEWEST):
        return "newest", 1
    if text.isascii() and text.isdecimal() and len(text) not in EPOCH_MS_DIGITS:
        return "offset", offset_argument(text)
    try:
        return "stored_ms", time_argument(text)
    except click.BadParameter as error:
        raise click.BadParameter(
            f"{shortened(text)!r} is neither oldest, newest, an offset nor a time, such as "
            "2030-01-31T12:00:00+01:00 or `90m ago`"
        ) from error


def run_lag(args: Args) -> int:
    with client_of(args) as client:
        check_names(client, topic=args.topic, group=args.group)
        if args.watch:
            return watch(args.every / 1000, lambda: _watched(client, args))
        reply = _lag(client, args)
    print_incomplete(reply.incomplete)
    print_rows(args, lag_rows(reply), lag_lines(reply, wide=args.output == "wide"))
    return 0


def _lag(client: Client, args: Args) -> admin.LagReply:
    request = admin.LagRequest(group=args.group, topic=args.topic, never_read=True)
    reply = client.call_admin(request, admin.LagReply)
    keep_of_namespace(args, reply)
    return reply


def _watched(client: Client, args: Args) -> list[str]:
    """The lag; of one group also its queues and its members."""
    lag = _lag(client, args)
    lines = lag_lines(lag, wide=False)
    incomplete = [lag.incomplete]
    if args.group:
        # By name, so that brokers count what the group has not come to there.
        topics = sorted({item.topic for item in lag.lags if item.group == args.group})
        request = admin.TimeSpansRequest(group=args.group, topics=topics)
        try:
            spans = client.call_admin(request, admin.TimeSpansReply)
            lines += ["", *queue_lines(spans)]
            members = list_clients(client, args)
            lines += ["", *member_lines(members)]
            incomplete += [spans.incomplete, members.incomplete]
        except (CallRefused, CallFailed) as error:
            incomplete.append(str(error))
    reasons = "; ".join(dict.fromkeys(filter(None, incomplete)))
    return [*lines, "", f"not everything: {reasons}"] if reasons else lines


def queue_lines(reply: admin.TimeSpansReply) -> list[str]:
    """Those that have messages which the group has not been given, the oldest first."""
    unread = sorted(
        (span for span in reply.spans if span.next_ms),
        key=lambda span: (span.next_ms, span.topic, span.broker, span.queue_id),
    )
    rows = [
        (
            span.topic,
            span.queue_id,
            span.broker,
            span.unread if span.HasField("unread") else "-",
            format_age(max(0, reply.now_ms - span.next_ms)),
            format_age(max(0, reply.now_ms - span.newest_ms)),
        )
        for span in unread[:SHOWN_QUEUES]
    ]
    header = ("TOPIC", "QUEUE", "BROKER", "UNREAD", "OLDEST", "NEWEST")
    others = len(reply.spans) - len(rows)
    lines = [columns(header, rows, optional=("NEWEST", "BROKER"))] if rows else []
    if unread[SHOWN_QUEUES:]:
        lines.append(f"more queues with unread messages: {len(unread) - len(rows)}")
    elif others:
        lines.append(f"queues without unread messages: {others}")
    return lines or ["the group has read no queue yet"]


def keep_of_namespace(args: Args, reply: admin.LagReply) -> None:
    """Its groups in any topic, and any group in its topics."""
    lags = [item for item in reply.lags if belongs(args, item.group, item.topic)]
    dead = [dead_letter for dead_letter in reply.dead_letters if belongs(args, dead_letter.group)]
    del reply.lags[:], reply.dead_letters[:]
    reply.lags.extend(lags)
    reply.dead_letters.extend(dead)


def joined(reply: admin.LagReply) -> list[admin.Lag]:
    """One row for each group and topic, whatever the number of brokers."""
    rows: dict[tuple[str, str], admin.Lag] = {}
    started = {lag.group for lag in reply.lags if not lag.never_read}
    for lag in reply.lags:
        if lag.never_read and lag.group in started:  # at another broker
            continue
        row = rows.setdefault((lag.group, lag.topic), admin.Lag(group=lag.group, topic=lag.topic))
        for name in SUMS:
            setattr(row, name, getattr(row, name) + getattr(lag, name))
        known = [ms for ms in (row.oldest_ready_ms, lag.oldest_ready_ms) if ms]
        row.oldest_ready_ms = min(known, default=0)
        row.never_read = lag.never_read
        row.verdict = worst_verdict(row.verdict, lag.verdict)
    return [rows[key] for key in sorted(rows)]


def total_of(lag: admin.Lag) -> int:
    return lag.ready + lag.in_flight + lag.blocked


def parked_fields(parked: Sequence[admin.ParkedKey]) -> list[dict[str, str | int]]:
    return [
        {
            "broker": item.broker,
            "topic": item.topic,
            "key": item.key,
            "queue": item.queue_id,
            "messages": item.messages,
            "parked_ms": item.parked_ms,
            "state": item.state,
        }
        for item in parked
    ]


def unordered_topics(client: Client, group: admin.Group, lag: admin.LagReply) -> list[str]:
    """FIFO topics that the group reads without being a FIFO group."""
    if group.type == "fifo":
        return []
    offsets = []
    for name in sorted({row.topic for row in lag.lags if not row.never_read})[:100]:
        request = admin.DescribeTopicRequest(name=name)
        if client.call_admin(request, admin.TopicReply).topic.type == "fifo":
            offsets.append(name)
    return offsets


def lag_lines(reply: admin.LagReply, *, wide: bool = False) -> list[str]:
    """The rows, their total when there are several, and dead letters by group."""
    rows = joined(reply)
    cells = [_cells(row, reply.now_ms) for row in rows]
    if len(rows) > 1:
        total = admin.Lag(group="total", topic="")
        for name in SUMS:
            setattr(total, name, sum(getattr(row, name) for row in rows))
        total.unknown_ages = 0  # the total has no age
        cells.append(_cells(total, reply.now_ms))
    table = columns(LAG_COLUMNS, cells, optional=LAG_OPTIONAL, wide=wide)
    lines = [table] if rows else ["no group has read a topic yet"]
    for group in sorted({row.group for row in rows if row.never_read}):
        lines.append(f"group {group} has read no topic yet: this is what each holds for it")
    dead = _dead_letters(reply)
    if dead:
        header = ("GROUP", "DEAD-LETTERS", "REDRIVEN")
        counts = [(group, *counts) for group, counts in sorted(dead.items())]
        lines += ["", columns(header, counts)]
    return lines


def lag_rows(reply: admin.LagReply) -> list[Row]:
    """An object for each group and topic, then one for each group with dead letters."""
    rows: list[Row] = []
    for row in joined(reply):
        age_ms = max(0, reply.now_ms - row.oldest_ready_ms) if row.oldest_ready_ms else None
        values = {name: getattr(row, name) for name in SUMS}
        names = {"group": row.group, "topic": row.topic, "lag": total_of(row)}
        names["verdict"] = row.verdict
        if row.never_read:
            values["never_read"] = True
        rows.append(names | values | {"oldest_ready_age_ms": age_ms})
    for group, (stored, redriven) in sorted(_dead_letters(reply).items()):
        rows.append({"group": group, "dead_letters": stored, "redriven": redriven})
    return rows


def run_reset(args: Args) -> int:
    request = reset_request(args)
    with client_of(args) as client:
        check_names(client, topic=args.topic, group=args.group)
        if not args.dry_run:
            _, value = args.to
            target = value if args.to[0] == "offset" else args.to[0].replace("stored_ms", "a time")
            confirm(
                args,
                f"group {args.group} reads on in topic {args.topic} at {target}, and what it has "
                "in flight there ends",
            )
        reply = client.call_admin(request, admin.ResetOffsetReply)
    print_incomplete(reply.incomplete)
    rows = [_reset_row(queue) | {"dry_run": args.dry_run} for queue in reply.queues]
    print_rows(args, rows, [reset_lines(reply, dry_run=args.dry_run)])
    # A broker that was not reached still reads on where it was.
    return 1 if reply.incomplete else 0


def _reset_row(queue: admin.ResetQueue) -> dict[str, object]:
    row = MessageToDict(
        queue, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return row | {name: int(row[name]) for name in ("before", "after", "in_flight")}


def reset_request(args: Args) -> admin.ResetOffsetRequest:
    name, value = args.to
    request = admin.ResetOffsetRequest(
        group=args.group,
        topic=args.topic,
        queue_id=args.queue,
        dry_run=args.dry_run,
        skip_retries=_skip_retries(args),
    )
    if value < 0:
        raise Refused(Code.BAD_REQUEST, "--to names a time before 1970")
    setattr(request, name, bool(value) if name in ("oldest", "newest") else value)
    return request


def _check_reset(args: Args) -> None:
    if args.skip_retries and args.keep_retries:
        raise click.UsageError("--skip-retries and --keep-retries cannot be combined")


def _skip_retries(args: Args) -> bool | None:
    """None leaves it to the broker."""
    return True if args.skip_retries else False if args.keep_retries else None


def reset_lines(reply: admin.ResetOffsetReply, *, dry_run: bool) -> str:
    rows = [
        (queue.broker, queue.topic, queue.queue_id, queue.before, queue.after, queue.in_flight)
        for queue in reply.queues
    ]
    ended = "WOULD-END" if dry_run else "ENDED"
    return columns(("BROKER", "TOPIC", "QUEUE", "BEFORE", "AFTER", ended), rows)


def _dead_letters(reply: admin.LagReply) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for dead_letter in reply.dead_letters:
        stored, redriven = counts.get(dead_letter.group, (0, 0))
        counts[dead_letter.group] = (stored + dead_letter.stored, redriven + dead_letter.redriven)
    return counts


def _cells(lag: admin.Lag, now_ms: int) -> tuple[object, ...]:
    age = "unknown" if lag.unknown_ages else "-"
    if lag.oldest_ready_ms:
        age = format_age(max(0, now_ms - lag.oldest_ready_ms))
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
        lag.verdict or "-",
    )


_RETRIES = (
    flag("--skip-retries", help="Skip pending retries and what is parked."),
    flag("--keep-retries", help="Keep them.  [default: skip them with `--to newest` only]"),
)

lag = command(
    "lag",
    run_lag,
    option("--group", default="", type=GROUP, metavar="G"),
    option("--topic", default="", type=TOPIC, metavar="T"),
    flag("-w", "--watch", help="Show it again and again, until Ctrl-C."),
    option("--every", type=POSITIVE_DURATION, default="2s", metavar="2s", help="With --watch."),
    help="Show what each group has still to do in each topic.",
    examples=("popmq lag --group billing", "popmq lag --watch", "popmq lag -o json"),
    namespaced=True,
)
reset_offset = command(
    "reset-offset",
    run_reset,
    option("--group", required=True, type=GROUP, metavar="G"),
    option("--topic", required=True, type=TOPIC, metavar="T"),
    option(
        "--to",
        required=True,
        type=Parsed("target", target_argument),
        metavar="oldest|newest|OFFSET|TIME",
    ),
    option("--queue", type=QUEUE, metavar="Q", help="This queue alone."),
    *_RETRIES,
    flag("--dry-run", help="Only show what would be done."),
    YES,
    help="Set where a group reads on, also a running one. Asks on a terminal.",
    examples=(
        "popmq reset-offset --group billing --topic orders --to oldest --dry-run",
        "popmq reset-offset --group billing --topic orders --to '2h ago'",
    ),
    namespaced=True,
    check=_check_reset,
)
