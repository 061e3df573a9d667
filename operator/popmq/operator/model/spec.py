"""What a BrokerCluster asks for, read once and checked whole.

The API server checks most of it before (crds/brokercluster.yaml) and fills in defaults; here it is
checked again, for objects that were stored before a rule was, and the settings are checked as the
roles will check them.  An error names field, value and limit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from popmq.common.errors import ConfigError
from popmq.common.quantities import HOUR_MS, parse_duration_ms
from popmq.common.settings.settings import load_settings
from popmq.operator.model.images import ANY_IMAGE, is_allowed
from popmq.operator.model.manifest import Manifest, at
from popmq.operator.model.names import (
    ADOPT_ANNOTATION,
    FENCE_ANNOTATION,
    FORCE_REMOVAL_ANNOTATION,
    PAUSE_ANNOTATION,
    PROTECT_ANNOTATION,
    RESTART_ANNOTATION,
    ObjectNames,
)
from popmq.operator.model.quantity import parse_quantity
from popmq.operator.model.stages import PeerRequirement, UsersUse

MOST_GROUPS, MOST_REPLICAS, MOST_CONTROLLERS, MOST_PROXIES = 64, 9, 3, 1000
# What the operator says itself: a cluster whose spec said otherwise would not find its parts.
OWN_SECTIONS = ("cluster", "controller", "broker", "proxy", "http")
OWN_KEYS = (
    *("replication.replicas", "replication.min_in_sync", "store.flush"),
    *("auth.key_file", "auth.admin_file"),
)
OWN_KEYS_ALLOWED = (
    "cluster.formerly",
    "cluster.secret_required",
    "controller.dead_after_ms",
    "controller.heartbeat_ms",
    "proxy.admin_on_public",
    "proxy.workers",
)

# Of a pod: where it runs and with what, and not what it may do.
POD_FIELDS = (
    "annotations",
    "affinity",
    "labels",
    "nodeSelector",
    "priorityClassName",
    "env",
    "runtimeClassName",
    "schedulerName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "volumeMounts",
    "volumes",
)
# What Pod Security `restricted` lets a volume be.
VOLUME_SOURCES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
)
OWN_VOLUMES = ("config", "tmp", "tls", "users", "cluster-secret", "process-tls", "data")
LONGEST_RETENTION_HOURS = 876_000
_VARIABLE = re.compile(r"\bPOPMQ_([A-Z]+)_([A-Z_]+)")

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
    env: Sequence[Manifest] = ()
    volumes: Sequence[Manifest] = ()
    mounts: Sequence[Manifest] = ()


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
    source_ranges: tuple[str, ...]
    traffic_policy: str
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class ControllersSpec:
    replicas: int
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class ConsoleIngress:
    host: str
    class_name: str
    tls_secret: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConsoleSpec:
    """The web console.  `open_to_anybody`: without a login, where the cluster has no users."""

    image: str
    open_to_anybody: bool
    ingress: ConsoleIngress | None
    resources: Manifest
    template: PodTemplate


@dataclass(frozen=True, slots=True)
class RemotingSpec:
    """A port of its own for Remoting clients.  `advertise` is HOST:PORT, in their routes;
    `group_ports` counts the broker groups that have a port each."""

    advertise: str
    group_ports: int


@dataclass(frozen=True, slots=True)
class Tls:
    mode: str  # Own | Secret | Disabled
    secret: str
    plain_text: bool
    names: tuple[str, ...]
    between_processes: bool = False


@dataclass(frozen=True, slots=True)
class Monitoring:
    pod_monitor: bool
    rules: bool
    labels: Mapping[str, str]
    runbook_url: str  # of the page of alerts


AUTH_MODES = ("Off", "Observe", "On")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A BrokerCluster. `uid` and `generation` are those of the object that was read.

    `secret_use`, `tls_use`, `users_use` and `admin_on_public` are no wishes of the object's: they
    say how far a cluster of before is (popmq.operator.cluster.secret_stage, process_tls_stage,
    users_stage, admin_stage)."""

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
    administrators: Sequence[Manifest]
    monitoring: Monitoring
    restart: str
    paused: bool
    fenced: frozenset[str]
    protected: bool
    remove_undrained: bool
    adopts: bool  # what another cluster of this name left
    scaled_by_hand: bool = False  # proxies.replicas, by kubectl scale
    secret_use: PeerRequirement = PeerRequirement.REQUIRED
    tls_use: PeerRequirement = PeerRequirement.NONE
    auth_mode: str = ""  # of AUTH_MODES; empty: as it is
    users_use: UsersUse = UsersUse.NONE
    admin_on_public: bool = False
    console: ConsoleSpec | None = None
    remoting: RemotingSpec | None = None
    console_callers: Sequence[Manifest] | None = None  # None: every peer

    @property
    def names(self) -> ObjectNames:
        return ObjectNames(self.name, self.namespace)

    def address_of(self, pattern: str) -> str:
        """Of one address in the settings of an operator: {name} and {namespace} are this
        cluster's."""
        return pattern.replace("{namespace}", self.namespace).replace("{name}", self.name)

    @property
    def controller_addresses(self) -> list[str]:
        return [self.names.controller_address(n) for n in range(self.controllers.replicas)]


