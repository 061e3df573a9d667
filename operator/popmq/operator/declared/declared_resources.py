"""Topics and ConsumerGroups: what each asks for, how the cluster differs, what to do about it.

Pure.  Settings are compared as the administration service tells them.  What cannot be changed where
messages may be (a type, fewer queues) is reported, never forced.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import TypeAlias

from popmq.common.errors import ConfigError
from popmq.common.quantities import DAY_MS, parse_duration_ms
from popmq.common.topics import CUSTOMISED_BACK_OFF_MS
from popmq.operator.model.conditions import FALSE, TRUE, ConditionValue, conditions
from popmq.operator.model.manifest import TOPIC, Manifest, ResourceKind, at, condition
from popmq.operator.model.spec import SpecError

DRIFT_KEPT = 10  # lines of status.drift
DRIFT_SHOWN = timedelta(minutes=10)  # for so long the condition Drifted stays
LONGEST_MS = 99_999 * DAY_MS  # as in the definition
STAMP = "%Y-%m-%dT%H:%M:%SZ"

Value: TypeAlias = str | int | tuple[int, ...]
Settings: TypeAlias = Mapping[str, Value]


class ChangeKind(Enum):
    CREATE = "made"
    ALTER = "changed"
    DELETE = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """To be done at the cluster. An alteration names only what is to be different."""

    act: ChangeKind
    kind: ResourceKind
    name: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeclaredResource:
    """A Topic or a ConsumerGroup as it was read. `name` is what the cluster calls it."""

    kind: ResourceKind
    name: str
    settings: Settings
    delete: bool  # with the object
    manifest: Manifest

    @property
    def object_name(self) -> str:
        name: str = self.manifest["metadata"]["name"]
        return name

    @property
    def is_deleting(self) -> bool:
        return "deletionTimestamp" in self.manifest["metadata"]

    @property
    def was_looked_at(self) -> bool:
        """With this very spec."""
        seen = at(self.manifest, "status", "observedGeneration")
        return bool(seen == self.manifest["metadata"].get("generation", 0))

    @property
    def was_as_wanted(self) -> bool:
        """Whatever differs now was done by somebody else."""
        return self.was_looked_at and condition(self.manifest, "Ready") == TRUE


@dataclass(frozen=True, slots=True)
class Decision:
    """`verdict` holds once `change` is done; `release`: then our finalizer may go."""

    resource: DeclaredResource
    verdict: ConditionValue
    change: Change | None = None
    drift: Sequence[str] = ()
    release: bool = False


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """What the cluster has, by name."""

    topics: Mapping[str, Settings]
    groups: Mapping[str, Settings]

    def from_manifest(self, resource: DeclaredResource) -> Settings | None:
        return (self.topics if resource.kind == TOPIC else self.groups).get(resource.name)


def read_declared(kind: ResourceKind, manifest: Manifest) -> DeclaredResource:
    """Raises SpecError for what the API server would have refused."""
    spec = manifest.get("spec") or {}
    settings = _topic(spec) if kind == TOPIC else _group(spec)
    name = spec.get("name") or manifest["metadata"]["name"]
    return DeclaredResource(kind, name, settings, spec.get("onDelete") == "Delete", manifest)


def decide(
    declared: Sequence[DeclaredResource], metadata: ClusterMetadata, *, paused: bool
) -> list[Decision]:
    """The first of several objects with one name, by age, is the one that counts."""
    holders: dict[tuple[ResourceKind, str], DeclaredResource] = {}
    decisions = []
    for resource in sorted(declared, key=_age):
        holder = (
            resource
            if resource.is_deleting
            else holders.setdefault((resource.kind, resource.name), resource)
        )
        if holder is not resource:
            why = f"{holder.object_name} declares {resource.name} already: delete one of them"
            decisions.append(Decision(resource, ConditionValue(FALSE, "Duplicate", why)))
        elif not resource.is_deleting:
            decisions.append(_kept(resource, metadata.from_manifest(resource), paused=paused))
    for resource in declared:
        if resource.is_deleting:
            shared = (resource.kind, resource.name) in holders
            decisions.append(
                _going(resource, metadata.from_manifest(resource), shared=shared, paused=paused)
            )
    return decisions


def decide_unreachable(
    declared: Iterable[DeclaredResource], verdict: ConditionValue, *, release: bool
) -> list[Decision]:
    """When nobody can be asked. `release`: there is no cluster, so nothing to be deleted."""
    return [
        Decision(resource, verdict, release=resource.is_deleting and release)
        for resource in declared
    ]


def declared_status(decision: Decision, refusal: str, generation: int, now: datetime) -> Manifest:
    """`refusal` is what the cluster said to the change, if it said no."""
    before = decision.resource.manifest.get("status") or {}
    verdict, drift = decision.verdict, list(before.get("drift") or [])
    if refusal:
        verdict = ConditionValue(FALSE, "Refused", refusal)
    stamp = now.strftime(STAMP)
    drift = [*drift, *(f"{stamp} {line}" for line in decision.drift)][-DRIFT_KEPT:]
    verdicts = {"Ready": verdict, "Drifted": _drifted(decision, drift, now)}
    status: Manifest = {
        "observedGeneration": generation,
        "conditions": conditions(verdicts, before, generation, now),
    }
    return {**status, "drift": drift} if drift else status


def differences(desired: Settings, current: Settings) -> Settings:
    return {key: value for key, value in desired.items() if current.get(key) != value}


def _kept(resource: DeclaredResource, current: Settings | None, *, paused: bool) -> Decision:
    if current is None:
        lost = (
            ["it was deleted: made again, without what it held"] if resource.was_as_wanted else []
        )
        change = Change(ChangeKind.CREATE, resource.kind, resource.name, resource.settings)
        return _unless(paused, Decision(resource, _ready(resource), change, lost), "it is not made")
    wrong = differences(resource.settings, current)
    drift = [f"{_told(key, current)}, not {_shown(wrong[key])}" for key in wrong]
    kept = drift if resource.was_as_wanted else []
    cannot = {key: why for key in wrong if (why := _cannot(key, resource.settings, current))}
    rest = {key: value for key, value in wrong.items() if key not in cannot}
    alter = Change(ChangeKind.ALTER, resource.kind, resource.name, rest) if rest else None
    verdict = _ready(resource)
    if cannot:
        verdict = ConditionValue(FALSE, "CannotChange", "; ".join(cannot.values()))
    decision = Decision(resource, verdict, alter, kept)
    return _unless(paused and alter is not None, decision, "; ".join(drift))


def _going(
    resource: DeclaredResource, current: Settings | None, *, shared: bool, paused: bool
) -> Decision:
    gone = ConditionValue(FALSE, "Going", "the object is deleted")
    if not resource.delete or shared or current is None:
        return Decision(resource, gone, release=True)
    change = Change(ChangeKind.DELETE, resource.kind, resource.name)
    return _unless(paused, Decision(resource, gone, change, release=True), "it is not deleted")


def _unless(paused: bool, decision: Decision, what: str) -> Decision:
    if not paused:
        return decision
    why = f"popmq.io/pause of the cluster is true: {what}"
    return Decision(decision.resource, ConditionValue(FALSE, "Paused", why))


def _ready(resource: DeclaredResource) -> ConditionValue:
    return ConditionValue(TRUE, "AsWanted", f"the cluster has {resource.name} like this")


def _drifted(decision: Decision, drift: Sequence[str], now: datetime) -> ConditionValue:
    if decision.drift:
        reason = "PutRight" if decision.verdict.status == TRUE else "CannotPutRight"
        return ConditionValue(TRUE, reason, "; ".join(decision.drift))
    old = at(decision.resource.manifest, "status", "conditions") or []
    known = next((condition for condition in old if condition["type"] == "Drifted"), None)
    if known is None or known["status"] != TRUE or not drift:
        return ConditionValue(FALSE, "AsWanted", "")
    since = drift[-1].partition(" ")[0]
    is_new = since >= (now - DRIFT_SHOWN).strftime(STAMP) and decision.resource.was_looked_at
    if is_new or decision.verdict.reason == "CannotChange":
        return ConditionValue(TRUE, known["reason"], known["message"])
    return ConditionValue(FALSE, "AsWanted", "")


def _cannot(key: str, desired: Settings, current: Settings) -> str:
    """Why a setting stays as it is; empty: it can be changed."""
    text = _told(key, current)
    if key == "type":
        return f"{text}, and no type can be changed: make another object with another spec.name"
    if key == "durability" and current.get("type") == "transaction":
        return f"{text}, and that of a Transaction topic is fixed: what it holds must not be lost"
    if key != "queues":
        return ""
    if current.get("type") == "fifo":
        return f"{text}, and that of a FIFO topic is fixed: message groups would lose their order"
    many, few = current["queues"], desired["queues"]
    assert isinstance(many, int), "queues are counted"
    assert isinstance(few, int), "queues are counted"
    return f"{text}, and a number cannot shrink: set spec.queues to {many}" if few < many else ""


def _told(key: str, current: Settings) -> str:
    return f"{key} is {_shown(current.get(key, 'not set'))}"


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{delay} ms" for delay in value)
    return str(value)


def _age(resource: DeclaredResource) -> tuple[str, str]:
    return resource.manifest["metadata"].get("creationTimestamp", ""), resource.object_name


def _topic(spec: Manifest) -> Settings:
    retention, lite_ttl = spec.get("retention"), spec.get("liteTtl")
    kind = str(spec.get("type") or "Normal").lower()
    return {
        "type": kind,
        # A lite topic is a queue that the broker makes: the definition's default is not meant.
        "queues": 1 if kind == "lite" else int(spec.get("queues") or 8),
        "permission": str(spec.get("permission") or "rw"),
        "durability": str(spec.get("durability") or "Disk").lower(),
        "retention": _duration("retention", retention) if retention else 0,
        "liteTtl": _duration("liteTtl", lite_ttl) if lite_ttl else 0,
    }


def _group(spec: Manifest) -> Settings:
    steps = tuple(_duration("backOff", step) for step in spec.get("backOff") or ())
    return {
        "type": str(spec.get("type") or "Normal").lower(),
        "maxAttempts": int(spec.get("maxAttempts") or 17),
        "startAt": str(spec.get("startAt") or "Oldest").lower(),
        "checkPoints": str(spec.get("checkPoints") or "Durable").lower(),
        "backOff": steps or CUSTOMISED_BACK_OFF_MS,
    }


def _duration(where: str, text: str) -> int:
    try:
        duration_ms = parse_duration_ms(text)
    except ConfigError as error:
        raise SpecError(f"spec.{where}: {error}") from error
    if duration_ms > LONGEST_MS:
        raise SpecError(f"spec.{where} = {text}: at most {LONGEST_MS // DAY_MS}d")
    return duration_ms
