"""The Helm chart: of one mind with crds/ and deploy/, and what helm makes of it."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
import yaml
from kube.control_plane import ROOT, ControlPlane, find_assets
from kube.running import given

CHART = ROOT / "charts" / "popmq"


def test_the_charts_definitions_are_those_of_crds() -> None:
    for path in (ROOT / "crds").glob("*.yaml"):
        assert (CHART / "crds" / path.name).read_bytes() == path.read_bytes()
    assert len(list((CHART / "crds").glob("*"))) == len(list((ROOT / "crds").glob("*.yaml")))


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    for part, below in values.items():
        known = schema["properties"][part]["properties"]
        assert set(below) == set(known), part


def helm(*arguments: str, ok: bool = True) -> str:
    done = subprocess.run(
        [find_assets() / "helm", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert not ok or done.returncode == 0, done.stderr
    return done.stdout + ("" if ok else done.stderr)


@pytest.mark.heavy
def test_the_chart_passes_helms_own_checks() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.heavy
def test_the_plain_manifests_are_what_the_chart_renders() -> None:
    done = subprocess.run(
        ["bash", "tools/render-manifests.sh"],
        capture_output=True,
        text=True,
        env={**os.environ, "HELM": str(find_assets() / "helm")},
        timeout=120,
        check=True,
        cwd=ROOT,
    )
    shipped = (ROOT / "deploy" / "operator.yaml").read_text(encoding="utf-8")
    assert done.stdout == shipped, "make manifests renders them again"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("operator.replicas=0", "replicas"),
        ("operator.replicaz=2", "replicaz"),
        ("cluster.name=Bad_Name", "name"),
    ],
)
def test_values_that_cannot_be_are_refused(value: str, said: str) -> None:
    answer = helm("template", "x", str(CHART), "--kube-version=1.34.0", "--set", value, ok=False)
    assert said in answer
    assert "values don't meet the specifications" in answer


@pytest.mark.heavy
def test_dashboards_and_alerts_are_the_charts_by_value() -> None:
    asked = ("monitoring.dashboards.enabled=true", "monitoring.alerts.enabled=true")
    given = [word for one in asked for word in ("--set", one)]
    told = helm("template", "x", str(CHART), "--kube-version=1.34.0", *given)
    made = [one for one in yaml.safe_load_all(told) if one]
    shown = {
        name: json.loads(text)
        for one in made
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in one["data"].items()
    }
    files = (ROOT / "monitoring" / "dashboards").glob("*.json")
    assert shown == {f"popmq-{path.name}": json.loads(path.read_text()) for path in files}
    (alerts,) = (one["spec"] for one in made if one["kind"] == "PrometheusRule")
    assert alerts == yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("kube"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


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


def _delete(plane: ControlPlane) -> str:
    request = ("delete", "bcl", "demo", "-n", "apps", "--dry-run=server")
    return plane.kubectl(*request, ok=False)
