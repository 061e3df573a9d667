"""One look at all Topics and ConsumerGroups of one cluster: list, compare, change, tell.

Like popmq.operator.cluster.reconcile it keeps no state and may be killed anywhere.
popmq.operator.declared.declared_resources decides.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from popmq.common.signing import Signer
from popmq.operator.cluster.cluster_secrets import secrets_of, trusted_of
from popmq.operator.cluster.reconcile import LeaseLost, ReconcileResult
from popmq.operator.declared.declared_resources import (
    Decision,
    DeclaredResource,
    decide,
    decide_unreachable,
    declared_status,
    read_declared,
)
from popmq.operator.declared.metadata_client import MetadataClient, ProxyAccess
from popmq.operator.declared.user_reconcile import UserClient, UserReconciler
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiClient, ApiError
from popmq.operator.model.conditions import FALSE, UNKNOWN, ConditionValue
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CONSUMER_GROUP,
    SECRET,
    TOPIC,
    USER,
    Manifest,
    ResourceKind,
    at,
    condition,
    is_owned_by,
)
from popmq.operator.model.names import FINALIZER
from popmq.operator.model.spec import ClusterSpec, SpecError, read_spec
from popmq.operator.resources.users import signer_in

logger = logging.getLogger(__name__)

LIST_S = 300.0
AT_ONCE = 16  # writes of statuses


@dataclass
class DeclaredCounters:
    """For metrics, of all clusters."""

    changes: int = 0
    drifts: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """What is declared for one cluster, and the BrokerCluster, as listed at `at_s`."""

    at_s: float
    manifests: list[tuple[ResourceKind, Manifest]]
    users: list[Manifest]
    owner: Manifest | None


class DeclaredReconciler:
    """With `monotonic`, a list is used again for LIST_S unless `forget` is called: between two
    lists only the cluster is asked, for drift."""

    def __init__(
        self,
        api: ApiClient,
        plane: MetadataClient,
        *,
        default_image: str,
        now: Callable[[], datetime],
        may_write: Callable[[], bool] = lambda: True,
        monotonic: Callable[[], float] | None = None,
        users: UserClient | None = None,
    ) -> None:
        self._api = api
        self._plane = plane
        self._default_image = default_image
        self._now = now
        self._may_write = may_write
        self._monotonic = monotonic
        self._listed: dict[tuple[str, str], Listed] = {}
        self._forgotten = 0  # calls of `forget`
        self.tally = DeclaredCounters()
        self._users = UserReconciler(api, users or UserClient(), now=now, check=self._check)

    def forget(self, namespace: str, cluster: str) -> None:
        """Something was declared or changed: list again."""
        self._listed.pop((namespace, cluster), None)
        self._forgotten += 1

    async def reconcile(self, namespace: str, cluster: str) -> ReconcileResult:
        """Raises ApiError and ApiAway; whoever calls does so again."""
        listed = await self._list(namespace, cluster)
        manifests, owner = listed.manifests, listed.owner
        if not manifests and not listed.users:
            self.forget(namespace, cluster)
            return ReconcileResult(soon=False, ready=True, gone=True)
        users_ready = not listed.users or await self._keep_users(owner, listed.users, cluster)
        if not manifests:
            return ReconcileResult(soon=False, ready=users_ready)
        declared, refused = [], []
        for kind, manifest in manifests:
            try:
                declared.append(read_declared(kind, manifest))
            except (SpecError, ValueError, TypeError) as error:
                unread = DeclaredResource(kind, manifest["metadata"]["name"], {}, False, manifest)
                refused.append(Decision(unread, ConditionValue(FALSE, "InvalidSpec", str(error))))
        decisions, refusals = await self._settle(owner, declared, namespace, cluster)
        decisions += refused
        refusals += [""] * len(refused)
        pairs = list(zip(decisions, refusals, strict=True))
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            await asyncio.gather(*(self._isolated(*pair) for pair in some))
        changed = any(decision.change for decision in decisions)
        if changed or any(refusals):
            self.forget(namespace, cluster)
        ready = all(decision.verdict.status == "True" for decision in decisions) and not any(
            refusals
        )
        return ReconcileResult(soon=changed and not any(refusals), ready=ready and users_ready)

    async def _keep_users(
        self, owner: Manifest | None, users: Sequence[Manifest], cluster: str
    ) -> bool:
        """Whether all are as wanted; else they are listed anew next time."""
        ready = False
        namespace = users[0]["metadata"]["namespace"]
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            await self._users.without_cluster(cluster, users)
        else:
            with suppress(SpecError):  # the BrokerCluster's own status says so
                spec = read_spec(owner, default_image=self._default_image)
                ready = await self._users.keep(spec, await self._access(owner, spec), users)
        if not ready:
            self.forget(namespace, cluster)
        return ready

    async def _list(self, namespace: str, cluster: str) -> Listed:
        key = (namespace, cluster)
        now_s = self._monotonic() if self._monotonic else 0.0
        known = self._listed.get(key)
        if known is not None and now_s < known.at_s + LIST_S:
            return known
        self._listed.pop(key, None)
        forgotten = self._forgotten
        listed = Listed(
            now_s,
            await self._declared(namespace, cluster),
            await self._declared_users(namespace, cluster),
            await self._api.get(BROKER_CLUSTER, namespace, cluster),
        )
        # What moved while the list was made may be missing in it.
        if self._monotonic is not None and forgotten == self._forgotten:
            self._listed[key] = listed
        return listed

    async def _declared(self, namespace: str, cluster: str) -> list[tuple[ResourceKind, Manifest]]:
        kinds = []
        for kind in (TOPIC, CONSUMER_GROUP):
            for resource in await self._api.list(kind, namespace):
                if at(resource, "spec", "cluster") == cluster:
                    kinds.append((kind, resource))
        return kinds

    async def _declared_users(self, namespace: str, cluster: str) -> list[Manifest]:
        try:
            users = await self._api.list(USER, namespace)
        except ApiError as error:
            if error.is_transient:
                raise
            return []  # the role is one of before, which may not list Users
        return [user for user in users if at(user, "spec", "cluster") == cluster]

    async def _settle(
        self,
        owner: Manifest | None,
        declared: Sequence[DeclaredResource],
        namespace: str,
        cluster: str,
    ) -> tuple[list[Decision], list[str]]:
        """The decisions, done, and what the cluster said to each."""
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            why = f"there is no BrokerCluster {cluster} in namespace {namespace}"
            return self._unasked(declared, ConditionValue(FALSE, "NoCluster", why), release=True)
        try:
            spec = read_spec(owner, default_image=self._default_image)
            access = await self._access(owner, spec)
            metadata = await self._plane.found(spec, access)
        except SpecError as error:
            why = f"the BrokerCluster {cluster} cannot be: {error}"
            return self._unasked(declared, ConditionValue(UNKNOWN, "InvalidCluster", why))
        except DataPlaneUnavailable as error:
            why = f"the cluster does not answer: {error}"
            return self._unasked(declared, ConditionValue(UNKNOWN, "NoAnswer", why))
        decisions = decide(declared, metadata, paused=spec.paused)
        await self._hold(decisions)
        return decisions, await self._do(spec, access, decisions)

    async def _access(self, owner: Manifest, spec: ClusterSpec) -> ProxyAccess:
        signer = Signer()
        if condition(owner, "Users"):  # the cluster has users, or is about to
            secret = await self._api.get(SECRET, spec.namespace, spec.names.admin_user)
            if secret is not None and is_owned_by(secret, spec.uid):
                signer = signer_in(secret) or signer
        # Only a port without plain text, and one that takes credentials, needs them.
        plain = spec.tls.plain_text and not signer.access_key
        if spec.tls.mode == "Disabled" or plain:
            return ProxyAccess(signer=signer)
        return ProxyAccess(trusted_of(spec, await secrets_of(self._api, spec)), signer)

    def _unasked(
        self,
        declared: Sequence[DeclaredResource],
        verdict: ConditionValue,
        *,
        release: bool = False,
    ) -> tuple[list[Decision], list[str]]:
        decisions = decide_unreachable(declared, verdict, release=release)
        return decisions, [""] * len(decisions)

    async def _do(
        self, spec: ClusterSpec, access: ProxyAccess, decisions: Sequence[Decision]
    ) -> list[str]:
        changes = [decision.change for decision in decisions if decision.change is not None]
        self._check()
        answers = iter(await self._plane.change(spec, access, changes))
        refusals = [next(answers) if decision.change is not None else "" for decision in decisions]
        self.tally.changes += len(changes)
        self.tally.drifts += sum(len(decision.drift) for decision in decisions)
        return refusals

    async def _isolated(self, decision: Decision, refusal: str) -> None:
        """An object whose status or finalizer cannot be written harms no other."""
        try:
            await self._tell(decision, refusal)
        except ApiError as error:
            if error.is_transient:
                raise
            names = {"kind": decision.resource.kind.kind, "object": decision.resource.object_name}
            logger.warning("status refused", extra={**names, "reason": str(error)})

    async def _tell(self, decision: Decision, refusal: str) -> None:
        """The finalizer, the status, and an event where something was done."""
        resource, api = decision.resource, self._api
        if await self._let_go(decision, refusal):
            return
        metadata = resource.manifest["metadata"]
        status = declared_status(decision, refusal, metadata.get("generation", 0), self._now())
        before = resource.manifest.get("status") or {}
        if status == before:
            return
        self._check()
        results: Manifest = {
            "apiVersion": resource.kind.api_version,
            "kind": resource.kind.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await api.apply(resource.kind, results, sub="status")
        if decision.drift:
            await api.event(resource.manifest, "Drifted", "; ".join(decision.drift), warning=True)
        ready = status["conditions"][0]
        if decision.change is not None and not refusal:
            what = f"{resource.name} was {decision.change.act.value}"
            await api.event(
                resource.manifest, decision.change.act.name.title(), what, warning=False
            )
        elif ready["status"] != "True" and _reason(before) != ready["reason"]:
            await api.event(resource.manifest, ready["reason"], ready["message"], warning=True)

    async def _hold(self, decisions: Sequence[Decision]) -> None:
        """Before anything is made: what goes with its object must not outlive it."""
        for decision in decisions:
            resource = decision.resource
            finalizers = resource.manifest["metadata"].get("finalizers") or []
            if resource.delete and not resource.is_deleting and FINALIZER not in finalizers:
                self._check()
                desired = [*finalizers, FINALIZER]
                await self._api.set_finalizers(resource.kind, resource.manifest, desired)

    async def _let_go(self, decision: Decision, refusal: str) -> bool:
        """Whether the object is about to be gone."""
        resource = decision.resource
        if resource.delete and (refusal or not decision.release):
            return False
        finalizers = resource.manifest["metadata"].get("finalizers") or []
        if FINALIZER in finalizers:
            self._check()
            left = [name for name in finalizers if name != FINALIZER]
            await self._api.set_finalizers(resource.kind, resource.manifest, left)
        return resource.is_deleting

    def _check(self) -> None:
        if not self._may_write():
            raise LeaseLost


def _reason(status: Manifest) -> str:
    for entry in status.get("conditions") or []:
        if entry["type"] == "Ready":
            return str(entry["reason"])
    return ""
