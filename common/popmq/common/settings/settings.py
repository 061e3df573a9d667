"""Every setting of every role: its name, default, limits, and where its value came from.

A TOML file, then `POPMQ_<SECTION>_<KEY>`, then flags; the later wins.  Units are in the names:
an `_ms` setting takes milliseconds or `90s`, a `_bytes` setting takes bytes or `4MiB`.  A wrong
name or value stops the process before it opens anything.  Only this module reads the
environment (docs/reference/settings.md).
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from popmq.common.address import address_error, is_loopback
from popmq.common.address import format_address as format_address
from popmq.common.address import parse_address as parse_address
from popmq.common.errors import ConfigError
from popmq.common.quantities import (
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    parse_duration_ms,
    parse_size,
)
from popmq.common.settings.auth_settings import AuthSettings
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.console_settings import ConsoleSettings
from popmq.common.settings.lean_settings import LeanSettings
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.report_settings import ReportsSettings
from popmq.common.settings.section import SettingsSection, checked, constant, shown, within
from popmq.common.settings.section import SettingsSection as _Section
from popmq.common.settings.section import checked as _checked
from popmq.common.settings.section import constant as _constant
from popmq.common.settings.section import matching as _matching
from popmq.common.settings.section import name_of as _name_of
from popmq.common.settings.section import one_of as _one_of
from popmq.common.settings.section import within as _within
from popmq.common.settings.send_settings import DedupSettings, TransactionSettings
from popmq.common.signing import ACCESS_KEY_VARIABLE, SECRET_VARIABLE

CLIENT_ENDPOINT = "POPMQ_ENDPOINT"
CLIENT_ADMIN_ENDPOINT = "POPMQ_ADMIN_ENDPOINT"
CLIENT_TLS_CA = "POPMQ_TLS_CA"
TRACEBACK = "POPMQ_TRACEBACK"  # of an error of a command that nothing expects
_OF_CLIENTS = (
    *(CLIENT_ENDPOINT, CLIENT_ADMIN_ENDPOINT, CLIENT_TLS_CA),
    *(ACCESS_KEY_VARIABLE, SECRET_VARIABLE, TRACEBACK),
)
OVER_TLS = "tls://"
UNIX = "unix:"
DEFAULT_ENDPOINT = "127.0.0.1:8081"


def environment() -> Mapping[str, str]:
    return os.environ


def runtime_folder() -> str:
    """Of this user, for sockets; empty where the system gives none."""
    return os.environ.get("XDG_RUNTIME_DIR", "")


def _address(default: str, *, optional: bool = False) -> str:
    return _checked(
        default,
        lambda value: "" if optional and not value else address_error(value),
        "HOST:PORT" + (" or empty" if optional else ""),
    )


def _frame_address(default: str, *, optional: bool = False) -> str:
    """An address of frames may be a unix socket, too."""

    def complaint(value: str) -> str:
        if (optional and not value) or (value.startswith(UNIX) and value != UNIX):
            return ""
        return address_error(value)

    allowed = "HOST:PORT or unix:PATH" + (" or empty" if optional else "")
    return _checked(default, complaint, allowed)


def _bad_addresses(values: tuple[str, ...]) -> str:
    places = [value for value in values if not value.startswith(UNIX)]
    return next(filter(None, map(address_error, places)), "" if values else "at least one address")


_MAX_BUFFERED_MS = 10 * 60_000


def _bad_namespaces(values: tuple[str, ...]) -> str:
    good = all(value.replace("-", "").isalnum() and value.islower() for value in values)
    return "" if good else "names of namespaces"


@dataclass(frozen=True, slots=True)
class OperatorSettings(SettingsSection):
    """`image` is what clusters get that name none, `report_image` what LagReports do;
    `report_role` is the ClusterRole of reports that make pods; `controller_address` replaces the
    names of the controllers' Services for an operator outside of the cluster's network, with
    {name} and {namespace} of the BrokerCluster."""

    namespaces: tuple[str, ...] = checked((), _bad_namespaces)  # none: every namespace
    image: str = "popmq:latest"
    report_image: str = "popmq-reports:latest"
    images: tuple[str, ...] = ()  # prefixes or digests; none: every version of its own images
    report_role: str = ""  # "": none may
    kubeconfig: str = ""
    identity: str = ""  # "": the name of the host, which is that of the pod
    lease: str = "popmq-operator"
    lease_namespace: str = ""  # "": its own
    lease_duration_ms: int = within(15_000, 1_000, 600_000)
    lease_renew_ms: int = within(2_000, 100, 60_000)
    resync_ms: int = within(300_000, 100, 3_600_000)
    declared_resync_ms: int = constant(5_000)
    controller_address: str = ""
    proxy_address: str = ""

    def relations(self) -> None:
        low = 5 * self.lease_renew_ms
        if self.lease_duration_ms < low:
            raise self.refuse("lease_duration_ms", f"at least {low}, five operator.lease_renew_ms")


@dataclass(frozen=True, slots=True)
class PopSettings(SettingsSection):
    invisible_default_ms: int = within(60_000, 1, 7 * DAY_MS)
    invisible_min_ms: int = within(1, 1, 7 * DAY_MS)
    invisible_max_ms: int = within(12 * HOUR_MS, 1, 7 * DAY_MS)
    max_in_flight_per_queue: int = within(100_000, 1, 10_000_000)
    max_in_flight_per_broker: int = within(1_000_000, 1, 10_000_000)
    max_batch: int = within(32, 1, 64)  # the members of a check point are bits of a u64
    reply_bytes: int = within(8 * MIB, 64 * KIB, GIB)
    retry_first_percent: int = within(20, 0, 100)
    # Of a topic of type priority: one receive in so many begins with a lower queue.
    priority_turn: int = constant(8)
    # SQL filters of one connection that its proxy has not seen lately; ten times as many at once.
    sql_filters_per_s: int = within(10, 1, 1_000_000)
    catch_up_percent: int = within(8, 1, 100)
    catch_up_behind_bytes: int = constant(64 * MIB)
    revive_step_ms: int = within(16, 1, 60_000)
    # Of a FIFO group in one queue: messages that were looked at and are not over.
    fifo_open_offsets: int = within(10_000, 1, 1_000_000)
    fifo_park_after_ms: int = within(60_000, 1, 7 * DAY_MS)
    fifo_parked_messages: int = within(100_000, 0, 10_000_000)  # of a group in one topic
    # Buffered check points: RocketMQ's popCkMaxBufferSize, popCkStayBufferTime,
    # popCkStayBufferTimeOut, and the 1,500 ms of its PopBufferMergeService.
    check_point_buffer_size: int = within(200_000, 0, 10_000_000)
    check_point_stay_ms: int = within(10_000, 1, _MAX_BUFFERED_MS)
    check_point_write_ahead_ms: int = within(3_000, 1, _MAX_BUFFERED_MS)
    check_point_min_stay_ms: int = within(1_500, 0, _MAX_BUFFERED_MS)

    def relations(self) -> None:
        low, high = self.invisible_min_ms, self.invisible_max_ms
        if self.invisible_default_ms < low:
            raise self.refuse("invisible_default_ms", f"at least pop.invisible_min_ms = {low}")
        if self.invisible_default_ms > high:
            raise self.refuse("invisible_default_ms", f"at most pop.invisible_max_ms = {high}")
        stay = self.check_point_stay_ms
        if self.check_point_min_stay_ms > stay:
            limit = f"at most pop.check_point_stay_ms = {stay}"
            raise self.refuse("check_point_min_stay_ms", limit)


@dataclass(frozen=True, slots=True)
class ControllerSettings(_Section):
    listen: str = _frame_address("127.0.0.1:9878")
    addresses: tuple[str, ...] = _checked(("127.0.0.1:9878",), _bad_addresses)
    heartbeat_ms: int = _within(500, 10, 60_000)
    dead_after_ms: int = _within(2000, 20, 600_000)
    store: str = _one_of("memory", "memory", "file", "kubernetes")
    data: str = _checked("./popmq-controller", lambda path: "" if path.strip() else "a path")
    namespace: str = _matching("", r"[a-z0-9-]{0,63}", "a namespace")  # "": the pod's own

    def relations(self) -> None:
        low = 2 * self.heartbeat_ms
        if self.dead_after_ms < low:
            raise self.refuse("dead_after_ms", f"at least {low}, twice controller.heartbeat_ms")


@dataclass(frozen=True, slots=True)
class BrokerSettings(_Section):
    name: str = _name_of("broker-a")  # of the broker group: all its replicas have the same
    node: str = _name_of("", optional=True)  # of this process in the cluster; "" is broker.name
    data: str = _checked("./popmq-data", lambda path: "" if path.strip() else "a path")
    listen: str = _frame_address("127.0.0.1:10911")
    advertise: str = _frame_address("", optional=True)  # "" says what it listens on


@dataclass(frozen=True, slots=True)
class ProxySettings(_Section):
    listen: str = _address(DEFAULT_ENDPOINT)
    advertise: str = _address("", optional=True)
    admin_listen: str = _frame_address("", optional=True)  # "": a unix socket that it names
    admin_on_public: bool = False
    reflection: bool = False
    transport: str = _one_of("lean", "lean", "grpcio")
    workers: int = _within(1, 1, 256)  # processes that share the port
    tls: str = _one_of("auto", "auto", "off", "only")
    tls_certificate: str = ""  # a PEM file with the chain; "": one of our own making
    tls_key: str = ""

    def relations(self) -> None:
        for present, other in (("tls_key", "tls_certificate"), ("tls_certificate", "tls_key")):
            if getattr(self, present) and not getattr(self, other):
                raise self.refuse(other, f"needed, as proxy.{present} is set")
        if self.transport != "lean" and self.workers > 1:
            raise self.refuse("workers", "more than one needs proxy.transport = lean")
        if self.transport != "lean" and (self.tls == "only" or self.tls_certificate):
            complaint = "serves plain text only; TLS (proxy.tls, proxy.tls_certificate) needs lean"
            raise self.refuse("transport", complaint)


def _bad_group_ports(values: tuple[str, ...]) -> str:
    parts = [value.rpartition(":") for value in values]
    names, ports = [name for name, _, _ in parts], [port for _, _, port in parts]
    good = all(
        re.fullmatch(r"[a-zA-Z0-9_-]{1,100}", name)
        and re.fullmatch(r"[1-9][0-9]{0,4}", port)
        and int(port) < 1 << 16
        for name, port in zip(names, ports, strict=True)
    )
    if not good:
        return "BROKER_GROUP:PORT for each broker group, as broker-a:9081"
    repeats = len(set(names)) < len(names) or len(set(ports)) < len(ports)
    return "each broker group and each port once" if repeats else ""


@dataclass(frozen=True, slots=True)
class RemotingSettings(_Section):
    listen: str = _address("", optional=True)  # "": on the public port only
    advertise: str = _address("", optional=True)  # "": proxy.advertise, or what a client reached
    # For clients that cannot name a broker group in a request: a port for each group.
    group_ports: tuple[str, ...] = _checked((), _bad_group_ports)

    def ports_of_groups(self) -> dict[str, int]:
        parts = (value.rpartition(":") for value in self.group_ports)
        return {name: int(port) for name, _, port in parts}


@dataclass(frozen=True, slots=True)
class ListenSettings(_Section):
    open_to_anybody: bool = False  # off loopback, clients and administration in plain text


@dataclass(frozen=True, slots=True)
class HttpSettings(_Section):
    listen: str = _address("127.0.0.1:5557")
    health_listen: str = _address("", optional=True)  # /livez, /readyz and /version alone; "": none


_BY_TOPIC = "a topic's choice (popmq topic create NAME --durability memory), not the store's"


@dataclass(frozen=True, slots=True)
class StoreSettings(_Section):
    """`max_pending_bytes` bounds what was handed in and is not durable yet."""

    segment_bytes: int = _within(GIB, 4 * KIB, 2 * GIB)
    flush: str = _one_of("auto", "auto", "fsync", "quorum", memory=_BY_TOPIC)
    max_pending_bytes: int = _within(256 * MIB, 4 * KIB, 64 * GIB)
    # Of log in memory, for slaves and consumers that keep up; 0 keeps none.
    tail_bytes: int = _within(16 * MIB, 0, 64 * GIB)
    snapshot_bytes: int = _within(128 * MIB, 4 * KIB, 1024 * GIB)  # of log from one to the next
    retention_hours: int = _within(72, 1, 100 * 365 * 24)
    retention_bytes: int = _within(0, 0, 1 << 60)  # of log; 0: no bound but the age
    # That a start counts by the wall clock, of the time in which no broker of the group ran.
    max_downtime_ms: int = _within(12 * HOUR_MS, 0, 30 * DAY_MS)
    disk_stop_percent: int = _within(90, 1, 100)  # used; sends are refused from here on
    reserved_segments: int = _within(2, 1, 64)  # allocated ahead, for acks on a full disk


@dataclass(frozen=True, slots=True)
class MessageSettings(_Section):
    max_body_bytes: int = _within(4 * MIB, 1, 32 * MIB)
    max_properties: int = _within(128, 0, 1024)
    max_properties_bytes: int = _within(16 * KIB, 0, MIB)
    max_batch: int = _within(1_024, 1, 4_096)  # messages of one send

    @property
    def largest_bytes(self) -> int:
        """What one message takes at most; 4 KiB for its system properties and headers."""
        return self.max_body_bytes + self.max_properties_bytes + 4 * KIB


@dataclass(frozen=True, slots=True)
class TimerSettings(_Section):
    max_delay_ms: int = _within(366 * DAY_MS, 1000, 100 * 366 * DAY_MS)
    wheel_slots: int = _within(604_800, 60, 100_000_000)
    slot_ms: int = _within(1000, 10, 60_000)
    log_segment_bytes: int = _within(25 * MIB, 4 * KIB, GIB)
    flush_ms: int = _within(1000, 1, 60_000)
    clean_ms: int = _constant(30_000)
    # Pending timers are counted again at this hour, looked for every so often, once.
    check_hour: int = _within(5, 0, 23)
    check_every_ms: int = _constant(45 * 60_000)
    check_apart_ms: int = _constant(70 * 60_000)
    checkpoint_sync_ms: int = _constant(3000)  # a slave asks its master for it
    slot_limit: int = _within(0, 0, 1 << 31)  # timers of one topic in one slot; 0: no bound
    late_limit: int = _within(1_000_000, 1, 100_000_000)
    cancelled_limit: int = _within(1_000_000, 1, 100_000_000)
    # A broker group that is drained hands so many to the others.
    moves_per_second: int = _within(2_000, 1, 1_000_000)


@dataclass(frozen=True, slots=True)
class GroupSettings(_Section):
    max_attempts: int = _within(17, 1, 1000)
    auto_create: bool = True
    auto_created_limit: int = _within(1_000, 1, 50_000)
    failing_percent: int = _within(20, 1, 100)
    failing_least: int = _within(10, 1, 1_000_000)


@dataclass(frozen=True, slots=True)
class TopicSettings(_Section):
    auto_create: bool = False
    queues: int = _within(8, 1, 1024)
    queues_total: int = _within(200_000, 1, 10_000_000)  # of all topics of a broker group
    auto_create_type: str = _one_of(
        "mixed", "normal", "fifo", "delay", "transaction", "priority", "mixed"
    )


@dataclass(frozen=True, slots=True)
class PollSettings(_Section):
    max_ms: int = _within(30_000, 1, 600_000)
    min_ms: int = _within(0, 0, 600_000)  # RocketMQ's is 5 s
    # Receives of one group at one proxy, above which each waits at one broker group.
    switch_poll_limit: int = _within(64, 0, 1_000_000)
    waiters: int = _within(100_000, 1, 10_000_000)


@dataclass(frozen=True, slots=True)
class FramesSettings(_Section):
    max_in_flight: int = _within(4096, 1, 1_000_000)
    max_frame_bytes: int = _within(64 * MIB, 4 * KIB, GIB)
    max_buffered_bytes: int = _within(64 * MIB, 4 * KIB, 4 * GIB)


@dataclass(frozen=True, slots=True)
class Settings:
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    controller: ControllerSettings = ControllerSettings()
    broker: BrokerSettings = BrokerSettings()
    proxy: ProxySettings = ProxySettings()
    auth: AuthSettings = field(default_factory=AuthSettings)
    lean: LeanSettings = field(default_factory=LeanSettings)
    remoting: RemotingSettings = RemotingSettings()
    listen: ListenSettings = ListenSettings()
    http: HttpSettings = HttpSettings()
    store: StoreSettings = StoreSettings()
    message: MessageSettings = MessageSettings()
    dedup: DedupSettings = field(default_factory=DedupSettings)
    pop: PopSettings = field(default_factory=PopSettings)
    timer: TimerSettings = TimerSettings()
    transaction: TransactionSettings = field(default_factory=TransactionSettings)
    group: GroupSettings = GroupSettings()
    topic: TopicSettings = TopicSettings()
    lite: LiteSettings = field(default_factory=LiteSettings)
    poll: PollSettings = PollSettings()
    frames: FramesSettings = FramesSettings()
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    reports: ReportsSettings = field(default_factory=ReportsSettings)
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    operator: OperatorSettings = field(default_factory=OperatorSettings)

    def __post_init__(self) -> None:
        """The largest message must fit wherever it passes, or it could never be stored or read."""
        # 4 KiB for the record's header, a revival token, and what a frame adds.
        largest = self.message.largest_bytes + 4 * KIB
        needs = f"which message.max_body_bytes = {self.message.max_body_bytes} needs"
        for section, key, low in (
            (self.store, "segment_bytes", largest),
            (self.store, "max_pending_bytes", largest),
            (self.frames, "max_frame_bytes", largest + self.pop.reply_bytes),
        ):
            if getattr(section, key) < low:
                raise section.refuse(key, f"at least {low}, {needs}")
        self._check_replication()

    def _check_replication(self) -> None:
        replicas = self.replication.replicas
        if self.store.flush == "fsync" and replicas > 1:
            raise self.store.refuse(
                "flush",
                f"one replica's disk is no promise of replication.replicas = {replicas}: "
                "quorum, or auto",
            )
        if self.store.flush == "quorum" and replicas == 1:
            raise self.store.refuse("flush", "needs replication.replicas of 2 or more: fsync")
        most = self.frames.max_frame_bytes - 4 * KIB
        if self.replication.fetch_bytes > most:
            raise self.replication.refuse(
                "fetch_bytes", f"at most {most}, which frames.max_frame_bytes leaves"
            )

    def check_client_ports(self) -> None:
        """Raises ConfigError for a port of clients or administration that takes plain text from
        other machines, unless that is a decision. Ports of frames have a check of their own."""
        if self.listen.open_to_anybody or self.proxy.tls == "only":
            return
        for setting, address in (
            ("proxy.listen, --port", self.proxy.listen),
            ("proxy.admin_listen, --admin-port", self.proxy.admin_listen),
            ("remoting.listen, --remoting-port", self.remoting.listen),
        ):
            is_network = address and not address.startswith(UNIX)
            if is_network and not is_loopback(parse_address(address)[0]):
                raise ConfigError(
                    f"{address} ({setting}) can be reached from other machines, in plain text and "
                    "by anybody: set proxy.tls = only, or, if that is meant, "
                    "listen.open_to_anybody = true (--open-to-anybody)"
                )

    @property
    def node(self) -> str:
        """What this broker process is called in the cluster."""
        return self.broker.node or self.broker.name

    def flat(self, *, constants: bool = False) -> dict[str, object]:
        """`section.key` -> value, in the order above; of the settings, or of the constants."""
        return {
            f"{section.name}.{item.name}": getattr(getattr(self, section.name), item.name)
            for section in fields(self)
            for item in fields(getattr(self, section.name))
            if item.metadata.get("constant", False) is constants
        }


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """`sources` says for each `section.key`: "default", the file, the variable or "--flag"."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(
    path: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    defaults: Mapping[str, object] | None = None,
) -> LoadedSettings:
    """Settings from the file, the environment and flags (`section.key` -> value, None: not given).

    `defaults` replaces built-in ones for a role (`popmq up` keeps small segments).  Raises
    ConfigError for the first unknown name or impossible value.
    """
    known = Settings().flat()
    values: dict[str, object] = {}
    sources = dict.fromkeys(known, "default")

    def take(key: str, value: object, source: str) -> None:
        if key not in known:
            raise _unknown(f"setting {key}", key, known)
        values[key] = _converted(key, value, known[key], source)
        sources[key] = source

    for key, value in (defaults or {}).items():
        take(key, value, "default")
    for key, value in _read_file(path, known).items():
        take(key, value, str(path))
    for variable, key in _variables(environ, known).items():
        take(key, environ[variable], variable)
    for key, value in flags.items():
        if value is not None:
            take(key, value, "--flag")
    return LoadedSettings(_build(values), sources)


