"""`popmq report lag|revive|delay`: made by Spark out of what the brokers keep.

Exit status: 0 made, 1 not made or, with --strict, incomplete.
"""

import argparse
import json
import sys
from pathlib import Path

from popmq.cli import metadata
from popmq.cli.messages import Subparsers, duration_argument
from popmq.common.errors import Code, Refused

NAMES = ("lag", "revive", "delay")
FORMATS = ("terminal", "json", "none")


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    report = subparsers.add_parser("report", help="lag, retries and delays, calculated by Spark")
    kinds = report.add_subparsers(required=True, metavar="REPORT", dest="report")
    for name, text in (
        ("lag", "what each group has still to do, its speed, and whether that is well"),
        ("revive", "what became of deliveries: acks, retries, dead letters, stuck consumers"),
        ("delay", "how punctual delayed messages were"),
    ):
        _arguments(kinds.add_parser(name, parents=[common], help=text))
    _add_history(kinds, common)


def _add_history(kinds: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser(
        "history", parents=[common], help="add what came since the last time to a folder of Parquet"
    )
    parser.set_defaults(run=run_history)
    parser.add_argument("--history", type=Path, required=True, metavar="DIR")
    parser.add_argument("--keep", type=int, default=30, metavar="DAYS", help="default 30")
    parser.add_argument("--master", default="local[2]", help="of Spark (default local[2])")
    parser.add_argument("--patience", type=duration_argument, default=30_000, metavar="30s")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_report)
    parser.add_argument("--group", default="", metavar="G")
    parser.add_argument("--topic", default="", metavar="T")
    parser.add_argument(
        "--since", type=duration_argument, default=0, metavar="1h", help="events since then alone"
    )
    parser.add_argument(
        "--window",
        type=duration_argument,
        default=300_000,
        metavar="5m",
        help="over which speeds and statuses are looked at (default 5m)",
    )
    parser.add_argument("--allowed", type=int, default=100, help="lag of a queue that is well")
    parser.add_argument("--history", metavar="DIR", help="read a history instead of the brokers")
    parser.add_argument("--master", default="local[2]", help="of Spark (default local[2])")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--csv", type=Path, metavar="DIR", help="write a file for each table")
    parser.add_argument("--parquet", type=Path, metavar="DIR", help="the same as Parquet")
    parser.add_argument("--prometheus", metavar="FILE|URL", help="metrics, or a Pushgateway")
    parser.add_argument(
        "--on-broker-down",
        choices=("fail", "skip"),
        default="fail",
        help="when a broker group does not answer (default fail)",
    )
    parser.add_argument("--patience", type=duration_argument, default=30_000, metavar="30s")


def run_report(args: argparse.Namespace) -> int:
    # Spark and what reads for it are an extra, and slow to import.
    try:
        from popmq.reports.output import exposition, files, page
        from popmq.reports.run import run
    except ImportError as error:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"reports need more packages ({error}): pip install 'popmq[reports]'",
        ) from None
    report = run(
        args.report,
        endpoint=args.endpoint,
        history=args.history or "",
        master=args.master,
        skip_down=args.on_broker_down == "skip",
        patience_s=args.patience / 1_000,
        group=args.group,
        topic=args.topic,
        since_ms=args.since,
        window_ms=args.window,
        allowed=args.allowed,
    )
    if args.html:
        args.html.write_text(page.to_html(report), encoding="utf-8")
    if args.csv:
        files.write_csv(report, args.csv)
    if args.parquet:
        files.write_parquet(report, args.parquet)
    if args.prometheus and "://" in args.prometheus:
        exposition.push(report, args.prometheus)
    elif args.prometheus:
        exposition.write_file(report, Path(args.prometheus))
    if args.json:
        print(files.to_json(report))
    else:
        from popmq.reports.output.terminal import print_report

        print_report(report)
    if report.incomplete:
        print(f"popmq: incomplete: {report.incomplete}", file=sys.stderr)
    return 0


def run_history(args: argparse.Namespace) -> int:
    try:
        from popmq.reports.run import add_to_history
    except ImportError as error:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"reports need more packages ({error}): pip install 'popmq[reports]'",
        ) from None
    added = add_to_history(
        args.endpoint,
        args.history,
        master=args.master,
        keep_days=args.keep,
        patience_s=args.patience / 1_000,
    )
    if args.json:
        print(json.dumps(added))
    else:
        print(metadata.columns(("TABLE", "ROWS ADDED"), list(added.items())))
    return 0
