"""Whether there is what the spec asks for: nothing else, nothing twice, nothing left out."""

import json
from typing import Any

from kube.control_plane import ControlPlane
from kube.world import NOW, is_ready

from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.model.manifest import (
    CLAIM,
    POD,
    SECRET,
    Manifest,
    ResourceKind,
    kind_of,
    name_of,
)
from popmq.operator.model.names import BROKER, CLUSTER_LABEL, FIELD_MANAGER, ROLE_LABEL
from popmq.operator.model.spec import read_spec

IMAGE = "popmq:1"  # of the tests' operators
COMPARED = ("spec", "data", "rules", "subjects", "roleRef")


def check_whole(plane: ControlPlane, namespace: str, name: str) -> None:
    """Of a cluster that has settled."""
    given = plane.get(f"/apis/popmq.io/v1beta1/namespaces/{namespace}/brokerclusters/{name}")
    assert given is not None
    spec = read_spec(given, default_image=IMAGE)
    wanted = desired(spec, first_shapes(spec), ClusterInputs(NOW))
    own = f"{CLUSTER_LABEL}={name}"
    kinds = {kind_of(one) for one in wanted}
    found = {(kind, one) for kind in kinds for one in _names(plane, kind, namespace, own)}
    assert found == {(kind_of(one), name_of(one)) for one in wanted}
    brokers = f"{own},{ROLE_LABEL}={BROKER}"
    pods = [
        spec.names.pod(index, ordinal)
        for index in range(spec.brokers.groups)
        for ordinal in range(spec.brokers.replicas)
    ]
    assert _names(plane, POD, namespace, brokers) == pods
    assert {f"data-{pod}" for pod in pods} <= {*_names(plane, CLAIM, namespace, brokers)}
    for one in _listed(plane, POD, namespace, brokers):
        assert is_ready(one), name_of(one)
        assert one["spec"]["containers"][0]["image"] == spec.image
    _check_contents(plane, [one for one in wanted if kind_of(one) != SECRET])


def _check_contents(plane: ControlPlane, wanted: list[Manifest]) -> None:
    """What would change if it were applied once more: nothing."""
    as_operator = ("--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}")
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": wanted})
    told = plane.kubectl(
        "apply", *as_operator, "--dry-run=server", "-o", "json", "-f", "-", given=given
    )
    for one in json.loads(told)["items"]:
        now = plane.get(kind_of(one).path(one["metadata"]["namespace"], name_of(one)))
        assert now is not None
        for part in COMPARED:
            assert _counted(now, part) == _counted(one, part), (name_of(one), part)


def _counted(one: Manifest, part: str) -> Any:
    return json.dumps(one.get(part), sort_keys=True)


def _names(plane: ControlPlane, kind: ResourceKind, namespace: str, selector: str) -> list[str]:
    return sorted(name_of(one) for one in _listed(plane, kind, namespace, selector))


def _listed(
    plane: ControlPlane, kind: ResourceKind, namespace: str, selector: str
) -> list[Manifest]:
    return plane.items(f"{kind.path(namespace)}?labelSelector={selector}")
