"""The next pod of a broker group to restart: broken pods first, then slaves, the master last.

A pod is deleted only when every other pod is ready and in sync and the SyncStateSet without it
still has min_in_sync members; a master hands over first.  If min_in_sync is all replicas, no
restart could keep that rule: there one member fewer is enough, and sends wait until the pod is
back.  The rule is evaluated again before each step.  So an election changes which pod is last, and
an operator that restarts continues the rollout.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from popmq.operator.cluster.actions import Action, DeletePod, HandOver, Wait
from popmq.operator.cluster.observed import GroupHealth, GroupSet, Pod


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The state of a broker group on which the rule depends."""

    name: str
    set: GroupSet
    pods: Sequence[Pod]
    health: GroupHealth | None
    min_in_sync: int

    @property
    def is_solo(self) -> bool:
        """Also a single broker that gets replicas: they wait for the one with the messages."""
        return self.set.replicas == 1 or bool(self.health and self.health.solo)

    @property
    def min_replicas(self) -> int:
        return min(self.min_in_sync, max(1, self.set.replicas - 1))

    def others(self, pod: Pod) -> list[Pod]:
        return [other for other in self.pods if other.name != pod.name]


def next_restart(group: RolloutGroup, *, template: str) -> Action | None:
    """The next step towards pods that are all made from `template`; None if all are."""
    stale = [pod for pod in group.pods if restart_reason(pod, template)]
    missing = group.set.replicas - len([pod for pod in group.pods if not pod.is_deleting])
    if not stale:
        return None
    if not group.set.settled or group.set.template != template:
        return Wait(f"{group.set.name} does not have its new template yet")
    deleting = [pod.name for pod in group.pods if pod.is_deleting]
    if deleting or missing > 0:
        return Wait(f"{', '.join(deleting) or group.set.name} is being restarted")
    broken = [pod for pod in stale if not pod.works]
    if broken:
        return _delete(broken[0], template)
    if group.is_solo:
        return _delete(stale[0], template)
    unready = [pod for pod in group.pods if not pod.ready]
    if unready and not (len(unready) == 1 and unready[0] in stale):
        return Wait(f"{unready[0].name} is not ready")
    return _replicated(group, unready or stale, template)


def restart_reason(pod: Pod, template: str) -> str:
    """Why the pod must be restarted; empty if it need not be."""
    if pod.template != template:
        return "its template changed"
    return "a restart was requested" if pod.restart else ""


def _replicated(group: RolloutGroup, stale: Sequence[Pod], template: str) -> Action:
    health = group.health
    if health is None:
        return Wait(f"no controller reports the master of {group.name}")
    if not health.master:
        problem = health.trouble or "an election is running"
        return Wait(f"group {group.name} has no master: {problem}")
    slaves = [pod for pod in stale if pod.name != health.master]
    pod = slaves[0] if slaves else stale[0]
    if refusal := removal_problem(group, pod):
        return Wait(refusal)
    if pod.name != health.master:
        return _delete(pod, template)
    return hand_over(group, pod, "it is the last to be restarted")


def removal_problem(group: RolloutGroup, pod: Pod) -> str:
    """Why the pod must not be deleted now; empty if it may be."""
    health = group.health
    assert health is not None
    left = health.in_sync - {pod.name}
    if pod.name in health.in_sync and len(left) < group.min_replicas:
        return (
            f"without {pod.name} only {len(left)} of {group.name} would be in sync, "
            f"and {group.min_replicas} are required"
        )
    lagging = [pod.name for pod in group.others(pod) if pod.name not in health.in_sync]
    return f"{lagging[0]} is not in sync" if lagging else ""


def hand_over(group: RolloutGroup, pod: Pod, reason: str, avoid: Collection[str] = ()) -> Action:
    """Hand over to an in-sync replica, preferably of the newest template, or wait."""
    assert group.health is not None
    candidates = [
        pod
        for pod in group.others(pod)
        if pod.name in group.health.in_sync and pod.ready and pod.name not in avoid
    ]
    candidates.sort(key=lambda item: (item.template != group.set.template, item.ordinal))
    if not candidates:
        return Wait(f"no other replica of {group.name} can become master instead of {pod.name}")
    return HandOver(group.name, pod.name, candidates[0].name, reason)


def _delete(pod: Pod, template: str) -> DeletePod:
    return DeletePod(pod.name, pod.uid, restart_reason(pod, template) or "it does not work")
