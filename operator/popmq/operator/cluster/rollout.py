"""Which pod of a broker group may go next: the broken first, slaves then, the master last.

A pod goes only when every other one is ready and in sync and the SyncStateSet without it still has
min_in_sync members; a master hands over first.  Where min_in_sync is all replicas, no restart at
all would keep to that: there sends wait until the pod is back.  The rule is asked anew before each
step, so an election in between changes who is last, and an operator that was killed starts here
again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from popmq.operator.cluster.actions import Action, DeletePod, HandOver, Wait
from popmq.operator.cluster.observed import GroupHealth, GroupSet, Pod


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """What the rule needs to know of a broker group."""

    name: str
    set: GroupSet
    pods: Sequence[Pod]
    health: GroupHealth | None
    min_in_sync: int

    @property
    def is_solo(self) -> bool:
        """Also one that is to get replicas: they wait for the one that has the messages."""
        return self.set.replicas == 1 or bool(self.health and self.health.solo)

    @property
    def min_replicas(self) -> int:
        return min(self.min_in_sync, max(1, self.set.replicas - 1))

    def others(self, pod: Pod) -> list[Pod]:
        return [other for other in self.pods if other.name != pod.name]


def next_restart(group: RolloutGroup, *, template: str) -> Action | None:
    """The next step towards pods that are all made from `template`; None when they are."""
    stale = [pod for pod in group.pods if reason_to_go(pod, template)]
    missing = group.set.replicas - len([pod for pod in group.pods if not pod.is_deleting])
    if not stale:
        return None
    if not group.set.settled or group.set.template != template:
        return Wait(f"{group.set.name} has not taken its new template")
    going = [pod.name for pod in group.pods if pod.is_deleting]
    if going or missing > 0:
        return Wait(f"{', '.join(going) or group.set.name} is being restarted")
    broken = [pod for pod in stale if not pod.works]
    if broken:
        return _delete(broken[0], template)
    if group.is_solo:
        return _delete(stale[0], template)
    unready = [pod for pod in group.pods if not pod.ready]
    if unready and not (len(unready) == 1 and unready[0] in stale):
        return Wait(f"{unready[0].name} is not ready")
    return _replicated(group, unready or stale, template)


def reason_to_go(pod: Pod, template: str) -> str:
    """Empty: it may stay."""
    if pod.template != template:
        return "its template changed"
    return "somebody asked for it" if pod.restart else ""


def _replicated(group: RolloutGroup, stale: Sequence[Pod], template: str) -> Action:
    health = group.health
    if health is None:
        return Wait(f"no controller says who leads {group.name}")
    if not health.master:
        problem = health.trouble or "an election is going on"
        return Wait(f"group {group.name} has no master: {problem}")
    slaves = [pod for pod in stale if pod.name != health.master]
    pod = slaves[0] if slaves else stale[0]
    if refusal := loss(group, pod):
        return Wait(refusal)
    if pod.name != health.master:
        return _delete(pod, template)
    return hand_over(group, pod, "it is the last to be restarted")


def loss(group: RolloutGroup, pod: Pod) -> str:
    """Why the group cannot do without this pod now; empty: it can."""
    health = group.health
    assert health is not None
    left = health.in_sync - {pod.name}
    if pod.name in health.in_sync and len(left) < group.min_replicas:
        return (
            f"without {pod.name} only {len(left)} of {group.name} would be in sync, "
            f"and {group.min_replicas} have to be"
        )
    lagging = [pod.name for pod in group.others(pod) if pod.name not in health.in_sync]
    return f"{lagging[0]} is not in sync" if lagging else ""


def hand_over(group: RolloutGroup, pod: Pod, reason: str, avoid: Collection[str] = ()) -> Action:
    """To the first in-sync replica that is made from the newest template, if there is one."""
    assert group.health is not None
    able = [
        pod
        for pod in group.others(pod)
        if pod.name in group.health.in_sync and pod.ready and pod.name not in avoid
    ]
    able.sort(key=lambda item: (item.template != group.set.template, item.ordinal))
    if not able:
        return Wait(f"no other replica of {group.name} could lead it instead of {pod.name}")
    return HandOver(group.name, pod.name, able[0].name, reason)


def _delete(pod: Pod, template: str) -> DeletePod:
    return DeletePod(pod.name, pod.uid, reason_to_go(pod, template) or "it does not work")
