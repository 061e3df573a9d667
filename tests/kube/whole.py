"""Whether there is what the spec asks for: nothing else, nothing twice, nothing left out."""

import json
from typing import Any

from kube.control_plane import ControlPlane
from kube.world import NOW, is_ready

from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.model.manifest import (
    CLAIM,
    CONFIG_MAP,
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
    expected = desired(spec, first_shapes(spec), ClusterInputs(NOW))
    own = f"{CLUSTER_LABEL}={name}"
    kinds = {kind_of(item) for item in expected}
    found_kinds = {(kind, text) for kind in kinds for text in _names(plane, kind, namespace, own)}
    assert found_kinds == {(kind_of(item), name_of(item)) for item in expected}
    brokers = f"{own},{ROLE_LABEL}={BROKER}"
    pods = [
        spec.names.pod(index, ordinal)
        for index in range(spec.brokers.groups)
        for ordinal in range(spec.brokers.replicas)
    ]
    assert _names(plane, POD, namespace, brokers) == pods
    assert {f"data-{pod}" for pod in pods} <= {*_names(plane, CLAIM, namespace, brokers)}
    for manifest in _listed(plane, POD, namespace, brokers):
        assert is_ready(manifest), name_of(manifest)
        assert manifest["spec"]["containers"][0]["image"] == spec.image
    random = {(CONFIG_MAP, spec.names.authority)}
    random |= {(SECRET, name_of(item)) for item in expected if kind_of(item) == SECRET}
    fixed = [item for item in expected if (kind_of(item), name_of(item)) not in random]
    _check_contents(plane, fixed)


def _check_contents(plane: ControlPlane, expected: list[Manifest]) -> None:
    """What would change if it were applied once more: nothing."""
    as_operator = ("--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}")
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": expected})
    output = plane.kubectl(
        "apply", *as_operator, "--dry-run=server", "-o", "json", "-f", "-", given=given
    )
    for item in json.loads(output)["items"]:
        now = plane.get(kind_of(item).path(item["metadata"]["namespace"], name_of(item)))
        assert now is not None
        for part in COMPARED:
            assert _counted(now, part) == _counted(item, part), (name_of(item), part)


def _counted(manifest: Manifest, part: str) -> Any:
    return json.dumps(manifest.get(part), sort_keys=True)


def _names(plane: ControlPlane, kind: ResourceKind, namespace: str, selector: str) -> list[str]:
    return sorted(name_of(manifest) for manifest in _listed(plane, kind, namespace, selector))


def _listed(
    plane: ControlPlane, kind: ResourceKind, namespace: str, selector: str
) -> list[Manifest]:
    return plane.items(f"{kind.path(namespace)}?labelSelector={selector}")
