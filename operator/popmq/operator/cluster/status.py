"""The status of a BrokerCluster: conditions, and a line that a person can take in at a glance."""

from collections.abc import Sequence
from datetime import datetime

from popmq.operator.cluster.observed import GroupHealth, Observed, Pod
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.model.conditions import FALSE, TRUE, UNKNOWN, ConditionValue, conditions
from popmq.operator.model.manifest import DEPLOYMENT, Manifest, at, kind_of, name_of
from popmq.operator.model.names import TEMPLATE_ANNOTATION
from popmq.operator.model.spec import ClusterSpec, SpecError, read_paused

# Reasons of Degraded, the worst first.
NO_MASTER, BROKER_DOWN, NOT_IN_SYNC = WORST_FIRST = ("NoMaster", "BrokerDown", "NotInSync")
GROUPS_NAMED = 8  # of those that lack something, in one message


def cluster_status(
    spec: ClusterSpec, observed: Observed, plan: ClusterPlan, before: Manifest, now: datetime
) -> Manifest:
    """`before` is the status as it is; times of conditions move only when they change."""
    groups = [_group(spec, observed, plan, index) for index in sorted(_indices(spec, observed))]
    ready = _ready(groups, observed, spec)
    verdicts = {
        "Ready": ready,
        "Degraded": _degraded(spec, observed),
        "Progressing": _progressing(spec, observed, plan),
        "Paused": _paused(spec.paused),
    }
    if plan.growing:
        verdicts["StorageResizing"] = ConditionValue(
            TRUE, "Growing", "volumes are being made larger"
        )
    for kind, (reason, message) in plan.blocked.items():
        verdicts[kind] = ConditionValue(TRUE, reason, message)
    masters = sum(1 for one in groups if one["master"])
    replicas, ready_proxies = _proxies(spec, observed)
    return {
        "observedGeneration": spec.generation,
        "version": spec.image.rpartition(":")[2] if ":" in spec.image else spec.image,
        "glance": {
            "masters": f"{masters}/{len(groups)}",
            "inSync": f"{sum(len(one['inSync']) for one in groups)}/"
            f"{spec.brokers.groups * spec.brokers.replicas}",
            "proxies": f"{ready_proxies}/{replicas}",
        },
        "plan": plan.steps,
        "groups": groups,
        "proxies": {
            "replicas": replicas,
            "ready": ready_proxies,
            "selector": _selector(spec),
            "endpoint": spec.names.proxy_endpoint,
        },
        "conditions": conditions(verdicts, before, spec.generation, now),
    }


def invalid_spec_status(cluster: Manifest, why: str, now: datetime) -> Manifest:
    """Of a spec that cannot be: all is left as it is, also what the status said before.  The
    conditions are those of any status, so that whoever waits for one finds it."""
    before = cluster.get("status") or {}
    generation = cluster["metadata"].get("generation", 0)
    try:
        paused = _paused(read_paused(cluster))
    except SpecError as error:
        paused = ConditionValue(UNKNOWN, "InvalidSpec", str(error))
    verdicts = {
        "Ready": ConditionValue(FALSE, "InvalidSpec", why),
        "Degraded": ConditionValue(
            UNKNOWN, "InvalidSpec", "nothing is looked at until the spec is right"
        ),
        "Progressing": ConditionValue(
            FALSE, "InvalidSpec", "nothing is changed until the spec is right"
        ),
        "Paused": paused,
    }
    kept = {key: value for key, value in before.items() if key not in ("conditions", "plan")}
    return {
        **kept,
        "observedGeneration": generation,
        "plan": [],
        "conditions": conditions(verdicts, before, generation, now),
    }


def is_on_purpose(before: Manifest, after: Manifest) -> bool:
    """Whether what changed between two looks may well be the operator's own work: it had or has
    something to do, or the spec is another."""
    same_spec = before.get("observedGeneration") == after["observedGeneration"]
    return bool(before.get("plan") or after["plan"] or not same_spec)


def _indices(spec: ClusterSpec, observed: Observed) -> set[int]:
    return set(range(spec.brokers.groups)) | set(observed.sets)


def _group(spec: ClusterSpec, observed: Observed, plan: ClusterPlan, index: int) -> Manifest:
    name = spec.names.group(index)
    health = (observed.health or {}).get(name, GroupHealth())
    pods: Sequence[Pod] = observed.pods.get(index, ())
    found = observed.sets.get(index)
    return {
        "name": name,
        "master": health.master,
        "epoch": health.epoch,
        "inSync": sorted(health.in_sync),
        "pods": len(pods),
        "ready": sum(1 for pod in pods if pod.ready),
        "updated": sum(1 for pod in pods if found and pod.template == found.template),
        "trouble": health.trouble,
    }


def _ready(groups: Sequence[Manifest], observed: Observed, spec: ClusterSpec) -> ConditionValue:
    if observed.health is None:
        return ConditionValue(
            UNKNOWN, "NoController", "no controller answers; brokers may serve on"
        )
    for group in groups:
        if not group["master"]:
            why = group["trouble"] or "no broker leads it"
            return ConditionValue(FALSE, "NoMaster", f"{group['name']}: {why}")
        if len(group["inSync"]) < spec.brokers.min_in_sync:
            why = f"{len(group['inSync'])} in sync, {spec.brokers.min_in_sync} have to be"
            return ConditionValue(FALSE, "NotInSync", f"{group['name']}: {why}")
    replicas, ready = _proxies(spec, observed)
    if replicas and not ready:
        return ConditionValue(FALSE, "NoProxy", f"none of {replicas} proxies is ready")
    return ConditionValue(TRUE, "Serving", "every broker group has a master, and a proxy is ready")