def _build(values: Mapping[str, object]) -> Settings:
    built = Settings()
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: replace(getattr(built, name), **given) for name, given in sections.items()}
    return replace(built, **changed)


def _read_file(path: str | None, known: Mapping[str, object]) -> dict[str, object]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    values: dict[str, object] = {}
    for section, table in tables.items():
        entries = table if isinstance(table, dict) else {"": table}
        for name, value in entries.items():
            key = f"{section}.{name}" if name else section
            if key not in known:
                raise _unknown(f"{path}: setting {key}", key, known)
            values[key] = value
    return values


# Kubernetes puts POPMQ_SERVICE_HOST, POPMQ_PORT_8081_TCP and their like into every pod beside a
# Service called popmq; no setting ends like one of them.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP)\w*)?$")


def _variables(environ: Mapping[str, str], known: Mapping[str, object]) -> dict[str, str]:
    names = {variable_of(key): key for key in known}
    for name in environ:
        strange = name.startswith("POPMQ_") and name not in (*names, *_OF_CLIENTS)
        if strange and not _SERVICE_LINK.search(name):
            raise _unknown(f"environment variable {name}", name, names)
    return {name: key for name, key in names.items() if name in environ}


def variable_of(key: str) -> str:
    """The environment variable that sets it."""
    return f"POPMQ_{key.replace('.', '_').upper()}"


