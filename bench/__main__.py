"""`python -m bench`: what popmq costs, alone and beside others (docs/benchmarks.md)."""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.compare import PEERS, Plan, compare
from bench.measure import Shape
from bench.peers import cache
from bench.report import write
from popmq.common.errors import PopmqError


def main() -> int:
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
    args = parser.parse_args()
    try:
        status: int = args.run(args)
    except PopmqError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return status


def run_compare(args: argparse.Namespace) -> int:
    wanted = args.peers.split(",")
    unknown = [key for key in wanted if key not in PEERS]
    if unknown:
        print(f"bench: no peer {unknown[0]!r}, only {', '.join(PEERS)}", file=sys.stderr)
        return 2
    plan = Plan(
        peers=wanted,
        rounds=args.rounds,
        seconds=args.seconds,
        shapes=tuple(map(Shape.parse, args.shapes.split(","))),
        body=args.body,
        consume=not args.no_consume,
        warm_up_s=args.warm_up,
    )
    base = args.data or cache.cache() / "data"
    base.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
    began = time.perf_counter()
    try:
        outcome = compare(plan, folder, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    page = write(outcome, args.out)
    print(page.read_text())
    print(f"{time.perf_counter() - began:.0f} s; {page.parent}/results.md, results.json, plot.svg")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
