"""`popmq config`: settings of this machine, where they came from, and those of processes."""

import json
from collections.abc import Sequence

import click

from popmq.cli.client import Client
from popmq.cli.terminal.command_line import ADMIN_ENDPOINT, Args, argument, command, group, option
from popmq.cli.terminal.contexts import connection_of
from popmq.cli.terminal.output import Row, columns, folded, print_incomplete, print_rows
from popmq.common.settings.describe import describe, descriptions, format_value
from popmq.common.settings.settings import environment, load_settings
from popmq.common.wire import admin_pb2 as admin

TIMEOUT_MS = 3_000


def run_config(args: Args) -> int:
    if args.endpoint or args.context or args.admin_endpoint:
        return _show_running(args)
    loaded = load_settings(args.config, environment(), {})
    flat = loaded.settings.flat().items()
    rows = [{"key": key, "value": value, "source": loaded.sources[key]} for key, value in flat]
    cells = [(row["key"], json.dumps(row["value"]), row["source"]) for row in rows]
    print_rows(args, rows, [columns(("KEY", "VALUE", "FROM"), cells)])
    return 0


def _show_running(args: Args) -> int:
    """What the processes of a cluster have, one line where all agree."""
    connection = connection_of(args.endpoint, args.context, args.admin_endpoint)
    with Client(
        connection.endpoint,
        tls_ca=connection.tls_ca,
        signer=connection.signer,
        admin_endpoint=connection.admin_endpoint,
        timeout_ms=TIMEOUT_MS,
    ) as client:
        reply = client.call_admin(admin.DescribeSettingsRequest(), admin.DescribeSettingsReply)
    print_incomplete(reply.incomplete)
    rows = running_rows(reply.processes)
    cells = [
        (row["key"], json.dumps(row["value"]), row["process"], "" if row["default"] else "set")
        for row in rows
    ]
    header = ("KEY", "VALUE", "PROCESS", "DEFAULT")
    print_rows(args, rows, [columns(header, cells, optional=("DEFAULT",))])
    return 0


def running_rows(processes: Sequence[admin.ProcessSettings]) -> list[Row]:
    """A row for each setting and value; `process` is `all`, or names those that have the value."""
    defaults = descriptions()
    keys = dict.fromkeys([*defaults, *(key for process in processes for key in process.values)])
    rows: list[Row] = []
    for key in keys:
        names: dict[str, list[str]] = {}  # by value
        for process in processes:
            if key in process.values:
                name = f"{process.role} {process.process}"
                names.setdefault(process.values[key], []).append(name)
        for value, have in names.items():
            decoded = json.loads(value)
            default = key in defaults and json.loads(json.dumps(defaults[key].default)) == decoded
            where = ", ".join(have) if len(names) > 1 else "all"
            rows.append({"key": key, "value": decoded, "process": where, "default": default})
    return rows


def run_explain(args: Args) -> int:
    described = describe(args.key)
    loaded = load_settings(args.config, environment(), {})
    section, name = described.key.split(".")
    value, source = loaded.settings.flat()[described.key], loaded.sources[described.key]
    row = {
        "key": described.key,
        "meaning": described.plain_meaning,
        "unit": described.unit,
        "default": described.default,
        "allowed": described.allowed,
        "value": value,
        "source": source,
        "variable": described.variable,
        "restart": True,
    }
    text = {
        "meaning": described.plain_meaning,
        "unit": described.unit,
        "default": format_value(described.key, described.default),
        "allowed": described.allowed,
        "here": f"{format_value(described.key, value)} (from {source})",
        "set by": f"{described.variable}, or {name} = ... below [{section}] of the TOML file",
        "takes effect": "when the process starts again",
    }
    lines = [described.key]
    lines += [folded(f"  {label:13} {words}") for label, words in text.items() if words]
    print_rows(args, [row], lines)
    return 0


class SettingKey(click.ParamType[str]):
    """Completed by the shell."""

    name = "setting"

    def shell_complete(
        self, context: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[click.shell_completion.CompletionItem]":
        from click.shell_completion import CompletionItem

        return [CompletionItem(key) for key in descriptions() if key.startswith(incomplete)]


_FILE = option("--config", metavar="FILE", help="A TOML file of settings.")
config = group(
    "config",
    [
        command(
            "explain",
            run_explain,
            argument("key", type=SettingKey()),
            _FILE,
            help="Tell what a setting means: unit, default, limits, and its value here.",
            examples=("popmq config explain store.flush",),
            connects=False,
        )
    ],
    help="Show settings of this machine, or of running processes, and what they mean.",
    alone=command(
        "config",
        run_config,
        _FILE,
        option(
            "--endpoint",
            metavar="HOST:PORT",
            help="Ask the running processes: this proxy, and the masters and controllers it knows.",
        ),
        ADMIN_ENDPOINT,
        option("--context", metavar="NAME", help="The same of a context (popmq context)."),
        help="Show each setting of this machine's files and environment, and where it came from.",
        examples=(
            "popmq config --config popmq.toml -o json",
            "popmq config --endpoint 127.0.0.1:8081",
            "popmq config explain store.flush",
        ),
        connects=False,
    ),
)
