"""`popmq dlq list|peek|redrive`: what groups gave up on, and its way back.

A redrive goes on where the brokers' logs say that it was, so it may be ended and started again at
any moment (docs/concepts/dead_letters.md).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import click

from popmq.cli.client import CallRefused, Client
from popmq.cli.lookup import message_of
from popmq.cli.messages import as_line, message_fields
from popmq.cli.resource_names import GROUP, TOPIC, check_names, client_of
from popmq.cli.terminal.arguments import COUNT, Parsed, count_argument, time_argument
from popmq.cli.terminal.command_line import Args, argument, command, flag, group, option
from popmq.cli.terminal.output import (
    Row,
    columns,
    format_ago,
    print_incomplete,
    print_note,
    print_rows,
)
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.quantities import iso_time
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

PAGE = 200
REDRIVE_BATCH = 100
# Brokers and proxies come back; a redrive that finds none for so long gives up.
PATIENCE_S = 30.0
PAUSE_S = 0.5
_PASSING = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.TOO_MANY_REQUESTS)

MAX_LOOKED_AT = 100_000  # dead letters, for those that are named by id
# Left out on narrow terminals, the last one first.
OPTIONAL = ("REASON", "REDRIVEN", "DEAD", "OFFSET", "LAST", "FIRST")
LIST_COLUMNS = ("OFFSET", "ID", "ORIGIN", "ATTEMPTS", "REASON", "FIRST", "LAST", "DEAD", "REDRIVEN")
COUNTS = ("redriven", "already", "filtered", "orphaned", "damaged")


def rate_argument(text: str) -> int:
    return count_argument(text.removesuffix("/s"))


def filter_argument(text: str) -> tuple[str, str | int]:
    """The request's field, and its value."""
    name, equals, value = text.partition("=")
    if name in ("tag", "key") and equals and value:
        return name, value
    if name in ("before", "after") and equals:
        milliseconds = time_argument(value)
        if milliseconds > 0:
            return f"{name}_ms", milliseconds
    raise click.BadParameter(
        f"{text[:40]!r} is no filter: write tag=T, key=K, before=TIME or after=TIME"
    )


