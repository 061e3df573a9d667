"""From what is wanted and what there is to the next steps: the whole decision, pure.

The order of day 2: what a human fenced, volumes, fewer replicas, drained groups, then restarts of
one pod at a time.  A step is taken only when the ones before it have nothing left to do, and the
next look decides anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from popmq.operator.cluster.actions import (
    Action,
    DeleteGroup,
    Drain,
    Fence,
    GrowClaim,
    HandOver,
    RemakeSet,
    Wait,
)
from popmq.operator.cluster.desired import BrokerGroupSize, ClusterInputs, desired
from popmq.operator.cluster.observed import GroupHealth, GroupSet, Observed, Pod, VolumeClaim
from popmq.operator.cluster.rollout import RolloutGroup, hand_over, next_restart, removal_problem
from popmq.operator.model.manifest import STATEFUL_SET, Manifest, kind_of
from popmq.operator.model.names import TEMPLATE_ANNOTATION
from popmq.operator.model.quantity import parse_quantity
from popmq.operator.model.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`objects` are applied, then `actions` done in their order.

    `blocked` says by condition type what cannot be done although the spec asks for it, and why.
    """

    objects: Sequence[Manifest] = ()
    shapes: Sequence[BrokerGroupSize] = ()
    actions: Sequence[Action] = ()
    blocked: dict[str, tuple[str, str]] = field(default_factory=dict)
    growing: bool = False  # volumes are larger on paper than on disk

    @property
    def steps(self) -> list[str]:
        return [str(action) for action in self.actions]


