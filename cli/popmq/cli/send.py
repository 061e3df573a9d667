"""`popmq send`: one message, or many from lines, now or later, in an order or as a transaction."""

import sys
import time
from collections.abc import Iterator, Sequence

import click
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.cli.client import Client
from popmq.cli.message_ids import MessageIds
from popmq.cli.resource_names import TOPIC, client_of
from popmq.cli.terminal.arguments import COUNT, DUE_TIME, DURATION, PROPERTY
from popmq.cli.terminal.command_line import Args, argument, command, flag, option
from popmq.cli.terminal.confirmation import can_ask, confirm
from popmq.cli.terminal.output import Row, format_ago, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.quantities import iso_time
from popmq.common.record.recall_handle import RecallHandle
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.delay import SPREAD_MS

MAX_BATCH = 1_000


def run_send(args: Args) -> int:
    now_ms = time.time_ns() // 1_000_000
    if args.at is not None and args.at <= now_ms and can_ask():
        confirm(args, f"--at is over ({format_ago(args.at, now_ms)}): the message goes out at once")
    ids = MessageIds()
    with client_of(args) as client:
        for bodies in _batches(args):
            now_ms = time.time_ns() // 1_000_000
            messages = [built(args, body, ids.next(now_ms // 1000), now_ms) for body in bodies]
            entries = client.send_batch(messages)
            if args.transaction in ("commit", "rollback"):
                _end(client, args, entries)
            print_rows(args, map(sent_fields, entries), map(sent_line, entries))
    return 0


def _check(args: Args) -> None:
    """One place where bodies come from, and one kind of message."""
    sources = [args.body is not None, args.file is not None, args.stdin_lines]
    if sum(sources) != 1:
        raise click.UsageError("name one BODY, or --file FILE, or --stdin-lines")
    kinds = {
        "--group-key": args.group_key,
        "--lite": args.lite,
        "--delay": args.delay,
        "--at": args.at,
        "--transaction": args.transaction,
        "--priority": args.priority,
    }
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{given[0]} and {given[1]} cannot be combined")
    if args.batch > 1 and args.transaction is not None:
        raise click.UsageError("--batch and --transaction cannot be combined")
    if args.spread is not None and args.delay is None and args.at is None:
        raise click.UsageError("--spread goes with --delay or --at")
    texts = {"--key": args.key, "--tag": (args.tag,), "--group-key": (args.group_key,)}
    empty = next((name for name, values in texts.items() if "" in values), None)
    if empty is not None:
        raise click.UsageError(f"{empty} is empty: leave it out, or give it a value")
    names = [name for name, _ in args.property]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise click.UsageError(f"--property {twice} is given twice: a message has one value of it")


def _batches(args: Args) -> Iterator[list[bytes]]:
    """Bodies, as many as one request takes; in topics of one type a batch has one type."""
    batch: list[bytes] = []
    for number, body in enumerate(_bodies(args), 1):
        if not body and args.stdin_lines:
            if batch:
                yield batch
            raise Refused(
                Code.MESSAGE_BODY_EMPTY,
                f"line {number} is empty, and a message needs a body: the lines before it were "
                "sent, it and those behind it were not",
            )
        batch.append(body)
        if len(batch) == args.batch:
            yield batch
            batch = []
    if batch:
        yield batch


def _bodies(args: Args) -> Iterator[bytes]:
    if args.stdin_lines:
        for line in sys.stdin.buffer:
            yield line.rstrip(b"\r\n")
        return
    body = body_of(args)
    for _ in range(args.count):
        yield body


def body_of(args: Args) -> bytes:
    """A body may be any bytes; Python hands those that are no text over as surrogates."""
    if args.file is not None:
        with open(args.file, "rb") as file:
            return file.read()
    if args.body == "-":
        return sys.stdin.buffer.read()
    given: str = args.body
    return given.encode(errors="surrogateescape")


def built(args: Args, body: bytes, message_id: str, now_ms: int) -> api.Message:
    """The message that the arguments of `send` describe."""
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
    elif args.priority is not None:
        properties.message_type = api.PRIORITY
        properties.priority = args.priority
    elif args.transaction is not None:
        properties.message_type = api.TRANSACTION
    elif due_ms is not None:
        properties.message_type = api.DELAY
        properties.delivery_timestamp.CopyFrom(_timestamp(due_ms))
    user_properties = dict(args.property)
    if args.spread is not None:
        user_properties[SPREAD_MS] = str(args.spread)
    return api.Message(
        topic=api.Resource(name=args.topic),
        user_properties=user_properties,
        system_properties=properties,
        body=body,
    )


def _end(client: Client, args: Args, entries: Sequence[service.SendResultEntry]) -> None:
    for entry in entries:
        client.end_transaction(args.topic, entry, commit=args.transaction == "commit")


def sent_fields(entry: service.SendResultEntry) -> Row:
    fields: dict[str, object] = {"message_id": entry.message_id, "queue_offset": entry.offset}
    if entry.transaction_id not in ("", entry.message_id):
        fields["transaction_id"] = entry.transaction_id
    if entry.recall_handle:
        fields["recall_handle"] = entry.recall_handle
        fields["due_ms"] = RecallHandle.decode(entry.recall_handle).due_ms
    return fields


def sent_line(entry: service.SendResultEntry) -> str:
    line = f"{entry.message_id} queue_offset={entry.offset}"
    if entry.transaction_id not in ("", entry.message_id):  # of a half message
        line += f" transaction={entry.transaction_id}"
    if not entry.recall_handle:
        return line
    due_ms = RecallHandle.decode(entry.recall_handle).due_ms
    return f"{line} due={iso_time(due_ms)} recall_handle={entry.recall_handle}"


def _timestamp(milliseconds: int) -> Timestamp:
    seconds, rest = divmod(milliseconds, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


send = command(
    "send",
    run_send,
    argument("topic", type=TOPIC),
    argument("body", required=False),
    option("--file", type=click.Path(exists=True, dir_okay=False), help="The body is this file's."),
    flag("--stdin-lines", help="Send each line of standard input as a message."),
    option("--key", multiple=True, default=(), metavar="K", help="To find the message by."),
    option("--tag", metavar="T", help="To filter by."),
    option("--property", multiple=True, default=(), type=PROPERTY, metavar="NAME=VALUE"),
    option("--count", type=COUNT, default=1, metavar="N", help="Send it N times.  [default: 1]"),
    option(
        "--batch",
        type=click.IntRange(1, MAX_BATCH),
        default=1,
        metavar="N",
        help="Send up to N messages in one request.",
    ),
    option(
        "--group-key",
        "--fifo-key",
        "group_key",
        metavar="G",
        help="Messages of one key keep their order (topics of type fifo).",
    ),
    option("--lite", metavar="NAME", help="Into this lite topic of a topic of type lite."),
    option("--priority", type=click.IntRange(0), metavar="N", help="For topics of type priority."),
    option(
        "--transaction",
        is_flag=False,
        flag_value="commit",
        type=click.Choice(("commit", "rollback", "open")),
        help="Send a half message, then end it so.  [without a value: commit]",
    ),
    option("--delay", type=DURATION, metavar="1h30m", help="Deliver after this time."),
    option("--at", type=DUE_TIME, metavar="TIME", help="Deliver at this time."),
    option(
        "--spread",
        type=DURATION,
        metavar="1m",
        help="With --delay or --at: at some time within this window after it.",
    ),
    flag("-y", "--yes", help="Do not ask when --at is over."),
    help="Send messages to a topic. BODY is text; - reads standard input to its end.",
    examples=(
        "popmq send orders 'hello' --tag greeting --key order-7",
        "popmq send orders --file order.json --delay 1h30m",
        "seq 1000 | popmq send orders --stdin-lines --batch 100",
    ),
    namespaced=True,
    check=_check,
)
