"""One look at one BrokerCluster and what follows: observe, plan, apply, act, tell.

It may be called at any time, as often as anybody likes, and killed anywhere: the next call finds
what is there and goes on.  It decides nothing itself (popmq.operator.cluster.plan does).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from popmq.operator.cluster.actions import (
    Action,
    DeleteGroup,
    DeletePod,
    Drain,
    Fence,
    GrowClaim,
    HandOver,
    RemakeSet,
    Wait,
)
from popmq.operator.cluster.cluster_secrets import secrets_of, trusted_of
from popmq.operator.cluster.data_plane import DataPlane
from popmq.operator.cluster.desired import ClusterInputs
from popmq.operator.cluster.observed import (
    DrainState,
    GroupHealth,
    Observed,
    Pod,
    VolumeClaim,
    by_group,
    group_sets,
)
from popmq.operator.cluster.plan import ClusterPlan, make_plan
from popmq.operator.cluster.status import (
    NOT_IN_SYNC,
    cluster_status,
    invalid_spec_status,
    is_on_purpose,
)
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiClient, ApiError
from popmq.operator.model.certificates import SecretData
from popmq.operator.model.conditions import FALSE, TRUE, verdict_in
from popmq.operator.model.manifest import (
    AUTOSCALER,
    BROKER_CLUSTER,
    CLAIM,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    LEASE,
    NETWORK_POLICY,
    OPTIONAL,
    POD,
    POD_MONITOR,
    RULES,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    STORAGE_CLASS,
    Manifest,
    ResourceKind,
    at,
    kind_of,
    name_of,
)
from popmq.operator.model.names import (
    BROKER,
    CLUSTER_LABEL,
    FENCED_LABEL,
    FIELD_MANAGER,
    FINALIZER,
    MANAGED_BY,
    OPERATOR_NAME,
    ROLE_LABEL,
    SCALER_FIELD_MANAGER,
)
from popmq.operator.model.spec import ClusterSpec, SpecError, read_spec
from popmq.operator.reports.report_reconcile import ReportDefaults, ReportReconciler

logger = logging.getLogger(__name__)

# What changes of a spec can leave behind. StatefulSets go by the plan alone.
PRUNED = (
    SERVICE,
    DISRUPTION_BUDGET,
    DEPLOYMENT,
    NETWORK_POLICY,
    AUTOSCALER,
    POD_MONITOR,
    RULES,
)


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """`soon`: something goes on, so look again in a moment."""

    soon: bool
    ready: bool
    gone: bool = False


class Reconciler:
    """For every cluster; it remembers none of them."""

    def __init__(
        self,
        api: ApiClient,
        plane: DataPlane,
        *,
        default_image: str,
        reports: ReportDefaults | None = None,
        now: Callable[[], datetime],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = api
        self._plane = plane
        self._default_image = default_image
        self._now = now
        self._may_write = may_write  # false once the Lease is lost
        self._reports = ReportReconciler(
            api, defaults=reports or ReportDefaults(), now=now, check=self._check
        )

    async def reconcile(self, namespace: str, name: str) -> ReconcileResult:
        """Raises ApiError and ApiAway; whoever calls does so again."""
        cluster = await self._api.get(BROKER_CLUSTER, namespace, name)
        if cluster is None:
            await self._reports.without_cluster(namespace, name)
            return ReconcileResult(soon=False, ready=False, gone=True)
        try:
            spec = read_spec(cluster, default_image=self._default_image)
            if "deletionTimestamp" in cluster["metadata"]:
                return await self._deleted(cluster, spec)
            await self._keep_finalizer(cluster)
            observed = await self._observe(spec)
            plan = make_plan(spec, observed, ClusterInputs(self._now(), observed.secrets))
        except SpecError as error:
            return await self._refuse(cluster, str(error))
        # The plan is shown before anything of it is done.
        status = await self._show(cluster, spec, observed, plan)
        ready = verdict_in(status, "Ready").status == TRUE
        if spec.paused:
            return ReconcileResult(soon=False, ready=ready)
        unseen = await self._apply(spec, observed, plan)
        await self._reports.keep(spec)
        for action in plan.actions:
            await self._act(cluster, spec, action, trusted_of(observed.secrets))
        moving = bool(plan.actions) or plan.growing or unseen or _rolling(observed)
        # Kubernetes does not tell when a copy is whole.
        moving |= verdict_in(status, "Degraded").reason == NOT_IN_SYNC
        return ReconcileResult(soon=moving or not ready, ready=ready)

    # -- looking

    async def _observe(self, spec: ClusterSpec) -> Observed:
        names, namespace = spec.names, spec.namespace
        selector = f"{CLUSTER_LABEL}={spec.name}"
        own = f"{selector},{MANAGED_BY}={OPERATOR_NAME}"
        objects: dict[tuple[ResourceKind, str], Manifest] = {}
        for kind in (*PRUNED, STATEFUL_SET):
            for one in await self._api.list(kind, namespace, own):
                objects[kind, name_of(one)] = one
        pods = await self._api.list(POD, namespace, f"{selector},{ROLE_LABEL}={BROKER}")
        claims = await self._api.list(CLAIM, namespace, f"{selector},{ROLE_LABEL}={BROKER}")
        sets = [one for (kind, _), one in objects.items() if kind == STATEFUL_SET]
        secrets = await secrets_of(self._api, spec)
        health = await self._plane.health(spec)
        grouped = by_group(names, claims)
        return Observed(
            objects=objects,
            sets=group_sets(names, sets),
            pods={
                i: [Pod.from_manifest(one) for one in group]
                for i, group in by_group(names, pods).items()
            },
            claims={
                i: [VolumeClaim.from_manifest(one, i) for one in group]
                for i, group in grouped.items()
            },
            growing_classes=await self._growing_classes(claims, spec),
            health=health,
            drained=await self._drained(spec, health, secrets),
            secrets=secrets,
        )

    async def _growing_classes(
        self, claims: Sequence[Manifest], spec: ClusterSpec
    ) -> frozenset[str]:
        """Asked only when there is something to grow: the right to read classes is seldom used."""
        wanted = spec.brokers.storage.size
        asked = {at(one, "spec", "resources", "requests", "storage") for one in claims}
        if asked <= {wanted}:
            return frozenset()
        classes = {at(one, "spec", "storageClassName") for one in claims} - {None}
        found = set()
        for name in classes:
            known = await self._api.get(STORAGE_CLASS, "", str(name))
            if known is not None and known.get("allowVolumeExpansion"):
                found.add(str(name))
        return frozenset(found)

    async def _drained(
        self,
        spec: ClusterSpec,
        health: Mapping[str, GroupHealth] | None,
        secrets: Mapping[str, SecretData],
    ) -> dict[str, DrainState]:
        """Of groups that are being drained because the spec does not want them any more."""
        found = {}
        wanted = {spec.names.group(index) for index in range(spec.brokers.groups)}
        for group, one in (health or {}).items():
            if one.draining and group not in wanted:
                try:
                    found[group] = await self._plane.drain_state(spec, group, trusted_of(secrets))
                except DataPlaneUnavailable as error:
                    found[group] = DrainState(
                        False, f"what {group} still has is not known: {error}"
                    )
        return found

    # -- doing

    async def _apply(self, spec: ClusterSpec, observed: Observed, plan: ClusterPlan) -> bool:
        """Whether a workload has a spec now that its controller has not seen."""
        unseen = False
        wanted = {(kind_of(one), name_of(one)) for one in plan.objects}
        await self._hand_replicas_over(spec, observed)
        for one in plan.objects:
            self._check()
            try:
                made = await self._api.apply(kind_of(one), one)
                unseen |= kind_of(one) in (DEPLOYMENT, STATEFUL_SET) and not _is_seen(made)
            except ApiError as error:
                if kind_of(one) not in OPTIONAL or error.status != 404:
                    raise
        for (kind, name), found in observed.objects.items():
            if kind in PRUNED and (kind, name) not in wanted:
                self._check()
                await self._api.delete(kind, spec.namespace, name, uid=found["metadata"]["uid"])
        if spec.tls.mode != "Own":
            await self._forget_own_ca(spec)
        return unseen

    async def _forget_own_ca(self, spec: ClusterSpec) -> None:
        for name in (spec.names.tls, spec.names.authority):
            if name == spec.tls.secret:
                continue
            secret = await self._api.get(SECRET, spec.namespace, name)
            labels = at(secret, "metadata", "labels") or {}
            if secret is not None and labels.get(CLUSTER_LABEL) == spec.name:
                await self._api.delete(SECRET, spec.namespace, name)

    async def _hand_replicas_over(self, spec: ClusterSpec, observed: Observed) -> None:
        """A field that its only owner leaves out falls back to its default: one proxy.  So the
        autoscaler gets the number first, under another manager's name."""
        deployment = observed.objects.get((DEPLOYMENT, spec.names.proxy))
        if spec.proxies.autoscaling is None or deployment is None or not _owns_replicas(deployment):
            return
        self._check()
        kept: Manifest = {
            "apiVersion": DEPLOYMENT.api_version,
            "kind": DEPLOYMENT.kind,
            "metadata": {"name": spec.names.proxy, "namespace": spec.namespace},
            "spec": {"replicas": deployment["spec"]["replicas"]},
        }
        await self._api.apply(DEPLOYMENT, kept, manager=SCALER_FIELD_MANAGER)

    async def _act(
        self, cluster: Manifest, spec: ClusterSpec, action: Action, trusted: bytes | None
    ) -> None:
        """One step, and an event about it once it is done."""
        self._check()
        namespace, api = spec.namespace, self._api
        try:
            match action:
                case Wait():
                    return
                case DeletePod(name, uid, _):
                    await api.delete(POD, namespace, name, uid=uid)
                case HandOver(group, _, to, _):
                    await self._plane.hand_over(spec, group, to)
                case Drain(group, undo):
                    await self._plane.drain(spec, group, trusted, undo=undo)
                case DeleteGroup(_, set_name):
                    await api.delete(STATEFUL_SET, namespace, set_name)
                case GrowClaim(name, size):
                    asked = {"spec": {"resources": {"requests": {"storage": size}}}}
                    await api.merge(CLAIM, namespace, name, asked)
                case RemakeSet(set_name, _):
                    await api.delete(STATEFUL_SET, namespace, set_name, orphan=True)
                case Fence(pod, lift):
                    labels = {FENCED_LABEL: None if lift else "true"}
                    await api.merge(POD, namespace, pod, {"metadata": {"labels": labels}})
        except DataPlaneUnavailable as error:
            logger.warning("step refused", extra={"step": str(action), "reason": str(error)})
            await api.event(
                cluster, f"{type(action).__name__}Failed", f"{action}: {error}", warning=True
            )
            return
        logger.info("step done", extra={"cluster": spec.name, "step": str(action)})
        await api.event(cluster, type(action).__name__, str(action), warning=False)

    def _check(self) -> None:
        """Before each write: another operator may be the holder of the Lease by now."""
        if not self._may_write():
            raise LeaseLost

    # -- telling

    async def _show(
        self, cluster: Manifest, spec: ClusterSpec, observed: Observed, plan: ClusterPlan
    ) -> Manifest:
        before = cluster.get("status") or {}
        status = cluster_status(spec, observed, plan, before, self._now())
        if status != before:
            await self._write_status(cluster, status)
            await self._tell_degraded(cluster, before, status)
        return status

    async def _tell_degraded(self, cluster: Manifest, before: Manifest, after: Manifest) -> None:
        """An event at each turn; a cluster that is new begins with what it lacks, and without."""
        was, now = verdict_in(before, "Degraded"), verdict_in(after, "Degraded")
        if now.status == TRUE and was.status not in ("", TRUE):
            warning = not is_on_purpose(before, after)
            await self._api.event(cluster, "Degraded", now.message, warning=warning)
        elif was.status == TRUE and now.status == FALSE:
            await self._api.event(cluster, now.reason, now.message, warning=False)

    async def _refuse(self, cluster: Manifest, why: str) -> ReconcileResult:
        status = invalid_spec_status(cluster, why, self._now())
        if status != (cluster.get("status") or {}):
            await self._write_status(cluster, status)
            await self._api.event(cluster, "InvalidSpec", why, warning=True)
        return ReconcileResult(soon=False, ready=False)

    async def _write_status(self, cluster: Manifest, status: Manifest) -> None:
        self._check()
        metadata = cluster["metadata"]
        told = {
            "apiVersion": BROKER_CLUSTER.api_version,
            "kind": BROKER_CLUSTER.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await self._api.apply(BROKER_CLUSTER, told, sub="status")

    # -- the end

    async def _keep_finalizer(self, cluster: Manifest) -> None:
        finalizers = cluster["metadata"].get("finalizers") or []
        if FINALIZER not in finalizers:
            await self._set_finalizers(cluster, [*finalizers, FINALIZER])

    async def _set_finalizers(self, cluster: Manifest, finalizers: list[str]) -> None:
        self._check()
        await self._api.set_finalizers(BROKER_CLUSTER, cluster, finalizers)

    async def _deleted(self, cluster: Manifest, spec: ClusterSpec) -> ReconcileResult:
        """What is owned goes by itself.  Leases go with the volumes: a record that names stores
        which are gone would keep a later cluster of the same name from electing anybody."""
        finalizers = cluster["metadata"].get("finalizers") or []
        if FINALIZER not in finalizers:
            return ReconcileResult(soon=False, ready=False)
        if spec.protected:
            why = "deleted, but popmq.io/delete-protection is true: nothing goes until it is not"
            return await self._refuse(cluster, why)
        if spec.brokers.storage.delete:
            observed = await self._api.list(
                STATEFUL_SET, spec.namespace, f"{CLUSTER_LABEL}={spec.name}"
            )
            indices = {*range(spec.brokers.groups), *group_sets(spec.names, observed)}
            for group in ("cluster.owner", *(spec.names.group(index) for index in sorted(indices))):
                self._check()
                await self._api.delete(LEASE, spec.namespace, spec.names.lease(group))
        await self._set_finalizers(cluster, [one for one in finalizers if one != FINALIZER])
        return ReconcileResult(soon=False, ready=False, gone=True)


class LeaseLost(Exception):
    """Another operator looks after the clusters now."""


def _is_seen(workload: Manifest) -> bool:
    seen = at(workload, "status", "observedGeneration") or 0
    return bool(seen >= workload["metadata"].get("generation", 0))


def _rolling(observed: Observed) -> bool:
    """A Deployment is on its way: its own controller does that, but the status is to follow."""
    for (kind, _), one in observed.objects.items():
        if kind == DEPLOYMENT:
            ready = at(one, "status", "readyReplicas") or 0
            updated = at(one, "status", "updatedReplicas") or 0
            left = (at(one, "status", "replicas") or 0) > updated  # of those before
            if left or not _is_seen(one) or {ready, updated} != {at(one, "spec", "replicas")}:
                return True
    return False


def _owns_replicas(deployment: Manifest) -> bool:
    for one in at(deployment, "metadata", "managedFields") or []:
        fields = at(one, "fieldsV1", "f:spec") or {}
        if one.get("manager") == FIELD_MANAGER and "f:replicas" in fields:
            return True
    return False
