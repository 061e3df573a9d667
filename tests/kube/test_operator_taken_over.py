"""A cluster that an earlier operator made is continued by this one as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.earlier import earlier_tree, python_path
from kube.chart_operator import ChartOperator, install_chart
from kube.control_plane import ControlPlane
from kube.running import given
from kube.voices import Voice

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

# Where a change of what pods are rolls every cluster once, name a commit that has that change.
EARLIER = "f2153b845182e5d18c19df42604c6aa360db92bb"
KINDS = (
    *("api/v1:pods,services,configmaps,secrets,serviceaccounts,persistentvolumeclaims",),
    *("apis/apps/v1:statefulsets,deployments", "apis/policy/v1:poddisruptionbudgets"),
    *("apis/networking.k8s.io/v1:networkpolicies",),
    *("apis/rbac.authorization.k8s.io/v1:roles,rolebindings",),
)


@pytest.fixture
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        install_chart(plane)
        yield plane


def _objects(plane: ControlPlane) -> dict[tuple[str, str], str]:
    """The uid of everything in the namespace, by kind and name."""
    result = {}
    for group in KINDS:
        root, _, plurals = group.partition(":")
        for plural in plurals.split(","):
            for item in plane.items(f"/{root}/namespaces/apps/{plural}"):
                result[plural, item["metadata"]["name"]] = item["metadata"]["uid"]
    return result


def _generations(plane: ControlPlane) -> dict[str, int]:
    """A workload's number goes up when its spec changes."""
    return {
        item["metadata"]["name"]: item["metadata"]["generation"]
        for plural in ("statefulsets", "deployments")
        for item in plane.items(f"/apis/apps/v1/namespaces/apps/{plural}")
    }


def test_an_operator_takes_a_cluster_of_the_one_before_over_and_restarts_nothing(
    plane: ControlPlane, tmp_path: Path
) -> None:
    path = "/apis/popmq.io/v1beta1/namespaces/apps/brokerclusters/demo"

    def is_settled(proxies: int) -> bool:
        manifest = plane.get(path) or {"metadata": {}}
        status = manifest.get("status") or {}
        conditions_by_type = {item["type"]: item for item in status.get("conditions") or []}
        seen = {item["observedGeneration"] for item in conditions_by_type.values()}
        states = [
            conditions_by_type.get(name, {}).get("status") for name in ("Ready", "Progressing")
        ]
        shown = (status.get("summary") or {}).get("proxies")
        return (
            states == ["True", "False"]
            and seen == {manifest["metadata"].get("generation")}
            and shown == f"{proxies}/{proxies}"
        )

    with Voice(plane, "apps", "demo") as voice:
        settings = {"POPMQ_OPERATOR_CONTROLLER_ADDRESS": voice.address}
        earlier = {"PYTHONPATH": python_path(earlier_tree(EARLIER, tmp_path / "earlier"))}
        with ChartOperator(plane, tmp_path, {**settings, **earlier}):
            plane.apply(given("demo", "apps", proxies={"replicas": 2}))
            plane.wait("the cluster", lambda: is_settled(2))
        before, generations = _objects(plane), _generations(plane)
        assert len([name for kind, name in before if kind == "pods"]) == 3 + 2 + 2
        asked = voice.looks
        with ChartOperator(plane, tmp_path, settings):
            plane.wait("its first looks", lambda: voice.looks >= asked + 3)
            assert _objects(plane) == before
            assert _generations(plane) == generations
            plane.apply(given("demo", "apps", proxies={"replicas": 3}))
            plane.wait("another proxy", lambda: is_settled(3))
        after = _objects(plane)
        assert {name: after.get(name) for name in before} == before
        new = [kind for kind, _ in after.keys() - before.keys()]
        assert new == ["pods"]
        changed = {
            name for name, number in _generations(plane).items() if generations[name] != number
        }
        assert changed == {"demo-proxy"}
