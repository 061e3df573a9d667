"""For the Prometheus operator, when asked for: what to scrape, and what to alert on."""

from popmq.operator.model.manifest import POD_MONITOR, RULES, Manifest, make
from popmq.operator.model.spec import ClusterSpec


def monitoring(spec: ClusterSpec) -> list[Manifest]:
    monitors = []
    labels = {**spec.names.labels(), **spec.monitoring.labels}
    if spec.monitoring.pod_monitor:
        monitor = make(POD_MONITOR, f"{spec.name}-popmq", spec.namespace, labels)
        monitor["spec"] = {
            "selector": {"matchLabels": spec.names.selector()},
            "podMetricsEndpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "interval": "15s",
                    # Prometheus adds the namespace and the pod.
                    "relabelings": [{"targetLabel": "cluster", "replacement": spec.name}],
                }
            ],
        }
        monitors.append(monitor)
    if spec.monitoring.rules:
        rules = make(RULES, f"{spec.name}-popmq", spec.namespace, labels)
        rules["spec"] = {"groups": [{"name": "popmq", "rules": _rules(spec)}]}
        monitors.append(rules)
    return monitors


def _rules(spec: ClusterSpec) -> list[Manifest]:
    here = f'namespace="{spec.namespace}",cluster="{spec.name}"'
    page = spec.monitoring.runbook_url
    return [
        _alert(
            "PopmqDiskFull",
            f"max by (namespace, cluster, pod) (popmq_store_disk_full{{{here}}}) == 1",
            "1m",
            "critical",
            "{{ $labels.pod }} refuses sends: its disk is full",
            page,
        ),
        _alert(
            "PopmqDiskFilling",
            f"max by (namespace, cluster, pod) (popmq_store_disk_used_ratio{{{here}}}) > 0.8",
            "10m",
            "warning",
            "{{ $labels.pod }} uses more than 80 % of its disk; sends stop at 90 %",
            page,
        ),
        _alert(
            "PopmqDown",
            f"up{{{here}}} == 0",
            "2m",
            "warning",
            "{{ $labels.pod }} does not answer",
            page,
        ),
    ]


def _alert(
    name: str, expression: str, lasting: str, severity: str, summary: str, page: str
) -> Manifest:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "runbook_url": f"{page}#{name.lower()}"},
    }
