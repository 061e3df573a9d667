"""One look at one BrokerCluster and what follows: observe, plan, apply, act, tell.

It may be called at any time, as often as anybody likes, and killed anywhere: the next call finds
what is there and goes on.  It decides nothing itself (popmq.operator.cluster.plan does).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from popmq.operator.cluster.admin_stage import admin_stage
from popmq.operator.cluster.apply import (
    PRUNED,
    ApplyResult,
    ObjectApplier,
)
from popmq.operator.cluster.charges import (
    NOBODY,
    OPERATOR_LEASE,
    Charge,
    ClusterCharges,
)
from popmq.operator.cluster.cluster_certificates import certificate_end, renewed_objects
from popmq.operator.cluster.cluster_secrets import (
    PlaneAccess,
    cluster_secret_of,
    plane_access,
    secrets_of,
    trusted_of,
)
from popmq.operator.cluster.data_plane import DataPlane
from popmq.operator.cluster.desired import ClusterInputs, owner_of
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
from popmq.operator.cluster.process_tls_stage import process_tls_stage
from popmq.operator.cluster.secret_stage import secret_stage
from popmq.operator.cluster.status import (
    NOT_IN_SYNC,
    cluster_status,
    invalid_spec_status,
    is_on_purpose,
    reconciled,
)
from popmq.operator.cluster.users_stage import mode_verdict, users_stage
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiClient, ApiError, NameTaken
from popmq.operator.model.certificates import SecretData
from popmq.operator.model.conditions import FALSE, TRUE, Refusal, verdict_in, with_condition
from popmq.operator.model.images import ANY_IMAGE
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CLAIM,
    DEPLOYMENT,
    LEASE,
    POD,
    SECRET,
    STATEFUL_SET,
    STORAGE_CLASS,
    Manifest,
    ResourceKind,
    at,
    is_owned_by,
    is_seen,
    kind_of,
    name_of,
    with_digest,
)
from popmq.operator.model.names import (
    BROKER,
    CLUSTER_LABEL,
    CONSOLE,
    FENCED_LABEL,
    FINALIZER,
    MANAGED_BY,
    OPERATOR_NAME,
    ROLE_LABEL,
    ROLES,
    ObjectNames,
    role_of,
)
from popmq.operator.model.spec import AUTH_MODES, ClusterSpec, SpecError, read_protected, read_spec
from popmq.operator.model.stages import UsersUse
from popmq.operator.reports.report_reconcile import ReportDefaults, ReportReconciler

logger = logging.getLogger(__name__)

AT_ZERO = "ProxiesAtZero"  # as it is wanted, so there is nothing to wait for


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """`soon`: something goes on, so look again in a moment.  `refused`: the API server refused
    something, so try again after a while."""

    soon: bool
    ready: bool
    gone: bool = False
    refused: bool = False
    failing_reports: int | None = None  # None: unknown
    certificate_end: float | None = None  # seconds since 1970; 0: there is none; None: unknown


class Reconciler:
    """For every cluster; it decides nothing by what it remembers."""

    def __init__(
        self,
        api: ApiClient,
        plane: DataPlane,
        *,
        default_image: str,
        images: Sequence[str] = (ANY_IMAGE,),
        reports: ReportDefaults | None = None,
        now: Callable[[], datetime],
        may_write: Callable[[], bool] = lambda: True,
        access: dict[tuple[str, str], PlaneAccess] | None = None,
        charges: ClusterCharges | None = None,
    ) -> None:
        self._api = api
        self._plane = plane
        self._default_image = default_image
        self._images = images
        self._now = now
        self._may_write = may_write  # false once the Lease is lost
        # By namespace and name, as the last look read it.
        self._access: dict[tuple[str, str], PlaneAccess] = {} if access is None else access
        self._charges = charges  # None: there is no other operator
        self._applier = ObjectApplier(api, self._check)
        self._reports = ReportReconciler(
            api, defaults=reports or ReportDefaults(), now=now, check=self._check
        )

    async def reconcile(self, namespace: str, name: str) -> ReconcileResult:
        """Raises ApiError and ApiAway; whoever calls does so again."""
        cluster = await self._api.get(BROKER_CLUSTER, namespace, name)
        if cluster is None:
            self._access.pop((namespace, name), None)
            if self._charges is not None:
                self._charges.forget(namespace, name)
            await self._reports.without_cluster(namespace, name)
            return ReconcileResult(soon=False, ready=False, gone=True)
        charge = await self._charge_of(cluster)
        if not charge.mine:
            return ReconcileResult(soon=False, ready=False, certificate_end=0.0)
        if "deletionTimestamp" in cluster["metadata"]:
            return await self._deleted(cluster)
        try:
            await self._set_finalizer(cluster, wanted=read_protected(cluster))
            spec = read_spec(cluster, default_image=self._default_image, images=self._images)
            reports = await self._reports.of(namespace, name)
            observed = replace(await self._observe(spec, reports), charge=charge)
            inputs = ClusterInputs(
                self._now(),
                observed.secrets,
                new_cluster_secret=observed.secret_stage.missing,
                new_user_secrets=observed.users_stage.missing,
            )
            plan = make_plan(spec, observed, inputs)
        except SpecError as error:
            return await self._refuse(cluster, str(error))
        # The plan is shown before anything of it is done.
        status = await self._show(cluster, spec, observed, plan)
        ready = verdict_in(status, "Ready").status == TRUE
        end = certificate_end(observed.secrets)
        end_s = 0.0 if end is None else end.timestamp()
        if spec.paused:
            await self._renew_certificates(cluster, await self._certificates_of(cluster))
            return ReconcileResult(soon=False, ready=ready, certificate_end=end_s)
        await self._forget_records(spec, observed, plan)
        result = await self._applier.apply(spec, observed, plan)
        for action in plan.actions:
            await self._act(cluster, spec, action, self._access[namespace, name], result)
        await self._show_refusals(cluster, status, result.refusals)
        settling = await self._keep_mode(cluster, spec, observed)
        failing = await self._reports.keep(
            spec, reports, has_ca=trusted_of(spec, observed.secrets) is not None
        )
        if result.transient is not None:
            raise result.transient
        moving = bool(plan.actions) or plan.growing or result.unseen or _rolling(observed)
        moving |= observed.secret_stage.is_begun  # nothing tells that the Secret is there
        moving |= settling
        # Kubernetes does not tell when a copy is whole.
        moving |= verdict_in(status, "Degraded").reason == NOT_IN_SYNC
        waits = not ready and verdict_in(status, "Ready").reason != AT_ZERO
        return ReconcileResult(
            soon=moving or waits,
            ready=ready,
            refused=bool(result.refusals),
            failing_reports=failing,
            certificate_end=end_s,
        )

    async def _charge_of(self, cluster: Manifest) -> Charge:
        if self._charges is None:
            return NOBODY
        self._check()
        metadata = cluster["metadata"]
        names = ObjectNames(metadata["name"], metadata["namespace"])
        owner = owner_of(names.cluster, metadata["uid"])
        charge = await self._charges.of(names, owner)
        if not charge.mine:
            why = (
                f"operator {charge.holder} is in charge of this cluster (Lease "
                f"{names.lease(OPERATOR_LEASE)}): {self._charges.identity} leaves it alone"
            )
            await self._api.recurring_event(cluster, "TwoOperators", why)
        return charge

    # -- looking

    async def _observe(self, spec: ClusterSpec, reports: Sequence[Manifest]) -> Observed:
        names, namespace = spec.names, spec.namespace
        selector = f"{CLUSTER_LABEL}={spec.name}"
        own = f"{selector},{MANAGED_BY}={OPERATOR_NAME}"
        objects: dict[tuple[ResourceKind, str], Manifest] = {}
        await self._applier.adopt_secrets(spec)
        for kind in (*PRUNED, STATEFUL_SET):
            for listed in await self._api.list(kind, namespace, own):
                resource = await self._applier.adopted(spec, kind, listed)
                if is_owned_by(resource, spec.uid):  # a label can be written by anybody
                    objects[kind, name_of(resource)] = resource
        labelled = await self._api.list(POD, namespace, selector)
        pods = [pod for pod in labelled if role_of(pod) in ROLES]
        claims = await self._api.list(CLAIM, namespace, f"{selector},{ROLE_LABEL}={BROKER}")
        sets = [manifest for (kind, _), manifest in objects.items() if kind == STATEFUL_SET]
        workloads = [
            manifest
            for (kind, _), manifest in objects.items()
            if kind in (DEPLOYMENT, STATEFUL_SET) and role_of(manifest) in ROLES
        ]
        tls_stage = process_tls_stage(spec, workloads, pods)
        spec = replace(spec, tls_use=tls_stage.use)
        secrets = await secrets_of(self._api, spec)
        stored = await cluster_secret_of(self._api, spec)
        stage = secret_stage(spec, stored, workloads, pods)
        users = await users_stage(self._api, spec, objects, pods)
        access = self._access[namespace, spec.name] = plane_access(
            spec, secrets, stored, stage, users.signer
        )
        health = await self._plane.health(spec, access)
        grouped = by_group(names, claims)
        return Observed(
            objects=objects,
            sets=group_sets(names, sets),
            pods={
                i: [Pod.from_manifest(manifest) for manifest in group]
                for i, group in by_group(names, pods).items()
            },
            claims={
                i: [VolumeClaim.from_manifest(manifest, i) for manifest in group]
                for i, group in grouped.items()
            },
            growing_classes=await self._growing_classes(claims, spec),
            health=health,
            drained=await self._drained(spec, health, access),
            secrets=secrets,
            secret_stage=stage,
            tls_stage=tls_stage,
            users_stage=users,
            admin_stage=admin_stage(spec, objects.get((DEPLOYMENT, names.proxy)), secrets, reports),
            console_pods=[pod for pod in labelled if role_of(pod) == CONSOLE],
        )

    async def _growing_classes(
        self, claims: Sequence[Manifest], spec: ClusterSpec
    ) -> frozenset[str]:
        """Asked only when there is something to grow: the right to read classes is seldom used."""
        desired = spec.brokers.storage.size
        asked = {at(claim, "spec", "resources", "requests", "storage") for claim in claims}
        if asked <= {desired}:
            return frozenset()
        classes = {at(claim, "spec", "storageClassName") for claim in claims} - {None}
        sets = set()
        for name in classes:
            known = await self._api.get(STORAGE_CLASS, "", str(name))
            if known is not None and known.get("allowVolumeExpansion"):
                sets.add(str(name))
        return frozenset(sets)

    async def _drained(
        self,
        spec: ClusterSpec,
        health: Mapping[str, GroupHealth] | None,
        access: PlaneAccess,
    ) -> dict[str, DrainState]:
        """Of groups that are being drained because the spec does not want them any more."""
        drain_states = {}
        desired = {spec.names.group(index) for index in range(spec.brokers.groups)}
        for group, item in (health or {}).items():
            if item.draining and group not in desired:
                try:
                    drain_states[group] = await self._plane.drain_state(spec, group, access)
                except DataPlaneUnavailable as error:
                    drain_states[group] = DrainState(
                        False, f"what {group} still has is not known: {error}"
                    )
        return drain_states

    # -- doing

    async def _act(
        self,
        cluster: Manifest,
        spec: ClusterSpec,
        action: Action,
        access: PlaneAccess,
        result: ApplyResult,
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
                    await self._plane.hand_over(spec, group, to, access)
                case Drain(group, undo):
                    await self._plane.drain(spec, group, access, undo=undo)
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
        except (DataPlaneUnavailable, ApiError) as error:
            logger.warning("step refused", extra={"step": str(action), "reason": str(error)})
            if isinstance(error, ApiError):
                result.add(str(action), error)
            await api.event(
                cluster, f"{type(action).__name__}Failed", f"{action}: {error}", warning=True
            )
            return
        logger.info("step done", extra={"cluster": spec.name, "step": str(action)})
        await api.event(cluster, type(action).__name__, str(action), warning=False)

    async def _keep_mode(self, cluster: Manifest, spec: ClusterSpec, observed: Observed) -> bool:
        """Whether auth.mode is not yet what the spec says."""
        stage, status = observed.users_stage, cluster.get("status") or {}
        if stage.use is UsersUse.NONE or stage.problem:
            return False
        if not stage.held or not stage.signer.access_key:
            return True
        known = verdict_in(status, "Users")
        if known.reason == (spec.auth_mode or known.reason) and known.reason in AUTH_MODES:
            return False
        try:
            self._check()
            mode = await self._plane.keep_mode(spec, self._access[spec.namespace, spec.name])
        except DataPlaneUnavailable as error:
            logger.warning("auth.mode is not set", extra={"reason": str(error)})
            await self._api.recurring_event(cluster, "UsersNotKept", str(error))
            return True
        verdict = mode_verdict(mode)
        current = await self._api.get(BROKER_CLUSTER, spec.namespace, spec.name) or cluster
        before = current.get("status") or {}
        kept = with_condition(before, "Users", verdict, spec.generation, self._now())
        await self._write_status(cluster, {**before, "conditions": kept})
        await self._api.event(cluster, f"Users{verdict.reason}", verdict.message, warning=False)
        return False

    async def _certificates_of(self, cluster: Manifest) -> dict[str, SecretData]:
        """The Secrets of its own CA, and one of the user's, whatever else the spec says."""
        metadata = cluster["metadata"]
        names, uid = ObjectNames(metadata["name"], metadata["namespace"]), metadata["uid"]
        of_user = str(at(cluster, "spec", "tls", "secretName") or "")
        if at(cluster, "spec", "tls", "mode") != "Secret":
            of_user = ""
        secrets = {}
        for name in filter(None, (names.authority, names.tls, names.process_tls, of_user)):
            secret = await self._api.get(SECRET, names.namespace, name)
            if secret is not None and (name == of_user or is_owned_by(secret, uid)):
                secrets[name] = secret.get("data") or {}
        return secrets

    async def _renew_certificates(
        self, cluster: Manifest, secrets: Mapping[str, SecretData]
    ) -> dict[str, SecretData]:
        """Of a cluster of which nothing else is changed: clients would be refused otherwise.
        Returns the Secrets as they are then."""
        metadata = cluster["metadata"]
        names, uid = ObjectNames(metadata["name"], metadata["namespace"]), metadata["uid"]
        after = dict(secrets)
        for manifest in renewed_objects(names, secrets, self._now()):
            self._check()
            manifest["metadata"]["ownerReferences"] = [owner_of(names.cluster, uid)]
            await self._api.apply_owned(kind_of(manifest), with_digest(manifest), owner_uid=uid)
            if kind_of(manifest) == SECRET:
                after[name_of(manifest)] = manifest["data"]
        return after

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

    async def _show_refusals(
        self, cluster: Manifest, status: Manifest, refusals: Sequence[Refusal]
    ) -> None:
        """After the attempt: what was refused, as a condition, and an event that counts up."""
        verdict = reconciled(refusals)
        if verdict != verdict_in(status, "Reconciled"):
            status["conditions"] = with_condition(
                status, "Reconciled", verdict, cluster["metadata"].get("generation", 0), self._now()
            )
            await self._write_status(cluster, status)
        for refusal in refusals:
            await self._api.recurring_event(cluster, refusal.reason, str(refusal))

    async def _tell_degraded(self, cluster: Manifest, before: Manifest, after: Manifest) -> None:
        """An event at each turn; a cluster that is new begins with what it lacks, and without."""
        was, now = verdict_in(before, "Degraded"), verdict_in(after, "Degraded")
        if now.status == TRUE and was.status not in ("", TRUE):
            warning = not is_on_purpose(before, after)
            await self._api.event(cluster, "Degraded", now.message, warning=warning)
        elif was.status == TRUE and now.status == FALSE:
            await self._api.event(cluster, now.reason, now.message, warning=False)

    async def _refuse(self, cluster: Manifest, why: str) -> ReconcileResult:
        """Nothing is changed but certificates that end; a renewal that fails is tried again soon,
        and does not hide why the cluster is refused."""
        secrets, failure = await self._certificates_of(cluster), None
        try:
            secrets = await self._renew_certificates(cluster, secrets)
        except (ApiError, NameTaken) as error:
            failure = error
        status = invalid_spec_status(cluster, why, secrets, self._now())
        if status != (cluster.get("status") or {}):
            await self._write_status(cluster, status)
            await self._api.event(cluster, "InvalidSpec", why, warning=True)
        if isinstance(failure, ApiError):
            raise failure
        end = certificate_end(secrets)
        end_s = 0.0 if end is None else end.timestamp()
        return ReconcileResult(soon=False, ready=False, certificate_end=end_s)

    async def _write_status(self, cluster: Manifest, status: Manifest) -> None:
        self._check()
        metadata = cluster["metadata"]
        reporteds = {
            "apiVersion": BROKER_CLUSTER.api_version,
            "kind": BROKER_CLUSTER.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await self._api.apply(BROKER_CLUSTER, reporteds, sub="status")

    # -- the end

    async def _set_finalizer(self, cluster: Manifest, *, wanted: bool) -> None:
        """Only a protected cluster has ours: any other can be deleted when no operator runs."""
        finalizers = cluster["metadata"].get("finalizers") or []
        if wanted != (FINALIZER in finalizers):
            others = [name for name in finalizers if name != FINALIZER]
            self._check()
            await self._api.set_finalizers(
                BROKER_CLUSTER, cluster, [*others, FINALIZER] if wanted else others
            )

    async def _deleted(self, cluster: Manifest) -> ReconcileResult:
        """Whatever the spec says.  What is owned goes by itself."""
        finalizers = cluster["metadata"].get("finalizers") or []
        if FINALIZER not in finalizers:
            return ReconcileResult(soon=False, ready=False)
        try:
            protected = read_protected(cluster)
        except SpecError as error:
            return await self._refuse(cluster, f"deleted, but not taken down: {error}")
        if protected:
            why = "deleted, but popmq.io/delete-protection is true: nothing goes until it is not"
            return await self._refuse(cluster, why)
        await self._set_finalizer(cluster, wanted=False)
        return ReconcileResult(soon=False, ready=False, gone=True)

    async def _forget_records(
        self, spec: ClusterSpec, observed: Observed, plan: ClusterPlan
    ) -> None:
        """Delete the Leases of broker groups that are new and have no volume: a record of an
        earlier cluster of this name, whose stores are gone, would let no master be elected."""
        new = [shape.index for shape in plan.shapes if shape.index not in observed.sets]
        if not new:
            return
        # Also those without labels: a volume that somebody restored is used by its name.
        claims = [name_of(claim) for claim in await self._api.list(CLAIM, spec.namespace)]
        names = spec.names
        without = [
            names.group(index)
            for index in new
            if not any(claim.startswith(names.claim(index, 0)[:-1]) for claim in claims)
        ]
        is_first = not observed.sets and len(without) == len(plan.shapes)
        others = ["cluster.owner", "cluster.groups"] if is_first else []
        for group in others + without:
            self._check()
            await self._api.delete(LEASE, spec.namespace, names.lease(group))


class LeaseLost(Exception):
    """Another operator looks after the clusters now."""


def _rolling(observed: Observed) -> bool:
    """A Deployment is on its way: its own controller does that, but the status is to follow."""
    for (kind, _), manifest in observed.objects.items():
        # A console that does not start has a condition, and nothing waits for it.
        if kind == DEPLOYMENT and role_of(manifest) != CONSOLE:
            ready = at(manifest, "status", "readyReplicas") or 0
            updated = at(manifest, "status", "updatedReplicas") or 0
            left = (at(manifest, "status", "replicas") or 0) > updated  # of those before
            if (
                left
                or not is_seen(manifest)
                or {ready, updated} != {at(manifest, "spec", "replicas")}
            ):
                return True
    return False
