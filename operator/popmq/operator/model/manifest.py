"""Objects of Kubernetes as they are written: nested dicts, and the few questions asked of them."""

import hashlib
import json
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
USER = ResourceKind("popmq.io/v1beta1", "User", "users")
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
INGRESS = ResourceKind("networking.k8s.io/v1", "Ingress", "ingresses")
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
    INGRESS,
    POD_MONITOR,
    RULES,
)
# Kinds that a cluster has only with the Prometheus operator.
OPTIONAL = (POD_MONITOR, RULES)

_BY_NAME = {
    (resource_kind.api_version, resource_kind.kind): resource_kind for resource_kind in OWNED
}


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
    found_manifest: Any = manifest
    for step in path:
        if not isinstance(found_manifest, dict):
            return None
        found_manifest = found_manifest.get(step)
    return found_manifest


def is_owned_by(manifest: Manifest, uid: str) -> bool:
    """By uid: an object of the same name that was made for an earlier owner is not owned."""
    owners = at(manifest, "metadata", "ownerReferences") or []
    return bool(uid) and any(owner.get("uid") == uid for owner in owners)


def is_left_by(manifest: Manifest, labels: Mapping[str, str], owner: Manifest) -> bool:
    """Whether an operator made it, with these labels, for another object of the owner's kind and
    name, and nobody else owns it.  A backup keeps labels, and the owner with its old uid or no
    owner."""
    owners = at(manifest, "metadata", "ownerReferences") or []
    return (
        not is_owned_by(manifest, owner["uid"])
        and labels.items() <= (at(manifest, "metadata", "labels") or {}).items()
        and all(
            (old.get("kind"), old.get("name")) == (owner["kind"], owner["name"]) for old in owners
        )
    )


def is_seen(workload: Manifest) -> bool:
    """Its controller has seen the newest spec."""
    seen = at(workload, "status", "observedGeneration") or 0
    return bool(seen >= workload["metadata"].get("generation", 0))


def is_rolled_out(deployment: Manifest) -> bool:
    """No pod of an earlier template is left, and one is ready."""
    status = deployment.get("status") or {}
    pods, updated = status.get("replicas") or 0, status.get("updatedReplicas") or 0
    return is_seen(deployment) and pods <= updated and bool(status.get("readyReplicas"))


APPLIED_ANNOTATION = "popmq.io/applied"


def with_digest(manifest: Manifest) -> Manifest:
    """With the digest of itself, by which fields that are not asked for any more are noticed."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**(metadata.get("annotations") or {}), APPLIED_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def is_unchanged(wanted: Manifest, existing: Manifest) -> bool:
    """To apply `wanted`, which has its digest, would change nothing: it was applied last, and
    nobody changed a field of it since.  A value in another spelling counts as changed."""
    metadata = {key: value for key, value in wanted["metadata"].items() if key != "name"}
    return all(
        _contains(existing.get(key), metadata if key == "metadata" else value)
        for key, value in wanted.items()
        if key not in ("apiVersion", "kind")
    )


def _contains(existing: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        known = existing if isinstance(existing, dict) else {}
        return all(_contains(known.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        entries = existing if isinstance(existing, list) else []
        return len(entries) == len(wanted) and all(map(_contains, entries, wanted))
    return bool(existing == wanted)


def condition(manifest: Manifest, kind: str) -> str:
    """The status of a condition: True, False, Unknown, or nothing."""
    for condition in at(manifest, "status", "conditions") or []:
        if condition.get("type") == kind:
            return str(condition.get("status", ""))
    return ""


def sorted_manifests(manifests: Iterable[Manifest]) -> list[Manifest]:
    """In the order in which they are applied."""
    order = {kind: place for place, kind in enumerate(OWNED)}
    return sorted(manifests, key=lambda manifest: (order[kind_of(manifest)], name_of(manifest)))
