"""All that a cluster is to consist of, as objects that can be applied: the builders together."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from popmq.common.protocol.cluster_secret import new_secret_text
from popmq.operator.cluster.cluster_certificates import certificate_objects
from popmq.operator.model.certificates import SecretData
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CONFIG_MAP,
    SECRET,
    Manifest,
    kind_of,
    make,
    sorted_manifests,
)
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.access import accounts, network_policies
from popmq.operator.resources.brokers import broker_group
from popmq.operator.resources.config import config_map
from popmq.operator.resources.console import console
from popmq.operator.resources.controllers import controllers
from popmq.operator.resources.monitoring import monitoring
from popmq.operator.resources.pods import SECRET_KEY
from popmq.operator.resources.proxies import proxies
from popmq.operator.resources.users import user_secrets


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
    new_cluster_secret: bool = True
    new_user_secrets: bool = False


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
    certificates = certificate_objects(spec, around.secrets, around.now)
    manifests = [
        *accounts(spec),
        *certificates,
        *([cluster_secret(spec)] if around.new_cluster_secret else []),
        *(user_secrets(spec) if around.new_user_secrets else []),
        config_map(spec),
        *controllers(spec),
        *proxies(spec),
        *console(spec, has_ca=any(kind_of(item) == CONFIG_MAP for item in certificates)),
        *monitoring(spec),
    ]
    if spec.policies:
        manifests += network_policies(spec)
    for shape in shapes:
        manifests += broker_group(
            spec, shape.index, replicas=shape.replicas, template_size=shape.template_size
        )
    for manifest in manifests:
        manifest["metadata"]["ownerReferences"] = [owner(spec)]
    return sorted_manifests(manifests)


def owner(spec: ClusterSpec) -> Manifest:
    return owner_of(spec.name, spec.uid)


def owner_of(cluster: str, uid: str) -> Manifest:
    """With the BrokerCluster goes what it owns; volume claims and Leases are not owned."""
    return {
        "apiVersion": BROKER_CLUSTER.api_version,
        "kind": BROKER_CLUSTER.kind,
        "name": cluster,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def cluster_secret(spec: ClusterSpec) -> Manifest:
    """A new one: it is created once, and nobody's is ever overwritten."""
    secret = make(SECRET, spec.names.cluster_secret, spec.namespace, spec.names.labels())
    secret["type"] = "Opaque"
    secret["data"] = {SECRET_KEY: base64.b64encode(new_secret_text().encode()).decode()}
    return secret
