"""Reports whose Spark works in pods, on a real API server: what pods there are, and that what they
run makes the report."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.processes import Role
from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.process_node import Image, ProcessNode
from kube.running import Running, given
from kube.sandbox import read_dockerfile, skip_without_root, stage_line
from kube.test_rights import granted, installed, used

from popmq.cli.client import Client
from popmq.operator.model.quantity import parse_quantity
from popmq.operator.reports.report_reconcile import ReportDefaults
from popmq.proxy.api import definition_pb2 as api

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

SENT, ACKED = 30, 10
ROLE = "mq-popmq-operator-system-reports"
IMAGE = "popmq-reports:1"
RUN_S = 400.0
# Addresses that no other test of this machine has, so that ports may be the real ones.
NETWORK = f"127.{16 + os.getpid() // 250 % 200}.{os.getpid() % 250}"


@dataclass
class Site:
    plane: ControlPlane
    node: ProcessNode
    operator: Running
    popmq: Role

    def ours(self, account: str, what: str) -> Object | None:
        return self.plane.get(f"/api/v1/namespaces/apps/{account}/{what}")

    def started(self, role: str) -> list[Object]:
        return [
            manifest for manifest in self.node.started if _label(manifest, "spark-role") == role
        ]

    def executors_now(self) -> list[Object]:
        path = "/api/v1/namespaces/apps/pods?labelSelector=spark-role=executor"
        return self.plane.items(path)


def _label(pod: Object, name: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def _is_wanted(pod: Object) -> bool:
    return bool(_label(pod, "spark-role") or _label(pod, "popmq.io/report"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("pyspark", reason="pip install 'popmq[reports]'")
    skip_without_root()
    folder = tmp_path_factory.mktemp("site")
    plane = ControlPlane(tmp_path_factory.mktemp("kube"), nodes=0, host=f"{NETWORK}.1", port=443)
    proxy = f"{NETWORK}.2"
    flags = ["--data", "data", "--host", proxy, "--port", "8081", "--http-port", "0"]
    settings = {
        "POPMQ_PROXY_ADMIN_LISTEN": f"{proxy}:8082",
        "POPMQ_PROXY_ADMIN_ON_PUBLIC": "true",  # a run that names --endpoint goes there
    }
    names = {
        "kubernetes.default.svc": plane.host,
        "demo-proxy.apps.svc": proxy,
        "demo-admin.apps.svc": proxy,
    }
    try:
        plane.start()
        installed(plane)
        token = plane.kubectl("create", "token", "mq-popmq-operator", "-n", "system").strip()
        reports = ReportDefaults(IMAGE, ROLE)
        with (
            Role("up", ["up", *flags], folder=folder, settings=settings) as popmq,
            ProcessNode(
                plane,
                folder,
                image=_image(),
                network=NETWORK,
                names=names,
                accepts=_is_wanted,
            ) as node,
        ):
            _work(popmq.ready.endpoint)
            operator = Running(plane, plane.access_as(token), reports=reports)
            yield Site(plane, node, operator, popmq)
    finally:
        plane.stop()


def _image() -> Image:
    """As the Dockerfile says."""
    environment: dict[str, str] = {}
    entry_point: list[str] = []
    for stage in stage_line(read_dockerfile(ROOT / "Dockerfile"), "reports"):
        for word, rest in stage.steps:
            if word == "ENV":
                pairs = [pair.partition("=") for pair in rest.split()]
                environment |= {key: value for key, _, value in pairs}
            elif word == "ENTRYPOINT":
                entry_point = json.loads(rest)
    return Image(entry_point, environment)


def _work(endpoint: str) -> None:
    topic = api.Resource(name="orders")
    with Client(endpoint) as client:
        for number in range(SENT):
            properties = api.SystemProperties(
                message_id=f"m{number}", body_encoding=api.IDENTITY, message_type=api.NORMAL
            )
            client.send(api.Message(topic=topic, body=b"x", system_properties=properties))
        left = ACKED
        while left:
            got = client.receive(
                "readers",
                api.MessageQueue(topic=topic),
                limit=left,
                wait_ms=500,
                invisible_ms=600_000,
            )
            client.ack("readers", "orders", got)
            left -= len(got)


def _told(text: str) -> Any:
    """The report that a driver printed."""
    (line,) = [name for name in text.splitlines() if name.startswith("{")]
    return json.loads(line)


def showcase_report() -> Object:
    """The spec of the LagReport in deploy/showcase.yaml."""
    documents = yaml.safe_load_all((ROOT / "deploy" / "showcase.yaml").read_text(encoding="utf-8"))
    (spec,) = [document["spec"] for document in documents if document["kind"] == "LagReport"]
    assert (spec["cluster"], spec["report"]) == ("demo", "lag")
    report: Object = spec
    return report


def _check_executors(
    pods: list[Object], owner: Object, *, account: str, cpu: str, memory: str
) -> None:
    for pod in pods:
        assert pod["spec"]["serviceAccountName"] == account
        assert pod["spec"]["automountServiceAccountToken"] is False
        (reference,) = pod["metadata"]["ownerReferences"]
        assert (reference["kind"], reference["uid"]) == ("Pod", owner["metadata"]["uid"])
        (container,) = pod["spec"]["containers"]
        assert container["image"] == IMAGE
        assert container["args"] == ["executor"]
        resources = container["resources"]
        assert parse_quantity(resources["requests"]["cpu"]) == parse_quantity(cpu)
        for kind in ("requests", "limits"):
            assert parse_quantity(resources[kind]["memory"]) == parse_quantity(memory), resources
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_lag_report_makes_executors_replaces_one_that_is_lost_and_takes_them_along(
    site: Site,
) -> None:
    plane = site.plane
    executors = showcase_report()["executors"]
    body = {"apiVersion": "popmq.io/v1beta1", "kind": "LagReport"}
    metadata = {"name": "hourly", "namespace": "apps"}
    spec = {"cluster": "demo", "executors": executors, "arguments": ["--json"]}
    spec["output"] = {"volumeClaim": "pages"}
    spec["schedule"] = "0 0 29 2 *"  # the run below is the only one, also at a full hour
    plane.apply(
        {
            **{"apiVersion": "v1", "kind": "PersistentVolumeClaim"},
            "metadata": {"name": "pages", "namespace": "apps"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
    )
    plane.apply({**body, "metadata": metadata, "spec": spec})
    plane.apply(given("demo", "apps", proxies={"replicas": 1}))
    cron_job = "/apis/batch/v1/namespaces/apps/cronjobs/demo-report-hourly"
    site.operator.look_until("demo", "apps", lambda: plane.get(cron_job) is not None)
    plane.kubectl("create", "job", "run", "--from=cronjob/demo-report-hourly", "-n", "apps")
    plane.wait("an executor", lambda: site.started("executor") or _has_ended(plane), limit_s=RUN_S)
    for lost in site.started("executor")[:1]:
        site.node.kill(lost)
    plane.wait("the run", lambda: _has_ended(plane), limit_s=RUN_S)
    driver = next(
        manifest for manifest in site.node.started if _label(manifest, "job-name") == "run"
    )
    name = driver["metadata"]["name"]
    assert _job(plane).get("succeeded") == 1, site.node.log(name)
    assert not _job(plane).get("failed"), site.node.log(name)

    report = _told(site.node.said(name))
    (row,) = report["groups"]
    assert (row["group"], row["topic"]) == ("readers", "orders")
    assert (row["lag"], row["ready"], row["in_flight"]) == (SENT - ACKED, SENT - ACKED, 0)

    assert driver["spec"]["serviceAccountName"] == "demo-report-hourly"
    pods = site.started("executor")
    assert len(pods) == 3, "the one that was lost was not replaced"
    _check_executors(pods, driver, account="demo-popmq", cpu="500m", memory="1Gi")
    for pod in pods:
        assert _label(pod, "popmq.io/cluster") == "demo"
        assert _label(pod, "app.kubernetes.io/component") == "report"
        assert _label(pod, "popmq.io/report") == "hourly"
    plane.wait("the executors to go", lambda: site.executors_now() == [], limit_s=60)

    # What stays when the run is deleted: the page, and the figures in the status.
    path = "/apis/popmq.io/v1beta1/namespaces/apps/lagreports/hourly"
    site.operator.look_until(
        "demo", "apps", lambda: "verdict" in (plane.get(path) or {}).get("status", {})
    )
    plane.kubectl("delete", "job", "run", "-n", "apps")
    plane.wait("the run's pod to go", lambda: site.ours("pods", name) is None, limit_s=60)
    site.operator.look_until("demo", "apps", lambda: True)
    status = (plane.get(path) or {})["status"]
    assert (status["groups"], status["failing"], status["lag"]) == (1, 0, SENT - ACKED)
    (worst,) = status["worst"]
    assert (worst["group"], worst["topic"], worst["verdict"]) == (
        *("readers", "orders"),
        status["verdict"],
    )
    page = site.node.claim("pages") / "hourly" / "lag.html"
    assert "readers" in page.read_text(encoding="utf-8")
    print(plane.kubectl("get", "lagreports", "-n", "apps"))

    role = plane.get(f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{ROLE}")
    assert role is not None
    asked = used(plane, "system:serviceaccount:apps:demo-report-hourly")
    assert asked == {"apps": granted(role)}


def _job(plane: ControlPlane) -> Object:
    status: Object = (plane.get("/apis/batch/v1/namespaces/apps/jobs/run") or {}).get(
        "status"
    ) or {}
    return status


def _has_ended(plane: ControlPlane) -> bool:
    kinds = {condition["type"] for condition in _job(plane).get("conditions") or []}
    return bool(kinds & {"Complete", "Failed"})


def test_spark_submit_makes_a_driver_that_makes_executors_and_the_report_comes_out(
    site: Site, tmp_path: Path
) -> None:
    plane, before = site.plane, len(site.started("executor"))
    plane.kubectl("create", "serviceaccount", "reports", "-n", "apps")
    binding = ("--clusterrole", ROLE, "--serviceaccount=apps:reports", "-n", "apps")
    plane.kubectl("create", "rolebinding", "reports", *binding)
    conf = {
        "spark.kubernetes.namespace": "apps",
        "spark.kubernetes.container.image": IMAGE,
        "spark.kubernetes.authenticate.driver.serviceAccountName": "reports",
        "spark.kubernetes.driver.podTemplateFile": str(ROOT / "deploy" / "report-driver.yaml"),
        "spark.kubernetes.driver.label.team": "shop",
        "spark.kubernetes.driver.request.cores": "250m",
        "spark.driver.memory": "600m",
        "spark.executor.instances": "1",
        "spark.executor.memory": "600m",
        "spark.executor.memoryOverhead": "424m",
        "spark.kubernetes.executor.request.cores": "500m",
    }
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [
            programs / "spark-submit",
            *("--master", f"k8s://{plane.url}", "--deploy-mode", "cluster", "--name", "revive"),
            *(word for key, value in conf.items() for word in ("--conf", f"{key}={value}")),
            "local:///opt/popmq/bin/popmq-report.py",
            *("revive", "--endpoint", "demo-proxy.apps.svc:8081", "--json"),
        ],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",  # as when the environment is active
            "KUBECONFIG": str(plane.folder / "admin.kubeconfig"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    (driver,) = site.started("driver")
    name = driver["metadata"]["name"]
    now = site.ours("pods", name)
    assert now is not None
    # The exit status of spark-submit says nothing of the driver's.
    assert now["status"]["phase"] == "Succeeded", site.node.log(name)

    (row,) = _told(site.node.said(name))["groups"]
    assert (row["group"], row["topic"]) == ("readers", "orders")
    assert (row["delivered"], row["acked"], row["retried"]) == (ACKED, ACKED, 0)

    assert driver["spec"]["serviceAccountName"] == "reports"
    assert _label(driver, "team") == "shop"
    (container,) = driver["spec"]["containers"]
    assert (container["image"], container["args"][0]) == (IMAGE, "driver")
    assert parse_quantity(container["resources"]["requests"]["cpu"]) == parse_quantity("250m")
    pods = site.started("executor")[before:]
    assert len(pods) == 1
    _check_executors(pods, driver, account="reports", cpu="500m", memory="1Gi")
    plane.wait("the executors to go", lambda: site.executors_now() == [], limit_s=60)
    # What was made for the driver is owned by it.
    plane.kubectl("delete", "pod", name, "-n", "apps")
    for kind in ("services", "configmaps"):
        path = f"/api/v1/namespaces/apps/{kind}?labelSelector=spark-app-selector"
        plane.wait(kind, lambda path=path: plane.items(path) == [], limit_s=60)
    used(plane, "system:serviceaccount:apps:reports")  # nothing was refused
