"""The `popmq` command: finds the subcommand, runs it, and turns refusals into one line.

`popmq --version` imports nothing else, and a command's module is imported only when it is called.
"""

import gc
import signal
import sys
from collections.abc import Sequence

from popmq.common.version import VERSION

# At Python's 700 the collector takes a tenth of a command's time, and 6 % of a proxy's: its calls
# in progress are thousands of objects and none is a cycle.
GC_AFTER_OBJECTS = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. Without `argv` this is the process's only work."""
    if argv is None:
        # Ctrl-C while modules are imported ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.set_threshold(GC_AFTER_OBJECTS, 10, 10)
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments == ["--version"]:
        print(f"popmq {VERSION}")
        return 0
    from popmq.cli.commands import run

    return run(arguments, interrupts=argv is None)


if __name__ == "__main__":
    sys.exit(main())
