"""Which operator is in charge of a cluster, where two installations watch the same namespace.

A Lease of each cluster names the installation, not the process: whichever of its processes acts may
renew it at once.  Another installation leaves the cluster alone and puts a mark on that Lease, so
that the one in charge can say so.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.kube.lease import Elector
from popmq.operator.model.manifest import LEASE, Manifest, at
from popmq.operator.model.names import ObjectNames

OTHER_ANNOTATION, OTHER_TIME_ANNOTATION = "popmq.io/other-operator", "popmq.io/other-operator-time"
OPERATOR_LEASE = "operator"  # of the Lease's name
DURATIONS = 3  # a Lease lasts for as many resyncs
RELEASES = 16  # at once, when the process stops


@dataclass(frozen=True, slots=True)
class Charge:
    """`other`: an installation that watches the cluster too, if it was there lately."""

    mine: bool
    holder: str
    other: str = ""


NOBODY = Charge(True, "")


class ClusterCharges:
    """`identity` is that of the installation; `resync_s` is the longest time between two looks."""

    def __init__(
        self,
        api: ApiClient,
        *,
        identity: str,
        resync_s: float,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._api = api
        self.identity = identity
        self._resync_s = resync_s
        self._monotonic = monotonic
        self._now = now
        self._electors: dict[tuple[str, str], Elector] = {}

    async def of(self, names: ObjectNames, owner: Manifest) -> Charge:
        """Raises ApiUnavailable when that is not known: the look is repeated."""
        key = (names.namespace, names.cluster)
        elector = self._electors.get(key)
        is_new = elector is None
        if elector is None:
            elector = self._electors[key] = Elector(
                self._api,
                namespace=names.namespace,
                name=names.lease(OPERATOR_LEASE),
                identity=self.identity,
                duration_s=self._resync_s * DURATIONS,
                monotonic=self._monotonic,
                owner=owner,
            )
        is_old = self._monotonic() - elector.tried_s >= self._resync_s / 2
        if is_new or is_old or not elector.holds:
            await elector.step()
        if elector.holds:
            return Charge(True, self.identity, self._other(elector.lease))
        if not elector.holder:
            raise ApiUnavailable(
                f"the operator that is in charge (Lease {names.lease(OPERATOR_LEASE)})"
            )
        await self._mark(elector.lease)
        return Charge(False, elector.holder)

    def forget(self, namespace: str, name: str) -> None:
        self._electors.pop((namespace, name), None)

    async def release(self) -> None:
        """Let another installation begin at once; a process of this one does so anyway."""
        slots = asyncio.Semaphore(RELEASES)

        async def released(elector: Elector) -> None:
            async with slots:
                await elector.release()

        await asyncio.gather(*map(released, self._electors.values()))

    def _other(self, lease: Manifest | None) -> str:
        other, time = (
            str(at(lease, "metadata", "annotations", key) or "")
            for key in (OTHER_ANNOTATION, OTHER_TIME_ANNOTATION)
        )
        try:
            age = self._now() - datetime.fromisoformat(time)
        except (ValueError, TypeError):
            return ""
        lately = age < timedelta(seconds=self._resync_s * DURATIONS)
        return other if lately and other != self.identity else ""

    async def _mark(self, lease: Manifest | None) -> None:
        if lease is None:
            return
        annotations = at(lease, "metadata", "annotations") or {}
        if self._is_marked(annotations):
            return
        time = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        marks = {OTHER_ANNOTATION: self.identity, OTHER_TIME_ANNOTATION: time}
        metadata = {**lease["metadata"], "annotations": {**annotations, **marks}}
        try:
            await self._api.replace(LEASE, {**lease, "metadata": metadata})
        except ApiError as error:
            if not error.is_transient:  # the one in charge renews it at this moment
                raise

    def _is_marked(self, annotations: Manifest) -> bool:
        try:
            marked = datetime.fromisoformat(str(annotations.get(OTHER_TIME_ANNOTATION)))
        except ValueError:
            return False
        fresh = self._now() - marked < timedelta(seconds=self._resync_s / 2)
        return fresh and annotations.get(OTHER_ANNOTATION) == self.identity
