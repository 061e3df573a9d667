"""The page of the four uses: its commands as they stand, on a real API server.

Its nodes run no containers, so that the controllers of the cluster are simulated, the figures of
its metrics server too, and there are no logs: tests/kube/test_report_pods.py makes the report.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.processes import Role
from kube.chart_operator import ChartOperator, refused_requests
from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.metrics_api import MetricsApi
from kube.test_rights import prometheus_definition
from kube.voices import Voice
from programs import run_program

from popmq.cli.monitoring.alert import all_alerts

PAGE = ROOT / "docs" / "how-to" / "the-four-uses.md"
NEEDS_CONTAINERS = ("kubectl logs ",)
REPORT_ROLE = "popmq-operator-popmq-system-reports"
QUIET, BUSY = "100m", "650m"  # of a proxy that requests 500m: below 65 %, and twice that


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        for kind in ("PodMonitor", "PrometheusRule"):
            plane.apply(prometheus_definition(kind))
        yield plane


class Reader:
    """Runs the page's commands as somebody who administers the Kubernetes cluster."""

    def __init__(self, plane: ControlPlane) -> None:
        self._environment = {
            **os.environ,
            "PATH": f"{plane.assets}:{os.environ['PATH']}",
            "KUBECONFIG": str(plane.folder / "admin.kubeconfig"),
        }
        self.said: dict[str, str] = {}

    def run(self, command: str) -> None:
        done = run_program(["bash", "-c", command], cwd=ROOT, env=self._environment, timeout=330)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.said[command] = done.stdout

    def watch(self, command: str, replicas: str) -> None:
        """Until the autoscaler has so many."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                lines = iter(process.stdout.readline, "")
                assert any(line.split()[-2] == replicas for line in lines), "the watch ended"
            finally:
                process.kill()


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_work_as_they_stand(plane: ControlPlane, tmp_path: Path) -> None:
    before, after = _split(commands(), "kubectl apply -f deploy/showcase.yaml")
    reader = Reader(plane)
    for command in before:
        reader.run(command)
    plane.wait_for_definitions()
    flags = ["up", "--data", str(tmp_path / "data"), "--port", "0", "--http-port", "0"]
    with (
        Role("up", flags, folder=tmp_path, settings={}) as popmq,
        Voice(plane, "default", "demo") as voice,
        MetricsApi(plane, cpu=QUIET) as metrics,
        ChartOperator(plane, tmp_path, _settings(voice.address, popmq.ready.endpoint)) as operator,
    ):
        plane.wait("the operator", lambda: operator.is_ready, limit_s=60)
        for command in after:
            if command.startswith(NEEDS_CONTAINERS):
                continue
            if "--watch" in command:
                reader.watch(command, "4")
                continue
            if " run load " in command:
                metrics.cpu = BUSY
            if command.startswith("kubectl delete -f deploy/showcase-monitoring.yaml"):
                _check_monitoring(plane)
            reader.run(command)
            if " run load " not in command and "hpa" not in command:
                metrics.cpu = QUIET
        pods = "/api/v1/namespaces/default/pods"
        plane.wait("the pods to go", lambda: plane.items(pods) == [], limit_s=60)
    assert refused_requests(plane) == []
    assert "demo-proxy" in reader.said["kubectl get hpa demo-proxy"]
    columns = reader.said["kubectl get lagreport hourly"].splitlines()[-1].split()
    assert columns[:4] == ["hourly", "True", "demo", "lag"]


def _settings(controller: str, proxy: str) -> dict[str, str]:
    return {
        "POPMQ_OPERATOR_RESYNC_MS": "2s",
        "POPMQ_OPERATOR_CONTROLLER_ADDRESS": controller,
        "POPMQ_OPERATOR_PROXY_ADDRESS": proxy,
        "POPMQ_OPERATOR_REPORT_IMAGE": "popmq-reports:0.1.0",
        "POPMQ_OPERATOR_REPORT_ROLE": REPORT_ROLE,
    }


def _split(lines: list[str], at: str) -> tuple[list[str], list[str]]:
    return lines[: lines.index(at)], lines[lines.index(at) :]


def _check_monitoring(plane: ControlPlane) -> None:
    """The monitors select the pods of the cluster and of the operator, by a port that they have."""
    base = "/apis/monitoring.coreos.com/v1/namespaces/default"
    for name, namespace, roles in (
        ("popmq-demo", "default", {"broker", "controller", "proxy"}),
        ("popmq-operator", "popmq-system", {""}),
    ):
        monitor = plane.get(f"{base}/podmonitors/{name}")
        assert monitor is not None
        labels = monitor["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}%3D{value}" for key, value in labels.items())
        pods = plane.items(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")
        scraped = [pod for pod in pods if "http" in _ports(pod)]
        component = "app.kubernetes.io/component"
        assert {pod["metadata"]["labels"].get(component, "") for pod in scraped} == roles
    (rule,) = plane.items(f"{base}/prometheusrules")
    alerts = [item["alert"] for group in rule["spec"]["groups"] for item in group["rules"]]
    assert alerts == [alert.name for alert in all_alerts()]


def _ports(pod: Object) -> set[str]:
    containers = pod["spec"]["containers"]
    return {port.get("name", "") for item in containers for port in item.get("ports", ())}


def test_the_page_names_what_the_files_have() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy" / "showcase.yaml").read_text()))
    kinds = [document["kind"] for document in documents]
    assert kinds == ["BrokerCluster", "Topic", "ConsumerGroup", "LagReport"]
    cluster, *_, report = documents
    assert "autoscaling" in cluster["spec"]["proxies"]
    assert report["spec"]["executors"]["instances"] == 2
    assert len(commands()) > 15
