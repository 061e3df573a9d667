"""The `popmq` command: finds the subcommand, runs it, and turns refusals into one line.

Only the module of the command that was asked for is imported: `popmq topic list` needs no broker.
Exit status: 0 done, 1 refused (standard error says why), 2 wrong usage.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from popmq.cli import namespace_option as in_namespace
from popmq.common.errors import ConfigError, PopmqError
from popmq.common.settings.settings import (
    OVER_TLS,
    client_endpoint,
    environment,
    load_settings,
    parse_address,
)

if TYPE_CHECKING:
    from popmq.cli.messages import Subparsers

REFUSED, INTERRUPTED = 1, 130

# Modules whose commands name topics and groups as clients do.
NAMESPACED = ("messages", "metadata", "lookup", "explain", "consumer_offsets", "dlq", "timers")

# Modules and the commands that each adds or adds to, in the order of the help.
MODULES = {
    "roles.role_process": ("up", "controller", "broker", "proxy"),
    "roles.operator_role": ("operator",),
    "brokers": ("broker", "failover"),
    "messages": ("send", "recv"),
    "metadata": ("topic", "group"),
    "lookup": ("message",),
    "explain": ("explain",),
    "consumer_offsets": ("lag", "reset-offset"),
    "dlq": ("dlq",),
    "timers": ("timers",),
    "load.bench": ("bench",),
    "drain": ("drain",),
    "doctor": ("doctor",),
    "report": ("report", "driver", "executor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = build_parser(environment(), argv[0] if argv else "")
        args = parser.parse_args(argv)
        check_texts(parser, args)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code if isinstance(stop.code, int) else 2
    try:
        in_namespace.name_whole(args)
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


def build_parser(environ: Mapping[str, str], command: str = "") -> argparse.ArgumentParser:
    """Of every command; of one alone when `command` is its name."""
    parser = argparse.ArgumentParser(
        prog="popmq", description="A RocketMQ-5-style message queue.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"popmq {version('popmq')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    common = _common_arguments(environ)
    needed = [name for name, commands in MODULES.items() if command in commands]
    if not needed:
        _add_config(subparsers, common)
        needed = [] if command == "config" else list(MODULES)
    in_namespaces = in_namespace.arguments(common)
    for name in needed:
        shared = in_namespaces if name in NAMESPACED else common
        import_module(f"popmq.cli.{name}").add_parsers(subparsers, shared)
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


def _add_config(subparsers: "Subparsers", common: argparse.ArgumentParser) -> None:
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
    from popmq.cli import metadata

    header = ("KEY", "VALUE", "FROM")
    cells = [(key, json.dumps(value), source) for key, value, source in rows]
    print(metadata.columns(header, cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
