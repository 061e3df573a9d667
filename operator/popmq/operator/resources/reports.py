"""A LagReport's CronJob: a pod with Spark in it that asks the proxies, and ends with the truth.

Spark runs inside the pod (`local[N]`), or makes pods that do its work and have this one for owner:
then the run has an account with a right to make pods.  The exit status of the command is that of
the report, so the Job's success is the report's.
"""

import math

from popmq.common.settings.settings import OVER_TLS
from popmq.common.signing import (
    ACCESS_KEY_FIELD,
    ACCESS_KEY_VARIABLE,
    SECRET_FIELD,
    SECRET_VARIABLE,
)
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
OUTPUT_FOLDER = "/reports"
# What a run says of its report when it ends, which Kubernetes keeps in the pod's status.
SUMMARY_FILE = "/run/popmq/summary.json"
# Of an executor's memory; Python, which reads and decodes, has the rest.
HEAP_SHARE = 0.6
RESOURCES: Manifest = {
    "requests": {"cpu": "500m", "memory": "1536Mi"},
    "limits": {"memory": "2560Mi"},
}


def cron_job(spec: ClusterSpec, report: LagReport, *, has_ca: bool = True) -> Manifest:
    """`has_ca`: the Secret of the proxies says who signed their certificate.  Without that, the
    authorities of the image are trusted."""
    names = spec.names
    labels = {**names.labels(REPORT), REPORT_LABEL: report.name}
    new_cron_job = make(CRON_JOB, names.report(report.name), spec.namespace, labels)
    new_cron_job["metadata"]["ownerReferences"] = [_owner(report)]
    new_cron_job["spec"] = {
        "schedule": report.schedule,
        "timeZone": report.time_zone,
        "suspend": report.suspend,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": LATE_S,
        "successfulJobsHistoryLimit": max(1, report.keep),  # whose pod says the figures
        "failedJobsHistoryLimit": max(1, report.keep),
        "jobTemplate": {
            "metadata": {"labels": labels},
            "spec": {
                "backoffLimit": 1,
                "activeDeadlineSeconds": report.deadline_s,
                "template": {"metadata": {"labels": labels}, "spec": _pod(spec, report, has_ca)},
            },
        },
    }
    return new_cron_job


def report_access(
    spec: ClusterSpec, report: LagReport, role: str
) -> list[tuple[ResourceKind, Manifest]]:
    """The account of runs that make pods, and what lets it."""
    name = spec.names.report(report.name)
    labels = {**spec.names.labels(REPORT), REPORT_LABEL: report.name}
    account = make(SERVICE_ACCOUNT, name, spec.namespace, labels)
    binding = make(ROLE_BINDING, name, spec.namespace, labels)
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": role,
    }
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": spec.namespace}]
    for new_account in (account, binding):
        new_account["metadata"]["ownerReferences"] = [_owner(report)]
    return [(SERVICE_ACCOUNT, account), (ROLE_BINDING, binding)]


