"""`popmq bench`: what a cluster does, measured from here with a topic of its own.

Three parts share the time: as many sends as the connections allow, receives with an ack for each
message, and both at once at a fixed rate for the time from send to delivery.  What was answered OK
must be stored, and what was acked must be gone, or the command fails.
"""

import sys
import time
from dataclasses import dataclass

from popmq.cli.load.consuming import Consumer, ConsumerSession, ConsumeStats
from popmq.cli.load.end_to_end import EndToEnd, send_and_receive
from popmq.cli.load.figures import LatencySummary, LoadStats, interpreter
from popmq.cli.load.http2 import MAX_BODY_BYTES
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import MIN_BODY_BYTES, AckTemplate, SendTemplate
from popmq.cli.load.sending import ClosedLoad, RocketMqSender
from popmq.cli.load.target import PopmqTopic, Target, check_stored, names
from popmq.cli.terminal.arguments import DURATION, Parsed, range_argument
from popmq.cli.terminal.command_line import Args, command, flag, option
from popmq.cli.terminal.output import columns, print_rows
from popmq.common.signing import Signer

SEND_SHARE, RECEIVE_SHARE = 0.4, 0.3
BAR, BAR_EVERY_S = 30, 0.2
MIN_FOR_MS = 1_000
INVISIBLE_MS = 300_000
COLUMNS = ("", "COUNT", "PER SECOND", "P50 MS", "P99 MS", "P99.9 MS", "MAX MS", "REFUSED")


@dataclass(frozen=True, slots=True)
class BenchResult:
    sends: LoadStats
    consumed: ConsumeStats
    both: EndToEnd


def run_bench(args: Args) -> int:
    if args.for_ms < MIN_FOR_MS:
        raise LoadError(f"--for {args.for_ms} ms is too short, at least {MIN_FOR_MS} ms")
    topic = _topic(args, *names())
    try:
        figures = measure(args, topic, Progress(args.for_ms / 1000, sys.stderr.isatty()))
    finally:
        if not args.keep:
            topic.delete()
    stored = figures.sends.done + figures.both.sends.done
    counted = f"stored {stored}, as answered; acked {figures.consumed.acks.done}, as counted"
    load = f"load from {interpreter()}"
    print_rows(args, [as_fields(figures)], [table(figures), counted, load])
    tallies = (figures.sends, figures.consumed.receives, figures.consumed.acks, figures.both.sends)
    return 1 if any(tally.refusals for tally in tallies) else 0


def measure(args: Args, topic: PopmqTopic, progress: "Progress") -> BenchResult:
    target = topic.target()
    total_s = args.for_ms / 1000
    send_s, receive_s = total_s * SEND_SHARE, total_s * RECEIVE_SHARE
    sends = _sends(args, topic, target, send_s, progress)
    consumed = _receives(args, topic, target, receive_s, progress)
    # What is left would stand before what the third part sends.
    rest = _topic(args, f"{topic.topic}-2", f"{topic.group}-2")
    try:
        both = _both(args, rest, total_s - send_s - receive_s, progress)
    finally:
        if not args.keep:
            rest.delete()
    progress.end()
    return BenchResult(sends, consumed, both)


def _topic(args: Args, name: str, group: str) -> PopmqTopic:
    signer = Signer(args.access_key, args.secret)
    return PopmqTopic(args.endpoint, name, group, admin_endpoint=args.admin_endpoint, signer=signer)


def _sends(
    args: Args,
    topic: PopmqTopic,
    target: Target,
    seconds: float,
    progress: "Progress",
) -> LoadStats:
    reactor = Reactor()
    try:
        template = SendTemplate(target.topic, args.body)
        lanes = [
            RocketMqSender(channel, template)
            for channel in target.connect(reactor, args.connections)
        ]
        load = ClosedLoad(reactor, lanes, args.in_flight)
        progress.watch(reactor, "send", load.tally)
        tally = load.run(seconds)
    finally:
        reactor.close()
    check_stored("sends", tally.done, 0, topic.stored())
    return tally


