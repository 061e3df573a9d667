"""The `popmq` command: finds the subcommand, runs it, and turns refusals into one line.

Exit status: 0 done, 1 refused (standard error says why), 2 wrong usage.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from popmq.cli import (
    bench,
    brokers,
    dlq,
    doctor,
    drain,
    explain,
    lookup,
    messages,
    metadata,
    operate,
    roles,
    timers,
)
from popmq.common.config import (
    OVER_TLS,
    client_endpoint,
    environment,
    load_settings,
    parse_address,
)
from popmq.common.errors import ConfigError, PopmqError

REFUSED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = build_parser(environment())
        args = parser.parse_args(argv)
        check_texts(parser, args)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code if isinstance(stop.code, int) else 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output (`| head`) has enough; nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except (PopmqError, OSError) as error:
        print("popmq:", " ".join(str(error).split()), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="popmq", description="A RocketMQ-5-style message queue.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"popmq {version('popmq')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    common = _common_arguments(environ)
    broker = roles.add_parsers(subparsers)
    brokers.add_parsers(subparsers, broker, common)
    messages.add_parsers(subparsers, common)
    metadata.add_parsers(subparsers, common)
    lookup.add_parsers(subparsers, common)
    explain.add_parsers(subparsers, common)
    operate.add_parsers(subparsers, common)
    dlq.add_parsers(subparsers, common)
    timers.add_parsers(subparsers, common)
    bench.add_parsers(subparsers, common)
    drain.add_parsers(subparsers, common)
    doctor.add_parser(subparsers)
    _add_config(subparsers, common)
    return parser


def check_texts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse bytes that are no text, where the protocol has texts: anywhere but in a body."""
    for name, value in vars(args).items():
        if name != "body" and not is_text(value):
            flag = name.replace("_", "-")
            parser.error(f"argument {flag}: {value!a} is not UTF-8")


def is_text(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_text, value))
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


def _common_arguments(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--endpoint",
        type=endpoint_argument,
        default=client_endpoint(environ),
        metavar="HOST:PORT",
        help="a proxy's address, tls://HOST:PORT over TLS (default %(default)s; POPMQ_ENDPOINT)",
    )
    common.add_argument("--json", action="store_true", help="one JSON object per line")
    return common


def endpoint_argument(text: str) -> str:
    try:
        parse_address(text.removeprefix(OVER_TLS))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _add_config(subparsers: messages.Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "config", parents=[common], help="show each setting and where its value came from"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.set_defaults(run=run_config)


def run_config(args: argparse.Namespace) -> int:
    loaded = load_settings(args.config, environment(), {})
    rows = [(key, value, loaded.sources[key]) for key, value in loaded.settings.flat().items()]
    if args.json:
        for key, value, source in rows:
            print(json.dumps({"key": key, "value": value, "source": source}))
        return 0
    header = ("KEY", "VALUE", "FROM")
    cells = [(key, json.dumps(value), source) for key, value, source in rows]
    print(metadata.columns(header, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