def read_spec(
    cluster: Manifest, *, default_image: str, images: Sequence[str] = (ANY_IMAGE,)
) -> ClusterSpec:
    """Raises SpecError for the first thing that cannot be.  `images` are the rules of
    popmq.operator.model.images that an image of the spec has to meet."""
    try:
        read = _read(cluster, default_image)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # Stored before the definition was: a value has another type than the field.
        raise SpecError(f"spec cannot be read: {error!r}") from error
    if read.image != default_image:
        check_image("spec.image", read.image, images)
    if read.console is not None and read.console.image not in (read.image, default_image):
        check_image("spec.console.image", read.console.image, images)
    return read


def check_image(path: str, image: str, rules: Sequence[str]) -> None:
    if not is_allowed(image, rules):
        raise SpecError(f"{path} = {image}: operator.images allows {', '.join(rules)}")


def _read(cluster: Manifest, default_image: str) -> ClusterSpec:
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
        pull_secrets=tuple(
            image_pull_secret["name"] for image_pull_secret in spec.get("imagePullSecrets") or []
        ),
        config=_config(spec),
        brokers=_brokers(spec.get("brokers") or {}),
        proxies=_proxies(spec.get("proxies") or {}),
        controllers=_controllers(spec.get("controller") or {}),
        tls=_tls(spec.get("tls") or {}),
        policies=bool(_value(spec, True, "networkPolicy", "enabled")),
        clients=at(spec, "networkPolicy", "clients"),
        administrators=at(spec, "networkPolicy", "administrators") or (),
        monitoring=_monitoring(spec.get("monitoring") or {}),
        restart=str(annotations.get(RESTART_ANNOTATION, "")),
        paused=read_paused(cluster),
        fenced=frozenset(name.strip() for name in fence.split(",") if name.strip()),
        protected=read_protected(cluster),
        remove_undrained=_flag(annotations, FORCE_REMOVAL_ANNOTATION),
        adopts=_flag(annotations, ADOPT_ANNOTATION) and not read_paused(cluster),
        scaled_by_hand=any(
            entry.get("subresource") == "scale" for entry in metadata.get("managedFields") or []
        ),
        auth_mode=_auth_mode(spec),
        console=_console(spec.get("console"), spec.get("image") or default_image),
        remoting=_remoting(spec),
        console_callers=at(spec, "networkPolicy", "console"),
    )
    if len(read.name) > 40:
        raise SpecError(f"metadata.name = {read.name}: at most 40 characters")
    return read


