"""A LagReport's CronJob: a pod with Spark in it that asks the proxies, and ends with the truth.

Spark runs inside the pod (`local[N]`), or makes pods that do its work and have this one for owner:
then the run has an account with a right to make pods.  The exit status of the command is that of
the report, so the Job's success is the report's.
"""

import math

from popmq.operator.model.lag_reports import Executors, LagReport
from popmq.operator.model.manifest import (
    CRON_JOB,
    LAG_REPORT,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Manifest,
    ResourceKind,
    make,
)
from popmq.operator.model.names import REPORT, REPORT_LABEL
from popmq.operator.model.quantity import parse_quantity
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.pods import (
    TLS_FOLDER,
    container_security,
    pod_security,
    variable,
)
from popmq.operator.resources.proxies import tls_secret

LATE_S = 300  # a run that could not begin within this is left out
LONGEST_S = 3600
# Of an executor's memory; Python, which reads and decodes, has the rest.
HEAP_SHARE = 0.6
RESOURCES: Manifest = {
    "requests": {"cpu": "500m", "memory": "1536Mi"},
    "limits": {"memory": "2560Mi"},
}


def cron_job(spec: ClusterSpec, one: LagReport) -> Manifest:
    names = spec.names
    labels = {**names.labels(REPORT), REPORT_LABEL: one.name}
    made = make(CRON_JOB, names.report(one.name), spec.namespace, labels)
    made["metadata"]["ownerReferences"] = [_owner(one)]
    made["spec"] = {
        "schedule": one.schedule,
        "timeZone": one.time_zone,
        "suspend": one.suspend,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": LATE_S,
        "successfulJobsHistoryLimit": one.keep,
        "failedJobsHistoryLimit": max(1, one.keep),
        "jobTemplate": {
            "metadata": {"labels": labels},
            "spec": {
                "backoffLimit": 1,
                "activeDeadlineSeconds": LONGEST_S,
                "template": {"metadata": {"labels": labels}, "spec": _pod(spec, one)},
            },
        },
    }
    return made


def report_access(
    spec: ClusterSpec, one: LagReport, role: str
) -> list[tuple[ResourceKind, Manifest]]:
    """The account of runs that make pods, and what lets it."""
    name = spec.names.report(one.name)
    labels = {**spec.names.labels(REPORT), REPORT_LABEL: one.name}
    account = make(SERVICE_ACCOUNT, name, spec.namespace, labels)
    binding = make(ROLE_BINDING, name, spec.namespace, labels)
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": role,
    }
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": spec.namespace}]
    for made in (account, binding):
        made["metadata"]["ownerReferences"] = [_owner(one)]
    return [(SERVICE_ACCOUNT, account), (ROLE_BINDING, binding)]


def _owner(one: LagReport) -> Manifest:
    return {
        "apiVersion": LAG_REPORT.api_version,
        "kind": LAG_REPORT.kind,
        "name": one.name,
        "uid": one.manifest["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _pod(spec: ClusterSpec, one: LagReport) -> Manifest:
    container: Manifest = {
        "name": REPORT,
        "image": one.image,
        "args": _arguments(spec, one),
        "env": _environment(spec, one),
        "resources": one.resources or RESOURCES,
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if spec.pull_policy:
        container["imagePullPolicy"] = spec.pull_policy
    alone = one.executors is None
    pod: Manifest = {
        "serviceAccountName": _account(spec) if alone else spec.names.report(one.name),
        "automountServiceAccountToken": not alone,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}}],
    }
    if _encrypted(spec):
        trusted = {"secretName": tls_secret(spec), "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        pod["volumes"].append({"name": "tls", "secret": trusted})
        mount = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}
        container["volumeMounts"].append(mount)
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    return pod


def _arguments(spec: ClusterSpec, one: LagReport) -> list[str]:
    made = ["report", one.report]
    if one.group:
        made += ["--group", one.group]
    if one.topic:
        made += ["--topic", one.topic]
    if one.master:
        made += ["--master", one.master]
    if one.executors is not None:
        made += ["--executors", str(one.executors.instances)]
        if _encrypted(spec):
            made += ["--executor-ca", tls_secret(spec)]
        for key, value in _settings(spec, one, one.executors).items():
            made += ["--conf", f"{key}={value}"]
    return [*made, *one.arguments]


def _settings(spec: ClusterSpec, one: LagReport, executors: Executors) -> dict[str, str]:
    """Of Spark, with the names of Kubernetes for what is known only in the pod."""
    memory = int(parse_quantity(executors.memory)) // 2**20
    heap = int(memory * HEAP_SHARE)
    kubernetes = {
        "namespace": spec.namespace,
        # They are owned by this pod, and go with it whatever becomes of it.
        "driver.pod.name": "$(POD_NAME)",
        "authenticate.executor.serviceAccountName": _account(spec),
        "container.image": one.image,
        "executor.request.cores": executors.cpu,
    }
    if spec.pull_policy:
        kubernetes["container.image.pullPolicy"] = spec.pull_policy
    if spec.pull_secrets:
        kubernetes["container.image.pullSecrets"] = ",".join(spec.pull_secrets)
    # Networks that let only some clients in know them by their labels.
    labels = {**spec.names.labels(REPORT), REPORT_LABEL: one.name}
    kubernetes |= {f"executor.label.{key}": value for key, value in labels.items()}
    return {
        "spark.driver.host": "$(POD_IP)",
        "spark.executor.cores": str(max(1, math.ceil(parse_quantity(executors.cpu)))),
        "spark.executor.memory": f"{heap}m",
        "spark.executor.memoryOverhead": f"{memory - heap}m",
        **{f"spark.kubernetes.{key}": value for key, value in kubernetes.items()},
    }


def _environment(spec: ClusterSpec, one: LagReport) -> list[Manifest]:
    at = spec.names.proxy_endpoint
    made = [variable("POPMQ_ENDPOINT", f"tls://{at}" if _encrypted(spec) else at)]
    if _encrypted(spec):
        made.append(variable("POPMQ_TLS_CA", f"{TLS_FOLDER}/ca.crt"))
    if one.executors is not None:
        fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
        made += [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ]
    return made


def _account(spec: ClusterSpec) -> str:
    """One without rights."""
    return f"{spec.name}-popmq"


def _encrypted(spec: ClusterSpec) -> bool:
    """Where the proxies take nothing else."""
    return spec.tls.mode != "Disabled" and not spec.tls.plain_text
