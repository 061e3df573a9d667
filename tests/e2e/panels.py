"""What each query of each dashboard returns from a real Prometheus, and whether that may be."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.prometheus import Prometheus

from popmq.common.metric_table.verdicts import Verdict

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
# Clusters with the same names of topics and groups: two in one namespace, of which the name of one
# begins with that of the other, and one of the same name in another namespace.
CHOSEN = {"namespace": "shop", "cluster": "demo"}
CLUSTERS = (CHOSEN, {**CHOSEN, "cluster": "demo-eu"}, {**CHOSEN, "namespace": "test"})
RATES_OVER = "15s"  # Grafana asks for at least four scrapes
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PanelQuery:
    dashboard: str
    panel: str
    legend: str
    unit: str
    expression: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.legend}"


def panel_queries(dashboards: Iterable[str] = ("*",)) -> list[PanelQuery]:
    """Of the committed files."""
    queries = []
    for path in sorted(path for name in dashboards for path in _files(name)):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                legend = target["legendFormat"].removeprefix("{{cluster}}").strip()
                queries.append(
                    PanelQuery(
                        path.stem,
                        panel["title"],
                        legend,
                        _unit(panel, legend),
                        concrete(target["expr"]),
                        panel["type"],
                    )
                )
    return queries


def _files(name: str) -> Iterable[Path]:
    return (MONITORING / "dashboards").glob(f"{name}.json")


def _unit(panel: dict[str, Any], legend: str) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == legend:
            defaults = {item["id"]: item["value"] for item in override["properties"]}
    return "verdict" if defaults.get("mappings") else str(defaults["unit"])


def concrete(expression: str, chosen: Mapping[str, str] = CHOSEN) -> str:
    """As Grafana would ask it with the cluster and all else chosen, over less time."""
    others = {name: ".*" for name in ("group", "topic", "operator", "namespace", "cluster")}
    expression = expression.replace("$__rate_interval", RATES_OVER)
    for variable, value in {**others, **chosen}.items():
        expression = expression.replace(f"${variable}", value)
    assert "$" not in expression, expression
    return expression


def has_data(samples: list[Sample]) -> bool:
    """A quantile of nothing is no number, and shows nothing."""
    return any(not math.isnan(value_of(sample)) for sample in samples)


def value_of(sample: Sample) -> float:
    return float(sample["value"][1])


def wait_for_data(
    prometheus: Prometheus, queries: Iterable[PanelQuery], *, limit_s: float
) -> dict[PanelQuery, list[Sample]]:
    """The samples of each; AssertionError with those that found nothing within the limit."""
    results: dict[PanelQuery, list[Sample]] = {}
    missing = list(queries)
    until_s = time.monotonic() + limit_s
    while missing:
        for query in missing:
            samples = prometheus.query(query.expression)
            if has_data(samples):
                results[query] = samples
        missing = [query for query in missing if query not in results]
        assert not missing or time.monotonic() < until_s, [query.name for query in missing]
        time.sleep(0.5 if missing else 0)  # until Prometheus has scraped again
    return results


def check_samples(query: PanelQuery, samples: list[Sample]) -> None:
    """Of the chosen cluster alone, and values that the unit can have."""
    for sample in samples:
        labels, value = sample["metric"], value_of(sample)
        if "popmq_operator_" in query.expression:
            assert {labels.get("namespace"), labels.get("cluster_namespace")} <= {
                *("popmq-system", CHOSEN["namespace"], None)
            }, query.name
        else:
            assert labels.items() >= CHOSEN.items(), query.name
        if not math.isnan(value):
            assert value >= 0 or "- time()" in query.expression, query.name
            assert not math.isinf(value) or "_eta_" in query.expression, query.name
        if query.unit == "percentunit" and query.panel != "Acked of what is delivered":
            assert not value > 1, query.name
        elif query.unit == "verdict":
            assert value in list(Verdict), query.name


def print_table(results: Mapping[PanelQuery, list[Sample]]) -> None:
    """Panel, series, value: shown by pytest -rP or -s."""
    for query, samples in results.items():
        for sample in samples:
            hidden = {"__name__", "namespace", "cluster", "job"}
            labels = {name: value for name, value in sample["metric"].items() if name not in hidden}
            series = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            sys.stdout.write(f"{query.name} | {series} | {value_of(sample):.6g} {query.unit}\n")


def differences_from_lag(prometheus: Prometheus, lag: Callable[[], str]) -> list[str]:
    """Between the tables of groups and what `popmq lag --json` says; retried while traffic ends."""
    rows = [json.loads(line) for line in lag().splitlines()]
    pairs = {(row["group"], row["topic"]): row for row in rows if "topic" in row}
    read = {pair: row for pair, row in pairs.items() if not row.get("never_read")}
    tables = _columns(prometheus, "overview", "Consumer groups, worst first")
    tables |= _columns(prometheus, "lag", "Groups and topics, worst first")
    expected = {
        "Lag": {pair: row["lag"] for pair, row in pairs.items()},
        "Verdict": {pair: Verdict[row["verdict"]] for pair, row in read.items() if row["verdict"]},
        "Ready": {pair: row["ready"] for pair, row in read.items()},
        "In flight": {pair: row["in_flight"] for pair, row in read.items()},
        "Blocked": {pair: row["blocked"] for pair, row in read.items()},
        "Retries": {pair: row["retries"] for pair, row in read.items()},
        "Delayed": {pair: row["delayed"] for pair, row in read.items()},
    }
    wrong = [
        f"{column}: {tables[column]}, popmq lag: {values}"
        for column, values in expected.items()
        if tables[column] != values
    ]
    for pair, row in read.items():
        age_s = (row["oldest_ready_age_ms"] or 0) / 1_000
        if abs(tables["Oldest waits"].get(pair, math.inf) - age_s) > AGE_S:
            wrong.append(f"Oldest waits: {pair}: {tables['Oldest waits']}, popmq lag: {age_s}")
    for panel, total in (
        ("Lag", sum(row["lag"] for row in pairs.values())),
        ("Dead letters kept", sum(row.get("dead_letters", 0) for row in rows)),
        ("Worst verdict", max(expected["Verdict"].values(), default=0)),
    ):
        (values,) = _columns(prometheus, "overview", panel).values()
        if list(values.values()) != [total]:
            wrong.append(f"{panel}: {values}, popmq lag: {total}")
    return wrong


AGE_S = 8.0  # the broker looks up ages every few seconds


def _columns(
    prometheus: Prometheus, dashboard: str, panel: str
) -> dict[str, dict[tuple[str, str], float]]:
    return {
        query.legend: {
            (sample["metric"].get("group", ""), sample["metric"].get("topic", "")): value_of(sample)
            for sample in prometheus.query(query.expression)
        }
        for query in panel_queries([dashboard])
        if query.panel == panel
    }
