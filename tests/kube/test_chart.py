"""The Helm chart: of one mind with crds/ and deploy/, and what helm makes of it."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.processes import Role
from kube.control_plane import ROOT, ControlPlane, find_assets
from kube.running import given
from programs import run_program

CHART = ROOT / "charts" / "popmq"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def test_the_charts_definitions_are_those_of_crds() -> None:
    for path in (ROOT / "crds").glob("*.yaml"):
        assert (CHART / "definitions" / path.name).read_bytes() == path.read_bytes()
    shipped = list((CHART / "definitions").glob("*"))
    assert len(shipped) == len(list((ROOT / "crds").glob("*.yaml")))
    # Helm installs those of this folder once, and never again.
    assert not (CHART / "crds").exists()


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    for part, below in values.items():
        known = schema["properties"][part]["properties"]
        assert set(below) == set(known), part


def helm(*arguments: str, ok: bool = True) -> str:
    done = run_program([find_assets() / "helm", *arguments], timeout=120, cwd=ROOT)
    assert not ok or done.returncode == 0, done.stderr
    return done.stdout + ("" if ok else done.stderr)


@pytest.mark.heavy
def test_the_chart_passes_helms_own_checks() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.heavy
def test_the_plain_manifests_are_what_the_chart_renders() -> None:
    done = run_program(
        ["bash", "tools/render-manifests.sh"],
        env={**os.environ, "HELM": str(find_assets() / "helm")},
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    shipped = (ROOT / "deploy" / "operator.yaml").read_text(encoding="utf-8")
    assert done.stdout == shipped, "make manifests renders them again"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("operator.replicas=0", "replicas"),
        ("operator.replicaz=2", "replicaz"),
        ("cluster.name=Bad_Name", "name"),
    ],
)
def test_values_that_cannot_be_are_refused(value: str, message: str) -> None:
    answer = helm("template", "x", str(CHART), "--kube-version=1.34.0", "--set", value, ok=False)
    assert message in answer
    assert "values don't meet the specifications" in answer


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("values", "count", "kept"),
    [
        ("crds.enabled=true", 5, True),
        ("crds.keep=false", 5, False),
        ("crds.enabled=false", 0, False),
    ],
)
def test_the_definitions_are_the_charts_by_value(values: str, count: int, kept: bool) -> None:
    rendered = helm("template", "x", str(CHART), "--kube-version=1.34.0", "--set", values)
    definitions = {
        item["metadata"]["name"]: item
        for item in yaml.safe_load_all(rendered)
        if item and item["kind"] == "CustomResourceDefinition"
    }
    assert len(definitions) == count
    for path in (ROOT / "crds").glob("*.yaml") if count else ():
        source = yaml.safe_load(path.read_text(encoding="utf-8"))
        definition = definitions[source["metadata"]["name"]]
        assert definition["spec"] == source["spec"]
        annotations = definition["metadata"].get("annotations", {})
        assert (annotations.get("helm.sh/resource-policy") == "keep") is kept


@pytest.mark.heavy
def test_dashboards_and_alerts_are_the_charts_by_value() -> None:
    asked = ("monitoring.dashboards.enabled=true", "monitoring.alerts.enabled=true")
    given = [word for item in asked for word in ("--set", item)]
    reported_helm = helm("template", "x", str(CHART), "--kube-version=1.34.0", *given)
    created = [item for item in yaml.safe_load_all(reported_helm) if item]
    shown = {
        name: json.loads(text)
        for manifest in created
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in manifest["data"].items()
    }
    files = (ROOT / "monitoring" / "dashboards").glob("*.json")
    assert shown == {f"popmq-{path.name}": json.loads(path.read_text()) for path in files}
    (alerts,) = (manifest["spec"] for manifest in created if manifest["kind"] == "PrometheusRule")
    assert alerts == yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())


@pytest.mark.heavy
def test_every_alert_leads_to_a_section_below_the_runbook_url_of_the_values() -> None:
    page = "https://docs.example/reference/alerts.html"
    values = ("alerts.enabled=true", f"alerts.runbookUrl={page}", "podMonitor.enabled=true")
    given = [word for item in values for word in ("--set", f"monitoring.{item}")]
    rendered = helm("template", "mq", str(CHART), "--kube-version=1.34.0", *given)
    kinds = {item["kind"]: item for item in yaml.safe_load_all(rendered) if item}
    urls = [
        rule["annotations"]["runbook_url"]
        for group in kinds["PrometheusRule"]["spec"]["groups"]
        for rule in group["rules"]
    ]
    headings = (ROOT / "docs" / "reference" / "alerts.md").read_text(encoding="utf-8")
    sections = [line[3:].lower() for line in headings.splitlines() if line.startswith("## ")]
    assert urls == [f"{page}#{section}" for section in sections]
    # The operator's pods are those that the monitor selects, and its job is that of the alerts.
    monitor, deployment = kinds["PodMonitor"], kinds["Deployment"]
    template = deployment["spec"]["template"]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert "popmq" in monitor["metadata"]["name"]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        yield plane


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_it_is_installed_upgraded_rolled_back_and_removed(
    plane: ControlPlane,
) -> None:
    for name in ("system", "apps"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        plane.post(
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        )
    where = (f"--kubeconfig={plane.folder}/admin.kubeconfig", "--namespace=system")
    helm("install", "mq", str(CHART), *where, "--wait", "--timeout=90s")
    values = ("--set", "operator.watchNamespaces={apps},monitoring.dashboards.enabled=true")
    helm("upgrade", "mq", str(CHART), *where, *values, "--wait", "--timeout=90s")
    helm("rollback", "mq", "1", *where, "--wait", "--timeout=90s")
    helm("upgrade", "mq", str(CHART), *where, *values, "--wait", "--timeout=90s")
    plane.apply(given("demo", "apps"))
    plane.kubectl("annotate", "bcl", "demo", "-n", "apps", "popmq.io/delete-protection=true")
    plane.wait("the policy", lambda: "is protected" in _delete(plane), limit_s=30)
    helm("uninstall", "mq", *where, "--wait", "--timeout=90s")
    assert plane.get("/apis/popmq.io/v1beta1/namespaces/apps/brokerclusters/demo")
    # The definitions are still those of that release.
    there = (f"--kubeconfig={plane.folder}/admin.kubeconfig", "--namespace=apps", "--wait")
    refused = helm("install", "other", str(CHART), *there, ok=False)
    assert "invalid ownership metadata" in refused
    helm("install", "other", str(CHART), *there, "--take-ownership", "--timeout=90s")
    helm("uninstall", "other", *there, "--timeout=90s")


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_delete", ["Retain", "Delete"])
def test_uninstall_takes_the_charts_cluster_along_although_its_operator_is_gone(
    plane: ControlPlane, tmp_path: Path, on_delete: str
) -> None:
    """As the operator's pods may be before the cluster is deleted."""
    namespace = f"all-{on_delete.lower()}"
    if not plane.items(DEFINITIONS):
        plane.define()
    plane.kubectl("create", "namespace", namespace)
    where = (f"--kubeconfig={plane.folder}/admin.kubeconfig", f"--namespace={namespace}")
    values = (
        "crds.enabled=false,cluster.enabled=true,cluster.spec.brokers.storage.onDelete=" + on_delete
    )
    helm("install", "mq", str(CHART), *where, "--set", values, "--wait", "--timeout=90s")
    settings = {
        "POPMQ_OPERATOR_KUBECONFIG": f"{plane.folder}/admin.kubeconfig",
        "POPMQ_OPERATOR_NAMESPACES": namespace,
        "POPMQ_OPERATOR_LEASE_NAMESPACE": namespace,
        "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
    }
    with Role("operator", ["operator"], folder=tmp_path, settings=settings):
        pods = f"/api/v1/namespaces/{namespace}/pods?labelSelector=popmq.io%2Fcluster%3Dpopmq"
        plane.wait("the brokers", lambda: len(plane.items(pods)) >= 3, limit_s=60)
    begun = time.monotonic()
    helm("uninstall", "mq", *where, "--wait", "--timeout=60s")
    plane.wait("the end of all pods", lambda: plane.items(pods) == [], limit_s=60)
    assert time.monotonic() - begun < 60
    path = f"/apis/popmq.io/v1beta1/namespaces/{namespace}/brokerclusters/popmq"
    assert plane.get(path) is None


def _delete(plane: ControlPlane) -> str:
    request = ("delete", "bcl", "demo", "-n", "apps", "--dry-run=server")
    return plane.kubectl(*request, ok=False)
