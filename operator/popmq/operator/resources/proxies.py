"""The proxies: a Deployment, the Service that clients call, a budget, an autoscaler."""

from dataclasses import replace

from popmq.operator.model.certificates import CERTIFICATE, KEY
from popmq.operator.model.manifest import (
    AUTOSCALER,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    SERVICE,
    Manifest,
    make,
)
from popmq.operator.model.names import (
    ADMIN_ANNOTATION,
    ADMIN_ONLY,
    ADMIN_PORT,
    GROUP_PORT,
    PROXY,
    PUBLIC_PORT,
    REMOTING_PORT,
)
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
from popmq.operator.resources.users import user_mounts, user_volumes

CLIENTS = "grpc"  # the name of the public port
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
    deployments = [
        deployment,
        _service(spec, selector),
        _admin_service(spec, selector),
        _budget(spec, selector),
    ]
    if spec.proxies.autoscaling:
        deployments.append(_autoscaler(spec, spec.proxies.autoscaling))
    else:
        deployment["spec"]["replicas"] = spec.proxies.replicas
    return deployments


def client_ports(spec: ClusterSpec) -> dict[str, int]:
    """By name: the public port, and those for Remoting clients."""
    if spec.remoting is None:
        return {CLIENTS: PUBLIC_PORT}
    groups = {f"remoting-{n}": GROUP_PORT + n for n in range(spec.remoting.group_ports)}
    return {CLIENTS: PUBLIC_PORT, "remoting": REMOTING_PORT, **groups}


def tls_secret(spec: ClusterSpec) -> str:
    """The Secret that the proxies read, if any."""
    return {"Own": spec.names.tls, "Secret": spec.tls.secret}.get(spec.tls.mode, "")


def _template(spec: ClusterSpec) -> Manifest:
    secret = tls_secret(spec)
    mounts = [{"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}] if secret else []
    manifest = container(
        spec,
        PROXY,
        ports={**client_ports(spec), "admin": ADMIN_PORT, **http_port()},
        env=[],
        resources=spec.proxies.resources,
        mounts=[*mounts, *user_mounts(spec)],
        drain_s=DRAIN_S,
    )
    # The certificate is read again when it changes, so a renewal makes no other pods.
    items = [{"key": key, "path": key} for key in (CERTIFICATE, KEY)]
    volumes = [{"name": "tls", "secret": {"secretName": secret, "items": items}}] if secret else []
    template = spec.proxies.template
    if not spec.admin_on_public:
        annotations = {**template.annotations, ADMIN_ANNOTATION: ADMIN_ONLY}
        template = replace(template, annotations=annotations)
    return pod_template(
        spec,
        PROXY,
        template,
        manifest,
        labels={},
        config=read_by(PROXY, settings(spec)),
        grace_s=GRACE_S,
        defaults=spread(spec, PROXY),
        volumes=[*volumes, *user_volumes(spec)],
    )


def _service(spec: ClusterSpec, selector: dict[str, str]) -> Manifest:
    service = make(SERVICE, spec.names.proxy, spec.namespace, spec.names.labels(PROXY))
    if spec.proxies.service_annotations:
        service["metadata"]["annotations"] = dict(spec.proxies.service_annotations)
    service["spec"] = {
        "type": spec.proxies.service_type,
        "selector": selector,
        "ports": [
            {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
            for name, port in client_ports(spec).items()
        ],
    }
    if spec.proxies.load_balancer_class:
        service["spec"]["loadBalancerClass"] = spec.proxies.load_balancer_class
    if spec.proxies.source_ranges:
        service["spec"]["loadBalancerSourceRanges"] = list(spec.proxies.source_ranges)
    if spec.proxies.traffic_policy:
        service["spec"]["externalTrafficPolicy"] = spec.proxies.traffic_policy
    return service


def _admin_service(spec: ClusterSpec, selector: dict[str, str]) -> Manifest:
    """Within the Kubernetes cluster alone, whatever type the Service of clients has."""
    service = make(SERVICE, spec.names.admin, spec.namespace, spec.names.labels(PROXY))
    service["spec"] = {
        "type": "ClusterIP",
        "selector": selector,
        "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"}],
    }
    return service


def _budget(spec: ClusterSpec, selector: dict[str, str]) -> Manifest:
    budget = make(DISRUPTION_BUDGET, spec.names.proxy, spec.namespace, spec.names.labels(PROXY))
    budget["spec"] = disruption_budget(selector)
    return budget


def _autoscaler(spec: ClusterSpec, desired: Autoscaling) -> Manifest:
    """Up fast, down by one a minute: each proxy that goes sends its clients to others."""
    names = spec.names
    scaler = make(AUTOSCALER, names.proxy, spec.namespace, names.labels(PROXY))
    metrics: list[Manifest] = [
        {
            "type": "Resource",
            "resource": {
                "name": "cpu",
                "target": {"type": "Utilization", "averageUtilization": desired.cpu_percent},
            },
        }
    ]
    if desired.loop_busy_metric:
        target = {"type": "AverageValue", "averageValue": f"{desired.loop_busy_percent * 10}m"}
        metric = {"name": desired.loop_busy_metric}
        metrics.append({"type": "Pods", "pods": {"metric": metric, "target": target}})
    scaler["spec"] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.proxy},
        "minReplicas": desired.min_replicas,
        "maxReplicas": desired.max_replicas,
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
