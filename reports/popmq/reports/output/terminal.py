"""A report as tables in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from popmq.reports.output.formatting import cell_of, head, moment
from popmq.reports.report import Report, ReportTable, Row

_STYLES = {"OK": "green", "BEHIND": "yellow", "UNKNOWN": "dim"}
ROWS_SHOWN = 40
LEAST_WIDTH = 132  # a narrower terminal folds lines, which is better than columns of one letter
# Of wide tables, what fits; everything is in the page, in JSON and in the files.
_LEFT_OUT = {
    "groups": {
        *("oldest_ready_ms", "blocked", "expired", "pop_rate", "changed", "standing"),
        *("retry_ratio", "returned", "lost", "kept", "ack_p95_ms", "revive_late_p50_ms"),
        *("revive_late_p95_ms", "ack_max_ms", "unknown_ages", "reset"),
    },
    "queues": {
        *("min_offset", "retry", "parked", "fifo", "oldest_ready_ms", "blocked", "expired"),
        "topic",
    },
}


def print_report(report: Report, console: Console | None = None) -> None:
    console = console or Console(width=max(LEAST_WIDTH, Console().width))
    console.print(f"[bold]{report.name}[/] of {report.source}, {moment(report.made_ms)}")
    for broker in report.moments:
        console.print(f"  {broker.broker}: up to position {broker.end_position:,}", style="dim")
    if report.incomplete:
        console.print(f"incomplete: {report.incomplete}", style="bold red")
    for table in report.tables:
        if table.rows:
            console.print(_table(table))
        else:
            console.print(f"{table.title}: none", style="dim")
    for note in report.notes:
        console.print(note, style="dim")


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """What is being done, in one line that goes away; only where somebody may see it, on stderr."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as line:
        yield lambda text: line.update(text.replace("[", "\\["))


def _table(table: ReportTable) -> Table:
    columns = [column for column in table.columns if column not in _LEFT_OUT.get(table.name, ())]
    shown = Table(title=table.title, title_justify="left", header_style="bold", box=None)
    for column in columns:
        numeric = any(isinstance(row[column], int | float) for row in table.rows)
        shown.add_column(head(column), justify="right" if numeric else "left", no_wrap=True)
    for row in table.rows[:ROWS_SHOWN]:
        shown.add_row(*(_styled(row, column) for column in columns))
    if len(table.rows) > ROWS_SHOWN:
        shown.caption = f"and {len(table.rows) - ROWS_SHOWN:,} more"
    return shown


def _styled(row: Row, column: str) -> str:
    text = cell_of(row, column).replace("[", "\\[")
    if column == "status":
        return f"[{_STYLES.get(row[column], 'bold red')}]{text}[/]"
    return text
