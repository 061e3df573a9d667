"""Alert: a rule for Prometheus, and the promtool tests that it fires and that it does not.

JSON strings are YAML strings, so they are written without a library.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from popmq.cli.monitoring.dashboard import check

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
        return f"{self.value} {self.threshold}"

    @property
    def annotations(self) -> Mapping[str, str]:
        return {"summary": self.summary, "description": self.what_to_do}


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
    """For `promtool test rules`: two for each alert."""
    lines = [
        "# Made from cli/monitoring/alerts.toml by `make metrics`; do not edit.",
        f"rule_files: [{rule_file}]",
        "evaluation_interval: 15s",
        "tests:",
    ]
    for alert in alerts:
        lines += _test(alert, alert.firing, fires=True) + _test(alert, alert.quiet, fires=False)
    return "\n".join(lines) + "\n"


def _test(alert: Alert, series: Mapping[str, str], *, fires: bool) -> list[str]:
    lines = [
        f"  - name: {alert.name} {'fires' if fires else 'stays quiet'}",
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
    ]
    if not fires:
        return [*lines, "        exp_alerts: []"]
    labels = {"severity": alert.severity, **alert.labels}
    return [
        *lines,
        "        exp_alerts:",
        f"          - exp_labels: {json.dumps(labels)}",
        f"            exp_annotations: {json.dumps(dict(alert.annotations), ensure_ascii=False)}",
    ]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
