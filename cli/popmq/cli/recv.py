"""`popmq recv`, and what is done with a receipt handle: `ack`, `nack`, `extend`.

A received message is printed before it is acked, so that what nobody saw is delivered again.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice

import click

from popmq.cli.browse import Browsed, Browser
from popmq.cli.client import RECEIVE_BATCH, CallFailed, Client
from popmq.cli.messages import as_line, format_argument, formatted, message_fields
from popmq.cli.resource_names import GROUP, TOPIC, check_names, client_of
from popmq.cli.terminal.arguments import COUNT, DURATION, TIME, Parsed
from popmq.cli.terminal.command_line import Args, argument, command, flag, option
from popmq.cli.terminal.output import print_incomplete, print_note, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.quantities import format_duration
from popmq.proxy.api import definition_pb2 as api

# With several brokers a receive waits at one of them, so each gets its turn this often.
TURN_MS = 2000
# A server may answer an empty receive without waiting; it is not asked again at once.
RETRY_PAUSE_S = 0.05
RECONNECT_PAUSE_S = 0.5
FOLLOW_POLL_MS = 10_000
DEFAULT_WAIT_MS = 20_000


def run_recv(args: Args) -> int:
    with client_of(args) as client:
        check_names(client, topic=args.topic)
        if args.latest is not None or args.since is not None:
            return _look(client, args)
        received = 0
        try:
            for batch in _receives(client, args):
                _print(args, batch)
                if args.ack:
                    _ack(client, args, batch)
                received += len(batch)
        except KeyboardInterrupt:
            if not args.follow:
                raise
    if not received and not args.follow:
        if args.output in ("json", "yaml"):
            _print(args, [])
        print_note(f"no message in {args.topic} for group {args.group}")
    return 0


def _ack(client: Client, args: Args, batch: Sequence[api.Message]) -> None:
    try:
        client.ack(args.group, args.topic, batch)
    except CallFailed as error:
        if not args.follow:
            raise
        print_note(f"{error}; what was printed last may come again")


def _check(args: Args) -> None:
    looks = [name for name, value in (("--latest", args.latest), ("--from", args.since)) if value]
    if len(looks) > 1:
        raise click.UsageError("--latest and --from cannot be combined")
    if looks and (args.group or args.ack):
        extra = "--group" if args.group else "--ack"
        raise click.UsageError(f"{looks[0]} looks at messages for no group: leave out {extra}")
    if not looks and not args.group:
        raise click.UsageError("Missing option '--group' (or look with --latest N, --from TIME)")
    if args.tag is not None and args.sql is not None:
        raise click.UsageError("--tag and --sql cannot be combined")
    if looks and (args.tag is not None or args.sql is not None):
        raise click.UsageError(f"{looks[0]} shows every message: leave out --tag and --sql")
    if args.follow and args.output in ("json", "yaml"):
        raise click.UsageError(f"--follow never ends, -o {args.output} does: use -o jsonl")


def _receives(client: Client, args: Args) -> Iterator[Sequence[api.Message]]:
    """Batches of messages, until there are --count of them or the time is over."""
    queues = one_per_broker(client.query_route(args.topic))
    if not queues:
        raise Refused(Code.FORBIDDEN, f"topic {args.topic} has no readable queue")
    wait_ms = DEFAULT_WAIT_MS if args.wait is None else args.wait
    deadline_ms = _monotonic_ms() + wait_ms
    count = args.count or (None if args.follow else 1)
    received, away = 0, False
    if args.follow:
        client.heartbeat(args.group)
    for turn, queue in enumerate(cycle(queues)):
        left_ms = FOLLOW_POLL_MS if args.follow else max(0, deadline_ms - _monotonic_ms())
        if args.lite:  # each time: brokers forget those who say nothing
            client.subscribe_lite(args.group, args.topic, args.lite)
        try:
            batch = client.receive(
                args.group,
                queue,
                limit=RECEIVE_BATCH if count is None else min(count - received, RECEIVE_BATCH),
                wait_ms=left_ms if len(queues) == 1 else min(left_ms, TURN_MS),
                invisible_ms=args.invisible,
                tag=args.tag or "*",
                sql=args.sql or "",
            )
        except CallFailed as error:
            if not args.follow or turn == 0:
                raise
            if not away:
                print_note(f"{error}; trying again until Ctrl-C")
            away = True
            time.sleep(RECONNECT_PAUSE_S)
            continue
        if away:
            print_note("connected again")
            client.heartbeat(args.group)
        away = False
        received += len(batch)
        if batch:
            yield batch
        if count is not None and received >= count:
            return
        # Every broker is asked once, however short the wait.
        if not args.follow and turn + 1 >= len(queues) and _monotonic_ms() >= deadline_ms:
            return
        if not batch:
            time.sleep(RETRY_PAUSE_S)


def _look(client: Client, args: Args) -> int:
    """Print stored messages; they stay where they are, for every group."""
    browser = Browser(client, args.topic)
    if args.latest is not None:
        messages = browser.latest(args.latest)
    else:
        messages = browser.from_time(args.since)
    print_incomplete("; ".join(f"broker group {n}: {why}" for n, why in browser.missing.items()))
    shown: Iterable[Browsed] = messages
    if args.count is not None:
        shown = islice(messages, args.count)
    _print(args, [browsed.message for browsed in shown])
    if args.follow:
        try:
            for batch in browser.follow():
                _print(args, [browsed.message for browsed in batch])
        except KeyboardInterrupt:
            return 0
    elif not messages:
        print_note(f"no message in {args.topic}")
    return 0


def _print(args: Args, messages: Sequence[api.Message]) -> None:
    if args.format is not None:
        escape = sys.stdout.isatty()
        for message in messages:
            print(formatted(args.format, message, escape=escape), end="", flush=True)
        return
    wide = args.output == "wide"
    lines = (as_line(message, wide=wide) for message in messages)
    print_rows(args, map(message_fields, messages), lines)


def one_per_broker(queues: list[api.MessageQueue]) -> list[api.MessageQueue]:
    """One readable queue of each broker: a receive on any of them serves all the broker's."""
    readable = (api.READ, api.READ_WRITE)
    firsts: dict[str, api.MessageQueue] = {}
    for queue in queues:
        if queue.permission in readable:
            firsts.setdefault(queue.broker.name, queue)
    return list(firsts.values())


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


