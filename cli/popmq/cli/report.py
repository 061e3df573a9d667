"""`popmq report lag|revive|delay`: made by Spark out of what the brokers keep.

Exit status: 0 made, 1 not made.  `popmq driver` and `popmq executor` are what Spark calls the image
with in pods that it made, each in place of this process.
"""

import json
import os
import sys
from pathlib import Path

import click

from popmq.cli.terminal.arguments import DURATION, Parsed, range_argument
from popmq.cli.terminal.command_line import Args, command, group, option
from popmq.cli.terminal.contexts import TLS_CA_VARIABLE
from popmq.cli.terminal.output import columns, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.signing import ACCESS_KEY_VARIABLE, SECRET_VARIABLE

NAMES = ("lag", "revive", "delay")
MOST_EXECUTORS = 100


def _conf_argument(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("spark."):
        raise click.BadParameter(f"{text!r} is no setting of Spark: spark.NAME=VALUE")
    return key, value


def run_pod(args: Args) -> int:
    """Does not come back: the process becomes Spark's."""
    try:
        from popmq.reports.executors import exec_spark_role
    except ImportError as error:
        raise _missing(error) from None
    exec_spark_role(args.role, args.arguments, os.environ)


def run_report(args: Args) -> int:
    _give_to_workers(args)
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
            ReportOptions(
                args.group,
                args.topic,
                args.since,
                args.window,
                args.failing_percent,
                args.failing_least,
            ),
            endpoint=_endpoints(args),
            history=args.history or "",
            place=SparkTarget(
                args.master,
                dict(args.conf),
                args.executors,
                args.executor_ca,
                args.executor_user,
                args.executor_scratch,
            ),
            skip_down=args.on_broker_down == "skip",
            patience_s=args.patience / 1_000,
            tell=tell,
        )
    if args.save:
        files.save(report, args.save)
    if args.summary:
        args.summary.write_text(json.dumps(report.summary()), encoding="utf-8")
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
        print_rows(args, [json.loads(files.to_json(report))], ())
    else:
        print_report(report)
    if report.incomplete:
        print(f"popmq: incomplete: {report.incomplete}", file=sys.stderr)
    return 0


def run_history(args: Args) -> int:
    _give_to_workers(args)
    try:
        from popmq.reports.run import add_to_history
    except ImportError as error:
        raise _missing(error) from None
    added = add_to_history(
        _endpoints(args),
        args.history,
        master=args.master,
        keep_days=args.keep,
        patience_s=args.patience / 1_000,
    )
    print_rows(args, [added], [columns(("TABLE", "ROWS ADDED"), list(added.items()))])
    return 0


def _give_to_workers(args: Args) -> None:
    """Spark's workers have from the environment what a context says: options show in plans."""
    for name, value in (
        (TLS_CA_VARIABLE, args.tls_ca),
        (ACCESS_KEY_VARIABLE, args.access_key),
        (SECRET_VARIABLE, args.secret),
    ):
        if value:
            os.environ[name] = value


def _endpoints(args: Args) -> str:
    """The admin port first; the public port is for proxies from before they had one."""
    return ",".join(filter(None, (args.admin_endpoint, args.endpoint)))


def _missing(error: ImportError) -> Refused:
    return Refused(
        Code.PRECONDITION_FAILED,
        f"reports need more packages ({error}): pip install 'popmq[reports]'",
    )


_PATIENCE = option("--patience", type=DURATION, default=30_000, metavar="30s")
_PATH = click.Path(path_type=Path)
_KINDS = {
    "lag": "What each group has still to do, its speed, and whether that is healthy.",
    "revive": "What became of deliveries: acks, retries, dead letters, stuck consumers.",
    "delay": "How punctual delayed messages were.",
}
_OPTIONS = (
    option("--group", default="", metavar="G"),
    option("--topic", default="", metavar="T"),
    option("--since", type=DURATION, default=0, metavar="1h", help="Events since then alone."),
    option(
        "--window",
        type=DURATION,
        default=300_000,
        metavar="5m",
        help="Over which speeds are looked at.  [default: 5m]",
    ),
    option(
        "--failing-percent",
        type=Parsed("number", range_argument(1, 100)),
        default=0,
        metavar="P",
        help="In place of the brokers' group.failing_percent.",
    ),
    option(
        "--failing-least",
        type=Parsed("number", range_argument(1, 1_000_000)),
        default=0,
        metavar="N",
        help="In place of the brokers' group.failing_least.",
    ),
    option("--history", metavar="DIR", help="Read a history instead of the brokers."),
    option(
        "--master",
        default="",
        help="Of Spark: k8s://https://HOST:PORT for executors in pods, or local[N] (local[2]).",
    ),
    option(
        "--executors",
        type=Parsed("number", range_argument(1, MOST_EXECUTORS)),
        default=0,
        metavar="N",
        help="So many pods.  [default: 2, or what Spark's own settings say]",
    ),
    option("--executor-ca", default="", metavar="SECRET", help="Whose ca.crt they trust."),
    option("--executor-user", default="", metavar="SECRET", help="With access_key and secret."),
    option("--executor-scratch", default="4Gi", metavar="SIZE", help="Of temporary files."),
    option(
        "--conf",
        type=Parsed("setting", _conf_argument),
        multiple=True,
        default=(),
        metavar="KEY=VALUE",
        help="A setting of Spark.",
    ),
    option("--save", metavar="DIR|URL", help="Add page and JSON to a folder, s3://... too."),
    option("--summary", type=_PATH, metavar="FILE", help="Write verdict and figures as JSON."),
    option("--html", type=_PATH, metavar="FILE", help="Write a page."),
    option("--csv", type=_PATH, metavar="DIR", help="Write a file for each table."),
    option("--parquet", type=_PATH, metavar="DIR", help="The same as Parquet."),
    option("--prometheus", metavar="FILE|URL", help="Metrics, or a Pushgateway."),
    option(
        "--on-broker-down",
        type=click.Choice(("fail", "skip")),
        default="fail",
        help="When a broker group does not answer.  [default: fail]",
    ),
    _PATIENCE,
)

report = group(
    "report",
    [
        *(
            command(
                name,
                run_report,
                *_OPTIONS,
                values={"report": name},
                help=text,
                examples=(f"popmq report {name} --html {name}.html",),
            )
            for name, text in _KINDS.items()
        ),
        command(
            "history",
            run_history,
            option("--history", type=_PATH, required=True, metavar="DIR"),
            option("--keep", type=int, default=30, metavar="DAYS", help="[default: 30]"),
            option("--master", default="local[2]", help="Of Spark.  [default: local[2]]"),
            _PATIENCE,
            help="Add what came since the last time to a folder of Parquet.",
            examples=("popmq report history --history ./history",),
        ),
    ],
    help="Lag, retries and delays, calculated by Spark.",
)


def _pod(name: str, text: str) -> click.Command:
    """Spark's own words follow, some of which begin with dashes."""
    return command(
        name,
        run_pod,
        click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
        values={"role": name},
        help=text,
        connects=False,
        prints=False,
        add_help_option=False,
        hidden=True,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )


driver = _pod("driver", "A driver's pod: spark-submit starts it.")
executor = _pod("executor", "An executor's pod: Spark starts it.")
