"""The ConfigMap: one TOML file for every role, checked as the roles will check it."""

import json
from collections.abc import Mapping

from popmq.common.errors import ConfigError
from popmq.common.settings.settings import load_settings
from popmq.operator.model.manifest import CONFIG_MAP, Manifest, make
from popmq.operator.model.names import BROKER_PORT, CONTROLLER_PORT, HTTP_PORT, PUBLIC_PORT
from popmq.operator.model.spec import ClusterSpec, SpecError
from popmq.operator.resources.pods import TLS_FOLDER

FILE = "popmq.toml"
DATA_FOLDER = "/var/lib/popmq"
# Sections that a role does not look at: a change there restarts none of its pods.
_NOT_READ = {
    "broker": ("proxy", "lean"),
    "proxy": ("broker", "store", "timer", "dedup", "replication"),
    "controller": ("proxy", "lean", "broker", "store", "timer", "dedup", "pop", "replication"),
}


def settings(spec: ClusterSpec) -> dict[str, str]:
    """By section.key. Raises SpecError for settings that do not fit each other."""
    brokers, tls = spec.brokers, spec.tls
    values = {
        "store.retention_hours": str(brokers.retention_hours),
        "lean.max_age_ms": str(spec.proxies.max_age_ms),
        **spec.config,
        "cluster.name": spec.name,
        "controller.listen": f"0.0.0.0:{CONTROLLER_PORT}",
        "controller.addresses": ",".join(spec.controller_addresses),
        "controller.store": "kubernetes",
        "broker.data": DATA_FOLDER,
        "broker.listen": f"0.0.0.0:{BROKER_PORT}",
        "proxy.listen": f"0.0.0.0:{PUBLIC_PORT}",
        "proxy.tls": "off" if tls.mode == "Disabled" else "auto" if tls.plain_text else "only",
        "http.listen": f"0.0.0.0:{HTTP_PORT}",
        "store.flush": brokers.flush,
        "replication.replicas": str(brokers.replicas),
        "replication.min_in_sync": str(brokers.min_in_sync),
    }
    if tls.mode != "Disabled":
        values["proxy.tls_certificate"] = f"{TLS_FOLDER}/tls.crt"
        values["proxy.tls_key"] = f"{TLS_FOLDER}/tls.key"
    variables = {f"POPMQ_{key.replace('.', '_').upper()}": value for key, value in values.items()}
    try:
        load_settings(None, variables, {})
    except ConfigError as error:
        raise SpecError(f"the settings of the cluster: {error}") from error
    return dict(sorted(values.items()))


def read_by(role: str, values: Mapping[str, str]) -> dict[str, str]:
    """Those of the settings whose change the role has to be restarted for."""
    return {key: value for key, value in values.items() if key.split(".")[0] not in _NOT_READ[role]}


def config_map(spec: ClusterSpec) -> Manifest:
    made = make(CONFIG_MAP, spec.names.config, spec.namespace, spec.names.labels())
    made["data"] = {FILE: toml(settings(spec))}
    return made


def toml(values: Mapping[str, str]) -> str:
    """JSON's texts are TOML's basic strings; numbers may be texts in a settings file."""
    sections: dict[str, list[str]] = {}
    for key, value in values.items():
        section, name = key.split(".", 1)
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    return "\n".join(
        f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()
    )