class Planner:
    """One look at one cluster; `plan` is the only thing to call."""

    def __init__(self, spec: ClusterSpec, observed: Observed, around: ClusterInputs) -> None:
        self._spec = replace(
            spec,
            secret_use=observed.secret_stage.use,
            tls_use=observed.tls_stage.use,
            users_use=observed.users_stage.use,
            admin_on_public=observed.admin_stage.on_public,
        )
        self._observed = observed
        self._around = around
        self._actions: list[Action] = []
        self._blocked: dict[str, tuple[str, str]] = {}
        self._growing = False

    def plan(self) -> ClusterPlan:
        self._fences()
        shapes = [shape for index in self._indices() if (shape := self._shape(index)) is not None]
        objects = desired(self._spec, shapes, self._around)
        templates = {
            manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["annotations"][
                TEMPLATE_ANNOTATION
            ]
            for manifest in objects
            if kind_of(manifest) == STATEFUL_SET
        }
        if not self._actions:
            self._restarts(templates)
        return ClusterPlan(objects, shapes, self._actions, self._blocked, self._growing)

    # -- parts of the decision

    def _indices(self) -> list[int]:
        index = set(range(self._spec.brokers.groups))
        return sorted(index | set(self._observed.sets))

    def _shape(self, index: int) -> BrokerGroupSize | None:
        """What may be applied of the group now; None when it is gone, or going."""
        group_set = self._observed.sets.get(index)
        brokers = self._spec.brokers
        desired = index < brokers.groups
        if group_set is None or group_set.is_deleting:
            if not desired:
                return None
            # One that is made again waits until the old one is gone: a name is taken once.
            self._actions.append(Wait(f"{self._spec.names.group_set(index)} is made"))
            fresh = BrokerGroupSize(index, brokers.replicas, brokers.storage.size)
            return None if group_set else fresh
        if not desired:
            return self._removal(index, group_set)
        self._undo_drain(index)
        size = self._storage(index, group_set)
        if size is None:
            return None
        return BrokerGroupSize(index, self._replicas(index, group_set), size)

    def _fences(self) -> None:
        for index, pods in sorted(self._observed.pods.items()):
            for pod in pods:
                if pod.fenced and pod.name not in self._spec.fenced:
                    self._actions.append(Fence(pod.name, lift=True))
                elif pod.name in self._spec.fenced and not pod.fenced and not pod.is_deleting:
                    self._actions.append(self._fence(index, pod))

    def _fence(self, index: int, pod: Pod) -> Action:
        """A master hands over before; one that cannot is cut off all the same."""
        group = self._group(index)
        if group is not None and group.health and group.health.master == pod.name:
            first = hand_over(group, pod, "it is to be fenced", avoid=self._spec.fenced)
            if isinstance(first, HandOver):
                return first
        return Fence(pod.name)

    def _storage(self, index: int, group_set: GroupSet) -> str | None:
        """The claim size to apply; None when the StatefulSet has to go first."""
        size = self._spec.brokers.storage.size
        target, now = parse_quantity(size), parse_quantity(group_set.size or "0")
        claims = self._observed.claims.get(index, ())
        if any(parse_quantity(claim.capacity) < parse_quantity(claim.asked) for claim in claims):
            self._growing = True
        if target < now:
            why = f"brokers.storage.size = {size}: volumes have {group_set.size} and cannot shrink"
            self._blocked["StorageBlocked"] = ("CannotShrink", why)
            return group_set.size
        small = [claim for claim in claims if parse_quantity(claim.asked) < target]
        if small:
            self._grow(small, size)
        elif target > now and claims:
            self._actions.append(RemakeSet(group_set.name, size))
            return None
        return group_set.size

    def _grow(self, claims: Sequence[VolumeClaim], size: str) -> None:
        for claim in claims:
            if claim.class_name in self._observed.growing_classes:
                self._actions.append(GrowClaim(claim.name, size))
                self._growing = True
            else:
                why = (
                    f"storage class {claim.class_name or '(none)'} of {claim.name} does not allow "
                    f"volumes to grow (allowVolumeExpansion), so it cannot have {size}"
                )
                self._blocked["StorageBlocked"] = ("ClassCannotGrow", why)

    def _replicas(self, index: int, group_set: GroupSet) -> int:
        """The spec's, or one less than now when there are too many and one may go."""
        replicas = self._spec.brokers.replicas
        if group_set.replicas <= replicas:
            return replicas
        group = self._group(index)
        assert group is not None
        last = next((pod for pod in group.pods if pod.ordinal == group_set.replicas - 1), None)
        if last is None:
            return group_set.replicas - 1
        why = self._cannot_go(group, last)
        if isinstance(why, HandOver):
            self._actions.append(why)
            return group_set.replicas
        if why:
            self._actions.append(Wait(why))
            self._blocked["ScaleInBlocked"] = ("NotSafe", why)
            return group_set.replicas
        self._actions.append(Wait(f"{last.name} goes: brokers.replicas = {replicas}"))
        return group_set.replicas - 1

    def _cannot_go(self, group: RolloutGroup, pod: Pod) -> HandOver | str:
        """Why the pod cannot leave the group for good, or what has to be done before."""
        if pod.is_deleting or any(pod.is_deleting for pod in group.pods):
            return f"{pod.name} or another of {group.name} is going"
        if group.health is None or not group.health.master:
            return f"who leads {group.name} is not known"
        if group.health.master == pod.name:
            step = hand_over(group, pod, "it is removed")
            return step if isinstance(step, HandOver) else str(step)
        return removal_problem(group, pod)

    def _removal(self, index: int, group_set: GroupSet) -> BrokerGroupSize | None:
        """A group that the spec does not want any more: drained, looked at, deleted."""
        name = self._spec.names.group(index)
        stays = BrokerGroupSize(index, group_set.replicas, group_set.size)
        if self._spec.remove_undrained:
            self._actions.append(DeleteGroup(name, group_set.name))
            return None
        health = self._health(name)
        if health is None:
            return self._refuse_removal(stays, "Unknown", f"no controller tells of {name}")
        if health.owner:
            why = f"{name} owns topics and consumer groups and cannot be removed"
            return self._refuse_removal(stays, "OwnsTopics", why)
        if not health.draining:
            self._actions.append(Drain(name))
            return self._refuse_removal(stays, "Draining", f"{name} is told to take nothing new")
        drained = self._observed.drained.get(name)
        if drained is None or not drained.done:
            rest = drained.rest if drained else f"what {name} still has is not known"
            return self._refuse_removal(stays, "Draining", rest)
        self._actions.append(DeleteGroup(name, group_set.name))
        return None

    def _refuse_removal(self, stays: BrokerGroupSize, reason: str, why: str) -> BrokerGroupSize:
        self._blocked["ScaleInBlocked"] = (reason, why)
        return stays

    def _undo_drain(self, index: int) -> None:
        """The spec wants the group, so it is to take messages: also when a human drained it."""
        name = self._spec.names.group(index)
        health = self._health(name)
        if health is not None and health.draining:
            self._actions.append(Drain(name, undo=True))

    def _restarts(self, templates: dict[str, str]) -> None:
        """One pod of the whole cluster at a time."""
        for index in sorted(self._observed.sets):
            group = self._group(index)
            if group is None or group.set.name not in templates:
                continue
            step = next_restart(group, template=templates[group.set.name])
            if isinstance(step, Wait):
                reason = ("Waiting", step.what)
                self._blocked.setdefault("RollBlocked", reason)
            if step is not None:
                self._actions.append(step)
                return

    # -- what they look at

    def _group(self, index: int) -> RolloutGroup | None:
        group_set = self._observed.sets.get(index)
        if group_set is None or group_set.is_deleting:
            return None
        name = self._spec.names.group(index)
        pods = self._observed.pods.get(index, ())
        return RolloutGroup(
            name, group_set, pods, self._health(name), self._spec.brokers.min_in_sync
        )

    def _health(self, name: str) -> GroupHealth | None:
        return None if self._observed.health is None else self._observed.health.get(name)


def make_plan(spec: ClusterSpec, observed: Observed, around: ClusterInputs) -> ClusterPlan:
    return Planner(spec, observed, around).plan()