def run_list(args: Args) -> int:
    with client_of(args) as client:
        check_names(client, group=args.group)
        letters = _chosen(args, _letters(client, args.group, args.count, bodies=bool(args.ids)))
    wide = args.output == "wide"
    text = f"group {args.group} has no dead letters"
    if letters:
        cells = [_cells(letter, time.time_ns() // 1_000_000) for letter in letters]
        text = columns(LIST_COLUMNS, cells, optional=OPTIONAL, wide=wide)
    print_rows(args, [letter_fields(letter, bodies=False) for letter in letters], [text])
    return 0


def run_peek(args: Args) -> int:
    with client_of(args) as client:
        check_names(client, group=args.group)
        letters = _chosen(args, _letters(client, args.group, args.count, bodies=True))
    rows = [letter_fields(letter, bodies=True) for letter in letters]
    lines = [letter_lines(letter) for letter in letters]
    print_rows(args, rows, lines or [f"group {args.group} has no dead letters"])
    return 0


def _chosen(args: Args, letters: Iterator[admin.DeadLetter]) -> list[admin.DeadLetter]:
    """Those with the ids that are named, or all.  Raises MESSAGE_NOT_FOUND for the first of the
    ids that is not there."""
    if not args.ids:
        return list(letters)
    dead_letters = {_message(letter).system_properties.message_id: letter for letter in letters}
    for message_id in args.ids:
        if message_id not in dead_letters:
            raise Refused(
                Code.MESSAGE_NOT_FOUND,
                f"group {args.group} has no dead letter {message_id} among the first {args.count}",
            )
    return [dead_letters[message_id] for message_id in args.ids]


def _letters(client: Client, group: str, count: int, *, bodies: bool) -> Iterator[admin.DeadLetter]:
    """Up to `count`, broker after broker, in pieces."""
    request = admin.ListDeadLettersRequest(group=group, bodies=bodies, limit=min(PAGE, count))
    reply = client.call_admin(request, admin.ListDeadLettersReply)
    print_incomplete(reply.incomplete)
    first: dict[str, list[admin.DeadLetter]] = {item.broker: [] for item in reply.ranges}
    for letter in reply.letters:
        first[letter.broker].append(letter)
    for where in reply.ranges:
        dead_letters, at, end = first[where.broker], where.next_offset, where.end_offset
        while count and dead_letters:
            yield from dead_letters[:count]
            count -= min(count, len(dead_letters))
            if not count or at >= end:
                break
            request.broker, request.from_offset, request.limit = where.broker, at, min(PAGE, count)
            reply = client.call_admin(request, admin.ListDeadLettersReply)
            dead_letters, at = (
                list(reply.letters),
                reply.ranges[0].next_offset if reply.ranges else end,
            )


def letter_lines(letter: admin.DeadLetter) -> str:
    return (
        f"{as_line(_message(letter))}\n"
        f"    broker={letter.broker} offset={letter.queue_offset} position={letter.position} "
        f"origin={_origin(letter)} attempts={letter.attempts} reason={letter.reason!r}\n"
        f"    first={_time(letter.first_delivery_ms)} last={_time(letter.last_delivery_ms)} "
        f"dead={_time(letter.dead_ms)} redriven={'yes' if letter.redriven else 'no'}"
    )


def letter_fields(letter: admin.DeadLetter, *, bodies: bool) -> Row:
    shown = message_fields(_message(letter))
    names = (
        "message_id",
        "tag",
        "keys",
        *(("body", "body_base64", "properties") if bodies else ()),
    )
    fields = {name: shown[name] for name in names if name in shown}
    return fields | {
        "broker": letter.broker,
        "offset": letter.queue_offset,
        "position": letter.position,
        "origin": {
            "topic": letter.origin_topic or None,
            "queue_id": letter.origin_queue_id,
            "offset": letter.origin_offset,
        },
        "attempts": letter.attempts,
        "reason": letter.reason,
        "first_delivery_ms": letter.first_delivery_ms or None,
        "last_delivery_ms": letter.last_delivery_ms or None,
        "dead_ms": letter.dead_ms,
        "redriven": letter.redriven,
    }


def run_redrive(args: Args) -> int:
    request = redrive_request(args)
    with client_of(args) as client:
        check_names(client, group=args.group, topic=args.topic)
        redrive = partial(client.call_admin, reply_type=admin.RedriveReply)
        run = Redrive(redrive, rate=args.rate)
        total = _redrive_by_ids(client, args, run) if args.ids else run.all(request)
    counts = {name: getattr(total, name) for name in COUNTS}
    done = "would be redriven" if args.dry_run else "redriven"
    text = (
        f"{total.redriven} {done}, {total.already} were before, {total.filtered} filtered, "
        f"{total.orphaned} of a deleted topic, {total.damaged} damaged"
    )
    print_rows(args, [counts | {"dry_run": args.dry_run}], [text])
    # A broker that was not reached has its dead letters still.
    return 1 if run.incomplete else 0


def _redrive_by_ids(client: Client, args: Args, run: "Redrive") -> admin.Redriven:
    """Each letter alone: a piece of a redrive that has one offset."""
    args.count = MAX_LOOKED_AT
    total = admin.Redriven()
    for letter in _chosen(args, _letters(client, args.group, args.count, bodies=True)):
        piece = redrive_request(args)
        piece.broker = letter.broker
        piece.from_offset, piece.end_offset = letter.queue_offset, letter.queue_offset + 1
        piece.limit = 1
        for part in run.piece(piece).progress:
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(part, name))
    return total


def redrive_request(args: Args) -> admin.RedriveRequest:
    request = admin.RedriveRequest(group=args.group, topic=args.topic, dry_run=args.dry_run)
    for name, value in args.filter:
        setattr(request, name, value)
    return request


@dataclass
class Redrive:
    """One redrive in pieces, no faster than `rate` a second (0: as fast as it goes)."""

    ask: Callable[[admin.RedriveRequest], admin.RedriveReply]
    rate: int = 0
    now_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], object] = time.sleep
    incomplete: str = ""  # who was left out by the last one, and why

    def all(self, request: admin.RedriveRequest) -> admin.Redriven:
        """Every broker's dead letters that are there now; returns the sums.

        Raises the refusal that lasted for longer than PATIENCE_S, or is none that passes.
        """
        whole = admin.RedriveRequest()
        whole.CopyFrom(request)
        whole.dry_run, whole.limit = True, 1
        total = admin.Redriven()
        plan = self._patiently(whole)
        self.incomplete = plan.incomplete
        print_incomplete(plan.incomplete)
        for where in plan.progress:
            self._broker(request, where, total)
        return total

    def piece(self, request: admin.RedriveRequest) -> admin.RedriveReply:
        """Dead letters of one broker, from an offset to another."""
        return self._patiently(request)

    def _broker(
        self, request: admin.RedriveRequest, where: admin.Redriven, total: admin.Redriven
    ) -> None:
        """One broker's, up to the end that its queue had at first: what dies again meanwhile
        is left to the next redrive."""
        piece = admin.RedriveRequest()
        piece.CopyFrom(request)
        piece.broker, piece.end_offset = where.broker, where.end_offset
        # About ten pieces a second, so that the pace is even.
        piece.limit = min(max(1, self.rate // 10), REDRIVE_BATCH) if self.rate else REDRIVE_BATCH
        due_s = self.now_s()
        while piece.from_offset < where.end_offset:
            reply = self._patiently(piece)
            if not reply.progress:
                return
            (done,) = reply.progress
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(done, name))
            if done.next_offset <= piece.from_offset:
                return  # the topic is gone
            piece.from_offset = done.next_offset
            if self.rate and not request.dry_run:
                due_s = max(due_s + done.redriven / self.rate, self.now_s())
                self.sleep_s(max(0.0, due_s - self.now_s()))

    def _patiently(self, request: admin.RedriveRequest) -> admin.RedriveReply:
        """A piece may be asked for again: what it did already counts as done before."""
        until_s = self.now_s() + PATIENCE_S
        while True:
            try:
                reply = self.ask(request)
                if not reply.incomplete or reply.progress or not request.broker:
                    return reply
                raise CallRefused(Code.HA_NOT_AVAILABLE, reply.incomplete)
            except PopmqError as error:
                number = error.number if isinstance(error, CallRefused) else error.code
                if number not in _PASSING or self.now_s() > until_s:
                    raise
                print_note(f"{error}; trying again")
            self.sleep_s(PAUSE_S)


def _message(letter: admin.DeadLetter) -> api.Message:
    return message_of(
        admin.FoundMessage(
            queue_offset=letter.queue_offset,
            attempt=letter.attempts,
            head=letter.head,
            properties=letter.properties,
        )
    )


def _origin(letter: admin.DeadLetter) -> str:
    topic = letter.origin_topic or "(deleted)"
    return f"{topic}/{letter.origin_queue_id}/{letter.origin_offset}"


def _time(milliseconds: int) -> str:
    return iso_time(milliseconds) if milliseconds else "-"


def _cells(letter: admin.DeadLetter, now_ms: int) -> tuple[object, ...]:
    def ago(then_ms: int) -> str:
        return format_ago(then_ms, now_ms) if then_ms else "-"

    return (
        letter.queue_offset,
        _message(letter).system_properties.message_id or "-",
        _origin(letter),
        letter.attempts,
        letter.reason,
        ago(letter.first_delivery_ms),
        ago(letter.last_delivery_ms),
        ago(letter.dead_ms),
        "yes" if letter.redriven else "no",
    )


_IDS = argument("ids", nargs=-1, metavar="[MESSAGE_ID]...")

dlq = group(
    "dlq",
    [
        command(
            "list",
            run_list,
            argument("group", type=GROUP),
            _IDS,
            option("--count", type=COUNT, default=100, metavar="N", help="[default: 100]"),
            help="List a group's dead letters, oldest first.",
            examples=("popmq dlq list billing",),
            namespaced=True,
        ),
        command(
            "peek",
            run_peek,
            argument("group", type=GROUP),
            _IDS,
            option("--count", type=COUNT, default=10, metavar="N", help="[default: 10]"),
            help="The same with their content.",
            examples=("popmq dlq peek billing 01ABCDEF --count 1000",),
            namespaced=True,
        ),
        command(
            "redrive",
            run_redrive,
            argument("group", type=GROUP),
            _IDS,
            option("--topic", default="", type=TOPIC, metavar="T", help="Those that come from it."),
            option(
                "--filter",
                type=Parsed("filter", filter_argument),
                multiple=True,
                default=(),
                metavar="tag=T|key=K|before=TIME|after=TIME",
                help="Which; times are those of becoming a dead letter. Several must all be true.",
            ),
            flag("--dry-run", help="Only count."),
            option(
                "--rate",
                type=Parsed("rate", rate_argument),
                default=0,
                metavar="N/s",
                help="At most so many a second.",
            ),
            help="Send dead letters back to their group, each once.",
            examples=(
                "popmq dlq redrive billing --dry-run",
                "popmq dlq redrive billing --filter tag=eu --rate 100/s",
                "popmq dlq redrive billing 01ABCDEF",
            ),
            namespaced=True,
        ),
    ],
    help="Dead letters: look at them, and send them back.",
)
