"""The web console of a cluster: a Deployment of one, its Service and an optional Ingress.

It keeps nothing but its sessions, in memory; so there is one.  It calls the proxies as any client
does, over TLS where they have it, and holds no secret of the cluster.
"""

from popmq.common.settings.settings import OVER_TLS
from popmq.operator.model.certificates import TRUSTED
from popmq.operator.model.manifest import DEPLOYMENT, INGRESS, SERVICE, Manifest, make
from popmq.operator.model.names import CONSOLE, CONSOLE_PORT, TEMPLATE_ANNOTATION
from popmq.operator.model.spec import ClusterSpec, ConsoleIngress, ConsoleSpec
from popmq.operator.model.stages import UsersUse
from popmq.operator.resources.pods import (
    TLS_FOLDER,
    container_security,
    digest,
    extended,
    pod_security,
    variable,
)

GRACE_S = 15


def console(spec: ClusterSpec, *, has_ca: bool) -> list[Manifest]:
    """`has_ca`: the cluster's ConfigMap says who signed the proxies' certificate."""
    if spec.console is None:
        return []
    names, labels = spec.names, spec.names.labels(CONSOLE)
    selector = names.selector(CONSOLE)
    deployment = make(DEPLOYMENT, names.console, spec.namespace, labels)
    deployment["spec"] = {
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "template": _template(spec, spec.console, has_ca),
    }
    service = make(SERVICE, names.console, spec.namespace, labels)
    port = {"name": CONSOLE, "port": CONSOLE_PORT, "targetPort": CONSOLE, "protocol": "TCP"}
    service["spec"] = {"type": "ClusterIP", "selector": selector, "ports": [port]}
    manifests = [deployment, service]
    if spec.console.ingress is not None:
        manifests.append(_ingress(spec, spec.console.ingress))
    return manifests


def asks_for_login(spec: ClusterSpec) -> bool:
    """Always, unless the spec opens the console of a cluster without users."""
    console = spec.console
    return spec.users_use is not UsersUse.NONE or console is None or not console.open_to_anybody


def _template(spec: ClusterSpec, console: ConsoleSpec, has_ca: bool) -> Manifest:
    template = console.template
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
    if _encrypted(spec) and has_ca:
        trusted = {"name": spec.names.authority, "items": [{"key": TRUSTED, "path": TRUSTED}]}
        volumes.append({"name": "tls", "configMap": trusted})
    pod: Manifest = {
        "serviceAccountName": f"{spec.name}-popmq",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.grace_s or GRACE_S,
        "securityContext": pod_security(),
        "containers": [extended(_container(spec, console, has_ca), template)],
        "volumes": [*volumes, *template.volumes],
        **template.fields,
    }
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    metadata: Manifest = {
        "labels": {**template.labels, **spec.names.labels(CONSOLE)},
        "annotations": dict(template.annotations),
    }
    metadata["annotations"][TEMPLATE_ANNOTATION] = digest({"metadata": metadata, "spec": pod})
    return {"metadata": metadata, "spec": pod}


def _container(spec: ClusterSpec, console: ConsoleSpec, has_ca: bool) -> Manifest:
    scheme = OVER_TLS if _encrypted(spec) else ""
    container: Manifest = {
        "name": CONSOLE,
        "image": console.image,
        "args": [
            "console",
            f"--listen=0.0.0.0:{CONSOLE_PORT}",
            "--login" if asks_for_login(spec) else "--open-to-anybody",
        ],
        "env": [
            variable("POPMQ_ENDPOINT", f"{scheme}{spec.names.proxy_endpoint}"),
            variable("POPMQ_ADMIN_ENDPOINT", f"{scheme}{spec.names.admin_endpoint}"),
        ],
        "ports": [{"name": CONSOLE, "containerPort": CONSOLE_PORT, "protocol": "TCP"}],
        "livenessProbe": _probe(every_s=10, failures=6),
        "readinessProbe": _probe(every_s=2, failures=3),
        "securityContext": container_security(),
        # What the process said last becomes part of the condition Console.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if _encrypted(spec) and has_ca:
        container["env"].append(variable("POPMQ_TLS_CA", f"{TLS_FOLDER}/{TRUSTED}"))
        mount = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}
        container["volumeMounts"].append(mount)
    if spec.pull_policy:
        container["imagePullPolicy"] = spec.pull_policy
    if console.resources:
        container["resources"] = console.resources
    return container


def _probe(*, every_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": "/livez", "port": CONSOLE},
        "periodSeconds": every_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _encrypted(spec: ClusterSpec) -> bool:
    """Wherever it is possible: sessions sign with secrets of users."""
    return spec.tls.mode != "Disabled"


def _ingress(spec: ClusterSpec, desired: ConsoleIngress) -> Manifest:
    ingress = make(INGRESS, spec.names.console, spec.namespace, spec.names.labels(CONSOLE))
    if desired.annotations:
        ingress["metadata"]["annotations"] = dict(desired.annotations)
    service = {"name": spec.names.console, "port": {"name": CONSOLE}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    ingress["spec"] = {"rules": [{"host": desired.host, "http": {"paths": [path]}}]}
    if desired.class_name:
        ingress["spec"]["ingressClassName"] = desired.class_name
    if desired.tls_secret:
        ingress["spec"]["tls"] = [{"hosts": [desired.host], "secretName": desired.tls_secret}]
    return ingress
