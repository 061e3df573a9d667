"""Commands that destroy something show what, and ask first."""

import sys

import click

from popmq.cli.terminal.command_line import Args, flag
from popmq.common.errors import Code, Refused

YES = flag("-y", "--yes", help="Do not ask.  Without a terminal the command needs it.")


def confirm(args: Args, text: str) -> None:
    """Return when --yes was given or the person agrees.  Raises the refusal otherwise.

    Without a terminal there is nobody to ask: the command needs --yes, and is wrong without it.
    """
    if args.yes:
        return
    if not can_ask():
        raise click.UsageError(f"{text}: add --yes to do this without a terminal")
    if not click.confirm(f"{text}. Go on?", err=True):
        raise Refused(Code.PRECONDITION_FAILED, "nothing was done")


def can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