def _unknown(what: str, name: str, known: Mapping[str, object]) -> ConfigError:
    for key, value in Settings().flat(constants=True).items():
        if name in (key, variable_of(key)):
            return ConfigError(f"{what} is no setting any more, it is always {shown(value)}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return ConfigError(f"{what} is unknown; the nearest known one is {near[0]}")


def _converted(key: str, value: object, default: object, source: str) -> object:
    """The value in the type of its default; `source` is named when it cannot be one."""
    try:
        return _as_type_of(default, key, value)
    except ConfigError as error:
        raise ConfigError(f"{key} = {shown(value)} ({source}): {error}") from error


def _as_type_of(default: object, key: str, value: object) -> object:
    match default:
        case bool():
            return _as_bool(value)
        case int():
            return _as_int(key, value)
        case tuple():
            return _as_texts(value)
        case _ if isinstance(value, str):
            return value
    raise ConfigError("a text in quotes")


def _as_bool(value: object) -> bool:
    if str(value) not in ("true", "false", "True", "False"):
        raise ConfigError("true or false")
    return str(value).lower() == "true"


def _as_texts(value: object) -> tuple[str, ...]:
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise ConfigError("a list of texts")
    return tuple(text.strip() for text in given if text.strip())


def _as_int(key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        return int(text)
    if key.endswith("_ms"):
        return parse_duration_ms(text or str(value))
    if key.endswith("_bytes"):
        return parse_size(text or str(value))
    raise ConfigError("a whole number")
