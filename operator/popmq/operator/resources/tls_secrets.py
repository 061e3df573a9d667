"""Secrets of a cluster with an own CA: the CA, which no pod sees, and what proxies serve."""

from collections.abc import Mapping
from datetime import datetime

from popmq.operator.model.certificates import SecretData, authority, serving
from popmq.operator.model.manifest import SECRET, Manifest, make
from popmq.operator.model.spec import ClusterSpec


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