def _degraded(spec: ClusterSpec, observed: Observed) -> ConditionValue:
    """Whether fewer brokers work or are in sync than are asked for, also where those that are left
    serve on, and while one is restarted on purpose."""
    found = [
        lack
        for index in sorted(_indices(spec, observed))
        if (lack := _lack_of(spec, observed, index)) is not None
    ]
    if found:
        told = [lack.message for lack in found[:GROUPS_NAMED]]
        if more := len(found) - len(told):
            told.append(f"and {more} more broker groups")
        worst = min((lack.reason for lack in found), key=WORST_FIRST.index)
        return ConditionValue(TRUE, worst, "; ".join(told))
    if observed.health is None:
        why = "no controller answers; every broker's pod is ready, which are in sync is not known"
        return ConditionValue(UNKNOWN, "NoController", why)
    return ConditionValue(FALSE, "Whole", "every broker is ready and in sync")


def _lack_of(spec: ClusterSpec, observed: Observed, index: int) -> ConditionValue | None:
    """What a broker group lacks of the replicas that it is to have; None: nothing."""
    found = observed.sets.get(index)
    if index < spec.brokers.groups:
        wanted = spec.brokers.replicas
    elif found is None or found.is_deleting:
        return None  # the spec does not want it, and it goes
    else:
        wanted = found.replicas
    name = spec.names.group(index)
    health = None if observed.health is None else observed.health.get(name, GroupHealth())
    pods = {pod.name: pod for pod in observed.pods.get(index, ())}
    names = [spec.names.pod(index, ordinal) for ordinal in range(wanted)]
    down = [f"{one} {why}" for one in names if (why := _why_down(pods.get(one)))]
    if health is None:
        if not down:
            return None
        message = f"{name}: {', '.join(down)}; no controller says how many are in sync"
        return ConditionValue(TRUE, BROKER_DOWN, message)
    copies = [one for one in names if one in health.in_sync]
    lagging = [
        f"{one} is not in sync"
        for one in names
        if one not in health.in_sync and not _why_down(pods.get(one))
    ]
    missing = [] if health.master else ["it has no master"]
    if not (missing or down or lagging):
        return None
    reason = NO_MASTER if missing else BROKER_DOWN if down else NOT_IN_SYNC
    what = ", ".join([*missing, *down, *lagging])
    return ConditionValue(TRUE, reason, f"{name}: {len(copies)} of {wanted} in sync ({what})")


def _why_down(pod: Pod | None) -> str:
    """Empty: it works, as far as its pod tells."""
    if pod is None:
        return "is missing"
    if pod.is_deleting:
        return "is told to go"
    if pod.fenced:
        return "is fenced"
    return "" if pod.ready else "is not ready"


def _paused(paused: bool) -> ConditionValue:
    if paused:
        return ConditionValue(TRUE, "Annotated", "popmq.io/pause is true: nothing is changed")
    return ConditionValue(FALSE, "NotPaused", "")


def _progressing(spec: ClusterSpec, observed: Observed, plan: ClusterPlan) -> ConditionValue:
    if plan.actions:
        return ConditionValue(TRUE, type(plan.actions[0]).__name__, plan.steps[0])
    if not spec.paused and (name := _replaces_pods(observed, plan)):
        return ConditionValue(TRUE, "RollingOut", f"{name} is to have other pods than it has")
    return ConditionValue(FALSE, "AsWanted", "")


def _replaces_pods(observed: Observed, plan: ClusterPlan) -> str:
    """A Deployment that is not as it is wanted yet. Its own controller sees to its pods; so it is
    no step of ours, and yet whoever waits for a change waits for it, too."""
    for wanted in plan.objects:
        if kind_of(wanted) != DEPLOYMENT:
            continue
        found = observed.objects.get((DEPLOYMENT, name_of(wanted)))
        if found is None or _template(found) != _template(wanted) or not _is_rolled_out(found):
            return name_of(wanted)
    return ""


def _template(deployment: Manifest) -> object:
    return at(deployment, "spec", "template", "metadata", "annotations", TEMPLATE_ANNOTATION)


def _is_rolled_out(deployment: Manifest) -> bool:
    status = deployment.get("status") or {}
    updated = status.get("updatedReplicas") or 0
    return (
        (status.get("observedGeneration") or 0) >= deployment["metadata"].get("generation", 0)
        and updated >= (at(deployment, "spec", "replicas") or 0)
        and (status.get("replicas") or 0) <= updated
    )


def _proxies(spec: ClusterSpec, observed: Observed) -> tuple[int, int]:
    deployment = observed.objects.get((DEPLOYMENT, spec.names.proxy))
    replicas = at(deployment, "spec", "replicas")
    wanted = spec.proxies.replicas if replicas is None else replicas
    return wanted, at(deployment, "status", "readyReplicas") or 0


def _selector(spec: ClusterSpec) -> str:
    labels = spec.names.selector("proxy")
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
