"""Commands that destroy something show what, and ask first."""

import sys

import click

from popmq.cli.terminal.command_line import Args
from popmq.common.errors import Code, Refused


def confirm(args: Args, text: str, *, always: bool = False) -> None:
    """Return when --yes was given or the person agrees.  Raises the refusal otherwise.

    Without a terminal nobody can answer: a script goes on, as it did before commands asked, but
    with `always` --yes is needed there.
    """
    if args.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if not always:
            return
        raise Refused(Code.PRECONDITION_FAILED, f"{text}; nothing was done: add --yes to do it")
    if not click.confirm(f"{text}. Go on?", err=True):
        raise Refused(Code.PRECONDITION_FAILED, "nothing was done")
