"""The operator as a process: the Lease, then the watches and workers of the one that holds it.

Losing the Lease ends the process, because requests of before may still be on their way; Kubernetes
starts it again, as a stand-by.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime

from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.settings.settings import OperatorSettings, Settings
from popmq.operator.cluster.charges import ClusterCharges
from popmq.operator.cluster.cluster_secrets import PlaneAccess
from popmq.operator.cluster.data_plane import DataPlane, NetworkDataPlane
from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.cluster.reconcile import Reconciler
from popmq.operator.cluster.reconcile_queue import ReconcileQueue
from popmq.operator.declared.declared_reconcile import DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient
from popmq.operator.declared.user_reconcile import UserClient
from popmq.operator.kube.access import ApiAccess
from popmq.operator.kube.admin_client import THREADS
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.kube.child_watch import child_watches
from popmq.operator.kube.event_watch import Clusters, registry_of, watch
from popmq.operator.kube.lease import Elector
from popmq.operator.model.conditions import UNKNOWN, verdict_in
from popmq.operator.model.images import repository
from popmq.operator.model.spec import SpecError, read_spec
from popmq.operator.reports.report_reconcile import ReportDefaults

logger = logging.getLogger(__name__)

STUCK_S = 300.0
REQUEST_SHARE = 3  # a request ends well before the Lease would


class OperatorProcess:
    """`ended` is called with the exit status when the process has to end."""

    def __init__(self, settings: Settings, access: ApiAccess, ended: Callable[[int], None]) -> None:
        desired = settings.operator
        self._settings = desired
        self._ended = ended
        self._access = access
        duration_s = desired.lease_duration_ms / 1000
        self._api = ApiClient(self._access)
        self._lease_api = ApiClient(self._access, timeout_s=duration_s / REQUEST_SHARE)
        self.elector = Elector(
            self._lease_api,
            namespace=desired.lease_namespace or self._access.namespace,
            name=desired.lease,
            identity=desired.identity or socket.gethostname(),
            duration_s=duration_s,
            monotonic=time.monotonic,
        )
        self._clusters: Clusters = {}
        plane_access: dict[tuple[str, str], PlaneAccess] = {}
        lease_namespace = desired.lease_namespace or self._access.namespace
        self._charges = ClusterCharges(
            self._api,
            identity=f"{lease_namespace}/{desired.lease}",
            resync_s=desired.resync_ms / 1000,
            monotonic=time.monotonic,
            now=lambda: datetime.now(UTC),
        )
        self._threads = ThreadPoolExecutor(THREADS, "admin")
        plane = NetworkDataPlane(desired.controller_address, desired.proxy_address, self._threads)
        reconciler = Reconciler(
            self._api,
            plane,
            default_image=desired.image,
            images=images_of(desired),
            reports=ReportDefaults(desired.report_image, desired.report_role, images_of(desired)),
            now=lambda: datetime.now(UTC),
            may_write=lambda: self.elector.holds,
            access=plane_access,
            charges=self._charges,
        )
        self.workers = ReconcileQueue(
            reconciler.reconcile,
            resync_s=desired.resync_ms / 1000,
            monotonic=time.monotonic,
            lost=self._lost,
            news=News(
                self._clusters, plane, plane_access, default_image=desired.image
            ).from_manifest,
        )
        self._declaring = DeclaredReconciler(
            self._api,
            NetworkMetadataClient(desired.proxy_address, self._threads),
            default_image=desired.image,
            now=lambda: datetime.now(UTC),
            may_write=lambda: self.elector.holds,
            monotonic=time.monotonic,
            users=UserClient(desired.proxy_address, self._threads),
        )
        # Each look opens a connection to each controller and closes it: no news to anybody.
        logging.getLogger("popmq.common.protocol.frame_port").setLevel(logging.WARNING)
        self.declared = ReconcileQueue(
            self._declaring.reconcile,
            resync_s=desired.declared_resync_ms / 1000,
            monotonic=time.monotonic,
            lost=self._lost,
        )
        self._stop = asyncio.Event()
        self.watching = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """For ever: hold the Lease or wait for it."""
        every_s = self._settings.lease_renew_ms / 1000
        while not self._stop.is_set():
            holds = await self.elector.step()
            if self._stop.is_set():
                return  # what was released is not lost
            if holds:
                self._lead()
            elif self._watch is not None:
                self._lost()
            await asyncio.sleep(every_s)

    async def stop(self) -> None:
        """The workers first: nothing may be written any more when the Lease is given away."""
        self._stop.set()
        await self.workers.stop()
        await self.declared.stop()
        if self.elector.holds:
            await self._charges.release()
        await self.elector.release()
        if self._watch is not None:
            with suppress(asyncio.CancelledError):
                await self._watch
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._api.close()
        await self._lease_api.close()

    @property
    def alive(self) -> bool:
        """Neither a look nor the Lease hangs: if it says no, the process is to be killed."""
        silent_s = time.monotonic() - self.elector.tried_s
        looks = (self.workers.longest_reconcile_s, self.declared.longest_reconcile_s)
        return max(*looks, silent_s) < STUCK_S

    def metrics(self) -> list[Metric]:
        counted, tally = self.workers.counted, self._declaring.tally
        return [
            reading("operator_leader", self.elector.holds),
            reading("operator_clusters", self.workers.clusters),
            reading("operator_clusters_ready", sum(counted.ready.values())),
            reading("operator_reconciles", counted.looks),
            reading("operator_reconciles_failed", counted.failed),
            reading("operator_reconcile_seconds", counted.seconds),
            reading("operator_longest_reconcile_seconds", self.workers.longest_reconcile_s),
            *(
                reading("operator_certificate_expiry_timestamp_seconds", end, *key)
                for key, end in sorted(counted.certificate_ends.items())
                if end
            ),
            *(
                reading("operator_reports_failing", count, *key)
                for key, count in sorted(counted.failing_reports.items())
            ),
            reading("operator_declared_changes", tally.changes),
            reading("operator_declared_drifts", tally.drifts),
            reading("operator_declared_reconciles_failed", self.declared.counted.failed),
        ]

    def _lead(self) -> None:
        if self._watch is None:
            logger.info("became the operator that acts")
            registry = registry_of(
                self._access, self._clusters, self._cluster_moved, self._declared_moved
            )
            namespaces = self._settings.namespaces
            children = child_watches(self._api, namespaces, self.workers.enqueue)
            self._watch = asyncio.get_running_loop().create_task(
                watch(
                    self._api, registry, children, namespaces, stop=self._stop, ready=self.watching
                )
            )
            self._watch.add_done_callback(self._watch_ended)

    def _cluster_moved(self, namespace: str, cluster: str) -> None:
        self._declaring.forget(namespace, cluster)
        self.workers.enqueue(namespace, cluster)

    def _declared_moved(self, namespace: str, cluster: str) -> None:
        self._declaring.forget(namespace, cluster)
        self.declared.enqueue(namespace, cluster)

    def _lost(self) -> None:
        if self._stop.is_set():
            return  # given away
        logger.critical("the lease is lost, stopping", extra={"holder": self.elector.holder})
        self._ended(1)

    def _watch_ended(self, task: "asyncio.Task[None]") -> None:
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            logger.critical("the watches failed, stopping", exc_info=task.exception())
        self._ended(1 if failed else 0)


def images_of(settings: OperatorSettings) -> tuple[str, ...]:
    """Where no rule is set: every version of the operator's own images."""
    own = (repository(settings.image), repository(settings.report_image))
    return settings.images or tuple(f"{name}{mark}" for name in own for mark in ":@")


