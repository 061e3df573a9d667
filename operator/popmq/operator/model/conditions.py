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


@dataclass(frozen=True, slots=True)
class Refusal:
    """An object or a step that the API server refused.  `reason` is that of the condition."""

    subject: str
    message: str
    reason: str = "Refused"

    def __str__(self) -> str:
        return f"{self.subject}: {self.message}"


def conditions(
    verdicts: Mapping[str, ConditionValue], before: Manifest, generation: int, now: datetime
) -> list[Manifest]:
    old = {condition["type"]: condition for condition in before.get("conditions") or []}
    new_conditions = []
    for kind, verdict in verdicts.items():
        known = old.get(kind, {})
        since = known.get("lastTransitionTime", "")
        if known.get("status") != verdict.status or not since:
            since = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        new_conditions.append(
            {
                "type": kind,
                "status": verdict.status,
                "reason": verdict.reason,
                "message": verdict.message,
                "lastTransitionTime": since,
                "observedGeneration": generation,
            }
        )
    return new_conditions


def with_condition(
    status: Manifest, kind: str, verdict: ConditionValue, generation: int, now: datetime
) -> list[Manifest]:
    """The conditions of `status` with this one as it is now; the others stay as they are."""
    (condition,) = conditions({kind: verdict}, status, generation, now)
    before = status.get("conditions") or []
    if any(entry["type"] == kind for entry in before):
        return [condition if entry["type"] == kind else entry for entry in before]
    return [*before, condition]


def since_in(status: Manifest, kind: str) -> datetime | None:
    """Since when a condition has its status; None when it is not there."""
    for condition in status.get("conditions") or []:
        if condition["type"] == kind:
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def verdict_in(status: Manifest, kind: str) -> ConditionValue:
    """A condition of a status; all empty when it is not there."""
    for condition in status.get("conditions") or []:
        if condition["type"] == kind:
            return ConditionValue(
                condition["status"], condition.get("reason", ""), condition.get("message", "")
            )
    return ConditionValue("", "", "")
