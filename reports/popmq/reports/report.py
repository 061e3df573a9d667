"""Report: what came out, as plain values, whatever it is shown as."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from popmq.common.metric_table.verdicts import Verdict
from popmq.common.quantities import format_duration

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """`columns` are names of values in the rows, in the order to show them in."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class BrokerMoment:
    """Where one broker group was when the report was made; positions are bytes of its log."""

    broker: str
    epoch: int
    end_position: int
    wall_ms: int
    log_ms: int
    sample: int = 0  # number of the newest one, in this epoch; 0: none was asked for
    failing_percent: int = 0  # its settings of verdicts; 0: it told none
    failing_least: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    name: str  # lag | revive | delay
    source: str  # the endpoint, or the history's folder
    made_ms: int
    moments: tuple[BrokerMoment, ...]
    tables: tuple[ReportTable, ...]
    incomplete: str = ""  # why some broker group is missing
    notes: tuple[str, ...] = ()
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)  # wall ms, lag

    def table(self, name: str) -> ReportTable:
        return next(table for table in self.tables if table.name == name)

    @property
    def first(self) -> ReportTable:
        return self.tables[0]

    def summary(self) -> dict[str, Any]:
        """A few figures, the most urgent groups among them; none of a report without verdicts."""
        rows = [row for row in self.first.rows if row.get("status") in Verdict.__members__]
        if "status" not in self.first.columns:
            return {}
        levels = [Verdict[row["status"]] for row in rows]
        levels += [Verdict.UNKNOWN] if self.incomplete else []

        def groups(verdict: Verdict) -> int:
            return len({row["group"] for row in rows if row["status"] == verdict.name})

        summary: dict[str, Any] = {
            "verdict": max(levels, default=Verdict.OK).name,
            "groups": len({row["group"] for row in rows}),
            "failing": groups(Verdict.FAILING),
            "stopped": groups(Verdict.STOPPED),
        }
        if "lag" in self.first.columns:
            summary["lag"] = sum(row["lag"] for row in rows)
            oldest_ms = max((row["waits_ms"] or 0 for row in rows), default=0)
            summary["oldest"] = format_duration(oldest_ms // 1_000 * 1_000)
        names = ("group", "topic", "lag")
        summary["worst"] = [
            {"verdict": row["status"], **{name: row[name] for name in names if name in row}}
            for row in rows[:3]
        ]
        return summary

    def to_json(self) -> dict[str, Any]:
        return {
            "report": self.name,
            "source": self.source,
            "made_ms": self.made_ms,
            "incomplete": self.incomplete,
            "notes": list(self.notes),
            "brokers": [
                {
                    "broker": moment.broker,
                    "epoch": moment.epoch,
                    "end_position": moment.end_position,
                    "wall_ms": moment.wall_ms,
                }
                for moment in self.moments
            ],
            **{
                table.name: [{name: row[name] for name in table.columns} for row in table.rows]
                for table in self.tables
            },
        }


def rows_of(frame: Any) -> Iterator[dict[str, Any]]:
    """A small data frame's rows, in its order."""
    return (row.asDict() for row in frame.collect())