class News:
    """Whether a cluster's controllers report what its status does not, between two reconciles.

    Kubernetes has an event of most of what moves, but none of an election after a cut in the
    network, nor of a copy that fell behind; and a whole reconcile at each beat would ask the API
    server for too much.  This is one request to each controller, and none to the API server.
    """

    def __init__(
        self,
        clusters: Clusters,
        plane: DataPlane,
        access: Mapping[tuple[str, str], PlaneAccess],
        *,
        default_image: str,
    ) -> None:
        self._access = access
        self._clusters = clusters
        self._plane = plane
        self._default_image = default_image

    async def from_manifest(self, namespace: str, name: str) -> bool:
        """False also where nothing can be known: the next look says so."""
        cluster = self._clusters.get((namespace, name))
        access = self._access.get((namespace, name))
        if cluster is None or access is None or "deletionTimestamp" in cluster["metadata"]:
            return False
        try:
            spec = read_spec(cluster, default_image=self._default_image)
        except SpecError:
            return False
        status = cluster.get("status") or {}
        health = await self._plane.health(spec, access)
        silent = verdict_in(status, "Ready").status == UNKNOWN
        if health is None or silent:
            return silent != (health is None)
        return any(
            (group["master"], group["inSync"]) != (seen.master, sorted(seen.in_sync))
            for group in status.get("groups") or []
            for seen in [health.get(group["name"], GroupHealth())]
        )
