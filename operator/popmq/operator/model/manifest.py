"""Objects of Kubernetes as they are written: nested dicts, and the few questions asked of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# JSON of the API server, whose types are its own: nothing here says more than that.
Manifest: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class ResourceKind:
    """What objects are asked for by. `api_version` is `v1` or `group/version`."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str, name: str = "") -> str:
        root = "/api/" if "/" not in self.api_version else "/apis/"
        where = f"{root}{self.api_version}"
        if namespace:
            where += f"/namespaces/{namespace}"
        return f"{where}/{self.plural}/{name}".rstrip("/")


BROKER_CLUSTER = ResourceKind("popmq.io/v1beta1", "BrokerCluster", "brokerclusters")
TOPIC = ResourceKind("popmq.io/v1beta1", "Topic", "topics")
CONSUMER_GROUP = ResourceKind("popmq.io/v1beta1", "ConsumerGroup", "consumergroups")
LAG_REPORT = ResourceKind("popmq.io/v1beta1", "LagReport", "lagreports")
STATEFUL_SET = ResourceKind("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT = ResourceKind("apps/v1", "Deployment", "deployments")
POD = ResourceKind("v1", "Pod", "pods")
CLAIM = ResourceKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE = ResourceKind("v1", "Service", "services")
SERVICE_ACCOUNT = ResourceKind("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAP = ResourceKind("v1", "ConfigMap", "configmaps")
SECRET = ResourceKind("v1", "Secret", "secrets")
EVENT = ResourceKind("v1", "Event", "events")
ROLE = ResourceKind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = ResourceKind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
DISRUPTION_BUDGET = ResourceKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = ResourceKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
AUTOSCALER = ResourceKind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
POD_MONITOR = ResourceKind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
RULES = ResourceKind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules")
CRON_JOB = ResourceKind("batch/v1", "CronJob", "cronjobs")
LEASE = ResourceKind("coordination.k8s.io/v1", "Lease", "leases")
STORAGE_CLASS = ResourceKind("storage.k8s.io/v1", "StorageClass", "storageclasses")

# What a cluster may own, in the order in which it is made: what pods need comes before them.
OWNED = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    SECRET,
    CONFIG_MAP,
    NETWORK_POLICY,
    SERVICE,
    DISRUPTION_BUDGET,
    DEPLOYMENT,
    STATEFUL_SET,
    AUTOSCALER,
    POD_MONITOR,
    RULES,
)
# Kinds that a cluster has only with the Prometheus operator.
OPTIONAL = (POD_MONITOR, RULES)

_BY_NAME = {(one.api_version, one.kind): one for one in OWNED}


def kind_of(manifest: Manifest) -> ResourceKind:
    return _BY_NAME[manifest["apiVersion"], manifest["kind"]]


def name_of(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def make(kind: ResourceKind, name: str, namespace: str, labels: Mapping[str, str]) -> Manifest:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
    }


def at(manifest: Manifest | None, *path: str) -> Any:
    """What is below the path, or None."""
    found: Any = manifest
    for step in path:
        if not isinstance(found, dict):
            return None
        found = found.get(step)
    return found


def condition(manifest: Manifest, kind: str) -> str:
    """The status of a condition: True, False, Unknown, or nothing."""
    for one in at(manifest, "status", "conditions") or []:
        if one.get("type") == kind:
            return str(one.get("status", ""))
    return ""


def sorted_manifests(manifests: Iterable[Manifest]) -> list[Manifest]:
    """In the order in which they are applied."""
    order = {kind: place for place, kind in enumerate(OWNED)}
    return sorted(manifests, key=lambda one: (order[kind_of(one)], name_of(one)))
