"""`python -m tools.command_examples` (make commands): write the examples of docs/reference/cli.md.

They are the first example of each command's help.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from popmq.cli.commands import root

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "cli.md"
_BLOCK = re.compile(r"(?<=^## Examples\n\n```sh\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def commands_below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name, the groups among them."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            subcommand = command.get_command(context, below)
            assert subcommand is not None
            yield from commands_below(f"{name} {below}", subcommand)


def examples() -> Iterator[str]:
    for _, command in commands_below("popmq", root()):
        lines = (command.epilog or "").partition("Examples:\n")[2].splitlines()
        yield from (line.strip() for line in lines[:1])


def page(text: str) -> str:
    """The page with those examples."""
    block = "\n".join(dict.fromkeys(examples())) + "\n"
    return _BLOCK.sub(lambda _: block, text, count=1)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.relative_to(ROOT)}\n")
