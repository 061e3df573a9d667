"""What a BrokerCluster asks for, read once and checked whole.

The API server checks most of it before (crds/brokercluster.yaml) and fills in defaults; here it is
checked again, for objects that were stored before a rule was, and the settings are checked as the
roles will check them.  An error names field, value and limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from popmq.common.errors import ConfigError
from popmq.common.quantities import HOUR_MS, parse_duration_ms
from popmq.common.settings.settings import load_settings
from popmq.operator.model.manifest import Manifest, at
from popmq.operator.model.names import (
    FENCE_ANNOTATION,
    FORCE_REMOVAL_ANNOTATION,
    PAUSE_ANNOTATION,
    PROTECT_ANNOTATION,
    RESTART_ANNOTATION,
    ObjectNames,
)
from popmq.operator.model.quantity import parse_quantity

MOST_GROUPS, MOST_REPLICAS, MOST_CONTROLLERS, MOST_PROXIES = 64, 9, 3, 1000
# What the operator says itself: a cluster whose spec said otherwise would not find its parts.
OWN_SECTIONS = ("cluster", "controller", "broker", "proxy", "http")
OWN_KEYS = ("replication.replicas", "replication.min_in_sync", "store.flush")
OWN_KEYS_ALLOWED = (
    "cluster.formerly",
    "controller.dead_after_ms",
    "controller.heartbeat_ms",
    "proxy.workers",
)

T = TypeVar("T")


class SpecError(ConfigError):
    """The spec cannot be what is meant; nothing of it is acted upon."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """What a spec may say about its pods; the rest is ours."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    size: str
    class_name: str | None
    delete: bool


@dataclass(frozen=True, slots=True)
class BrokersSpec:
    groups: int
    replicas: int
    min_in_sync: int  # as is in force, never 0
    flush: str
    storage: Storage
    retention_hours: int
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class Autoscaling:
    min_replicas: int
    max_replicas: int
    cpu_percent: int
    loop_busy_metric: str
    loop_busy_percent: int