def _receives(
    args: Args,
    topic: PopmqTopic,
    target: Target,
    seconds: float,
    progress: "Progress",
) -> ConsumeStats:
    before = topic.left()
    reactor = Reactor()
    try:
        channels = target.connect(reactor, args.connections)
        session = ConsumerSession(reactor, channels[0], target.group, [target.topic])
        receives = target.receives(wait_ms=100, invisible_ms=INVISIBLE_MS)
        consumer = Consumer(reactor, channels, receives, AckTemplate(target.topic, target.group))
        progress.watch(reactor, "receive and ack", consumer.result.acks)
        consumed = consumer.run(seconds)
        session.close()
    finally:
        reactor.close()
    check_stored("acks", consumed.acks.done, topic.left(), before)
    return consumed


def _both(args: Args, topic: PopmqTopic, seconds: float, progress: "Progress") -> EndToEnd:
    reactor = Reactor()
    try:
        progress.watch(reactor, f"{args.rate} a second, end to end", None)
        both = send_and_receive(
            reactor, topic.target(), rate=args.rate, seconds=seconds, body=args.body
        )
    finally:
        reactor.close()
    check_stored("sends at a rate", both.sends.done, 0, topic.stored())
    return both


class Progress:
    """A line on standard error that is written over; nothing when that is no terminal."""

    def __init__(self, total_s: float, shown: bool) -> None:
        self._total_s = total_s
        self._shown = shown
        self._began = time.perf_counter()

    def watch(self, reactor: Reactor, what: str, tally: LoadStats | None) -> None:
        def show() -> None:
            rate = f"{tally.per_second:,.0f}/s" if tally is not None and tally.done else ""
            self._draw(f"{what} {rate}")
            reactor.at(time.perf_counter() + BAR_EVERY_S, show)

        if self._shown:
            show()

    def end(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _draw(self, text: str) -> None:
        passed = min(time.perf_counter() - self._began, self._total_s)
        full = int(BAR * passed / self._total_s)
        bar = "#" * full + "." * (BAR - full)
        line = f"[{bar}] {passed:.0f} of {self._total_s:.0f} s  {text}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def table(figures: BenchResult) -> str:
    consumed, both = figures.consumed, figures.both
    rows = [
        _row("sends", figures.sends, figures.sends.spread()),
        _row("receives of up to 32", consumed.receives, consumed.receives.spread()),
        _row("acks", consumed.acks, consumed.acks.spread()),
        _row("send at a rate", both.sends, both.sends.spread()),
        _row("send to delivery", both.consumed.arrivals, both.consumed.arrivals.spread()),
    ]
    return columns(COLUMNS, rows)


def _row(name: str, tally: LoadStats, spread: LatencySummary) -> tuple[object, ...]:
    times = (f"{p50:.2f}" for p50 in (spread.p50, spread.p99, spread.p999, spread.max))
    refused = ", ".join(f"{count} {why}" for why, count in tally.refusals.items()) or "0"
    return (name, tally.done, f"{tally.per_second:.0f}", *times, refused)


def as_fields(figures: BenchResult) -> dict[str, object]:
    return {
        "send": figures.sends.as_json(),
        "receive": figures.consumed.receives.as_json(),
        "ack": figures.consumed.acks.as_json(),
        "twice": figures.consumed.twice + figures.both.consumed.twice,
        "send_at_rate": figures.both.sends.as_json(),
        "send_to_delivery": figures.both.consumed.arrivals.as_json(),
        "interpreter": interpreter(),
    }


bench = command(
    "bench",
    run_bench,
    option("--for", "for_ms", type=DURATION, default=30_000, metavar="T", help="[default: 30s]"),
    option(
        "--connections",
        type=Parsed("number", range_argument(1, 1_000)),
        default=16,
        metavar="N",
        help="[default: 16]",
    ),
    option(
        "--in-flight",
        type=Parsed("number", range_argument(1, 1_000)),
        default=16,
        metavar="N",
        help="[default: 16]",
    ),
    option(
        "--body",
        type=Parsed("bytes", range_argument(MIN_BODY_BYTES, MAX_BODY_BYTES)),
        default=1024,
        metavar="BYTES",
        help="[default: 1024]",
    ),
    option(
        "--rate",
        type=Parsed("number", range_argument(1, 1_000_000)),
        default=500,
        metavar="N",
        help="Of the third part.  [default: 500]",
    ),
    flag("--keep", help="Leave the topic and the group."),
    help="Measure sends, receives and latency of a cluster. It loads the cluster as much as it "
    "can.",
    examples=("popmq bench --for 10s",),
)
