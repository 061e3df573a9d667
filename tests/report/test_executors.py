"""What pods that Spark makes are asked to run, and the template that they are made from."""

from pathlib import Path

import pytest
import yaml

from popmq.common.errors import Refused
from popmq.reports.executors import (
    IMAGE,
    TEMPLATE,
    driver_command,
    executor_command,
    executor_settings,
    pod_template,
)

ROOT = Path(__file__).resolve().parents[2]
SPARK = Path("/opt/spark")
# As Spark's BasicExecutorFeatureStep gives them to the container.
GIVEN = {
    "JAVA_HOME": "/java",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.7:7078",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "614m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_ID": "4",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.8",
    "SPARK_EXECUTOR_POD_NAME": "lag-exec-4",
    **{f"SPARK_JAVA_OPT_{number}": f"-Dn={number}" for number in (10, 2, 0)},
}


def test_an_executors_process_is_sparks_backend_with_what_the_environment_says() -> None:
    command = executor_command(SPARK, GIVEN)
    assert command[:6] == ["/java/bin/java", "-Dn=0", "-Dn=2", "-Dn=10", "-Xms614m", "-Xmx614m"]
    assert command[6:9] == [
        *("-cp", "/opt/spark/jars/*"),
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
    ]
    assert dict(zip(command[9::2], command[10::2], strict=True)) == {
        "--driver-url": GIVEN["SPARK_DRIVER_URL"],
        "--executor-id": "4",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.8",
        "--resourceProfileId": "0",
        "--podName": "lag-exec-4",
    }


def test_settings_and_further_classes_go_before_sparks_own() -> None:
    more = {"SPARK_CONF_DIR": "/opt/spark/conf", "SPARK_EXTRA_CLASSPATH": "/more.jar"}
    command = executor_command(SPARK, {**GIVEN, **more})
    paths = command[command.index("-cp") + 1]
    assert paths == "/opt/spark/conf:/more.jar:/opt/spark/jars/*"


def test_a_drivers_process_is_a_spark_submit_that_starts_it_where_it_is() -> None:
    words = ("--properties-file", "/opt/spark/conf/spark.properties", "local:///x.py", "lag")
    command = driver_command(SPARK, {"SPARK_DRIVER_BIND_ADDRESS": "10.0.0.7"}, words)
    assert command[0] == "/opt/spark/bin/spark-submit"
    assert "spark.driver.bindAddress=10.0.0.7" in command
    assert command[-6:] == ["--deploy-mode", "client", *words]


def test_executors_pods_are_those_that_pod_security_restricted_admits() -> None:
    shipped = yaml.safe_load((ROOT / "deploy" / "report-driver.yaml").read_text(encoding="utf-8"))
    for pod in (pod_template()["spec"], shipped["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    assert pod_template()["spec"]["automountServiceAccountToken"] is False


def test_of_the_secret_that_proxies_are_trusted_by_executors_see_no_key(tmp_path: Path) -> None:
    settings = executor_settings({IMAGE: "x"}, tmp_path, "demo-tls")
    assert settings["spark.executorEnv.POPMQ_TLS_CA"] == "/etc/popmq-tls/ca.crt"
    pod = yaml.safe_load(Path(settings[TEMPLATE]).read_text(encoding="utf-8"))["spec"]
    (volume,) = (volume for volume in pod["volumes"] if "secret" in volume)
    assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_executors_get_their_user_by_reference_to_its_secret(tmp_path: Path) -> None:
    settings = executor_settings({IMAGE: "x"}, tmp_path, "", "reporter")
    reference = "spark.kubernetes.executor.secretKeyRef"
    assert settings[f"{reference}.POPMQ_ACCESS_KEY"] == "reporter:access_key"
    assert settings[f"{reference}.POPMQ_SECRET"] == "reporter:secret"
    assert not any(
        key.startswith(reference) for key in executor_settings({IMAGE: "x"}, tmp_path, "")
    )


def test_a_template_that_somebody_gives_goes_before_ours(tmp_path: Path) -> None:
    settings = executor_settings({IMAGE: "x", TEMPLATE: "/mine.yaml"}, tmp_path, "")
    assert TEMPLATE not in settings
    assert list(tmp_path.iterdir()) == []


def test_executors_without_an_image_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=IMAGE):
        executor_settings({}, tmp_path, "")
