"""Which of several operators acts: the holder of one Lease, by compare-and-set.

Clocks of machines are not compared: another's Lease counts as left when *we* saw it unchanged for
its whole duration.  A holder writes nothing any more once two thirds of the duration have passed
since it began its last renewal that worked, however long it was stopped in between.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.model.manifest import LEASE, Manifest, at

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease of another holder, and when we first saw it like this."""

    holder: str
    version: str
    at_s: float
    duration_s: float


class Elector:
    """`monotonic` counts seconds on a clock that nobody sets; with `owner` goes the Lease."""

    def __init__(
        self,
        api: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float,
        monotonic: Callable[[], float],
        owner: Manifest | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration_s = duration_s
        self._monotonic = monotonic
        self._renewed_s: float | None = None  # the begin of the last renewal that worked
        self._seen: ObservedLease | None = None
        self._owner = owner
        self.lease: Manifest | None = None  # as it was before the last step
        self.tried_s = monotonic()

    @property
    def holds(self) -> bool:
        if self._renewed_s is None:
            return False
        return self._monotonic() < self._renewed_s + self._duration_s * 2 / 3

    @property
    def holder(self) -> str:
        return self._identity if self.holds else (self._seen.holder if self._seen else "")

    async def step(self) -> bool:
        """Take or renew it; whether it is ours now."""
        begun = self.tried_s = self._monotonic()
        try:
            lease = self.lease = await self._api.get(LEASE, self._namespace, self._name)
            if lease is None:
                await self._api.create(LEASE, self._lease(None))
            elif self._may_take(lease, begun):
                await self._api.replace(LEASE, self._lease(lease))
            else:
                self._renewed_s = None
                return False
        except (ApiUnavailable, ApiError) as error:
            # It may have been written, also where a repeated request then got a conflict; if so,
            # the next step finds our own name.  Nobody can have it before we stop by ourselves.
            logger.warning("the lease was not renewed", extra={"reason": str(error)})
            return self.holds
        self._renewed_s = begun
        self._seen = None
        return True

    async def release(self) -> None:
        """Let the next one begin at once."""
        if not self.holds:
            return
        self._renewed_s = None
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
            if lease is not None and at(lease, "spec", "holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.replace(LEASE, lease)
        except (ApiUnavailable, ApiError) as error:
            logger.warning("the lease was not released", extra={"reason": str(error)})

    def _may_take(self, lease: Manifest, now_s: float) -> bool:
        holder = at(lease, "spec", "holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        version = json.dumps(lease["spec"], sort_keys=True)  # annotations are others'
        if self._seen is None or self._seen.version != version:
            duration_s = float(at(lease, "spec", "leaseDurationSeconds") or self._duration_s)
            self._seen = ObservedLease(holder, version, now_s, duration_s)
        return now_s >= self._seen.at_s + self._seen.duration_s

    def _lease(self, current: Manifest | None) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people
        metadata: Manifest = {"name": self._name, "namespace": self._namespace}
        if self._owner is not None:
            metadata["ownerReferences"] = [self._owner]
        spec: Manifest = dict((current or {}).get("spec") or {})
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + bool(current)
        if current is not None:
            metadata = current["metadata"]
        spec.update(
            holderIdentity=self._identity,
            leaseDurationSeconds=max(1, round(self._duration_s)),
            renewTime=now,
        )
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": spec,
        }
