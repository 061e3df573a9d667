"""Alert: a rule for Prometheus, and the promtool tests that it fires and that it does not.

JSON strings are YAML strings, so they are written without a library.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from popmq.cli.monitoring.dashboard import by_cluster, check

PAGE = "docs/reference/alerts.md"
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STEPS = 120  # of 15 s in a test: 30 minutes
_AT = "28m"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `value` has passed `beyond` for `lasting`.

    `firing` and `quiet` are series of tests: what a name with its labels reads at each 15 s, in
    promtool's notation, in which N means the number of steps.  `labels` are those of the result.
    """

    name: str
    value: str
    threshold: str
    hold_duration: str
    severity: str  # critical: somebody has to look now; warning: today
    summary: str
    what_to_do: str
    labels: Mapping[str, str]
    firing: Mapping[str, str]
    quiet: Mapping[str, str]

    def __post_init__(self) -> None:
        check(self.value)
        assert self.severity in ("critical", "warning"), self.name

    @property
    def expression(self) -> str:
        return f"{by_cluster(self.value)} {self.threshold}"

    @property
    def annotations(self) -> Mapping[str, str]:
        return {
            "summary": self.summary,
            "description": self.what_to_do,
            "runbook_url": f"{PAGE}#{self.name.lower()}",
        }


def all_alerts() -> list[Alert]:
    """Those of alerts.toml."""
    text = Path(__file__).with_name("alerts.toml").read_text(encoding="utf-8")
    return [Alert(**data) for data in tomllib.loads(text)["alerts"]]


def rules(alerts: Iterable[Alert]) -> str:
    lines = [
        "# Made from cli/monitoring/alerts.toml by `make metrics`; do not edit.",
        "groups:",
        "  - name: popmq",
        "    rules:",
    ]
    for alert in alerts:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_text(alert.expression)}",
            f"        for: {alert.hold_duration}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            *(f"          {key}: {_text(text)}" for key, text in alert.annotations.items()),
        ]
    return "\n".join(lines) + "\n"


def rule_tests(alerts: Iterable[Alert], rule_file: str) -> str:
    """For `promtool test rules`: three for each alert.

    In the third, one cluster fires.  Two others with the same names of groups and topics are quiet:
    one in another namespace, and one whose name begins with that name.
    """
    lines = [
        "# Made from cli/monitoring/alerts.toml by `make metrics`; do not edit.",
        f"rule_files: [{rule_file}]",
        "evaluation_interval: 15s",
        "tests:",
    ]
    for alert in alerts:
        lines += _test(alert, "fires", alert.firing, [alert.labels])
        lines += _test(alert, "stays quiet", alert.quiet, [])
        if alert.labels:
            several = {
                **_of_cluster(alert.quiet, "a", "demo"),
                **_of_cluster(alert.quiet, "b", "demo-eu"),
                **_of_cluster(alert.firing, "b", "demo"),
            }
            own = {"cluster": "demo", _namespace_label(alert.labels): "b"}
            what = "fires for one cluster of three"
            lines += _test(alert, what, several, [{**alert.labels, **own}])
    return "\n".join(lines) + "\n"


def alert_page(alerts: Iterable[Alert]) -> str:
    """The reference page to which each alert's `runbook_url` leads."""
    parts = [
        "# Alerts\n\n"
        "Made from cli/monitoring/alerts.toml by `make metrics`; do not edit. The rules are in "
        "`monitoring/alerts.yml` ([monitoring](../concepts/monitoring.md)).\n"
    ]
    parts += [
        f"## {alert.name}\n\n{alert.summary} ({alert.severity}, after {alert.hold_duration})\n\n"
        f"{alert.what_to_do}\n\n```promql\n{alert.expression}\n```\n"
        for alert in alerts
    ]
    return "\n".join(parts)


def _namespace_label(labels: Iterable[str]) -> str:
    """What an operator says of a cluster has the namespace of the operator, and this one."""
    return "cluster_namespace" if "cluster_namespace" in labels else "namespace"


def _of_cluster(series: Mapping[str, str], namespace: str, cluster: str) -> dict[str, str]:
    labelled = {}
    for name, values in series.items():
        labels = dict(_LABEL.findall(name))
        labels |= {_namespace_label(labels): namespace, "cluster": cluster}
        written = ",".join(f'{label}="{value}"' for label, value in labels.items())
        labelled[f"{name.partition('{')[0]}{{{written}}}"] = values
    return labelled


def _test(
    alert: Alert, what: str, series: Mapping[str, str], firing: Sequence[Mapping[str, str]]
) -> list[str]:
    """`firing`: the labels of each alert that has to fire."""
    lines = [
        f"  - name: {alert.name} {what}",
        "    interval: 15s",
        "    input_series:",
    ]
    for name, values in series.items():
        lines.append(f"      - series: {_text(name)}")
        lines.append(f"        values: {_text(values.replace('N', str(_STEPS)))}")
    lines += [
        "    alert_rule_test:",
        f"      - eval_time: {_AT}",
        f"        alertname: {alert.name}",
        f"        exp_alerts:{'' if firing else ' []'}",
    ]
    for labels in firing:
        shown = {"severity": alert.severity, **labels}
        lines += [
            f"          - exp_labels: {json.dumps(shown)}",
            f"            exp_annotations: {_text(dict(alert.annotations))}",
        ]
    return lines


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
