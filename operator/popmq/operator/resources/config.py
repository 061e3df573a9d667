"""The ConfigMap: one TOML file for every role, checked as the roles will check it."""

import json
from collections.abc import Mapping

from popmq.common.address import format_address
from popmq.common.settings.section import shown
from popmq.operator.model.certificates import CERTIFICATE, KEY, TRUSTED
from popmq.operator.model.manifest import CONFIG_MAP, Manifest, make
from popmq.operator.model.names import (
    ADMIN_PORT,
    BROKER_PORT,
    CONTROLLER_PORT,
    GROUP_PORT,
    HTTP_PORT,
    PUBLIC_PORT,
    REMOTING_PORT,
)
from popmq.operator.model.spec import ClusterSpec, RemotingSpec, check_settings
from popmq.operator.model.stages import PeerRequirement, UsersUse
from popmq.operator.resources.pods import PROCESS_TLS_FOLDER, SECRET_FILE, TLS_FOLDER
from popmq.operator.resources.users import ADMIN_FILE, KEYS_FILE, USERS_FOLDER

FILE = "popmq.toml"
DATA_FOLDER = "/var/lib/popmq"
# Sections that a role does not look at: a change there restarts none of its pods.
_NOT_READ = {
    "broker": ("proxy", "lean", "listen", "remoting", "auth"),
    "proxy": ("broker", "store", "timer", "dedup", "replication"),
    "controller": (
        "proxy",
        "lean",
        "listen",
        "remoting",
        "auth",
        "broker",
        "store",
        "timer",
        "dedup",
        "pop",
        "replication",
    ),
}
# Settings that a spec has a field of its own for.
PATHS = {
    "store.retention_hours": "spec.brokers.retention",
    "lean.max_age_ms": "spec.proxies.maxConnectionAge",
    "remoting.advertise": "spec.remoting.advertise",
    "store.flush": "spec.brokers.durability.flush",
    "replication.replicas": "spec.brokers.replicas",
    "replication.min_in_sync": "spec.brokers.durability.minInSync",
}


def settings(spec: ClusterSpec) -> dict[str, str]:
    """By section.key. Raises SpecError for settings that do not fit each other."""
    brokers, tls = spec.brokers, spec.tls
    values = {
        "store.retention_hours": str(brokers.retention_hours),
        "lean.max_age_ms": str(spec.proxies.max_age_ms),
        # As clusters of before were; the condition OpenToAnybody says so.
        "listen.open_to_anybody": shown(tls.plain_text),
        **spec.config,
        "cluster.name": spec.name,
        **_cluster_secret(spec),
        **_process_tls(spec),
        "controller.listen": f"0.0.0.0:{CONTROLLER_PORT}",
        "controller.addresses": ",".join(spec.controller_addresses),
        "controller.store": "kubernetes",
        "broker.data": DATA_FOLDER,
        "broker.listen": f"0.0.0.0:{BROKER_PORT}",
        "proxy.listen": f"0.0.0.0:{PUBLIC_PORT}",
        "proxy.admin_listen": f"0.0.0.0:{ADMIN_PORT}",
        "proxy.admin_on_public": shown(spec.admin_on_public),
        "proxy.tls": "off" if tls.mode == "Disabled" else "auto" if tls.plain_text else "only",
        "http.listen": f"0.0.0.0:{HTTP_PORT}",
        "store.flush": brokers.flush,
        "replication.replicas": str(brokers.replicas),
        "replication.min_in_sync": str(brokers.min_in_sync),
    }
    if spec.remoting is not None:
        values |= _remoting(spec, spec.remoting)
    if spec.users_use is not UsersUse.NONE:
        values["auth.key_file"] = f"{USERS_FOLDER}/{KEYS_FILE}"
    if spec.users_use is UsersUse.FIRST:
        values["auth.admin_file"] = f"{USERS_FOLDER}/{ADMIN_FILE}"
    if tls.mode != "Disabled":
        values["proxy.tls_certificate"] = f"{TLS_FOLDER}/tls.crt"
        values["proxy.tls_key"] = f"{TLS_FOLDER}/tls.key"
    check_settings(values, {key: PATHS.get(key, f"spec.config[{key}]") for key in values})
    return dict(sorted(values.items()))


def _remoting(spec: ClusterSpec, remoting: RemotingSpec) -> dict[str, str]:
    """Routes name the Service: the address of a pod would be over with the pod."""
    groups = range(remoting.group_ports)
    ports = [format_address(spec.names.group(n), GROUP_PORT + n) for n in groups]
    return {
        "remoting.listen": f"0.0.0.0:{REMOTING_PORT}",
        "remoting.advertise": remoting.advertise or spec.names.remoting_endpoint,
        **({"remoting.group_ports": ",".join(ports)} if ports else {}),
    }


def _cluster_secret(spec: ClusterSpec) -> dict[str, str]:
    match spec.secret_use:
        case PeerRequirement.REQUIRED:
            return {"cluster.secret_file": SECRET_FILE}
        case PeerRequirement.ACCEPTED:
            return {"cluster.secret_file": SECRET_FILE, "cluster.secret_required": "false"}
        case PeerRequirement.NONE:
            return {"cluster.secret_required": "false"}


def _process_tls(spec: ClusterSpec) -> dict[str, str]:
    if spec.tls_use is PeerRequirement.NONE:
        return {}
    files = {"certificate": CERTIFICATE, "key": KEY, "authority": TRUSTED}
    values = {f"cluster.tls_{name}": f"{PROCESS_TLS_FOLDER}/{file}" for name, file in files.items()}
    if spec.tls_use is PeerRequirement.ACCEPTED:
        values["cluster.tls_required"] = "false"
    return values


def read_by(role: str, values: Mapping[str, str]) -> dict[str, str]:
    """Those of the settings whose change the role has to be restarted for."""
    return {key: value for key, value in values.items() if key.split(".")[0] not in _NOT_READ[role]}


def config_map(spec: ClusterSpec) -> Manifest:
    new_config_map = make(CONFIG_MAP, spec.names.config, spec.namespace, spec.names.labels())
    new_config_map["data"] = {FILE: toml(settings(spec))}
    return new_config_map


def toml(values: Mapping[str, str]) -> str:
    """JSON's texts are TOML's basic strings; numbers may be texts in a settings file."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(
        f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()
    )