def read_paused(cluster: Manifest) -> bool:
    """Whatever else the spec says.  Raises SpecError when it is neither true nor false."""
    return _flag(cluster["metadata"].get("annotations") or {}, PAUSE_ANNOTATION)


def read_protected(cluster: Manifest) -> bool:
    """Whatever else the spec says.  Raises SpecError when it is neither true nor false."""
    return _flag(cluster["metadata"].get("annotations") or {}, PROTECT_ANNOTATION)


def _flag(annotations: Mapping[str, str], name: str) -> bool:
    value = str(annotations.get(name, "")).strip().lower()
    if value not in ("", "true", "false"):
        raise SpecError(f"annotation {name} = {value}: true or false")
    return value == "true"


def _value(spec: Manifest, default: T, *path: str) -> T:
    value = at(spec, *path)
    return default if value is None else value


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
    if retention_ms > LONGEST_RETENTION_HOURS * HOUR_MS:
        longest = f"at most {LONGEST_RETENTION_HOURS}h"
        raise SpecError(f"brokers.retention = {spec['retention']}: {longest}")
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
        source_ranges=tuple(service.get("loadBalancerSourceRanges") or ()),
        traffic_policy=service.get("externalTrafficPolicy") or "",
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


def _console(spec: Manifest | None, image: str) -> ConsoleSpec | None:
    if spec is None:
        return None
    ingress = spec.get("ingress")
    if ingress is not None and not ingress.get("host"):
        raise SpecError("console.ingress: needs host, the name that browsers use")
    return ConsoleSpec(
        image=spec.get("image") or image,
        open_to_anybody=bool(_value(spec, False, "openToAnybody")),
        ingress=ingress
        and ConsoleIngress(
            str(ingress["host"]),
            str(ingress.get("className") or ""),
            str(ingress.get("tlsSecretName") or ""),
            ingress.get("annotations") or {},
        ),
        resources=spec.get("resources") or {},
        template=_template(spec),
    )


def _remoting(spec: Manifest) -> RemotingSpec | None:
    remoting = spec.get("remoting")
    if remoting is None:
        return None
    for key in spec.get("config") or {}:
        if key.startswith("remoting."):
            raise SpecError(f"config: {key} is set by the operator from spec.remoting")
    groups = _value(spec, 1, "brokers", "groups")
    ports = _count(remoting, "remoting", "groupPorts", 0, 0, MOST_GROUPS)
    if 0 < ports < groups:
        raise SpecError(f"remoting.groupPorts = {ports}: 0, or at least brokers.groups = {groups}")
    return RemotingSpec(str(remoting.get("advertise") or ""), ports)


def _tls(spec: Manifest) -> Tls:
    mode = _choice(spec, "tls", "mode", "Own", "Secret", "Disabled")
    secret = spec.get("secretName") or ""
    if mode == "Secret" and not secret:
        raise SpecError("tls.mode = Secret: needs tls.secretName")
    plain_text = bool(_value(spec, True, "plainText"))
    if mode == "Disabled" and not plain_text:
        raise SpecError("tls.plainText = false: with tls.mode = Disabled nothing would be left")
    names = tuple(_dns_name(str(name)) for name in spec.get("names") or ())
    between_processes = bool(_value(spec, False, "betweenProcesses"))
    if between_processes and mode != "Own":
        raise SpecError(f"tls.betweenProcesses = true: needs tls.mode = Own, not {mode}")
    return Tls(mode, secret, plain_text, names, between_processes)


def _auth_mode(spec: Manifest) -> str:
    mode = str(at(spec, "auth", "mode") or "")
    if mode not in ("", *AUTH_MODES):
        raise SpecError(f"auth.mode = {mode}: one of {', '.join(AUTH_MODES)}")
    if mode in ("On", "Observe") and at(spec, "tls", "mode") == "Disabled":
        raise SpecError(
            f"auth.mode = {mode}: needs tls.mode Own or Secret, since credentials in plain text "
            "are refused"
        )
    return mode


