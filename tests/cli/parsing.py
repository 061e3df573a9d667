"""A command line as popmq understands it, without running it."""

from popmq.cli.commands import parse
from popmq.cli.terminal.command_line import Args, Invocation


def invoked(*argv: str) -> Invocation:
    result = parse(argv)
    assert isinstance(result, Invocation), argv
    return result


def parsed(*argv: str) -> Args:
    return invoked(*argv).args
