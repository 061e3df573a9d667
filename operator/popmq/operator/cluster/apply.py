"""Applies the objects of a cluster, each by itself: a refused object does not stop the others.

Always holds: an object that this BrokerCluster does not own (by uid) is never changed or deleted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from popmq.operator.cluster.desired import owner_of
from popmq.operator.cluster.observed import Observed
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.kube.api_client import NAME_TAKEN, NOT_FOUND, ApiClient, ApiError, NameTaken
from popmq.operator.model.conditions import Refusal
from popmq.operator.model.manifest import (
    AUTOSCALER,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    INGRESS,
    NETWORK_POLICY,
    OPTIONAL,
    POD_MONITOR,
    RULES,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    Manifest,
    ResourceKind,
    at,
    is_owned_by,
    is_seen,
    is_unchanged,
    kind_of,
    name_of,
    with_digest,
)
from popmq.operator.model.names import FIELD_MANAGER, SCALER_FIELD_MANAGER
from popmq.operator.model.spec import ClusterSpec

# What changes of a spec can leave behind. StatefulSets go by the plan alone.
PRUNED = (
    SERVICE,
    DISRUPTION_BUDGET,
    DEPLOYMENT,
    NETWORK_POLICY,
    AUTOSCALER,
    INGRESS,
    POD_MONITOR,
    RULES,
)


@dataclass
class ApplyResult:
    """`unseen`: a workload has a spec now that its controller has not seen.  `transient` is an
    error after which the whole reconcile is to be repeated soon."""

    refusals: list[Refusal] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)  # subjects, refused or not answered
    unseen: bool = False
    transient: ApiError | None = None

    def add(self, subject: str, error: ApiError) -> None:
        self.failed.add(subject)
        if error.is_transient:
            self.transient = self.transient or error
        else:
            self.refusals.append(error.refusal(subject))


class ObjectApplier:
    """`check` raises when this operator may not write any more."""

    def __init__(self, api: ApiClient, check: Callable[[], None]) -> None:
        self._api = api
        self._check = check

    async def adopted(self, spec: ClusterSpec, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """As it is after it was taken over, if the spec says so and it may be."""
        if not spec.adopts:
            return manifest
        self._check()
        owner = owner_of(spec.name, spec.uid)
        return await self._api.adopted(kind, manifest, spec.names.labels(), owner)

    async def adopt_secrets(self, spec: ClusterSpec) -> None:
        """Those that are read before anything is planned."""
        names = spec.names
        own = (names.authority, names.tls, names.process_tls, names.cluster_secret)
        for name in (*own, names.users_key, names.admin_user) if spec.adopts else ():
            secret = await self._api.get(SECRET, spec.namespace, name)
            if secret is not None:
                await self.adopted(spec, SECRET, secret)

    async def apply(self, spec: ClusterSpec, observed: Observed, plan: ClusterPlan) -> ApplyResult:
        """Raises ApiUnavailable, when no other object would fare better."""
        result = ApplyResult()
        try:
            await self._hand_replicas_over(spec, observed)
        except ApiError as error:
            result.add(f"Deployment {spec.names.proxy}", error)
        signed = (spec.names.tls, spec.names.process_tls, spec.names.authority)
        for manifest in plan.objects:
            authority_lost = f"Secret {spec.names.authority}" in result.failed
            if authority_lost and name_of(manifest) in signed:
                continue  # a certificate whose authority is not stored would change each time
            self._check()
            try:
                await self._apply(spec, observed, manifest, result)
            except ApiError as error:
                if kind_of(manifest) not in OPTIONAL or error.status != NOT_FOUND:
                    result.add(subject_of(manifest), error)
            except NameTaken as error:
                result.failed.add(subject_of(manifest))
                result.refusals.append(Refusal(subject_of(manifest), str(error), "NameTaken"))
        await self._prune(spec, observed, plan, result)
        return result

    async def _apply(
        self, spec: ClusterSpec, observed: Observed, manifest: Manifest, result: ApplyResult
    ) -> None:
        kind = kind_of(manifest)
        names = spec.names
        once = (names.cluster_secret, names.users_key, names.admin_user)
        if kind == SECRET and name_of(manifest) in once:
            return await self._create_once(spec, manifest)
        marked = with_digest(manifest)
        known = observed.objects.get((kind, name_of(manifest)))
        if known is None:
            known = await self._api.get(kind, spec.namespace, name_of(manifest))
        if known is not None:
            known = await self.adopted(spec, kind, known)
        if known is not None and is_owned_by(known, spec.uid) and is_unchanged(marked, known):
            result.unseen |= kind in (DEPLOYMENT, STATEFUL_SET) and not is_seen(known)
            return
        applied = await self._api.apply_owned(kind, marked, owner_uid=spec.uid, known=known)
        if kind in (DEPLOYMENT, STATEFUL_SET):
            # One whose spec is another now gets other pods, also if its controller was fast.
            before = at(known, "metadata", "generation")
            changed = before != applied["metadata"].get("generation", 0)
            result.unseen |= changed or not is_seen(applied)

    async def _create_once(self, spec: ClusterSpec, manifest: Manifest) -> None:
        """An object that another operator creates at this moment stays as it is: the API server
        refuses ours as a conflict, and the next look reads theirs."""
        known = await self._api.get(SECRET, spec.namespace, name_of(manifest))
        if known is None:
            await self._api.create(SECRET, manifest)
        elif not is_owned_by(known, spec.uid):
            raise NameTaken(NAME_TAKEN)

    async def _prune(
        self, spec: ClusterSpec, observed: Observed, plan: ClusterPlan, result: ApplyResult
    ) -> None:
        desired = {(kind_of(manifest), name_of(manifest)) for manifest in plan.objects}
        for (kind, name), existing in observed.objects.items():
            if kind in PRUNED and (kind, name) not in desired:
                self._check()
                try:
                    uid = existing["metadata"]["uid"]
                    await self._api.delete(kind, spec.namespace, name, uid=uid)
                except ApiError as error:
                    result.add(f"{kind.kind} {name}", error)
        if spec.tls.mode != "Own":
            try:
                await self._forget_own_ca(spec)
            except ApiError as error:
                result.add(f"Secret {spec.names.authority}", error)
        if (CONFIG_MAP, spec.names.authority) not in desired:
            try:
                await self._forget(CONFIG_MAP, spec, spec.names.authority)
            except ApiError as error:
                result.add(f"ConfigMap {spec.names.authority}", error)

    async def _forget_own_ca(self, spec: ClusterSpec) -> None:
        for name in (spec.names.tls, spec.names.authority):
            await self._forget(SECRET, spec, name)

    async def _forget(self, kind: ResourceKind, spec: ClusterSpec, name: str) -> None:
        known = await self._api.get(kind, spec.namespace, name)
        if known is not None and is_owned_by(known, spec.uid):
            self._check()
            uid = known["metadata"]["uid"]
            await self._api.delete(kind, spec.namespace, name, uid=uid)

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


def subject_of(manifest: Manifest) -> str:
    return f"{manifest['kind']} {name_of(manifest)}"


def _owns_replicas(deployment: Manifest) -> bool:
    for entry in at(deployment, "metadata", "managedFields") or []:
        fields = at(entry, "fieldsV1", "f:spec") or {}
        if entry.get("manager") == FIELD_MANAGER and "f:replicas" in fields:
            return True
    return False
