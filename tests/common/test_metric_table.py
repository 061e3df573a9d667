"""The table of metrics: what it says is what pages show, and what pages of text name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from popmq.cli.monitoring.files import PAGE, reference_page
from popmq.common.metric_table.row import PREFIX, Kind
from popmq.common.metric_table.table import TABLE, reading
from popmq.common.observability import Histogram

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("broker", "common", "proxy", "controller", "operator", "cli")
_UNITS = ("messages", "bytes", "seconds", "ratio", "percent", "records")
_NAMED = re.compile(r"\bpopmq_[a-z][a-z0-9_]*")
# Words of other kinds in pages: fixtures, columns of commands.
_NO_METRICS = {"popmq_broker", "popmq_pytest"}


def test_the_reference_page_is_made_from_the_table() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == reference_page(), "run make metrics"


def test_every_metric_of_the_table_is_made_somewhere() -> None:
    """By a call of `reading`, or of what hands its first argument on to it."""
    sets: set[str] = set()
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "reading(" in text or "_by_pair(" in text:
                sets |= set(_names_made(ast.parse(text)))
    # tests/report has those of reports, which Spark calculates.
    assert [name for name, row in TABLE.items() if row.role != "report" and name not in sets] == []


def _names_made(tree: ast.Module) -> Iterator[str]:
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        first = node.args[0]
        if node.func.id not in ("reading", "_by_pair"):
            continue
        if isinstance(first, ast.Constant):
            yield str(first.value)
        elif isinstance(first, ast.JoinedStr):  # f"timer_{name}", with the names in the module
            parts = [
                value.value if isinstance(value, ast.Constant) else None for value in first.values
            ]
            for word in words:
                yield "".join(word if part is None else str(part) for part in parts)


def test_units_are_in_the_names() -> None:
    """Seconds and bytes only, no milliseconds; a histogram always has a unit."""
    wrong = [name for name in TABLE if re.search(r"_(ms|millis|kb|mib|minutes)(_|$)", name)]
    wrong += [
        name
        for name, row in TABLE.items()
        if row.kind is Kind.HISTOGRAM and name.rsplit("_", 1)[-1] not in _UNITS
    ]
    wrong += [name for name in TABLE if name.endswith("_total") or name.startswith(PREFIX)]
    assert wrong == []


def test_every_label_has_a_bound() -> None:
    assert [name for name, row in TABLE.items() if bool(row.labels) is not bool(row.bound)] == []


def test_every_metric_that_a_page_names_is_in_the_table() -> None:
    known = {series for row in TABLE.values() for series in (*row.series, row.exposed)}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    unknown = {
        (path.name, name)
        for path in pages
        for name in _NAMED.findall(path.read_text(encoding="utf-8"))
        if name not in known and name not in _NO_METRICS and not name.endswith("_")
    }
    assert unknown == set()


def test_a_metric_that_is_not_in_the_table_cannot_be_made() -> None:
    with pytest.raises(KeyError):
        reading("made_up", 1)
    with pytest.raises(ValueError, match="zip"):
        reading("messages_in", 1)


def test_a_histogram_in_milliseconds_is_shown_in_seconds() -> None:
    took = Histogram((5, 1_000), divisor=1_000)
    took.observe(5)
    took.observe_each(7, 3)
    metric = reading("store_flush_seconds", took)
    assert (metric.value, list(metric.buckets)) == (0.026, [("0.005", 1), ("1", 4), ("+Inf", 4)])
