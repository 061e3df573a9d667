"""MetricRow: what one metric is called, and what there is to know of it.

The name that code uses has no prefix; the one that a page shows is `exposed`.  Every label has a
bound, or the metric says what happens beyond it.
"""

from dataclasses import dataclass
from enum import Enum

PREFIX = "popmq_"
OTHERS = "_others"  # the value of each label when a bound was passed


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricRow:
    role: str  # which serves it
    kind: Kind
    name: str  # ends in its unit
    help: str
    labels: tuple[str, ...] = ()
    bound: str = ""  # of the labels: how many values there are at most, and what comes beyond

    @property
    def exposed(self) -> str:
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"

    @property
    def series(self) -> tuple[str, ...]:
        """What a query may ask for."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.exposed,)
        return tuple(f"{self.exposed}_{part}" for part in ("bucket", "sum", "count"))
