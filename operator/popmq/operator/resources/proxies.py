"""The proxies: a Deployment, the Service that clients call, a budget, an autoscaler."""

from popmq.operator.model.manifest import (
    AUTOSCALER,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    SERVICE,
    Manifest,
    make,
)
from popmq.operator.model.names import PROXY, PUBLIC_PORT
from popmq.operator.model.spec import Autoscaling, ClusterSpec
from popmq.operator.resources.config import read_by, settings
from popmq.operator.resources.pods import (
    TLS_FOLDER,
    container,
    disruption_budget,
    http_port,
    pod_template,
    spread,
)

GRACE_S = 45
DRAIN_S = 5  # until every node's Service table has forgotten the pod


def proxies(spec: ClusterSpec) -> list[Manifest]:
    names, labels = spec.names, spec.names.labels(PROXY)
    selector = names.selector(PROXY)
    deployment = make(DEPLOYMENT, names.proxy, spec.namespace, labels)
    deployment["spec"] = {
        "selector": {"matchLabels": selector},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": _template(spec),
    }
    made = [deployment, _service(spec, selector), _budget(spec, selector)]
    if spec.proxies.autoscaling:
        made.append(_autoscaler(spec, spec.proxies.autoscaling))
    else:
        deployment["spec"]["replicas"] = spec.proxies.replicas
    return made


def tls_secret(spec: ClusterSpec) -> str:
    """The Secret that the proxies read, if any."""
    return {"Own": spec.names.tls, "Secret": spec.tls.secret}.get(spec.tls.mode, "")


def _template(spec: ClusterSpec) -> Manifest:
    secret = tls_secret(spec)
    mounts = [{"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}] if secret else []
    one = container(
        spec,
        PROXY,
        ports={"grpc": PUBLIC_PORT, **http_port()},
        env=[],
        resources=spec.proxies.resources,
        mounts=mounts,
        drain_s=DRAIN_S,
    )
    # The certificate is read again when it changes, so a renewal makes no other pods.
    volumes = [{"name": "tls", "secret": {"secretName": secret}}] if secret else []
    return pod_template(
        spec,
        PROXY,
        spec.proxies.template,
        one,
        labels={},
        config=read_by(PROXY, settings(spec)),
        grace_s=GRACE_S,
        defaults=spread(spec, PROXY),
        volumes=volumes,
    )


def _service(spec: ClusterSpec, selector: dict[str, str]) -> Manifest:
    service = make(SERVICE, spec.names.proxy, spec.namespace, spec.names.labels(PROXY))
    if spec.proxies.service_annotations:
        service["metadata"]["annotations"] = dict(spec.proxies.service_annotations)
    service["spec"] = {
        "type": spec.proxies.service_type,
        "selector": selector,
        "ports": [{"name": "grpc", "port": PUBLIC_PORT, "targetPort": "grpc", "protocol": "TCP"}],
    }
    if spec.proxies.load_balancer_class:
        service["spec"]["loadBalancerClass"] = spec.proxies.load_balancer_class
    return service


def _budget(spec: ClusterSpec, selector: dict[str, str]) -> Manifest:
    budget = make(DISRUPTION_BUDGET, spec.names.proxy, spec.namespace, spec.names.labels(PROXY))
    budget["spec"] = disruption_budget(selector)
    return budget


def _autoscaler(spec: ClusterSpec, wanted: Autoscaling) -> Manifest:
    """Up fast, down by one a minute: each proxy that goes sends its clients to others."""
    names = spec.names
    scaler = make(AUTOSCALER, names.proxy, spec.namespace, names.labels(PROXY))
    metrics: list[Manifest] = [
        {
            "type": "Resource",
            "resource": {
                "name": "cpu",
                "target": {"type": "Utilization", "averageUtilization": wanted.cpu_percent},
            },
        }
    ]
    if wanted.loop_busy_metric:
        target = {"type": "AverageValue", "averageValue": f"{wanted.loop_busy_percent * 10}m"}
        metric = {"name": wanted.loop_busy_metric}
        metrics.append({"type": "Pods", "pods": {"metric": metric, "target": target}})
    scaler["spec"] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.proxy},
        "minReplicas": wanted.min_replicas,
        "maxReplicas": wanted.max_replicas,
        "metrics": metrics,
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [{"type": "Percent", "value": 100, "periodSeconds": 30}],
            },
            "scaleDown": {
                "stabilizationWindowSeconds": 300,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
            },
        },
    }
    return scaler
