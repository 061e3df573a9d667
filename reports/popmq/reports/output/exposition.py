"""A report as a page of metrics: for a Pushgateway, or a file that the node exporter reads.

Values that are unknown are left out: one NaN would spoil every sum.
"""

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from popmq.common.errors import Unavailable
from popmq.reports.report import Report, Row

PREFIX = "popmq_report_"
_TIMEOUT_S = 10
_LABELS = ("group", "topic", "broker", "read_topic", "queue", "client")
# Table -> column -> the metric's name behind the prefix, and its divisor.
_GAUGES: dict[tuple[str, str], dict[str, tuple[str, int]]] = {
    ("lag", "groups"): {
        **{name: (f"{name}_messages", 1) for name in ("lag", "ready", "in_flight", "blocked")},
        "retries": ("retry_messages", 1),
        "expired": ("expired_messages", 1),
        "waits_ms": ("oldest_ready_seconds", 1_000),
        "unknown_ages": ("unknown_age_queues", 1),
        "in_rate": ("in_messages_per_second", 1),
        "ack_rate": ("acked_messages_per_second", 1),
        "eta_s": ("eta_seconds", 1),
        "skew": ("skew_ratio", 1),
    },
    ("lag", "dead_letters"): {"dead_letters": ("dead_letter_messages", 1)},
    ("revive", "groups"): {
        **{
            name: (f"{name}_messages", 1)
            for name in (
                *(
                    "delivered",
                    "acked",
                    "retried",
                    "dead_lettered",
                    "returned",
                    "lost",
                    "kept",
                    "reset",
                ),
            )
        },
        "ack_p99_ms": ("ack_p99_seconds", 1_000),
        "revive_late_p99_ms": ("revive_late_p99_seconds", 1_000),
    },
    ("delay", "topics"): {
        "fired": ("fired_messages", 1),
        "late_p99_ms": ("late_p99_seconds", 1_000),
        "late_max_ms": ("late_max_seconds", 1_000),
    },
}


def exposition(report: Report) -> str:
    """Text format 0.0.4, sorted; `_timestamp_seconds` says how old it is."""
    lines: list[str] = []
    for table in report.tables:
        gauges = _GAUGES.get((report.name, table.name), {})
        for column, (name, divisor) in gauges.items():
            if column in table.columns:
                lines += _gauge(name, [(row, row[column]) for row in table.rows], divisor)
        if report.name == "lag" and table.name == "groups":
            lines += _gauge(
                "group_ok", [(row, int(row["status"] == "OK")) for row in table.rows], 1
            )
    stamp = f"{report.name}_timestamp_seconds"
    lines += [f"# TYPE {PREFIX}{stamp} gauge", f"{PREFIX}{stamp} {report.made_ms / 1_000:.3f}"]
    lines += _gauge(f"{report.name}_complete", [({}, int(not report.incomplete))], 1)
    return "\n".join(lines) + "\n"


def write_file(report: Report, path: Path) -> None:
    """By rename, so that nobody reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(exposition(report))
    Path(name).chmod(0o644)
    Path(name).rename(path)


def push(report: Report, gateway: str) -> None:
    """Replaces what the last report of this kind and source left there."""
    base = gateway.rstrip("/")
    place = f"/metrics/job/popmq_report_{report.name}/source/{quote(report.source, safe=':')}"
    request = urllib.request.Request(
        base + place, exposition(report).encode(), {"Content-Type": "text/plain"}, method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            pass
    except (urllib.error.URLError, OSError) as error:
        raise Unavailable(
            f"the Pushgateway at {gateway} did not take the report: {error}"
        ) from None


def _gauge(name: str, values: Sequence[tuple[Row, float | None]], divisor: int) -> Iterator[str]:
    known = [(row, value) for row, value in values if value is not None]
    if not known:
        return
    yield f"# TYPE {PREFIX}{name} gauge"
    for row, value in known:
        labels = ",".join(
            f'{label}="{_escaped(str(row[label]))}"' for label in _LABELS if label in row
        )
        yield f"{PREFIX}{name}{'{' + labels + '}' if labels else ''} {value / divisor:.12g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