def _owner(report: LagReport) -> Manifest:
    return {
        "apiVersion": LAG_REPORT.api_version,
        "kind": LAG_REPORT.kind,
        "name": report.name,
        "uid": report.manifest["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _pod(spec: ClusterSpec, report: LagReport, has_ca: bool) -> Manifest:
    mounts_ca = has_ca and _encrypted(spec, report)
    container: Manifest = {
        "name": REPORT,
        "image": report.image,
        "args": _arguments(spec, report, mounts_ca),
        "env": _environment(spec, report, mounts_ca),
        "resources": report.resources or RESOURCES,
        "securityContext": container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "terminationMessagePath": SUMMARY_FILE,
    }
    if report.output.secret:
        container["envFrom"] = [{"secretRef": {"name": report.output.secret}}]
    if spec.pull_policy:
        container["imagePullPolicy"] = spec.pull_policy
    alone = report.executors is None
    pod: Manifest = {
        "serviceAccountName": _account(spec) if alone else spec.names.report(report.name),
        "automountServiceAccountToken": not alone,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": report.scratch}}],
    }
    if report.output.claim:
        claim = {"claimName": report.output.claim}
        pod["volumes"].append({"name": "output", "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": "output", "mountPath": OUTPUT_FOLDER})
    if mounts_ca:
        trusted = {"secretName": tls_secret(spec), "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        pod["volumes"].append({"name": "tls", "secret": trusted})
        mount = {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}
        container["volumeMounts"].append(mount)
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    return pod


def _arguments(spec: ClusterSpec, report: LagReport, mounts_ca: bool) -> list[str]:
    arguments = ["report", report.report]
    if report.group:
        arguments += ["--group", report.group]
    if report.topic:
        arguments += ["--topic", report.topic]
    if report.since:
        arguments += ["--since", report.since]
    if report.output.claim or report.output.url:
        base = OUTPUT_FOLDER if report.output.claim else report.output.url
        folder, question, options = base.partition("?")
        arguments += ["--save", f"{folder.rstrip('/')}/{report.name}{question}{options}"]
    if report.output.pushgateway:
        arguments += ["--prometheus", report.output.pushgateway]
    if report.master:
        arguments += ["--master", report.master]
    if report.executors is not None:
        arguments += ["--executors", str(report.executors.instances)]
        arguments += ["--executor-scratch", report.scratch]
        if mounts_ca:
            arguments += ["--executor-ca", tls_secret(spec)]
        if report.user_secret:
            arguments += ["--executor-user", report.user_secret]
        for key, value in _settings(spec, report, report.executors).items():
            arguments += ["--conf", f"{key}={value}"]
    return [*arguments, "--summary", SUMMARY_FILE, *report.arguments]


def _settings(spec: ClusterSpec, report: LagReport, executors: Executors) -> dict[str, str]:
    """Of Spark, with the names of Kubernetes for what is known only in the pod."""
    memory = int(parse_quantity(executors.memory)) // 2**20
    heap = int(memory * HEAP_SHARE)
    kubernetes = {
        "namespace": spec.namespace,
        # They are owned by this pod, and go with it whatever becomes of it.
        "driver.pod.name": "$(POD_NAME)",
        "authenticate.executor.serviceAccountName": _account(spec),
        "container.image": report.image,
        "executor.request.cores": executors.cpu,
    }
    if spec.pull_policy:
        kubernetes["container.image.pullPolicy"] = spec.pull_policy
    if spec.pull_secrets:
        kubernetes["container.image.pullSecrets"] = ",".join(spec.pull_secrets)
    # Networks that let only some clients in know them by their labels.
    labels = {**spec.names.labels(REPORT), REPORT_LABEL: report.name}
    kubernetes |= {f"executor.label.{key}": value for key, value in labels.items()}
    return {
        "spark.driver.host": "$(POD_IP)",
        "spark.executor.cores": str(max(1, math.ceil(parse_quantity(executors.cpu)))),
        "spark.executor.memory": f"{heap}m",
        "spark.executor.memoryOverhead": f"{memory - heap}m",
        **{f"spark.kubernetes.{key}": value for key, value in kubernetes.items()},
    }


def _environment(spec: ClusterSpec, report: LagReport, mounts_ca: bool) -> list[Manifest]:
    scheme = OVER_TLS if _encrypted(spec, report) else ""
    variables = [
        variable("POPMQ_ENDPOINT", f"{scheme}{spec.names.proxy_endpoint}"),
        variable("POPMQ_ADMIN_ENDPOINT", f"{scheme}{spec.names.admin_endpoint}"),
    ]
    if mounts_ca:
        variables.append(variable("POPMQ_TLS_CA", f"{TLS_FOLDER}/ca.crt"))
    if report.user_secret:
        variables += [
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": report.user_secret, "key": key}},
            }
            for name, key in (
                (ACCESS_KEY_VARIABLE, ACCESS_KEY_FIELD),
                (SECRET_VARIABLE, SECRET_FIELD),
            )
        ]
    if report.executors is not None:
        fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
        variables += [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in fields.items()
        ]
    return variables


def _account(spec: ClusterSpec) -> str:
    """One without rights."""
    return f"{spec.name}-popmq"


def _encrypted(spec: ClusterSpec, report: LagReport) -> bool:
    """Where the proxies take nothing else, and where credentials are sent."""
    plain = spec.tls.plain_text and not report.user_secret
    return spec.tls.mode != "Disabled" and not plain
