"""`popmq report lag|revive|delay`: made by Spark out of what the brokers keep.

Exit status: 0 made, 1 not made.  `popmq driver` and `popmq executor` are what Spark calls the image
with in pods that it made, each in place of this process.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from popmq.cli import metadata
from popmq.cli.messages import Subparsers, duration_argument
from popmq.common.errors import Code, Refused

NAMES = ("lag", "revive", "delay")
MOST_EXECUTORS = 100


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
    for name, text in (("driver", "spark-submit's"), ("executor", "an executor's")):
        # Spark's own words follow, some of which begin with dashes.
        part = subparsers.add_parser(
            name, prefix_chars="\0", add_help=False, help=f"{text} pod: Spark starts it"
        )
        part.add_argument("arguments", nargs="*", metavar="ARGUMENT")
        part.set_defaults(run=run_pod)


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
    _add_place(parser)
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


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master",
        default="",
        help="of Spark: k8s://https://HOST:PORT for executors in pods, or local[N] (local[2])",
    )
    parser.add_argument(
        "--executors",
        type=_executors_argument,
        default=0,
        metavar="N",
        help="so many pods (default 2, or what Spark's own settings say)",
    )
    parser.add_argument(
        "--executor-ca", default="", metavar="SECRET", help="whose ca.crt they trust proxies by"
    )
    parser.add_argument(
        "--conf",
        type=_conf_argument,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark",
    )


def _executors_argument(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= MOST_EXECUTORS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {MOST_EXECUTORS}")
    return number


def _conf_argument(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r} is no setting of Spark: spark.NAME=VALUE")
    return key, value


def run_pod(args: argparse.Namespace) -> int:
    """Does not come back: the process becomes Spark's."""
    try:
        from popmq.reports.executors import exec_spark_role
    except ImportError as error:
        raise _missing(error) from None
    exec_spark_role(args.command, args.arguments, os.environ)


def run_report(args: argparse.Namespace) -> int:
    # Spark and what reads for it are an extra, and slow to import.
    try:
        from popmq.reports.output import exposition, files, page
        from popmq.reports.output.terminal import print_report, progress
        from popmq.reports.report_builder import ReportOptions
        from popmq.reports.run import SparkTarget, run
    except ImportError as error:
        raise _missing(error) from None
    with progress() as tell:
        report = run(
            args.report,
            ReportOptions(args.group, args.topic, args.since, args.window, args.allowed),
            endpoint=args.endpoint,
            history=args.history or "",
            place=SparkTarget(args.master, dict(args.conf), args.executors, args.executor_ca),
            skip_down=args.on_broker_down == "skip",
            patience_s=args.patience / 1_000,
            tell=tell,
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
        print_report(report)
    if report.incomplete:
        print(f"popmq: incomplete: {report.incomplete}", file=sys.stderr)
    return 0


def run_history(args: argparse.Namespace) -> int:
    try:
        from popmq.reports.run import add_to_history
    except ImportError as error:
        raise _missing(error) from None
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


def _missing(error: ImportError) -> Refused:
    return Refused(
        Code.PRECONDITION_FAILED,
        f"reports need more packages ({error}): pip install 'popmq[reports]'",
    )
