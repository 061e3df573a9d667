"""`python -m bench`: what popmq costs, alone and beside others (docs/benchmarks.md)."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench import core
from bench.alone import PARTS, Asked, Row, page
from bench.compare import PEERS, Plan, compare
from bench.cross_check import cross_check
from bench.measure import Shape
from bench.peers import cache
from bench.report import machine, write
from popmq.cli.load.http2 import HEADER_VARIANTS
from popmq.common.errors import PopmqError

QUICK = ("unary", "open", "mixed", "delays", "idle", "polls", "start")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="get the packages of the peers")
    fetch.set_defaults(run=lambda args: cache.fetch())
    beside = commands.add_parser("compare", help="peers side by side")
    beside.add_argument("--peers", default=",".join(PEERS), help="of: %(default)s")
    beside.add_argument("--rounds", type=int, default=3)
    beside.add_argument("--seconds", type=float, default=5.0, help="of each case in each round")
    beside.add_argument("--shapes", default="64x1,4x64", help="connections x in flight")
    beside.add_argument("--body", type=int, default=1024)
    beside.add_argument("--warm-up", type=float, default=300.0, help="seconds at most, each peer")
    beside.add_argument("--no-consume", action="store_true", help="sends only")
    beside.add_argument("--data", type=Path, help="where the peers keep their files meanwhile")
    beside.add_argument("--out", type=Path, default=Path("bench-results"))
    beside.set_defaults(run=run_compare)
    alone = commands.add_parser("alone", help="popmq alone")
    alone.add_argument("--only", default=",".join(QUICK), help=f"of: {','.join(PARTS)}")
    for name, default in (("seconds", 10.0), ("rate", 1_000.0)):
        alone.add_argument(f"--{name}", type=float, default=default)
    for name, count in (("body", 1024), ("polls", 10_000), ("store-mb", 1024), ("grow", 10**6)):
        alone.add_argument(f"--{name}", type=int, default=count)
    alone.add_argument("--data", type=Path)
    alone.add_argument("--out", type=Path, default=Path("bench-results"))
    alone.set_defaults(run=run_alone)
    check = commands.add_parser("h2load", help="our load generator beside h2load")
    check.add_argument("--seconds", type=float, default=5.0)
    check.add_argument("--rounds", type=int, default=3)
    check.add_argument("--shapes", default="64x1,4x64")
    check.set_defaults(run=run_cross_check)
    core_of = commands.add_parser(
        "core", help="CPU of send, receive and ack, and of a commit before"
    )
    core_of.add_argument("--against", default="main", help="the commit; default: %(default)s")
    core_of.add_argument("--rounds", type=int, default=10)
    core_of.add_argument("--messages", type=int, default=8_192, help="of each round")
    core_of.add_argument("--headers", default="plain", choices=HEADER_VARIANTS)
    core_of.set_defaults(run=run_core)
    quick = commands.add_parser("quick", help="both in about three minutes, with what is fetched")
    quick.set_defaults(run=run_quick)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except PopmqError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return status


@contextmanager
def own_folder(base: Path | None) -> Iterator[Path]:
    base = base or cache.cache() / "data"
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_compare(args: argparse.Namespace) -> int:
    requested = args.peers.split(",")
    unknown = [key for key in requested if key not in PEERS]
    if unknown:
        print(f"bench: no peer {unknown[0]!r}, only {', '.join(PEERS)}", file=sys.stderr)
        return 2
    plan = Plan(
        peers=requested,
        rounds=args.rounds,
        seconds=args.seconds,
        shapes=tuple(map(Shape.parse, args.shapes.split(","))),
        body=args.body,
        consume=not args.no_consume,
        warm_up_s=args.warm_up,
    )
    began = time.perf_counter()
    with own_folder(args.data) as folder:
        outcome = compare(plan, folder, lambda line: print(line, flush=True))
    page = write(outcome, args.out)
    print(page.read_text())
    print(f"{time.perf_counter() - began:.0f} s; {page.parent}/results.md, results.json, plot.svg")
    return 1 if outcome.failures else 0


def run_alone(args: argparse.Namespace) -> int:
    requested = args.only.split(",")
    unknown = [part for part in requested if part not in PARTS]
    if unknown:
        print(f"bench: no part {unknown[0]!r}, only {', '.join(PARTS)}", file=sys.stderr)
        return 2
    asked = Asked(args.seconds, args.body, args.polls, args.rate, args.store_mb, args.grow)
    rows: dict[str, list[Row]] = {}
    failures: dict[str, str] = {}
    for part in requested:
        rows[part] = []
        with own_folder(args.data) as folder:
            try:
                for row in PARTS[part](asked, folder):
                    rows[part].append(row)
                    print(f"{part:8} {row.what}: {row.figure}  {row.aim}", flush=True)
            except PopmqError as error:
                failures[part] = str(error)
                print(f"{part:8} failed: {error}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    facts = machine()
    (args.out / "alone.md").write_text(page(rows, failures, facts))
    fields = {part: [asdict(row) for row in each] for part, each in rows.items()}
    whole = {"machine": facts, "asked": asdict(asked), "failures": failures, "parts": fields}
    (args.out / "alone.json").write_text(json.dumps(whole, indent=1))
    print(f"{args.out}/alone.md, alone.json")
    return 1 if failures else 0


def run_cross_check(args: argparse.Namespace) -> int:
    for shape in map(Shape.parse, args.shapes.split(",")):
        with own_folder(None) as folder:
            cross_check(folder, shape=shape, seconds=args.seconds, rounds=args.rounds, say=print)
    return 0


def run_core(args: argparse.Namespace) -> int:
    shape = {"rounds": args.rounds, "messages": args.messages, "headers": args.headers}
    print(core.compare(args.against, **shape))
    return 0


def run_quick(args: argparse.Namespace) -> int:
    """Peers that take long to warm are left to `compare`."""
    words = ("compare", "--peers", "popmq,popmq-up,redis,nats", "--rounds", "2", "--seconds", "2")
    small = ("--seconds", "5", "--store-mb", "64", "--rate", "500")
    status = main(["alone", "--only", "idle,mixed,delays,start", *small])
    return main(words) or status


if __name__ == "__main__":
    sys.exit(main())
