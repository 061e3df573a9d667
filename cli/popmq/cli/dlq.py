"""`popmq dlq list|peek|redrive`: what groups gave up on, and its way back.

A redrive goes on where the brokers' logs say that it was, so it may be ended and started again at
any moment (docs/concepts/dead_letters.md).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from popmq.cli.client import CallRefused, Client
from popmq.cli.lookup import message_of
from popmq.cli.messages import Subparsers, as_json, as_line, count_argument, time_argument
from popmq.cli.metadata import columns, say_incomplete
from popmq.common.errors import Code, PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

PAGE = 200
REDRIVE_BATCH = 100
# Brokers and proxies come back; a redrive that finds none for so long gives up.
PATIENCE_S = 30.0
PAUSE_S = 0.5
_PASSING = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT, Code.TOO_MANY_REQUESTS)

LIST_COLUMNS = ("OFFSET", "ID", "ORIGIN", "ATTEMPTS", "REASON", "FIRST", "LAST", "DEAD", "REDRIVEN")
COUNTS = ("redriven", "already", "filtered", "orphaned", "damaged")


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    actions = subparsers.add_parser("dlq", help="dead letters: look, and send back").add_subparsers(
        required=True, metavar="ACTION"
    )
    every = actions.add_parser(
        "list", parents=[common], help="a group's dead letters, oldest first"
    )
    every.set_defaults(run=run_list)
    every.add_argument("--count", type=count_argument, default=100, metavar="100")
    peek = actions.add_parser("peek", parents=[common], help="the same with their content")
    peek.set_defaults(run=run_peek)
    peek.add_argument("--count", type=count_argument, default=10, metavar="10")
    redrive = actions.add_parser(
        "redrive", parents=[common], help="send them back to their group, each once"
    )
    redrive.set_defaults(run=run_redrive)
    redrive.add_argument("--topic", default="", metavar="T", help="those that come from there")
    redrive.add_argument(
        "--filter",
        type=filter_argument,
        action="append",
        default=[],
        metavar="tag=T|key=K|before=TIME|after=TIME",
        help="which; times are those of becoming a dead letter. Several must all be true",
    )
    redrive.add_argument("--dry-run", action="store_true", help="only count")
    redrive.add_argument("--rate", type=rate_argument, default=0, metavar="N/s", help="at most")
    for one in (every, peek, redrive):
        one.add_argument("group", metavar="GROUP")


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
    raise argparse.ArgumentTypeError(
        f"{text[:40]!r} is no filter: write tag=T, key=K, before=TIME or after=TIME"
    )


def run_list(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        letters = list(_letters(client, args.group, args.count, bodies=False))
    if args.json:
        for letter in letters:
            print(letter_json(letter, bodies=False))
    else:
        print(columns(LIST_COLUMNS, list(map(_cells, letters))))
    return 0


def run_peek(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        for letter in _letters(client, args.group, args.count, bodies=True):
            print(letter_json(letter, bodies=True) if args.json else letter_lines(letter))
    return 0


def _letters(client: Client, group: str, count: int, *, bodies: bool) -> Iterator[admin.DeadLetter]:
    """Up to `count`, broker after broker, in pieces."""
    request = admin.ListDeadLettersRequest(group=group, bodies=bodies, limit=min(PAGE, count))
    reply = client.call_admin(request, admin.ListDeadLettersReply)
    say_incomplete(reply.incomplete)
    first = {one.broker: [] for one in reply.ranges}  # type: dict[str, list[admin.DeadLetter]]
    for letter in reply.letters:
        first[letter.broker].append(letter)
    for where in reply.ranges:
        found, at, end = first[where.broker], where.next_offset, where.end_offset
        while count and found:
            yield from found[:count]
            count -= min(count, len(found))
            if not count or at >= end:
                break
            request.broker, request.from_offset, request.limit = where.broker, at, min(PAGE, count)
            reply = client.call_admin(request, admin.ListDeadLettersReply)
            found, at = list(reply.letters), reply.ranges[0].next_offset if reply.ranges else end


def letter_lines(letter: admin.DeadLetter) -> str:
    return (
        f"{as_line(_message(letter))}\n"
        f"    broker={letter.broker} offset={letter.queue_offset} position={letter.position} "
        f"origin={_origin(letter)} attempts={letter.attempts} reason={letter.reason!r}\n"
        f"    first={_time(letter.first_delivery_ms)} last={_time(letter.last_delivery_ms)} "
        f"dead={_time(letter.dead_ms)} redriven={'yes' if letter.redriven else 'no'}"
    )


def letter_json(letter: admin.DeadLetter, *, bodies: bool) -> str:
    shown: dict[str, object] = json.loads(as_json(_message(letter)))
    names = (
        "message_id",
        "tag",
        "keys",
        *(("body", "body_base64", "properties") if bodies else ()),
    )
    value = {name: shown[name] for name in names if name in shown}
    value |= {
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
    return json.dumps(value, ensure_ascii=False)


def run_redrive(args: argparse.Namespace) -> int:
    request = redrive_request(args)
    with Client(args.endpoint) as client:
        redrive = partial(client.call_admin, reply_type=admin.RedriveReply)
        run = Redrive(redrive, rate=args.rate)
        total = run.all(request)
    counts = {name: getattr(total, name) for name in COUNTS}
    if args.json:
        print(json.dumps(counts | {"dry_run": args.dry_run}))
    else:
        done = "would be redriven" if args.dry_run else "redriven"
        print(
            f"{total.redriven} {done}, {total.already} were before, {total.filtered} filtered, "
            f"{total.orphaned} of a deleted topic, {total.damaged} damaged"
        )
    # A broker that was not reached has its dead letters still.
    return 1 if run.incomplete else 0


def redrive_request(args: argparse.Namespace) -> admin.RedriveRequest:
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
        say_incomplete(plan.incomplete)
        for where in plan.progress:
            self._broker(request, where, total)
        return total

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
                print(f"popmq: {error}; trying again", file=sys.stderr)
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
    if not milliseconds:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


def _cells(letter: admin.DeadLetter) -> tuple[object, ...]:
    return (
        letter.queue_offset,
        _message(letter).system_properties.message_id or "-",
        _origin(letter),
        letter.attempts,
        letter.reason,
        _time(letter.first_delivery_ms),
        _time(letter.last_delivery_ms),
        _time(letter.dead_ms),
        "yes" if letter.redriven else "no",
    )
