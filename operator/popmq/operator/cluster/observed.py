"""What there is: a cluster's objects and what the controllers say, as the plan looks at them.

Everything is made from plain objects of one look; nothing is remembered from an earlier one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from popmq.operator.cluster.admin_stage import AdminStage
from popmq.operator.cluster.charges import NOBODY, Charge
from popmq.operator.cluster.process_tls_stage import ProcessTlsStage
from popmq.operator.cluster.secret_stage import SecretStage
from popmq.operator.cluster.users_stage import UsersStage
from popmq.operator.model.certificates import SecretData
from popmq.operator.model.manifest import Manifest, ResourceKind, at, condition, name_of
from popmq.operator.model.names import (
    FENCED_LABEL,
    GROUP_LABEL,
    POD_RESTART_ANNOTATION,
    TEMPLATE_ANNOTATION,
    ObjectNames,
)


@dataclass(frozen=True, slots=True)
class Pod:
    """A broker's pod. `works` is false for one whose container runs nothing at all."""

    name: str
    uid: str
    ordinal: int
    template: str
    ready: bool
    works: bool
    is_deleting: bool  # told to go, not gone
    fenced: bool
    restart: bool  # somebody asked for this one to be restarted
    image: str = ""

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "Pod":
        metadata = manifest["metadata"]
        annotations = metadata.get("annotations") or {}
        states = at(manifest, "status", "containerStatuses") or []
        return cls(
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            ordinal=int(metadata["name"].rpartition("-")[2]),
            template=annotations.get(TEMPLATE_ANNOTATION, ""),
            ready=condition(manifest, "Ready") == "True",
            works=condition(manifest, "Ready") == "True"
            or any((state.get("state") or {}).get("running") for state in states),
            is_deleting="deletionTimestamp" in metadata,
            fenced=(metadata.get("labels") or {}).get(FENCED_LABEL) == "true",
            restart=annotations.get(POD_RESTART_ANNOTATION) == "true",
            image=str((at(manifest, "spec", "containers") or [{}])[0].get("image", "")),
        )


@dataclass(frozen=True, slots=True)
class GroupSet:
    """A broker group's StatefulSet. `settled`: its controller has seen the newest spec."""

    index: int
    name: str
    replicas: int
    template: str
    size: str
    settled: bool
    is_deleting: bool

    @classmethod
    def from_manifest(cls, manifest: Manifest, index: int) -> "GroupSet":
        spec, metadata = manifest["spec"], manifest["metadata"]
        annotations = at(spec, "template", "metadata", "annotations") or {}
        claims = spec.get("volumeClaimTemplates") or [{}]
        size = at(claims[0], "spec", "resources", "requests", "storage") or ""
        seen = at(manifest, "status", "observedGeneration") or 0
        return cls(
            index=index,
            name=metadata["name"],
            replicas=spec.get("replicas", 1),
            template=annotations.get(TEMPLATE_ANNOTATION, ""),
            size=str(size),
            settled=seen >= metadata.get("generation", 0),
            is_deleting="deletionTimestamp" in metadata,
        )


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A broker's volume claim: asked for, and as large as it is."""

    name: str
    index: int
    asked: str
    capacity: str
    class_name: str

    @classmethod
    def from_manifest(cls, manifest: Manifest, index: int) -> "VolumeClaim":
        return cls(
            name=name_of(manifest),
            index=index,
            asked=str(at(manifest, "spec", "resources", "requests", "storage") or "0"),
            capacity=str(at(manifest, "status", "capacity", "storage") or "0"),
            class_name=at(manifest, "spec", "storageClassName") or "",
        )


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """What a controller says of a broker group. Brokers are called like their pods."""

    master: str = ""
    epoch: int = 0
    in_sync: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    trouble: str = ""
    draining: bool = False
    solo: bool = False  # one broker that nobody elects
    owner: bool = False  # it owns topics and groups, and cannot be removed


@dataclass(frozen=True, slots=True)
class DrainState:
    """What is left in a broker group that goes: nothing, or a sentence about it."""

    done: bool
    rest: str


@dataclass(frozen=True, slots=True)
class Observed:
    """`health` is None when no controller answers. `objects` are what we own, by kind and name."""

    objects: Mapping[tuple[ResourceKind, str], Manifest] = field(default_factory=dict)
    sets: Mapping[int, GroupSet] = field(default_factory=dict)
    pods: Mapping[int, Sequence[Pod]] = field(default_factory=dict)
    claims: Mapping[int, Sequence[VolumeClaim]] = field(default_factory=dict)
    growing_classes: frozenset[str] = frozenset()  # storage classes whose volumes may grow
    health: Mapping[str, GroupHealth] | None = None
    drained: Mapping[str, DrainState] = field(default_factory=dict)
    secrets: Mapping[str, SecretData] = field(default_factory=dict)
    charge: Charge = NOBODY
    secret_stage: SecretStage = field(default_factory=SecretStage)
    tls_stage: ProcessTlsStage = field(default_factory=ProcessTlsStage)
    users_stage: UsersStage = field(default_factory=UsersStage)
    admin_stage: AdminStage = field(default_factory=AdminStage)
    console_pods: Sequence[Manifest] = ()


def group_sets(names: ObjectNames, manifests: Sequence[Manifest]) -> dict[int, GroupSet]:
    found_group_sets = {}
    for manifest in manifests:
        index = names.index_of_set(name_of(manifest))
        if index is not None:
            found_group_sets[index] = GroupSet.from_manifest(manifest, index)
    return found_group_sets


def by_group(names: ObjectNames, manifests: Sequence[Manifest]) -> dict[int, list[Manifest]]:
    """Pods or claims by the index of their broker group, in the order of their names."""
    found_group: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        label = (at(manifest, "metadata", "labels") or {}).get(GROUP_LABEL, "")
        index = names.index_of_set(f"{names.cluster}-{label}")
        if index is not None:
            found_group.setdefault(index, []).append(manifest)
    for group in found_group.values():
        group.sort(key=lambda manifest: int(name_of(manifest).rpartition("-")[2]))
    return found_group
