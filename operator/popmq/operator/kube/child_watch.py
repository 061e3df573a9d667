"""Watches what clusters own: one list and one watch of each kind, with the operator's label.

The API server selects, so objects of others cost nothing here however many there are, and nothing
of an object is kept: an event wakes the cluster that the object's label names.  A watch that ends
or breaks starts again with a list, which wakes every cluster once more.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.model.manifest import (
    CLAIM,
    CONFIG_MAP,
    CRON_JOB,
    DEPLOYMENT,
    POD,
    SERVICE,
    STATEFUL_SET,
    Manifest,
    ResourceKind,
    at,
)
from popmq.operator.model.names import CLUSTER_LABEL, MANAGED_BY, OPERATOR_NAME

logger = logging.getLogger(__name__)

WATCHED = (POD, STATEFUL_SET, DEPLOYMENT, SERVICE, CONFIG_MAP, CLAIM, CRON_JOB)
SELECTOR = f"{MANAGED_BY}={OPERATOR_NAME}"
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a watch that failed starts again

Wake = Callable[[str, str], None]


def child_watches(api: ApiClient, namespaces: Sequence[str], wake: Wake) -> list["ChildWatch"]:
    """No namespace is every namespace."""
    return [
        ChildWatch(api, kind, namespace, wake)
        for kind in WATCHED
        for namespace in namespaces or ("",)
    ]


class ChildWatch:
    """Of one kind, in one namespace or in all ("").  `wake` gets namespace and cluster."""

    def __init__(self, api: ApiClient, kind: ResourceKind, namespace: str, wake: Wake) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._wake = wake

    async def run(self) -> None:
        """Until it is cancelled."""
        pause_s = PAUSE_S
        while True:
            try:
                version = await self._list()
                pause_s = PAUSE_S
                await self._follow(version)
            except (ApiError, ApiUnavailable) as error:
                names = {"kind": self._kind.kind, "namespace": self._namespace}
                logger.warning("watch failed", extra={**names, "reason": str(error)})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _list(self) -> str:
        """The resource version to watch from."""
        version = ""
        async for page in self._api.pages(self._kind, self._namespace, SELECTOR):
            for manifest in page.get("items") or []:
                self._moved(manifest)
            version = str(at(page, "metadata", "resourceVersion") or "")
        return version

    async def _follow(self, version: str) -> None:
        """Until the server ends the watch or does not know the version any more."""
        watch = self._api.watch(self._kind, self._namespace, SELECTOR, version)
        async for event in watch:
            if event.get("type") == "ERROR":
                return
            if event.get("type") != "BOOKMARK":
                self._moved(event.get("object") or {})

    def _moved(self, manifest: Manifest) -> None:
        cluster = at(manifest, "metadata", "labels", CLUSTER_LABEL)
        if cluster:
            self._wake(str(at(manifest, "metadata", "namespace") or ""), str(cluster))
