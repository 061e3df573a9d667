"""What the pods of every role have in common: one container that Pod Security `restricted` admits.

A user without a name, a root file system that cannot be written, no capabilities, no token unless
the role talks to the API server.  A spec may say where pods run, not how powerful they are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from popmq.operator.model.certificates import CERTIFICATE, KEY, TRUSTED
from popmq.operator.model.manifest import Manifest
from popmq.operator.model.names import (
    CONFIG_ANNOTATION,
    HTTP_PORT,
    RESTART_ANNOTATION,
    SECRET_ANNOTATION,
    TEMPLATE_ANNOTATION,
    TLS_ANNOTATION,
)
from popmq.operator.model.spec import ClusterSpec, PodTemplate
from popmq.operator.model.stages import PeerRequirement

USER = 10001  # as in the Dockerfile
CONFIG_FOLDER = "/etc/popmq"
CONFIG_FILE = f"{CONFIG_FOLDER}/popmq.toml"
TLS_FOLDER = "/etc/popmq-tls"
SECRET_FOLDER, SECRET_KEY = "/etc/popmq-secret", "secret"
SECRET_FILE = f"{SECRET_FOLDER}/{SECRET_KEY}"
SECRET_VOLUME = "cluster-secret"
PROCESS_TLS_FOLDER, PROCESS_TLS_VOLUME = "/etc/popmq-process-tls", "process-tls"
SECRET_MODE = 0o440  # for the pod's group; a role refuses a file that every user may read

Env = Sequence[Manifest]


def container(
    spec: ClusterSpec,
    role: str,
    *,
    ports: Mapping[str, int],
    env: Env,
    resources: Manifest,
    mounts: Sequence[Manifest] = (),
    slow_start_s: int = 60,
    drain_s: int = 0,
) -> Manifest:
    """`slow_start_s`: how long it may take to serve; `drain_s`: how long it goes on serving after
    it was told to go, so that Services forget it first."""
    container: Manifest = {
        "name": role,
        "image": spec.image,
        "args": [role, "--config", CONFIG_FILE],
        "env": list(env),
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "startupProbe": _probe("/livez", every_s=2, failures=max(1, slow_start_s // 2)),
        "livenessProbe": _probe("/livez", every_s=5, failures=6),
        "readinessProbe": _probe("/readyz", every_s=2, failures=2),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *_secret_mounts(spec),
            *mounts,
        ],
    }
    if spec.pull_policy:
        container["imagePullPolicy"] = spec.pull_policy
    if resources:
        container["resources"] = resources
    if drain_s:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": drain_s}}}
    return container


def _probe(path: str, *, every_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": every_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def pod_template(
    spec: ClusterSpec,
    role: str,
    template: PodTemplate,
    manifest: Manifest,
    *,
    labels: Mapping[str, str],
    config: Mapping[str, str],
    grace_s: int,
    defaults: Mapping[str, Any],
    volumes: Sequence[Manifest] = (),
) -> Manifest:
    """The template with the hash of itself, by which a pod tells from what it was made.

    `defaults` are fields of the pod that differ by role; the user's template goes before them.
    `config` is what the role reads from the ConfigMap: a change of it makes other pods.
    """
    settings_hash = digest(config)
    annotations = {**template.annotations, CONFIG_ANNOTATION: settings_hash}
    if spec.secret_use is not PeerRequirement.NONE:
        annotations[SECRET_ANNOTATION] = spec.secret_use.value
    if spec.tls_use is not PeerRequirement.NONE:
        annotations[TLS_ANNOTATION] = spec.tls_use.value
    if spec.restart:
        annotations[RESTART_ANNOTATION] = spec.restart
    pod: Manifest = {
        "serviceAccountName": f"{spec.name}-popmq",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.grace_s or grace_s,
        "securityContext": pod_security(),
        "containers": [extended(manifest, template)],
        "volumes": [
            {"name": "config", "configMap": {"name": spec.names.config}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
            *_secret_volumes(spec),
            *volumes,
            *template.volumes,
        ],
        **defaults,
        **template.fields,
    }
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    metadata: Manifest = {
        "labels": {**template.labels, **spec.names.labels(role), **labels},
        "annotations": annotations,
    }
    annotations[TEMPLATE_ANNOTATION] = digest({"metadata": metadata, "spec": pod})
    return {"metadata": metadata, "spec": pod}


def extended(container: Manifest, template: PodTemplate) -> Manifest:
    """With the environment and the mounts of the user's template, after the operator's own."""
    mounts = [*container["volumeMounts"], *template.mounts]
    return {**container, "env": [*container["env"], *template.env], "volumeMounts": mounts}


def _secret_mounts(spec: ClusterSpec) -> list[Manifest]:
    mounts = []
    if spec.secret_use is not PeerRequirement.NONE:
        mounts.append({"name": SECRET_VOLUME, "mountPath": SECRET_FOLDER, "readOnly": True})
    if spec.tls_use is not PeerRequirement.NONE:
        mount = {"name": PROCESS_TLS_VOLUME, "mountPath": PROCESS_TLS_FOLDER, "readOnly": True}
        mounts.append(mount)
    return mounts


def _secret_volumes(spec: ClusterSpec) -> list[Manifest]:
    volumes = []
    if spec.secret_use is not PeerRequirement.NONE:
        volumes.append(_secret_volume(SECRET_VOLUME, spec.names.cluster_secret, SECRET_KEY))
    if spec.tls_use is not PeerRequirement.NONE:
        keys = (CERTIFICATE, KEY, TRUSTED)
        volumes.append(_secret_volume(PROCESS_TLS_VOLUME, spec.names.process_tls, *keys))
    return volumes


def _secret_volume(name: str, secret_name: str, *keys: str) -> Manifest:
    items = [{"key": key, "path": key} for key in keys]
    secret = {"secretName": secret_name, "items": items, "defaultMode": SECRET_MODE}
    return {"name": name, "secret": secret}


def pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def spread(spec: ClusterSpec, role: str, **more: str) -> Mapping[str, Any]:
    """Apart from each other when there is a choice: zones first, then nodes."""
    selector = {"matchLabels": spec.names.selector(role, **more)}
    return {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": selector,
            }
            for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
        ]
    }


def http_port() -> Mapping[str, int]:
    return {"http": HTTP_PORT}


def variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def disruption_budget(selector: Mapping[str, str]) -> Manifest:
    """One at a time, whoever asks for an eviction."""
    return {"maxUnavailable": 1, "selector": {"matchLabels": dict(selector)}}
