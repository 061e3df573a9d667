"""`popmq completion SHELL`: the script that makes a shell complete commands, options and names."""

import click
from click.shell_completion import get_completion_class

from popmq.cli.terminal.command_line import Args, argument, command

VARIABLE = "_POPMQ_COMPLETE"


def run_completion(args: Args) -> int:
    shell = get_completion_class(args.shell)
    assert shell is not None, "the argument is one of the shells that Click knows"
    print(shell(click.Command("popmq"), {}, "popmq", VARIABLE).source())
    return 0


completion = command(
    "completion",
    run_completion,
    argument("shell", type=click.Choice(("bash", "zsh", "fish"))),
    help="Print the script that makes a shell complete popmq's commands, options and names.",
    examples=(
        "source <(popmq completion bash)",
        "source <(popmq completion zsh)",
        "popmq completion fish | source",
    ),
    connects=False,
    prints=False,
)
