"""Commands as Click objects: declared here in one form, parsed to a function and its arguments.

Parsing and running are apart: a command's callback returns an `Invocation`, and the caller runs it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from popmq.cli.terminal.arguments import POSITIVE_DURATION
from popmq.cli.terminal.contexts import Connection, connection_of
from popmq.common.errors import ConfigError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Args = SimpleNamespace
Run = Callable[[Args], int]

FORMATS = ("table", "wide", "json", "yaml", "jsonl")
WIDTH = 100  # of help texts, on terminals that are wider


@dataclass(frozen=True, slots=True)
class Invocation:
    """A command with its arguments, ready to run."""

    run: Run
    args: Args


@dataclass(frozen=True, slots=True)
class Entry:
    """A command of the first level: the module to import, and its line in the help."""

    module: str
    name: str  # of the Click command in that module
    help: str
    section: str = ""  # empty: not listed


def option(*names: str, **keywords: Any) -> click.Option:
    return click.Option(names, **keywords)


def flag(*names: str, **keywords: Any) -> click.Option:
    return click.Option(names, is_flag=True, default=False, **keywords)


def argument(name: str, **keywords: Any) -> click.Argument:
    return click.Argument([name], **keywords)


ADMIN_ENDPOINT = option(
    "--admin-endpoint",
    metavar="HOST:PORT",
    help="Where it is administered, or unix:PATH.  [default: POPMQ_ADMIN_ENDPOINT, the context, "
    "what a proxy on this machine names]",
)


def command(
    name: str,
    run: Run,
    *params: click.Parameter,
    help: str,
    examples: Sequence[str] = (),
    connects: bool = True,
    prints: bool = True,
    namespaced: bool = False,
    values: Mapping[str, object] | None = None,
    check: Callable[[Args], None] | None = None,
    **keywords: Any,
) -> click.Command:
    """`connects`: takes --endpoint; `prints`: takes -o; `values` are arguments that are fixed.

    `check` raises click.UsageError for arguments that contradict each other.
    """
    shared = _shared_options(connects=connects, prints=prints, namespaced=namespaced)

    def callback(**parsed: object) -> Invocation:
        _check_texts(parsed)
        args = Args(**{**(values or {}), **parsed})
        if check is not None:
            check(args)
        _resolve(args, connects=connects, prints=prints, namespaced=namespaced)
        return Invocation(run, args)

    return click.Command(
        name,
        params=[*params, *shared],
        callback=callback,
        help=help,
        epilog=_epilog(examples),
        short_help=help.split(". ")[0].rstrip("."),
        **keywords,
    )


def group(
    name: str,
    commands: Sequence[click.Command],
    *,
    help: str,
    examples: Sequence[str] = (),
    alone: click.Command | None = None,
    folder_option: str = "",
) -> click.Group:
    """`alone` is the command that runs when none is named; its options are the group's."""
    shown = {item.name or "": item for item in commands}
    if alone is None:
        return SuggestingGroup(name, shown, help=help, epilog=_epilog(examples))
    chosen = alone.callback
    assert chosen is not None, "a command has a callback"

    @click.pass_context
    def callback(context: click.Context, /, **parsed: object) -> object:
        if context.invoked_subcommand is None:
            return chosen(**parsed)
        for param in context.command.params:
            source = context.get_parameter_source(param.name or "")
            if source is click.core.ParameterSource.COMMANDLINE:
                later = context.invoked_subcommand
                raise click.UsageError(f"{param.opts[0]} goes after {later}: here it is lost")
        return None

    return SuggestingGroup(
        name,
        shown,
        params=alone.params,
        callback=callback,
        invoke_without_command=True,
        help=help,
        epilog=alone.epilog or _epilog(examples),
        folder_option=folder_option,
    )