def _dns_name(name: str) -> str:
    """As certificates have it: an address as it is, letters beyond ASCII as xn--..."""
    try:
        encoded = name if name.isascii() else name.encode("idna").decode()
    except UnicodeError as error:
        raise SpecError(f"tls.names: {name}: is not a DNS name: {error}") from error
    if not encoded or any(not mark.isalnum() and mark not in "-.*:_" for mark in encoded):
        raise SpecError(f"tls.names: {name!r}: is neither a DNS name nor an address")
    return encoded


def _monitoring(spec: Manifest) -> Monitoring:
    return Monitoring(
        bool(spec.get("podMonitor")),
        bool(spec.get("rules")),
        spec.get("labels") or {},
        str(spec.get("runbookUrl") or "docs/reference/alerts.md"),
    )


def _template(spec: Manifest) -> PodTemplate:
    given = dict(spec.get("template") or {})
    labels = given.pop("labels", None) or {}
    for label in labels:
        if label.startswith(("popmq.io/", "app.kubernetes.io/")):
            raise SpecError(f"template.labels: {label} is the operator's own")
    for name in given:
        if name not in POD_FIELDS:
            raise SpecError(f"template.{name}: is not a field of a template")
    priority = str(given.get("priorityClassName") or "")
    if priority.startswith("system-"):
        raise SpecError(
            f"template.priorityClassName = {priority}: that of Kubernetes' own parts is refused"
        )
    return PodTemplate(
        labels,
        given.pop("annotations", None) or {},
        grace_s=given.pop("terminationGracePeriodSeconds", None),
        env=_environment(given.pop("env", None) or ()),
        volumes=_volumes(given.pop("volumes", None) or ()),
        mounts=given.pop("volumeMounts", None) or (),
        fields=given,
    )


def _environment(given: Sequence[Manifest]) -> Sequence[Manifest]:
    for variable in given:
        if str(variable["name"]).startswith("POPMQ_"):
            raise SpecError(f"template.env: {variable['name']}: a setting belongs into spec.config")
    return given


def _volumes(given: Sequence[Manifest]) -> Sequence[Manifest]:
    for volume in given:
        name, sources = volume["name"], [key for key in volume if key != "name"]
        if name in OWN_VOLUMES:
            raise SpecError(f"template.volumes: {name} is the operator's own")
        if len(sources) != 1 or sources[0] not in VOLUME_SOURCES:
            shown = ", ".join(sources) or "nothing"
            allowed = ", ".join(VOLUME_SOURCES)
            raise SpecError(f"template.volumes: {name} is {shown}: one of {allowed}")
    return given


def _config(spec: Manifest) -> Mapping[str, str]:
    given: Mapping[str, str] = spec.get("config") or {}
    for key in given:
        own = key.split(".")[0] in OWN_SECTIONS or key in OWN_KEYS
        if own and key not in OWN_KEYS_ALLOWED:
            raise SpecError(f"config: {key} is set by the operator from other fields of the spec")
    check_settings(given, {key: f"spec.config[{key}]" for key in given})
    return dict(given)


def check_settings(values: Mapping[str, str], paths: Mapping[str, str]) -> None:
    """As the roles will check them.  Raises SpecError that names fields of the spec: `paths` has
    them by section.key."""
    variables = {f"POPMQ_{key.replace('.', '_').upper()}": value for key, value in values.items()}
    try:
        load_settings(None, variables, {}).settings.check_client_ports()
    except ConfigError as error:
        message = str(error).replace("environment variable ", "")
        for key, path in paths.items():
            variable = f"POPMQ_{key.replace('.', '_').upper()}"
            message = message.replace(f" ({variable})", "")
            message = re.sub(rf"\b({variable}|{re.escape(key)})(?![\w.\]])", path, message)
        # Nothing else in a spec is called by the name of a variable.
        message = _VARIABLE.sub(lambda m: f"{m[1]}.{m[2]}".lower(), message)
        raise SpecError(message) from error