# -- by receipt handle


def run_ack(args: Args) -> int:
    with client_of(args) as client:
        client.ack_handles(args.group, args.topic, [("", handle) for handle in args.handle])
    rows = [{"receipt_handle": handle, "acked": True} for handle in args.handle]
    print_rows(args, rows, [f"acked {len(rows)} message{'s' if len(rows) != 1 else ''}"])
    return 0


def run_change(args: Args) -> int:
    """`nack` makes it visible at once, `extend` later than it would be."""
    with client_of(args) as client:
        handle = client.change_invisible_time(args.group, args.topic, args.handle, args.invisible)
    done = (
        "returned"
        if args.invisible == 0
        else f"invisible for {format_duration(args.invisible)} from now on"
    )
    row = {"receipt_handle": handle, "invisible_ms": args.invisible}
    print_rows(args, [row], [done if args.invisible == 0 else f"{done}: {handle}"])
    return 0


recv = command(
    "recv",
    run_recv,
    argument("topic", type=TOPIC),
    option("--group", type=GROUP, metavar="G", help="The consumer group that receives."),
    flag("--ack", help="Ack each message once it is printed."),
    option("--tag", metavar="T", help="Only these tags: a, or 'a || b'."),
    option("--sql", metavar="EXPRESSION", help="Only what it is true of: \"region = 'eu'\"."),
    option("--count", type=COUNT, metavar="N", help="Stop after N.  [default: 1]"),
    option("--wait", type=DURATION, metavar="20s", help="Stop when this is over.  [default: 20s]"),
    flag("--follow", help="Go on until Ctrl-C."),
    option(
        "--invisible",
        type=DURATION,
        default="60s",
        metavar="60s",
        help="How long the message is hidden from other consumers.  [default: 60s]",
    ),
    option(
        "--lite",
        multiple=True,
        default=(),
        metavar="NAME",
        help="Of a topic of type lite: from this lite topic; may be repeated.",
    ),
    option("--latest", type=COUNT, metavar="N", help="Look at the last N; no group gets them."),
    option("--from", "since", type=TIME, metavar="TIME", help="Look at all from this time on."),
    option(
        "--format",
        type=Parsed("format", format_argument),
        metavar="TEXT",
        help=r"Print this for each message, with fields in braces: '{body} {tag}\n'.",
    ),
    help="Receive messages and print them. Without --ack they come back after --invisible. The "
    "topic has to exist; the group is made when it is first used, if the broker allows that.",
    examples=(
        "popmq recv orders --group billing --ack",
        "popmq recv orders --group billing --follow --ack -o jsonl",
        "popmq recv orders --latest 10",
        "popmq recv orders --from '90m ago' --format '{stored_ms} {body}\\n'",
    ),
    namespaced=True,
    check=_check,
)

_OF_HANDLE = (
    option("--topic", required=True, type=TOPIC, metavar="T", help="The message's topic."),
    option("--group", required=True, type=GROUP, metavar="G", help="The group that received it."),
)

ack = command(
    "ack",
    run_ack,
    argument("handle", nargs=-1, required=True),
    *_OF_HANDLE,
    help="Ack received messages by their receipt handles (receipt_handle of recv -o jsonl).",
    examples=("popmq ack --topic orders --group billing HANDLE",),
    namespaced=True,
)
nack = command(
    "nack",
    run_change,
    argument("handle"),
    *_OF_HANDLE,
    values={"invisible": 0},
    help="Return a received message at once, as its next attempt.",
    examples=("popmq nack --topic orders --group billing HANDLE",),
    namespaced=True,
)
extend = command(
    "extend",
    run_change,
    argument("handle"),
    *_OF_HANDLE,
    option("--by", "invisible", type=DURATION, required=True, metavar="5m", help="From now on."),
    help="Keep a received message invisible for longer; prints the handle that is good from then "
    "on.",
    examples=("popmq extend --by 5m --topic orders --group billing HANDLE",),
    namespaced=True,
)
