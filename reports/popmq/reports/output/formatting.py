"""How values and columns are written for people."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

NONE = "-"
UNKNOWN = "unknown"
# Status words go with a symbol, so that colour is never all that tells.
SYMBOLS = {
    **{"OK": "✓", "BEHIND": "▲", "STUCK": "◆", "STOPPED": "■", "FAILING": "✖", "UNKNOWN": "?"},
}
_HEADS = {
    "in_rate": "in /s",
    "pop_rate": "delivered /s",
    "ack_rate": "acked /s",
    "retry_rate": "retries /s",
    "eta_s": "done in",
    "waits_ms": "oldest waits",
    "oldest_ready_ms": "oldest stored",
    "within_s": "due within",
    "pop_ago_s": "last receive",
    "ack_ago_s": "last ack",
    "held_s": "oldest held",
    "over_1s": "over 1 s",
    "retry_ratio": "retried share",
}
_RATES = ("in_rate", "pop_rate", "ack_rate", "retry_rate")
_AGES = ("eta_s", "pop_ago_s", "ack_ago_s", "held_s", "within_s")


def head(column: str) -> str:
    if column in _HEADS:
        return _HEADS[column]
    return column.removesuffix("_ms").replace("_", " ")


def cell_of(row: Mapping[str, Any], column: str) -> str:
    """A value of a row; an age that is not known, or not of all queues, says so."""
    value = row[column]
    if column == "waits_ms":
        if value is None and row.get("ready"):
            return UNKNOWN
        if row.get("unknown_ages"):
            return f"≥ {cell(column, value)}"
    return cell(column, value)


def cell(column: str, value: Any) -> str:
    """One value; what is unknown is a dash and never a number."""
    if value is None:
        if column == "eta_s":
            return "not draining"
        return "later" if column == "within_s" else NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column == "status":
        return f"{SYMBOLS.get(value, '')} {value}".strip()
    if column == "oldest_ready_ms":
        return moment(value)
    if column.endswith("_ms"):
        return span(value)
    if column in _AGES:
        return span(value * 1_000)
    if column == "retry_ratio":
        return f"{100 * value:.1f} %"
    if column in _RATES or isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def span(ms: float) -> str:
    """Three digits and a unit: 250 ms, 1.25 s, 12.4 min, 3.1 h."""
    for limit, unit, size in ((1_000, "ms", 1), (60_000, "s", 1_000), (3_600_000, "min", 60_000)):
        if abs(ms) < limit:
            return f"{ms / size:.3g} {unit}"
    return f"{ms / 3_600_000:.3g} h" if ms < 86_400_000 else f"{ms / 86_400_000:.3g} d"


def moment(wall_ms: int) -> str:
    return datetime.fromtimestamp(wall_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