class SuggestingGroup(click.Group):
    """Names the nearest command when one is unknown; `folder_option` takes a folder that was
    written in the place of a command."""

    def __init__(self, *positional: Any, folder_option: str = "", **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._folder_option = folder_option

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(context, args[0]) is None and not args[0].startswith("-"):
            near = nearest(args[0], self.list_commands(context))
            names = ", ".join(self.list_commands(context))
            known = f"Did you mean {near}?" if near else f"There are {names}."
            if self._folder_option and os.path.isdir(args[0]):
                known = f"A folder goes after {self._folder_option}: "
                known += f"{context.command_path} {self._folder_option} {args[0]}"
            context.fail(f"No such command {args[0]!r}. {known}")
        return super().resolve_command(context, args)


class LazyGroup(SuggestingGroup):
    """The first level: a command's module is imported when it is called."""

    def __init__(self, entries: Mapping[str, Entry], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.entries = entries

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.section]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        entry = self.entries.get(name)
        if entry is None:
            return None
        found_command = getattr(import_module(entry.module), entry.name)
        assert isinstance(found_command, click.Command), f"{entry.module}.{entry.name} is a command"
        return found_command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """By sections, without importing anything."""
        sections = dict.fromkeys(entry.section for entry in self.entries.values() if entry.section)
        for section in sections:
            with formatter.section(section):
                formatter.write_dl(
                    [
                        (name, entry.help)
                        for name, entry in self.entries.items()
                        if entry.section == section
                    ]
                )

    def shell_complete(self, context: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=self.entries[name].help)
            for name in self.list_commands(context)
            if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, context, incomplete)


def nearest(name: str, names: Sequence[str]) -> str:
    """The known name that a mistyped one most likely means; empty when none is near."""
    import difflib

    exact = [item for item in names if item.lower() == name.lower()]
    near = exact or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return near[0] if near else ""


def is_text(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_text, value))
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)


def _check_texts(parsed: Mapping[str, object]) -> None:
    """Refuse bytes that are no text, where the protocol has texts: anywhere but in a body."""
    for name, value in parsed.items():
        if name not in ("body", "arguments") and not is_text(value):
            raise click.UsageError(f"{name.replace('_', '-')}: {value!a} is not UTF-8")


def _shared_options(*, connects: bool, prints: bool, namespaced: bool) -> list[click.Option]:
    options = []
    if connects:
        options += [
            option(
                "--endpoint",
                metavar="HOST:PORT",
                help="A proxy's address, tls://HOST:PORT over TLS.  [default: POPMQ_ENDPOINT, "
                "the context, 127.0.0.1:8081]",
            ),
            ADMIN_ENDPOINT,
            option("--context", metavar="NAME", help="Use this context (popmq context)."),
            option(
                "--timeout",
                type=POSITIVE_DURATION,
                metavar="10s",
                help="How long each answer may take.  [default: 2.5s to look, 10s to change]",
            ),
        ]
    if namespaced:
        options.append(
            option(
                "--namespace",
                metavar="NS",
                help="The namespace of the topics and groups that are named.",
            )
        )
    if prints:
        options += [
            option(
                "-o",
                "--output",
                type=click.Choice(FORMATS),
                default="table",
                help="How to print.  [default: table]",
            ),
            flag("--json", help="The same as -o jsonl: one JSON object per line."),
        ]
    return options


def _resolve(args: Args, *, connects: bool, prints: bool, namespaced: bool) -> None:
    if prints:
        if args.json:
            args.output = "jsonl"
        if args.output == "yaml" and find_spec("yaml") is None:
            raise click.UsageError("-o yaml needs PyYAML: pip install 'popmq[cli]'")
        args.json = args.output in ("json", "jsonl", "yaml")
    if connects:
        try:
            connection: Connection = connection_of(args.endpoint, args.context, args.admin_endpoint)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        args.endpoint = connection.endpoint
        args.tls_ca = connection.tls_ca
        args.access_key, args.secret = connection.access_key, connection.secret
        args.admin_endpoint = connection.admin_endpoint
        if namespaced and args.namespace is None:
            args.namespace = connection.namespace
    if namespaced:
        args.namespace = args.namespace or ""
        if args.namespace:
            from popmq.cli.terminal.namespace_option import in_namespace

            in_namespace(args)


def _epilog(examples: Sequence[str]) -> str | None:
    if not examples:
        return None
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
