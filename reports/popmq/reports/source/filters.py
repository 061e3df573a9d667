"""Filters: what of a query the source can heed before it reads, and never more than asked for.

Everything that is heeded here Spark checks again; a filter that is not understood is left to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Kinds out of retry and dead-letter topics.
_ENDS = frozenset(("RETRY", "DEAD", "PARKED", "REDRIVEN"))


@dataclass(slots=True)
class Filters:
    """`None`: not asked for. Log times are of one broker each."""

    brokers: frozenset[str] | None = None
    kinds: frozenset[str] | None = None
    topics: frozenset[str] | None = None
    from_log_ms: int = 0
    before_log_ms: int | None = None

    def take(self, filters: Iterable[Any]) -> None:
        """Objects of pyspark's filter classes, told by their names so that nothing is imported."""
        for condition in filters:
            name = type(condition).__name__
            column: tuple[str, ...] = getattr(condition, "attribute", ())
            if len(column) != 1:
                continue
            if name in ("EqualTo", "In"):
                values = condition.value if name == "In" else (condition.value,)
                self._among(column[0], frozenset(values))
            elif column[0] == "log_ms" and isinstance(getattr(condition, "value", None), int):
                self._range(name, condition.value)

    def _among(self, column: str, values: frozenset[Any]) -> None:
        if column == "broker":
            self.brokers = values if self.brokers is None else self.brokers & values
        elif column == "kind":
            self.kinds = values if self.kinds is None else self.kinds & values
        elif column == "topic":
            self.topics = values if self.topics is None else self.topics & values

    def _range(self, name: str, value: int) -> None:
        if name in ("GreaterThan", "GreaterThanOrEqual"):
            self.from_log_ms = max(self.from_log_ms, value + (name == "GreaterThan"))
        elif name in ("LessThan", "LessThanOrEqual"):
            before = value + (name == "LessThanOrEqual")
            self.before_log_ms = min(before, self.before_log_ms or before)

    def wants_broker(self, broker: str) -> bool:
        return self.brokers is None or broker in self.brokers

    def wants_partition(self, table: str, layout: str, topic: str) -> bool:
        if table == "revive" and self.kinds is not None:
            if layout == "head":
                return bool(self.kinds & (_ENDS | {"UNDONE"}))
            if layout == "offset":
                return "RESET" in self.kinds
            return bool(self.kinds - _ENDS - {"RESET"})
        if table in ("fired", "messages") and self.topics is not None:
            return topic in self.topics
        return True