@dataclass(frozen=True, slots=True)
class ProxiesSpec:
    replicas: int
    autoscaling: Autoscaling | None
    max_age_ms: int
    service_type: str
    service_annotations: Mapping[str, str]
    load_balancer_class: str
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class ControllersSpec:
    replicas: int
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class Tls:
    mode: str  # Own | Secret | Disabled
    secret: str
    plain_text: bool
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Monitoring:
    pod_monitor: bool
    rules: bool
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A BrokerCluster. `uid` and `generation` are those of the object that was read."""

    name: str
    namespace: str
    uid: str
    generation: int
    image: str
    pull_policy: str | None
    pull_secrets: tuple[str, ...]
    config: Mapping[str, str]
    brokers: BrokersSpec
    proxies: ProxiesSpec
    controllers: ControllersSpec
    tls: Tls
    policies: bool
    clients: Sequence[Manifest] | None
    monitoring: Monitoring
    restart: str
    paused: bool
    fenced: frozenset[str]
    protected: bool
    remove_undrained: bool

    @property
    def names(self) -> ObjectNames:
        return ObjectNames(self.name, self.namespace)

    @property
    def controller_addresses(self) -> list[str]:
        return [self.names.controller_address(n) for n in range(self.controllers.replicas)]


def read_spec(cluster: Manifest, *, default_image: str) -> ClusterSpec:
    """Raises SpecError for the first thing that cannot be."""
    metadata = cluster["metadata"]
    spec = cluster.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    fence = annotations.get(FENCE_ANNOTATION, "")
    read = ClusterSpec(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        image=spec.get("image") or default_image,
        pull_policy=spec.get("imagePullPolicy"),
        pull_secrets=tuple(one["name"] for one in spec.get("imagePullSecrets") or []),
        config=_config(spec),
        brokers=_brokers(spec.get("brokers") or {}),
        proxies=_proxies(spec.get("proxies") or {}),
        controllers=_controllers(spec.get("controller") or {}),
        tls=_tls(spec.get("tls") or {}),
        policies=bool(_value(spec, True, "networkPolicy", "enabled")),
        clients=at(spec, "networkPolicy", "clients"),
        monitoring=_monitoring(spec.get("monitoring") or {}),
        restart=str(annotations.get(RESTART_ANNOTATION, "")),
        paused=read_paused(cluster),
        fenced=frozenset(name.strip() for name in fence.split(",") if name.strip()),
        protected=_flag(annotations, PROTECT_ANNOTATION),
        remove_undrained=_flag(annotations, FORCE_REMOVAL_ANNOTATION),
    )
    if len(read.name) > 40:
        raise SpecError(f"metadata.name = {read.name}: at most 40 characters")
    return read


def read_paused(cluster: Manifest) -> bool:
    """Whatever else the spec says.  Raises SpecError when it is neither true nor false."""
    return _flag(cluster["metadata"].get("annotations") or {}, PAUSE_ANNOTATION)


def _flag(annotations: Mapping[str, str], name: str) -> bool:
    value = str(annotations.get(name, "")).strip().lower()
    if value not in ("", "true", "false"):
        raise SpecError(f"annotation {name} = {value}: true or false")
    return value == "true"


def _value(spec: Manifest, default: T, *path: str) -> T:
    found = at(spec, *path)
    return default if found is None else found


def _count(spec: Manifest, where: str, key: str, default: int, low: int, high: int) -> int:
    value = _value(spec, default, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{where}.{key} = {value!r}: a whole number")
    if not low <= value <= high:
        raise SpecError(f"{where}.{key} = {value}: {low} to {high}")
    return value


def _choice(spec: Manifest, where: str, key: str, *choices: str) -> str:
    """The first is the default."""
    value = _value(spec, choices[0], key)
    if value not in choices:
        raise SpecError(f"{where}.{key} = {value}: one of {', '.join(choices)}")
    return value


def _duration(spec: Manifest, where: str, key: str, default: str) -> int:
    try:
        return parse_duration_ms(_value(spec, default, key))
    except ConfigError as error:
        raise SpecError(f"{where}.{key}: {error}") from error


def _brokers(spec: Manifest) -> BrokersSpec:
    replicas = _count(spec, "brokers", "replicas", 3, 1, MOST_REPLICAS)
    durability = spec.get("durability") or {}
    default = max(1, replicas - 1)
    least = _value(durability, default, "minInSync")
    if not 1 <= least <= replicas:
        raise SpecError(
            f"brokers.durability.minInSync = {least}: 1 to brokers.replicas = {replicas}"
        )
    flush = _choice(durability, "brokers.durability", "flush", "Auto", "Fsync", "Quorum")
    if (flush == "Fsync" and replicas > 1) or (flush == "Quorum" and replicas == 1):
        other = "Quorum" if replicas > 1 else "Fsync"
        raise SpecError(
            f"brokers.durability.flush = {flush}: with brokers.replicas = {replicas} "
            f"it is {other} or Auto"
        )
    retention_ms = _duration(spec, "brokers", "retention", "72h")
    if retention_ms < HOUR_MS:
        raise SpecError(f"brokers.retention = {spec['retention']}: at least 1h")
    return BrokersSpec(
        groups=_count(spec, "brokers", "groups", 1, 1, MOST_GROUPS),
        replicas=replicas,
        min_in_sync=least,
        flush=flush.lower(),
        storage=_storage(spec.get("storage") or {}),
        retention_hours=retention_ms // HOUR_MS,
        resources=spec.get("resources") or {},
        template=_template(spec),
    )


def _storage(spec: Manifest) -> Storage:
    size = _value(spec, "20Gi", "size")
    try:
        if parse_quantity(size) <= 0:
            raise ConfigError("more than 0")
    except ConfigError as error:
        raise SpecError(f"brokers.storage.size = {size}: {error}") from error
    delete = _choice(spec, "brokers.storage", "onDelete", "Retain", "Delete") == "Delete"
    return Storage(str(size), spec.get("className"), delete)


def _proxies(spec: Manifest) -> ProxiesSpec:
    service = spec.get("service") or {}
    return ProxiesSpec(
        replicas=_count(spec, "proxies", "replicas", 2, 0, MOST_PROXIES),
        autoscaling=_autoscaling(spec.get("autoscaling")),
        max_age_ms=_duration(spec, "proxies", "maxConnectionAge", "10m"),
        service_type=_choice(
            service, "proxies.service", "type", "ClusterIP", "NodePort", "LoadBalancer"
        ),
        service_annotations=service.get("annotations") or {},
        load_balancer_class=service.get("loadBalancerClass") or "",
        resources=spec.get("resources") or {},
        template=_template(spec),
    )


def _autoscaling(spec: Manifest | None) -> Autoscaling | None:
    if spec is None or not _value(spec, True, "enabled"):
        return None
    where = "proxies.autoscaling"
    least = _count(spec, where, "minReplicas", 2, 1, MOST_PROXIES)
    most = _count(spec, where, "maxReplicas", 10, 1, MOST_PROXIES)
    if least > most:
        raise SpecError(f"{where}.minReplicas = {least}: at most maxReplicas = {most}")
    return Autoscaling(
        least,
        most,
        _count(spec, where, "cpuPercent", 65, 1, 100),
        spec.get("loopBusyMetric") or "",
        _count(spec, where, "loopBusyPercent", 70, 1, 100),
    )


def _controllers(spec: Manifest) -> ControllersSpec:
    replicas = _count(spec, "controller", "replicas", 2, 1, MOST_CONTROLLERS)
    return ControllersSpec(replicas, spec.get("resources") or {}, _template(spec))


def _tls(spec: Manifest) -> Tls:
    mode = _choice(spec, "tls", "mode", "Own", "Secret", "Disabled")
    secret = spec.get("secretName") or ""
    if mode == "Secret" and not secret:
        raise SpecError("tls.mode = Secret: needs tls.secretName")
    plain_text = bool(_value(spec, True, "plainText"))
    if mode == "Disabled" and not plain_text:
        raise SpecError("tls.plainText = false: with tls.mode = Disabled nothing would be left")
    return Tls(mode, secret, plain_text, tuple(spec.get("names") or ()))


def _monitoring(spec: Manifest) -> Monitoring:
    return Monitoring(
        bool(spec.get("podMonitor")), bool(spec.get("rules")), spec.get("labels") or {}
    )


def _template(spec: Manifest) -> PodTemplate:
    given = dict(spec.get("template") or {})
    labels = given.pop("labels", None) or {}
    for label in labels:
        if label.startswith(("popmq.io/", "app.kubernetes.io/")):
            raise SpecError(f"template.labels: {label} is the operator's own")
    return PodTemplate(
        labels,
        given.pop("annotations", None) or {},
        grace_s=given.pop("terminationGracePeriodSeconds", None),
        fields=given,
    )


def _config(spec: Manifest) -> Mapping[str, str]:
    given: Mapping[str, str] = spec.get("config") or {}
    for key in given:
        own = key.split(".")[0] in OWN_SECTIONS or key in OWN_KEYS
        if own and key not in OWN_KEYS_ALLOWED:
            raise SpecError(f"config: {key} is set by the operator from other fields of the spec")
    variables = {f"POPMQ_{key.replace('.', '_').upper()}": value for key, value in given.items()}
    try:
        load_settings(None, variables, {})
    except ConfigError as error:
        raise SpecError(f"config: {error}") from error
    return dict(given)
