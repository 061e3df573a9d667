"""MetricRow: what one metric is called, and what there is to know of it.

The name that code uses has no prefix; the one that a page shows is `exposed`.  Every label has a
bound, or the metric says what happens beyond it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

PREFIX = "popmq_"
OTHERS = "_others"  # the value of each label when a bound was passed


class MetricRole(Enum):
    BROKER = "broker"
    PROXY = "proxy"
    CONTROLLER = "controller"
    OPERATOR = "operator"
    EVERY = "every role"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricUnit(Enum):
    """What the name ends in, but for counters, which have `_total` behind it."""

    NONE = ""
    MESSAGES = "messages"
    BYTES = "bytes"
    SECONDS = "seconds"
    RATIO = "ratio"
    PERCENT = "percent"
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class MetricRow:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bound: str = ""  # of the labels: how many values there are at most, and what comes beyond
    unit: MetricUnit = MetricUnit.NONE
    role: MetricRole = MetricRole.EVERY

    @property
    def exposed(self) -> str:
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"

    @property
    def series(self) -> tuple[str, ...]:
        """What a query may ask for."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.exposed,)
        return tuple(f"{self.exposed}_{part}" for part in ("bucket", "sum", "count"))


def unit_of(name: str) -> MetricUnit:
    """By the last word of the name."""
    last = name.rsplit("_", 1)[-1]
    return next((unit for unit in MetricUnit if unit.value == last), MetricUnit.NONE)


def rows(role: MetricRole, *found: MetricRow) -> tuple[MetricRow, ...]:
    return tuple(
        MetricRow(one.name, one.kind, one.help, one.labels, one.bound, unit_of(one.name), role)
        for one in found
    )


def counter(name: str, text: str, labels: Sequence[str] = (), bound: str = "") -> MetricRow:
    return MetricRow(name, Kind.COUNTER, text, tuple(labels), bound)


def gauge(name: str, text: str, labels: Sequence[str] = (), bound: str = "") -> MetricRow:
    return MetricRow(name, Kind.GAUGE, text, tuple(labels), bound)


def histogram(name: str, text: str, labels: Sequence[str] = (), bound: str = "") -> MetricRow:
    return MetricRow(name, Kind.HISTOGRAM, text, tuple(labels), bound)
