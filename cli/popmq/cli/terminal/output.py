"""What commands print: tables for people, and rows as JSON or YAML for programs.

`-o jsonl` prints one object a line, `json` and `yaml` one list of the same objects.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace

from popmq.common.escaping import escaped, escaped_lines, json_text

Row = Mapping[str, object]
LEAST_WIDTH = 16  # of a column whose names are cut
_CUT = ("GROUP", "TOPIC", "NAME", "NODE", "CLIENT", "MEMBER", "PROXY", "ADDRESS", "LOG")
_OWN_COLOURS = re.compile(r"(\x1b\[(?:0|1|31|32|33)m)")


def print_rows(args: SimpleNamespace, rows: Iterable[Row], text: Iterable[str]) -> None:
    """Print the rows in the format that `args` name; `text` is what the formats for people show."""
    match args.output:
        case "jsonl":
            for row in rows:
                print(json_text(row), flush=True)
        case "json":
            print(json_text(list(rows), indent=2))
        case "yaml":
            import yaml

            text = yaml.safe_dump(plain(list(rows)), allow_unicode=True, sort_keys=False)
            print(escaped_lines(text), end="")
        case _:
            for line in text:
                print(_shown(line), flush=True)


def _shown(line: str) -> str:
    """With the colours of this module, and no other control characters but line feeds."""
    parts = _OWN_COLOURS.split(line) if has_colour() else [line]
    return "".join(part if at % 2 else escaped_lines(part) for at, part in enumerate(parts))


def plain(value: object) -> object:
    """Without the types that only Python knows."""
    return json.loads(json.dumps(value))


def terminal_width() -> int | None:
    """Columns of the terminal, or as COLUMNS says; None where lines may be of any length."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        at_hand = sys.stdout.isatty()
        return os.get_terminal_size(sys.stdout.fileno()).columns or None if at_hand else None
    except (OSError, ValueError):
        return None


def folded(line: str) -> str:
    """A line of text in as many lines as the terminal needs, all but the first one indented more;
    no word is broken."""
    width = terminal_width()
    if width is None or len(line) <= width:
        return line
    import textwrap

    indent = len(line) - len(line.lstrip())
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def has_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    optional: Sequence[str] = (),
    wide: bool = False,
) -> str:
    """A table as text.  Where the terminal is narrower, columns of `optional` are left out, the
    last of them first, and then the longest names are cut, unless `wide` wants all."""
    cells = [[_cell(value) for value in row] for row in rows]
    width = None if wide else terminal_width()
    kept = list(range(len(header)))
    for name in reversed(optional):
        if width is None or _width_of(header, cells, kept) <= width:
            break
        if name in header:
            kept.remove(list(header).index(name))
    names, shown = [header[at] for at in kept], [[row[at] for at in kept] for row in cells]
    if width is not None:
        shown = _cut(names, shown, width)
    return _rendered(names, shown)


def _cut(header: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The widest names as narrow as the terminal needs; one that is cut ends in `...`."""
    every = range(len(header))
    widths = [max(len(line[at]) for line in (header, *cells)) for at in every]
    least = [
        max(len(name), LEAST_WIDTH) if name in _CUT else size
        for name, size in zip(header, widths, strict=True)
    ]
    while (over := sum(widths) + 2 * (len(widths) - 1) - width) > 0:
        at = max(every, key=lambda at: widths[at] if widths[at] > least[at] else 0)
        if widths[at] <= least[at]:
            break
        # Down to the next widest at most, so that long texts share what is missing.
        others = [widths[other] for other in every if least[at] <= widths[other] < widths[at]]
        widths[at] = max(least[at], widths[at] - over, *(others and [max(others) - 1]))
    return [
        [_shortened(text, size) for text, size in zip(row, widths, strict=True)] for row in cells
    ]


def _shortened(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."


def _width_of(header: Sequence[str], cells: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    widths = [max(len(line[at]) for line in (header, *cells)) for at in kept]
    return sum(widths) + 2 * (len(widths) - 1)


def _rendered(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the extra `cli` has rich, which knows how wide characters are
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        return "\n".join(
            "  ".join(map(str.ljust, line, widths)).rstrip() for line in (header, *cells)
        )
    # The text decides: whatever the terminal, a cell is neither folded nor cut.
    width = _width_of(header, cells, range(len(header))) + len(header) * 2
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for name in header:
        table.add_column(Text(name), no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(width=max(width, 1), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _cell(value: object) -> str:
    """Text that moves no cursor."""
    return escaped(str(value))


def heading(text: str) -> str:
    """Bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if has_colour() else text


def coloured(text: str, colour: str) -> str:
    """`colour` is red, yellow or green; plain where colours are not wanted."""
    number = {"red": 31, "green": 32, "yellow": 33}[colour]
    return f"\x1b[{number}m{text}\x1b[0m" if has_colour() else text


def print_note(text: str) -> None:
    """On standard error, so that what programs read stays clean."""
    print(f"popmq: {escaped(' '.join(text.split()))}", file=sys.stderr)


def print_incomplete(reason: str) -> None:
    if reason:
        print_note(f"not everything: {reason}")


# -- times


def format_age(milliseconds: int) -> str:
    """At most two units, as people say it: 34m, 1h05m, 3d4h; below a second it is `now`."""
    seconds = milliseconds // 1000
    if seconds < 1:
        return "now"
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3_600:
        return f"{seconds // 60}m"
    if seconds < 86_400:
        return f"{seconds // 3_600}h{seconds % 3_600 // 60:02d}m"
    return f"{seconds // 86_400}d{seconds % 86_400 // 3_600}h"


def format_ago(then_ms: int, now_ms: int) -> str:
    """`34m ago`; `now` within a second."""
    age = format_age(max(0, now_ms - then_ms))
    return age if age == "now" else f"{age} ago"


def format_due(due_ms: int, now_ms: int) -> str:
    """`in 90s` within the hour, then `today 18:00`, `tomorrow 09:00`, else the date; in the time
    zone of this machine."""
    if due_ms <= now_ms:
        return format_ago(due_ms, now_ms)
    if due_ms - now_ms < 3_600_000:
        return f"in {format_age(due_ms - now_ms)}"
    try:
        due, now = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (due_ms, now_ms))
    except (ValueError, OverflowError, OSError):
        return f"{due_ms}ms"
    days = (due.date() - now.date()).days
    if days < 2:
        return f"{('today', 'tomorrow')[days]} {due:%H:%M}"
    return f"{due:%Y-%m-%d %H:%M}"
