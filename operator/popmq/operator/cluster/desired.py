"""All that a cluster is to consist of, as objects that can be applied: the builders together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from popmq.operator.model.certificates import SecretData, authority, serving
from popmq.operator.model.manifest import BROKER_CLUSTER, SECRET, Manifest, make, sorted_manifests
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.access import accounts, network_policies
from popmq.operator.resources.brokers import broker_group
from popmq.operator.resources.config import config_map
from popmq.operator.resources.controllers import controllers
from popmq.operator.resources.monitoring import monitoring
from popmq.operator.resources.proxies import proxies


@dataclass(frozen=True, slots=True)
class BrokerGroupSize:
    """What may be applied now of a broker group, which is not always what the spec asks for."""

    index: int
    replicas: int
    template_size: str  # of its volume claims


@dataclass(frozen=True, slots=True)
class ClusterInputs:
    """What the objects depend on beside the spec."""

    now: datetime
    secrets: Mapping[str, SecretData] = field(default_factory=dict)


def first_shapes(spec: ClusterSpec) -> list[BrokerGroupSize]:
    """Of a cluster that does not exist yet."""
    brokers = spec.brokers
    return [
        BrokerGroupSize(index, brokers.replicas, brokers.storage.size)
        for index in range(brokers.groups)
    ]


def desired(
    spec: ClusterSpec, shapes: list[BrokerGroupSize], around: ClusterInputs
) -> list[Manifest]:
    """In the order in which they are applied. Raises SpecError for settings that do not fit."""
    made = [
        *accounts(spec),
        *tls_secrets(spec, around.secrets, around.now),
        config_map(spec),
        *controllers(spec),
        *proxies(spec),
        *monitoring(spec),
    ]
    if spec.policies:
        made += network_policies(spec)
    for shape in shapes:
        made += broker_group(
            spec, shape.index, replicas=shape.replicas, template_size=shape.template_size
        )
    for one in made:
        one["metadata"]["ownerReferences"] = [owner(spec)]
    return sorted_manifests(made)


def owner(spec: ClusterSpec) -> Manifest:
    """With the BrokerCluster goes what it owns; volume claims and Leases are not owned."""
    return {
        "apiVersion": BROKER_CLUSTER.api_version,
        "kind": BROKER_CLUSTER.kind,
        "name": spec.name,
        "uid": spec.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def certificate_names(spec: ClusterSpec) -> list[str]:
    """What clients may call the proxies by."""
    service, namespace = spec.names.proxy, spec.namespace
    below = (service, f"{service}.{namespace}", f"{service}.{namespace}.svc")
    return [*below, f"{service}.{namespace}.svc.cluster.local", "localhost", *spec.tls.names]


def tls_secrets(
    spec: ClusterSpec, found: Mapping[str, SecretData], now: datetime
) -> list[Manifest]:
    """`found` are the data of the cluster's Secrets by name, as they are now."""
    if spec.tls.mode != "Own":
        return []
    names = spec.names
    ca = authority(found.get(names.authority), spec.name, now)
    served = serving(found.get(names.tls), ca, certificate_names(spec), now)
    return [_secret(spec, names.authority, ca), _secret(spec, names.tls, served)]


def _secret(spec: ClusterSpec, name: str, data: Mapping[str, str]) -> Manifest:
    made = make(SECRET, name, spec.namespace, spec.names.labels())
    made["type"] = "kubernetes.io/tls"
    made["data"] = dict(data)
    return made
