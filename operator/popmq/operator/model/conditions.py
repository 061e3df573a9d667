"""Conditions of a custom resource's status, as Kubernetes writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from popmq.operator.model.manifest import Manifest

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"


@dataclass(frozen=True, slots=True)
class ConditionValue:
    status: str
    reason: str
    message: str


def conditions(
    verdicts: Mapping[str, ConditionValue], before: Manifest, generation: int, now: datetime
) -> list[Manifest]:
    old = {one["type"]: one for one in before.get("conditions") or []}
    made = []
    for kind, verdict in verdicts.items():
        known = old.get(kind, {})
        since = known.get("lastTransitionTime", "")
        if known.get("status") != verdict.status or not since:
            since = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        made.append(
            {
                "type": kind,
                "status": verdict.status,
                "reason": verdict.reason,
                "message": verdict.message,
                "lastTransitionTime": since,
                "observedGeneration": generation,
            }
        )
    return made


def verdict_in(status: Manifest, kind: str) -> ConditionValue:
    """A condition of a status; all empty when it is not there."""
    for one in status.get("conditions") or []:
        if one["type"] == kind:
            return ConditionValue(one["status"], one.get("reason", ""), one.get("message", ""))
    return ConditionValue("", "", "")
