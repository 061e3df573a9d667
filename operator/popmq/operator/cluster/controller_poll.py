"""Whether a cluster's controllers say something that its status does not: for between two looks.

Kubernetes has an event of most of what moves, but none of an election after a cut in the network,
nor of a copy that fell behind; and a whole look at each beat would ask the API server for too much.
"""

from popmq.operator.cluster.data_plane import DataPlane
from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable
from popmq.operator.model.conditions import UNKNOWN, verdict_in
from popmq.operator.model.manifest import BROKER_CLUSTER
from popmq.operator.model.spec import SpecError, read_spec


class News:
    """Of every cluster; one request to the API server, and one to each controller."""

    def __init__(self, api: ApiClient, plane: DataPlane, *, default_image: str) -> None:
        self._api = api
        self._plane = plane
        self._default_image = default_image

    async def from_manifest(self, namespace: str, name: str) -> bool:
        """False also where nothing can be known: the next look says so."""
        try:
            cluster = await self._api.get(BROKER_CLUSTER, namespace, name)
            if cluster is None or "deletionTimestamp" in cluster["metadata"]:
                return False
            spec = read_spec(cluster, default_image=self._default_image)
        except (ApiError, ApiUnavailable, SpecError):
            return False
        status = cluster.get("status") or {}
        health = await self._plane.health(spec)
        silent = verdict_in(status, "Ready").status == UNKNOWN
        if health is None or silent:
            return silent != (health is None)
        return any(
            (group["master"], group["inSync"]) != (seen.master, sorted(seen.in_sync))
            for group in status.get("groups") or []
            for seen in [health.get(group["name"], GroupHealth())]
        )
