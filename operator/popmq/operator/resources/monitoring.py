"""For the Prometheus operator, when asked for: whom to scrape, and what to wake somebody for."""

from popmq.operator.model.manifest import POD_MONITOR, RULES, Manifest, make
from popmq.operator.model.spec import ClusterSpec


def monitoring(spec: ClusterSpec) -> list[Manifest]:
    made = []
    labels = {**spec.names.labels(), **spec.monitoring.labels}
    if spec.monitoring.pod_monitor:
        monitor = make(POD_MONITOR, f"{spec.name}-popmq", spec.namespace, labels)
        monitor["spec"] = {
            "selector": {"matchLabels": spec.names.selector()},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        }
        made.append(monitor)
    if spec.monitoring.rules:
        rules = make(RULES, f"{spec.name}-popmq", spec.namespace, labels)
        rules["spec"] = {"groups": [{"name": "popmq", "rules": _rules(spec)}]}
        made.append(rules)
    return made


def _rules(spec: ClusterSpec) -> list[Manifest]:
    here = f'namespace="{spec.namespace}",pod=~"{spec.name}-.*"'
    broker = f'namespace="{spec.namespace}",pod=~"{spec.name}-broker-.*"'
    return [
        _alert(
            "PopmqDiskFull",
            f"max by (pod) (popmq_store_disk_full{{{broker}}}) == 1",
            "1m",
            "critical",
            "{{ $labels.pod }} refuses sends: its disk is full",
        ),
        _alert(
            "PopmqDiskFilling",
            f"max by (pod) (popmq_store_disk_used_ratio{{{broker}}}) > 0.8",
            "10m",
            "warning",
            "{{ $labels.pod }} uses more than 80 % of its disk; sends stop at 90 %",
        ),
        _alert(
            "PopmqPodDown",
            f"up{{{here}}} == 0",
            "2m",
            "warning",
            "{{ $labels.pod }} does not answer",
        ),
    ]


def _alert(name: str, expression: str, lasting: str, severity: str, summary: str) -> Manifest:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }
