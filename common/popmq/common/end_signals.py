"""The signals that end a process cleanly: Ctrl-C, SIGTERM, and SIGHUP of a closed terminal."""

import asyncio
import signal
from collections.abc import Callable


def on_end_signal(then: Callable[[], object]) -> None:
    """Call `then` in the running loop at each of them; under `nohup` SIGHUP stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, then)
