"""Plots of what a Prometheus has about the cluster (the setting console.prometheus)."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlencode

from popmq.common.errors import PopmqError, Unavailable
from popmq.console.fetches import Fetch, Fetches
from popmq.console.model import Line

POINTS = 240  # of a line


class Unit(Enum):
    RATE = "messages a second"
    MESSAGES = "messages"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: Unit
    lines: Mapping[str, str]  # name -> PromQL


@dataclass(frozen=True, slots=True)
class DrawnChart:
    title: str
    unit: Unit
    lines: Sequence[Line]


class Prometheus:
    def __init__(self, url: str, fetches: Fetches) -> None:
        self.url = url.rstrip("/")
        self._fetches = fetches

    def charts(
        self, charts: Sequence[Chart], hours: int, now_s: float | None = None
    ) -> tuple[list[DrawnChart], str]:
        """Those that were answered within a second, and why the others were not."""
        step_s = max(1, hours * 3_600 // POINTS)
        end_s = int(time.time() if now_s is None else now_s) // step_s * step_s
        span = {"start": end_s - hours * 3_600, "end": end_s, "step": step_s}
        started = [
            {name: self._start(query, span) for name, query in chart.lines.items()}
            for chart in charts
        ]
        drawn, reasons = [], []
        for chart, fetches in zip(charts, started, strict=True):
            try:
                lines = [Line(name, points_of(each.answer())) for name, each in fetches.items()]
                drawn.append(DrawnChart(chart.title, chart.unit, lines))
            except PopmqError as error:
                reasons.append(str(error))
        return drawn, "; ".join(dict.fromkeys(reasons))

    def _start(self, query: str, span: Mapping[str, int]) -> Fetch:
        return self._fetches.start(
            f"{self.url}/api/v1/query_range?{urlencode({'query': query, **span})}"
        )


def points_of(content: bytes) -> list[tuple[int, float]]:
    """Of the first series of an answer; empty when there is none.  Raises Unavailable."""
    try:
        series = json.loads(content)["data"]["result"]
        values = series[0]["values"] if series else []
        points = [(int(float(at_s) * 1_000), float(value)) for at_s, value in values]
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise Unavailable("the answer is none of Prometheus") from error
    return [(at_ms, value) for at_ms, value in points if math.isfinite(value)]


def label(value: str) -> str:
    """A string of PromQL."""
    return json.dumps(value, ensure_ascii=False)


def _p99(buckets: str) -> str:
    return f"histogram_quantile(0.99, sum by (le) (rate({buckets}[5m])))"


CLUSTER = (
    Chart(
        "Messages a second",
        Unit.RATE,
        {
            "stored": "sum(rate(popmq_messages_in_total[5m]))",
            "delivered": "sum(rate(popmq_messages_out_total[5m]))",
        },
    ),
    Chart(
        "Latency, the slowest of a hundred",
        Unit.SECONDS,
        {
            "send": _p99('popmq_proxy_request_seconds_bucket{method="SendMessage"}'),
            "delivery to ack": _p99("popmq_ack_latency_seconds_bucket"),
        },
    ),
    Chart("Lag", Unit.MESSAGES, {"messages": "sum(popmq_consumer_lag_messages)"}),
)


def group_charts(name: str) -> Sequence[Chart]:
    where = f"{{group={label(name)}}}"
    return (
        Chart(
            "Messages a second",
            Unit.RATE,
            {
                "delivered": f"sum(rate(popmq_group_messages_out_total{where}[5m]))",
                "acked": f"sum(rate(popmq_group_messages_acked_total{where}[5m]))",
            },
        ),
        Chart("Lag", Unit.MESSAGES, {"messages": f"sum(popmq_consumer_lag_messages{where})"}),
        Chart(
            "Oldest ready message",
            Unit.SECONDS,
            {"age": f"max(popmq_consumer_queueing_latency_seconds{where})"},
        ),
    )


def topic_charts(name: str) -> Sequence[Chart]:
    where = f"{{topic={label(name)}}}"
    return (
        Chart(
            "Messages a second",
            Unit.RATE,
            {
                "stored": f"sum(rate(popmq_messages_in_total{where}[5m]))",
                "delivered": f"sum(rate(popmq_group_messages_out_total{where}[5m]))",
            },
        ),
        Chart("Lag", Unit.MESSAGES, {"messages": f"sum(popmq_consumer_lag_messages{where})"}),
    )
