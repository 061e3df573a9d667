"""Views that are drawn again and again on the terminal, until q or Ctrl-C."""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from popmq.common.errors import Code, PopmqError

_NO_ANSWER = "no answer, this is what was known before: "
_HOME_AND_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def watch(every_s: float, lines: Callable[[], Sequence[str]]) -> int:
    """Show `lines`, cut to the screen, every so often; where there is no terminal, once.

    The screen of before comes back at the end, with the last view below it.
    """
    if not sys.stdout.isatty():
        print(*lines(), sep="\n", flush=True)
        return 0
    shown: Sequence[str] = ()
    sys.stdout.write(_ENTER)
    try:
        with _keys_without_enter() as keys:
            while True:
                shown = _lines_now(lines, shown)
                sys.stdout.write(_HOME_AND_CLEAR + "\n".join(_screen(shown, every_s)))
                sys.stdout.flush()
                if _is_quit(keys, every_s):
                    return 0
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(_LEAVE)
        if shown:
            sys.stdout.write("\n".join(shown) + "\n")
        sys.stdout.flush()


def _lines_now(lines: Callable[[], Sequence[str]], shown: Sequence[str]) -> Sequence[str]:
    """Those of before below a line that says why, while the server does not answer."""
    try:
        return "\n".join(lines()).splitlines()
    except PopmqError as error:
        if not shown or error.code is not Code.HA_NOT_AVAILABLE:
            raise
        before = shown[1:] if shown[0].startswith(_NO_ANSWER) else shown
        return [f"{_NO_ANSWER}{error}", *before]


def _screen(shown: Sequence[str], every_s: float) -> list[str]:
    size = shutil.get_terminal_size()
    footer = f"{time.strftime('%H:%M:%S')}  every {every_s:g} s, q ends"
    # A line with colours has invisible characters: it is not cut in the middle of one.
    body = [
        line if "\x1b" in line else line[: size.columns] for line in shown[: max(1, size.lines - 2)]
    ]
    if len(shown) > len(body):
        footer += f"; {len(shown) - len(body)} more lines"
    return [*body, footer[: size.columns]]


@contextmanager
def _keys_without_enter() -> Iterator[int | None]:
    """The descriptor of standard input when it is a terminal, which hands over each key at once."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _is_quit(keys: int | None, wait_s: float) -> bool:
    """Whether q is pressed within `wait_s`, which is waited for otherwise."""
    poll = select.poll()
    if keys is not None:
        poll.register(keys, select.POLLIN)
    until_s = time.monotonic() + wait_s
    while (left_s := until_s - time.monotonic()) > 0:
        if poll.poll(left_s * 1_000) and os.read(keys or 0, 1) in (b"q", b"Q", b""):
            return True
    return False
