"""The controllers: each a Deployment of one with a Service of its own.

Brokers register with every controller and proxies follow every one, so each needs an address; two
that disagree do no harm, because the records change by compare-and-set (decision D7).
"""

from popmq.operator.model.manifest import DEPLOYMENT, DISRUPTION_BUDGET, SERVICE, Manifest, make
from popmq.operator.model.names import CONTROLLER, CONTROLLER_LABEL, CONTROLLER_PORT
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.config import read_by, settings
from popmq.operator.resources.pods import (
    container,
    disruption_budget,
    http_port,
    pod_template,
    spread,
)

GRACE_S = 15
# Brokers serve on without a controller, but nobody is promoted: five minutes would be long.
NODE_LOST_S = 10
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def controllers(spec: ClusterSpec) -> list[Manifest]:
    parts = [part for n in range(spec.controllers.replicas) for part in _controller(spec, n)]
    names = spec.names
    budget = make(
        DISRUPTION_BUDGET, f"{spec.name}-controller", spec.namespace, names.labels(CONTROLLER)
    )
    budget["spec"] = disruption_budget(names.selector(CONTROLLER))
    return [*parts, budget]


def _controller(spec: ClusterSpec, number: int) -> list[Manifest]:
    names, name = spec.names, spec.names.controller(number)
    labels = {**names.labels(CONTROLLER), CONTROLLER_LABEL: str(number)}
    selector = names.selector(CONTROLLER, **{CONTROLLER_LABEL: str(number)})
    service = make(SERVICE, name, spec.namespace, labels)
    service["spec"] = {
        "selector": selector,
        "publishNotReadyAddresses": True,
        "ports": [{"name": "frames", "port": CONTROLLER_PORT, "targetPort": "frames"}],
    }
    deployment = make(DEPLOYMENT, name, spec.namespace, labels)
    deployment["spec"] = {
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "Recreate"},
        "template": _template(spec, number),
    }
    return [service, deployment]


def _template(spec: ClusterSpec, number: int) -> Manifest:
    manifest = container(
        spec,
        CONTROLLER,
        ports={"frames": CONTROLLER_PORT, **http_port()},
        env=[],
        resources=spec.controllers.resources,
    )
    return pod_template(
        spec,
        CONTROLLER,
        spec.controllers.template,
        manifest,
        labels={CONTROLLER_LABEL: str(number)},
        config=read_by(CONTROLLER, settings(spec)),
        grace_s=GRACE_S,
        defaults={
            "serviceAccountName": f"{spec.name}-controller",
            "automountServiceAccountToken": True,  # its records are Leases
            "tolerations": [
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": NODE_LOST_S,
                }
                for key in _LOST
            ],
            **spread(spec, CONTROLLER),
        },
    )
