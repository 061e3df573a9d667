"""Executors in pods of their own: the further settings of a session on Kubernetes, and how the
image starts what Spark asks it for.

Spark makes executors' pods from a template and calls the entry point of their image with the one
word `executor`, and that of a driver that spark-submit made with `driver` and arguments of its own;
all else is in the environment (docs/concepts/reports.md).
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from popmq.common.errors import Code, Refused
from popmq.common.signing import (
    ACCESS_KEY_FIELD,
    ACCESS_KEY_VARIABLE,
    SECRET_FIELD,
    SECRET_VARIABLE,
)
from popmq.reports.java import java_home

KUBERNETES = "k8s://"
IMAGE = "spark.kubernetes.container.image"
TEMPLATE = "spark.kubernetes.executor.podTemplateFile"
INSTANCES = "spark.executor.instances"
SCRATCH = "4Gi"
_USER = 10001  # as in the Dockerfile
_CA_FOLDER = "/etc/popmq-tls"
_SECRET_REFERENCE = "spark.kubernetes.executor.secretKeyRef"
_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
# With these a driver needs rights on pods alone: executors have their settings in their command
# line, and what is made for a driver goes with its pod.
_PODS_ALONE = {
    "spark.kubernetes.executor.disableConfigMap": "true",
    "spark.kubernetes.driver.service.deleteOnTermination": "false",
    "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
    "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
}


def executor_settings(
    given: Mapping[str, str],
    folder: Path,
    ca_secret: str,
    user_secret: str = "",
    scratch: str = SCRATCH,
) -> dict[str, str]:
    """`given` goes before them, whoever gave it; a template for pods is written to `folder`.
    `user_secret` names the Secret with the user that they are at the proxies."""
    if IMAGE not in given:
        raise Refused(
            Code.BAD_REQUEST,
            f"executors need an image with Spark and popmq: --conf {IMAGE}=popmq-reports:0.1.0",
        )
    new_executor_settings = dict(_PODS_ALONE)
    if TEMPLATE not in given:
        path = folder / "executor.json"
        path.write_text(json.dumps(pod_template(ca_secret, scratch)), encoding="utf-8")
        new_executor_settings[TEMPLATE] = str(path)
    if ca_secret:
        new_executor_settings["spark.executorEnv.POPMQ_TLS_CA"] = f"{_CA_FOLDER}/ca.crt"
    if user_secret:  # by reference: plans and command lines show the values of settings
        for name, key in (
            (ACCESS_KEY_VARIABLE, ACCESS_KEY_FIELD),
            (SECRET_VARIABLE, SECRET_FIELD),
        ):
            new_executor_settings[f"{_SECRET_REFERENCE}.{name}"] = f"{user_secret}:{key}"
    return new_executor_settings


def pod_template(ca_secret: str = "", scratch: str = SCRATCH) -> dict[str, Any]:
    """Pod Security `restricted` admits it; an executor has no business with the API server."""
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {"sizeLimit": scratch}}]
    if ca_secret:
        # Not the key, which the same Secret has.
        items = [{"key": "ca.crt", "path": "ca.crt"}]
        volumes.append({"name": "ca", "secret": {"secretName": ca_secret, "items": items}})
        mounts.append({"name": "ca", "mountPath": _CA_FOLDER})
    container = {
        "name": "executor",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": mounts,
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "spec": pod}


def executor_command(spark: Path, environ: Mapping[str, str]) -> list[str]:
    """Of the process that an executor's container is; `spark` is Spark's folder.

    Names and order as in the entry point that Spark's own images have.
    """
    java = f"{environ['JAVA_HOME']}/bin/java"
    paths = [environ.get(name, "") for name in ("SPARK_CONF_DIR", "SPARK_EXTRA_CLASSPATH")]
    classes = ":".join(filter(None, [*paths, f"{spark}/jars/*"]))
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    named = {
        "driver-url": "SPARK_DRIVER_URL",
        "executor-id": "SPARK_EXECUTOR_ID",
        "cores": "SPARK_EXECUTOR_CORES",
        "app-id": "SPARK_APPLICATION_ID",
        "hostname": "SPARK_EXECUTOR_POD_IP",
        "resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        "podName": "SPARK_EXECUTOR_POD_NAME",
    }
    arguments = [word for flag, name in named.items() for word in (f"--{flag}", environ[name])]
    heap = [f"-Xms{memory}", f"-Xmx{memory}"]
    return [java, *_java_options(environ), *heap, "-cp", classes, _BACKEND, *arguments]


def driver_command(spark: Path, environ: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Of a driver's: a spark-submit that starts it here, with what the one outside has said."""
    address = environ["SPARK_DRIVER_BIND_ADDRESS"]
    settings = ("spark.driver.bindAddress", "spark.executorEnv.SPARK_DRIVER_POD_IP")
    reply = [word for name in settings for word in ("--conf", f"{name}={address}")]
    return [str(spark / "bin" / "spark-submit"), *reply, "--deploy-mode", "client", *arguments]


def _java_options(environ: Mapping[str, str]) -> list[str]:
    """SPARK_JAVA_OPT_0 and so on, one argument each."""
    prefix = "SPARK_JAVA_OPT_"
    numbers = sorted(
        int(name.removeprefix(prefix))
        for name in environ
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    )
    return [environ[f"{prefix}{number}"] for number in numbers]


def exec_spark_role(role: str, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """`driver` or `executor`.  Raises Refused outside of such a pod."""
    import pyspark

    spark = Path(pyspark.__file__).parent
    own = {**environ, "JAVA_HOME": java_home(), "SPARK_HOME": str(spark)}
    own["PYSPARK_PYTHON"] = sys.executable
    try:
        command = (
            driver_command(spark, own, arguments)
            if role == "driver"
            else executor_command(spark, own)
        )
    except KeyError as error:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"popmq {role} is for Spark, which starts it in a pod: {error.args[0]} is not set",
        ) from None
    sys.stdout.flush()
    os.execve(command[0], command, own)
