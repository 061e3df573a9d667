"""docs/reference/metrics.md, from the table: `make metrics` writes it, a test looks for drift."""

from popmq.common.metric_table.row import Kind, MetricRow
from popmq.common.metric_table.table import SECTIONS

PATH = "docs/reference/metrics.md"

_HEAD = """# Metrics

Made from the table in code (`common/metric_table/`) by `make metrics`; do not edit. Every role
serves its metrics on `/metrics` ([ports](../operating.md#ports)); in `popmq up` with one process
one page has those of all roles. The usual `process_` and `python_gc_` metrics are there, too.
What to watch: [monitoring](../concepts/monitoring.md).

Counters count from the start of their process. Units are in the names: seconds, bytes, messages.
"""
_TABLE = "| metric | type | role | labels | what |\n|---|---|---|---|---|\n"


def page() -> str:
    parts = [_HEAD]
    for title, rows in SECTIONS.items():
        parts.append(
            f"## {title}\n\n| metric | type | role | labels | what |\n|---|---|---|---|---|\n"
        )
        parts[-1] += "".join(map(_line, rows))
    return "\n".join(parts)


def _line(row: MetricRow) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    if row.bound:
        labels += f" ({row.bound})"
    name = f"`{row.exposed}`"
    if row.kind is Kind.HISTOGRAM:
        name += " (`_bucket`, `_sum`, `_count`)"
    return f"| {name} | {row.kind.value} | {row.role.value} | {labels} | {row.help} |\n"
