"""The status of a BrokerCluster: conditions, and a summary of one line."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from popmq.common.address import format_address
from popmq.operator.cluster.charges import OPERATOR_LEASE
from popmq.operator.cluster.cluster_certificates import certificate_verdicts, expiry_verdicts
from popmq.operator.cluster.observed import GroupHealth, Observed, Pod
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.cluster.users_stage import users_verdict
from popmq.operator.model.certificates import SecretData
from popmq.operator.model.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionValue,
    Refusal,
    conditions,
    since_in,
    verdict_in,
)
from popmq.operator.model.manifest import (
    DEPLOYMENT,
    SERVICE,
    Manifest,
    at,
    condition,
    kind_of,
    name_of,
)
from popmq.operator.model.names import CONSOLE_PORT, TEMPLATE_ANNOTATION
from popmq.operator.model.spec import ClusterSpec, SpecError, read_paused
from popmq.operator.model.stages import UsersUse

# Reasons of Degraded, the worst first.
NO_MASTER, BROKER_DOWN, NOT_IN_SYNC = WORST_FIRST = ("NoMaster", "BrokerDown", "NotInSync")
REFUSALS_SHOWN = 4
GROUPS_NAMED = 8  # of those that lack something, in one message
# Of the error of `popmq console` in an image without the extra.
EXTRA = "popmq[console]"
MESSAGE_SHOWN = 300  # characters of what a container said last


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
        "Authenticated": observed.secret_stage.verdict,
        "OpenToAnybody": _open(spec),
        "AdminOnPublic": observed.admin_stage.verdict,
    }
    if spec.auth_mode or observed.users_stage.use is not UsersUse.NONE:
        known = verdict_in(before, "Users")
        verdicts["Users"] = users_verdict(spec, observed.users_stage, known)
    if observed.tls_stage.verdict is not None:
        verdicts["ProcessTls"] = observed.tls_stage.verdict
    # Known after the attempt alone: until then what is known of the last attempt.
    if (last := verdict_in(before, "Reconciled")).status:
        verdicts["Reconciled"] = last
    if spec.proxies.autoscaling and not at(spec.proxies.resources, "requests", "cpu"):
        why = "the autoscaler compares with proxies.resources.requests.cpu, which is not set"
        verdicts["ScalingBlocked"] = ConditionValue(TRUE, "NoCpuRequest", why)
    if spec.scaled_by_hand and spec.proxies.autoscaling:
        why = (
            f"proxies.replicas = {spec.proxies.replicas} was set by kubectl scale, without effect "
            "beside proxies.autoscaling: change its minReplicas and maxReplicas"
        )
        verdicts["ReplicasIgnored"] = ConditionValue(TRUE, "Autoscaled", why)
    if other := observed.charge.other:
        why = (
            f"operator {other} watches this cluster, too; {observed.charge.holder} is in charge: "
            f"Lease {spec.names.lease(OPERATOR_LEASE)} says"
        )
        verdicts["TwoOperators"] = ConditionValue(TRUE, "Watched", why)
    replaced = verdict_in(before, "AuthorityReplaced")
    since = since_in(before, "AuthorityReplaced")
    verdicts |= certificate_verdicts(spec, observed.secrets, replaced, since, now)
    if spec.console is not None:
        verdicts["Console"] = _console(spec, observed.users_stage.use, observed.console_pods)
    if plan.growing:
        verdicts["StorageResizing"] = ConditionValue(
            TRUE, "Growing", "volumes are being made larger"
        )
    for kind, (reason, message) in plan.blocked.items():
        verdicts[kind] = ConditionValue(TRUE, reason, message)
    masters = sum(1 for group in groups if group["master"])
    replicas, ready_proxies = _proxies(spec, observed)
    return {
        "observedGeneration": spec.generation,
        "version": _version(spec, observed),
        "summary": {
            "masters": f"{masters}/{len(groups)}",
            "inSync": f"{sum(len(group['inSync']) for group in groups)}/"
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
            **({"remoting": spec.names.remoting_endpoint} if spec.remoting else {}),
            **_outside(spec, observed),
        },
        "conditions": conditions(verdicts, before, spec.generation, now),
    }


def _outside(spec: ClusterSpec, observed: Observed) -> Manifest:
    """Where clients outside of the Kubernetes cluster connect, as far as the Service says."""
    service = observed.objects.get((SERVICE, spec.names.proxy))
    port = (at(service, "spec", "ports") or [{}])[0]
    entries = at(service, "status", "loadBalancer", "ingress") or []
    hosts = [str(entry.get("hostname") or entry.get("ip") or "") for entry in entries]
    shown: Manifest = {}
    if addresses := [format_address(host, int(port["port"])) for host in hosts if host]:
        shown["addresses"] = addresses
    if port.get("nodePort"):
        shown["nodePort"] = port["nodePort"]
    return shown


def _version(spec: ClusterSpec, observed: Observed) -> str:
    """What the brokers run; of one without pods, what they are going to."""
    images = {pod.image for pods in observed.pods.values() for pod in pods if pod.image}
    return ", ".join(sorted(_tag(image) for image in images or {spec.image}))


def _tag(image: str) -> str:
    """The tag, or the beginning of a digest where there is none."""
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    return tag or digest[: len("sha256:") + 12] or "latest"


def _open(spec: ClusterSpec) -> ConditionValue:
    if not spec.tls.plain_text:
        return ConditionValue(FALSE, "Encrypted", "the proxies take TLS alone")
    why = (
        "the proxies take plain text: whoever reaches them can use them and read along "
        "(spec.tls.mode, spec.tls.plainText)"
    )
    return ConditionValue(TRUE, "PlainText", why)


def _console(spec: ClusterSpec, use: UsersUse, pods: Sequence[Manifest]) -> ConditionValue:
    assert spec.console is not None
    if not any(condition(pod, "Ready") == "True" for pod in pods):
        words = next((words for pod in pods if (words := _last_words(pod))), "")
        if EXTRA in words:
            why = f"image {spec.console.image} has no console: {words}"
            return ConditionValue(FALSE, "ImageLacksConsole", why)
        names = ", ".join(sorted(map(name_of, pods))) or "its pod is not made yet"
        return ConditionValue(FALSE, "NotReady", f"{names}: {words}" if words else names)
    if use is UsersUse.NONE and not spec.console.open_to_anybody:
        why = (
            "the console asks for a login and the cluster has no users: set spec.auth.mode, or "
            "spec.console.openToAnybody if every client may administer the cluster"
        )
        return ConditionValue(FALSE, "NoUsers", why)
    why = f"kubectl port-forward service/{spec.names.console} {CONSOLE_PORT}"
    return ConditionValue(TRUE, "Serving", why)


def _last_words(pod: Manifest) -> str:
    """What its container said when it ended, or why it does not start."""
    for status in at(pod, "status", "containerStatuses") or []:
        for key in ("state", "lastState"):
            ended = at(status, key, "terminated", "message")
            if ended:
                return str(ended).strip()[-MESSAGE_SHOWN:]
        reason = at(status, "state", "waiting", "reason")
        if reason:
            return str(reason)
    return ""


def invalid_spec_status(
    cluster: Manifest, why: str, secrets: Mapping[str, SecretData], now: datetime
) -> Manifest:
    """Of a spec that cannot be: all is left as it is, also what the status said before.  The
    conditions are those of any status, so that whoever waits for one finds it.  `secrets` are those
    of its certificates."""
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
    for kind in ("Authenticated", "OpenToAnybody", "AdminOnPublic"):
        if (last := verdict_in(before, kind)).status:
            verdicts[kind] = last
    verdicts["Reconciled"] = ConditionValue(FALSE, "InvalidSpec", why)
    verdicts |= expiry_verdicts(secrets, now)
    kept = {key: value for key, value in before.items() if key not in ("conditions", "plan")}
    return {
        **kept,
        "observedGeneration": generation,
        "plan": [],
        "conditions": conditions(verdicts, before, generation, now),
    }


def reconciled(refusals: Sequence[Refusal]) -> ConditionValue:
    """Whether every object of the cluster is as it is wanted, so far as the API server agrees."""
    if not refusals:
        return ConditionValue(TRUE, "Applied", "every object is applied")
    shown = [str(refusal) for refusal in refusals[:REFUSALS_SHOWN]]
    if more := len(refusals) - len(shown):
        shown.append(f"and {more} more")
    return ConditionValue(FALSE, refusals[0].reason, "; ".join(shown))


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
    group_set = observed.sets.get(index)
    return {
        "name": name,
        "master": health.master,
        "epoch": health.epoch,
        "inSync": sorted(health.in_sync),
        "pods": len(pods),
        "ready": sum(1 for pod in pods if pod.ready),
        "updated": sum(1 for pod in pods if group_set and pod.template == group_set.template),
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
    if not replicas:
        return ConditionValue(FALSE, "ProxiesAtZero", "proxies.replicas is 0: no client is served")
    if not ready:
        return ConditionValue(FALSE, "NoProxy", f"none of {replicas} proxies is ready")
    return ConditionValue(TRUE, "Serving", "every broker group has a master, and a proxy is ready")


def _degraded(spec: ClusterSpec, observed: Observed) -> ConditionValue:
    """Whether fewer brokers work or are in sync than are asked for, also where those that are left
    serve on, and while one is restarted on purpose."""
    lacks = [
        lack
        for index in sorted(_indices(spec, observed))
        if (lack := _lack_of(spec, observed, index)) is not None
    ]
    if lacks:
        messages = [lack.message for lack in lacks[:GROUPS_NAMED]]
        if more := len(lacks) - len(messages):
            messages.append(f"and {more} more broker groups")
        worst = min((lack.reason for lack in lacks), key=WORST_FIRST.index)
        return ConditionValue(TRUE, worst, "; ".join(messages))
    if observed.health is None:
        why = "no controller answers; every broker's pod is ready, which are in sync is not known"
        return ConditionValue(UNKNOWN, "NoController", why)
    return ConditionValue(FALSE, "Whole", "every broker is ready and in sync")


def _lack_of(spec: ClusterSpec, observed: Observed, index: int) -> ConditionValue | None:
    """What a broker group lacks of the replicas that it is to have; None: nothing."""
    group_set = observed.sets.get(index)
    if index < spec.brokers.groups:
        desired = spec.brokers.replicas
    elif group_set is None or group_set.is_deleting:
        return None  # the spec does not want it, and it goes
    else:
        desired = group_set.replicas
    name = spec.names.group(index)
    health = None if observed.health is None else observed.health.get(name, GroupHealth())
    pods = {pod.name: pod for pod in observed.pods.get(index, ())}
    names = [spec.names.pod(index, ordinal) for ordinal in range(desired)]
    down = [f"{text} {why}" for text in names if (why := _why_down(pods.get(text)))]
    if health is None:
        if not down:
            return None
        message = f"{name}: {', '.join(down)}; no controller says how many are in sync"
        return ConditionValue(TRUE, BROKER_DOWN, message)
    copies = [copy for copy in names if copy in health.in_sync]
    lagging = [
        f"{copy} is not in sync"
        for copy in names
        if copy not in health.in_sync and not _why_down(pods.get(copy))
    ]
    missing = [] if health.master else ["it has no master"]
    if not (missing or down or lagging):
        return None
    reason = NO_MASTER if missing else BROKER_DOWN if down else NOT_IN_SYNC
    what = ", ".join([*missing, *down, *lagging])
    return ConditionValue(TRUE, reason, f"{name}: {len(copies)} of {desired} in sync ({what})")


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
    for desired in plan.objects:
        if kind_of(desired) != DEPLOYMENT:
            continue
        deployment = observed.objects.get((DEPLOYMENT, name_of(desired)))
        if (
            deployment is None
            or _template(deployment) != _template(desired)
            or not _is_rolled_out(deployment)
        ):
            return name_of(desired)
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
    desired = spec.proxies.replicas if replicas is None else replicas
    return desired, at(deployment, "status", "readyReplicas") or 0


def _selector(spec: ClusterSpec) -> str:
    labels = spec.names.selector("proxy")
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
