"""A LagReport's CronJob: a pod with Spark in it that asks the proxies, and ends with the truth.

Spark runs inside the pod (`local[N]`); the exit status of the command is that of the report, so the
Job's success is the report's.
"""

from popmq.operator.lag_reports import LagReport
from popmq.operator.manifest import CRON_JOB, LAG_REPORT, Manifest, make
from popmq.operator.names import REPORT, REPORT_LABEL
from popmq.operator.resources.pods import (
    TLS_FOLDER,
    container_security,
    pod_security,
    variable,
)
from popmq.operator.resources.proxies import tls_secret
from popmq.operator.spec import ClusterSpec

LATE_S = 300  # a run that could not begin within this is left out
LONGEST_S = 3600
RESOURCES: Manifest = {
    "requests": {"cpu": "500m", "memory": "1536Mi"},
    "limits": {"memory": "2560Mi"},
}


def cron_job(spec: ClusterSpec, one: LagReport) -> Manifest:
    names = spec.names
    labels = {**names.labels(REPORT), REPORT_LABEL: one.name}
    made = make(CRON_JOB, names.report(one.name), spec.namespace, labels)
    made["metadata"]["ownerReferences"] = [
        {
            "apiVersion": LAG_REPORT.api_version,
            "kind": LAG_REPORT.kind,
            "name": one.name,
            "uid": one.manifest["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
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


def _pod(spec: ClusterSpec, one: LagReport) -> Manifest:
    container: Manifest = {
        "name": REPORT,
        "image": one.image,
        "args": _arguments(spec, one),
        "env": _environment(spec),
        "resources": one.resources or RESOURCES,
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if spec.pull_policy:
        container["imagePullPolicy"] = spec.pull_policy
    pod: Manifest = {
        "serviceAccountName": f"{spec.name}-popmq",
        "automountServiceAccountToken": False,
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
    return [*made, *one.arguments]


def _environment(spec: ClusterSpec) -> list[Manifest]:
    at = spec.names.proxy_endpoint
    if not _encrypted(spec):
        return [variable("POPMQ_ENDPOINT", at)]
    return [
        variable("POPMQ_ENDPOINT", f"tls://{at}"),
        variable("POPMQ_TLS_CA", f"{TLS_FOLDER}/ca.crt"),
    ]


def _encrypted(spec: ClusterSpec) -> bool:
    """Where the proxies take nothing else."""
    return spec.tls.mode != "Disabled" and not spec.tls.plain_text
