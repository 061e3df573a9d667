"""A cluster's certificates as objects: the own CA, what the proxies serve, what clients trust."""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.operator.model.certificates import (
    CERTIFICATE,
    TRUSTED,
    SecretData,
    authority,
    between_processes,
    end_of,
    names_in,
    serving,
)
from popmq.operator.model.conditions import TRUE, ConditionValue
from popmq.operator.model.manifest import CONFIG_MAP, SECRET, Manifest, make, name_of
from popmq.operator.model.names import ObjectNames
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.model.stages import PeerRequirement

WARN = timedelta(days=14)
PROCESS_NAME = ClusterSettings().tls_name
REPLACED_SHOWN = timedelta(days=7)


def certificate_names(spec: ClusterSpec) -> list[str]:
    """What clients may call the proxies by."""
    below = [
        f"{service}{domain}"
        for service in (spec.names.proxy, spec.names.admin)
        for domain in _domains(spec.namespace)
    ]
    return [*below, "localhost", *spec.tls.names]


def _domains(namespace: str) -> tuple[str, ...]:
    return ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")


def certificate_objects(
    spec: ClusterSpec, secrets: Mapping[str, SecretData], now: datetime
) -> list[Manifest]:
    """`secrets` are the data of the cluster's Secrets by name, as they are now."""
    match spec.tls.mode:
        case "Own":
            names = certificate_names(spec)
            needs_processes = spec.tls_use is not PeerRequirement.NONE
            return _own(spec.names, secrets, names, now, processes=needs_processes)
        case "Secret" if TRUSTED in secrets.get(spec.tls.secret, {}):
            return [_trusted(spec.names, secrets[spec.tls.secret][TRUSTED])]
    return []


def renewed_objects(
    names: ObjectNames, secrets: Mapping[str, SecretData], now: datetime
) -> list[Manifest]:
    """Those of an own CA that have to change although nothing else may, for the same names: empty
    while both certificates are good for long enough, or where there is no own CA."""
    ca, served = secrets.get(names.authority), secrets.get(names.tls)
    if ca is None or served is None or end_of(ca) is None or end_of(served) is None:
        return []
    has_processes = names.process_tls in secrets
    *made, trusted = _own(names, secrets, names_in(served), now, processes=has_processes)
    changed = [
        manifest for manifest in made if manifest["data"] != dict(secrets[name_of(manifest)])
    ]
    return [*changed, trusted] if changed else []


def _own(
    names: ObjectNames,
    secrets: Mapping[str, SecretData],
    desired: Sequence[str],
    now: datetime,
    *,
    processes: bool,
) -> list[Manifest]:
    ca = authority(secrets.get(names.authority), names.cluster, now)
    served = serving(secrets.get(names.tls), ca, desired, now)
    made = [_secret(names, names.authority, ca), _secret(names, names.tls, served)]
    if processes:
        shown = between_processes(secrets.get(names.process_tls), ca, PROCESS_NAME, now)
        made.append(_secret(names, names.process_tls, shown))
    return [*made, _trusted(names, ca[TRUSTED])]


def _secret(names: ObjectNames, name: str, data: Mapping[str, str]) -> Manifest:
    secret = make(SECRET, name, names.namespace, names.labels())
    secret["type"] = "kubernetes.io/tls"
    secret["data"] = dict(data)
    return secret


def _trusted(names: ObjectNames, encoded: str) -> Manifest:
    """What clients trust, without the key: whoever may read ConfigMaps can mount it."""
    config_map = make(CONFIG_MAP, names.authority, names.namespace, names.labels())
    config_map["data"] = {TRUSTED: base64.b64decode(encoded).decode(errors="replace")}
    return config_map


def certificate_end(secrets: Mapping[str, SecretData]) -> datetime | None:
    """When the first of them ends: that of the proxies or of the own CA.  None: there is none."""
    ends = [end for data in secrets.values() if CERTIFICATE in data and (end := end_of(data))]
    return min(ends, default=None)


def expiry_verdicts(secrets: Mapping[str, SecretData], now: datetime) -> dict[str, ConditionValue]:
    """Also of a cluster whose spec cannot be read."""
    end = certificate_end(secrets)
    if end is None or end - now >= WARN:
        return {}
    what = "ended" if end <= now else "ends"
    why = f"a certificate of the cluster or its CA {what} at {end:%Y-%m-%dT%H:%M:%SZ}"
    reason = "Expired" if end <= now else "Expiring"
    return {"CertificateExpiring": ConditionValue(TRUE, reason, why)}


def certificate_verdicts(
    spec: ClusterSpec,
    secrets: Mapping[str, SecretData],
    before: ConditionValue,
    since: datetime | None,
    now: datetime,
) -> dict[str, ConditionValue]:
    """`before` is the condition AuthorityReplaced as it was, since `since`."""
    verdicts = expiry_verdicts(secrets, now)
    names = spec.names
    if spec.tls.mode != "Own":
        return verdicts
    if names.tls in secrets and end_of(secrets.get(names.authority, {})) is None:
        why = (
            f"Secret {names.authority} was deleted or damaged, so there is a new CA: clients that "
            f"trust the one before have to trust ca.crt of ConfigMap {names.authority}"
        )
        verdicts["AuthorityReplaced"] = ConditionValue(TRUE, "Deleted", why)
    elif before.status == TRUE and since is not None and now - since < REPLACED_SHOWN:
        verdicts["AuthorityReplaced"] = before
    return verdicts
