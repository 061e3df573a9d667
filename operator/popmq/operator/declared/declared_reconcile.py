"""One look at all Topics and ConsumerGroups of one cluster: list, compare, change, tell.

Like popmq.operator.cluster.reconcile it keeps no state and may be killed anywhere.
popmq.operator.declared.declared_resources decides.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

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
from popmq.operator.declared.metadata_client import MetadataClient
from popmq.operator.kube.admin_client import DataPlaneUnavailable
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.conditions import FALSE, UNKNOWN, ConditionValue
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CONSUMER_GROUP,
    TOPIC,
    Manifest,
    ResourceKind,
    at,
)
from popmq.operator.model.names import FINALIZER
from popmq.operator.model.spec import ClusterSpec, SpecError, read_spec

AT_ONCE = 16  # writes of statuses


@dataclass
class DeclaredCounters:
    """For metrics, of all clusters."""

    changes: int = 0
    drifts: int = 0


class DeclaredReconciler:
    def __init__(
        self,
        api: ApiClient,
        plane: MetadataClient,
        *,
        default_image: str,
        now: Callable[[], datetime],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._api = api
        self._plane = plane
        self._default_image = default_image
        self._now = now
        self._may_write = may_write
        self.tally = DeclaredCounters()

    async def reconcile(self, namespace: str, cluster: str) -> ReconcileResult:
        """Raises ApiError and ApiAway; whoever calls does so again."""
        manifests = await self._declared(namespace, cluster)
        if not manifests:
            return ReconcileResult(soon=False, ready=True, gone=True)
        declared, refused = [], []
        for kind, manifest in manifests:
            try:
                declared.append(read_declared(kind, manifest))
            except SpecError as error:
                unread = DeclaredResource(kind, manifest["metadata"]["name"], {}, False, manifest)
                refused.append(Decision(unread, ConditionValue(FALSE, "InvalidSpec", str(error))))
        owner = await self._api.get(BROKER_CLUSTER, namespace, cluster)
        decisions, refusals = await self._settle(owner, declared, namespace, cluster)
        decisions += refused
        refusals += [""] * len(refused)
        tellings = [self._tell(*pair) for pair in zip(decisions, refusals, strict=True)]
        for start in range(0, len(tellings), AT_ONCE):
            await asyncio.gather(*tellings[start : start + AT_ONCE])
        changed = any(one.change for one in decisions)
        ready = all(one.verdict.status == "True" for one in decisions) and not any(refusals)
        return ReconcileResult(soon=changed and not any(refusals), ready=ready)

    async def _declared(self, namespace: str, cluster: str) -> list[tuple[ResourceKind, Manifest]]:
        found = []
        for kind in (TOPIC, CONSUMER_GROUP):
            for one in await self._api.list(kind, namespace):
                if at(one, "spec", "cluster") == cluster:
                    found.append((kind, one))
        return found

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
            trusted = trusted_of(await secrets_of(self._api, spec))
            found = await self._plane.found(spec, trusted)
        except SpecError as error:
            why = f"the BrokerCluster {cluster} cannot be: {error}"
            return self._unasked(declared, ConditionValue(UNKNOWN, "InvalidCluster", why))
        except DataPlaneUnavailable as error:
            why = f"the cluster does not answer: {error}"
            return self._unasked(declared, ConditionValue(UNKNOWN, "NoAnswer", why))
        decisions = decide(declared, found, paused=spec.paused)
        await self._hold(decisions)
        return decisions, await self._do(spec, trusted, decisions)

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
        self, spec: ClusterSpec, trusted: bytes | None, decisions: Sequence[Decision]
    ) -> list[str]:
        changes = [one.change for one in decisions if one.change is not None]
        self._check()
        answers = iter(await self._plane.change(spec, trusted, changes))
        refusals = [next(answers) if one.change is not None else "" for one in decisions]
        self.tally.changes += len(changes)
        self.tally.drifts += sum(len(one.drift) for one in decisions)
        return refusals

    async def _tell(self, decision: Decision, refusal: str) -> None:
        """The finalizer, the status, and an event where something was done."""
        one, api = decision.one, self._api
        if await self._let_go(decision, refusal):
            return
        metadata = one.manifest["metadata"]
        status = declared_status(decision, refusal, metadata.get("generation", 0), self._now())
        before = one.manifest.get("status") or {}
        if status == before:
            return
        self._check()
        told: Manifest = {
            "apiVersion": one.kind.api_version,
            "kind": one.kind.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await api.apply(one.kind, told, sub="status")
        if decision.drift:
            await api.event(one.manifest, "Drifted", "; ".join(decision.drift), warning=True)
        ready = status["conditions"][0]
        if decision.change is not None and not refusal:
            what = f"{one.name} was {decision.change.act.value}"
            await api.event(one.manifest, decision.change.act.name.title(), what, warning=False)
        elif ready["status"] != "True" and _reason(before) != ready["reason"]:
            await api.event(one.manifest, ready["reason"], ready["message"], warning=True)

    async def _hold(self, decisions: Sequence[Decision]) -> None:
        """Before anything is made: what goes with its object must not outlive it."""
        for decision in decisions:
            one = decision.one
            finalizers = one.manifest["metadata"].get("finalizers") or []
            if one.delete and not one.is_deleting and FINALIZER not in finalizers:
                self._check()
                wanted = [*finalizers, FINALIZER]
                await self._api.set_finalizers(one.kind, one.manifest, wanted)

    async def _let_go(self, decision: Decision, refusal: str) -> bool:
        """Whether the object is about to be gone."""
        one = decision.one
        if one.delete and (refusal or not decision.release):
            return False
        finalizers = one.manifest["metadata"].get("finalizers") or []
        if FINALIZER in finalizers:
            self._check()
            left = [name for name in finalizers if name != FINALIZER]
            await self._api.set_finalizers(one.kind, one.manifest, left)
        return one.is_deleting

    def _check(self) -> None:
        if not self._may_write():
            raise LeaseLost


def _reason(status: Manifest) -> str:
    for one in status.get("conditions") or []:
        if one["type"] == "Ready":
            return str(one["reason"])
    return ""
