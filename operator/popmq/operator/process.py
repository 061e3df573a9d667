"""The operator as a process: the Lease, then the watches and workers of the one that holds it.

Losing the Lease ends the process, because requests of before may still be on their way; Kubernetes
starts it again, as a stand-by.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.settings.settings import Settings
from popmq.operator.cluster.data_plane import DataPlane, NetworkDataPlane
from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.cluster.reconcile import Reconciler
from popmq.operator.cluster.reconcile_queue import ReconcileQueue
from popmq.operator.declared.declared_reconcile import DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient
from popmq.operator.kube.api_client import ApiClient, ApiError, ApiUnavailable, find_access
from popmq.operator.kube.event_watch import registry_of, watch
from popmq.operator.kube.lease import Elector
from popmq.operator.model.conditions import UNKNOWN, verdict_in
from popmq.operator.model.manifest import BROKER_CLUSTER
from popmq.operator.model.spec import SpecError, read_spec
from popmq.operator.reports.report_reconcile import ReportDefaults

logger = logging.getLogger(__name__)

STUCK_S = 300.0
REQUEST_SHARE = 3  # a request ends well before the Lease would


class OperatorProcess:
    """`ended` is called with the exit status when the process has to end."""

    def __init__(self, settings: Settings, ended: Callable[[int], None]) -> None:
        wanted = settings.operator
        self._settings = wanted
        self._ended = ended
        self._access = find_access(wanted.kubeconfig)
        duration_s = wanted.lease_duration_ms / 1000
        self._api = ApiClient(self._access)
        self._lease_api = ApiClient(self._access, timeout_s=duration_s / REQUEST_SHARE)
        self.elector = Elector(
            self._lease_api,
            namespace=wanted.lease_namespace or self._access.namespace,
            name=wanted.lease,
            identity=wanted.identity or socket.gethostname(),
            duration_s=duration_s,
            monotonic=time.monotonic,
        )
        plane = NetworkDataPlane(wanted.controller_address, wanted.proxy_address)
        reconciler = Reconciler(
            self._api,
            plane,
            default_image=wanted.image,
            reports=ReportDefaults(wanted.report_image, wanted.report_role),
            now=lambda: datetime.now(UTC),
            may_write=lambda: self.elector.holds,
        )
        self.workers = ReconcileQueue(
            reconciler.reconcile,
            resync_s=wanted.resync_ms / 1000,
            monotonic=time.monotonic,
            lost=self._lost,
            news=News(self._api, plane, default_image=wanted.image).from_manifest,
        )
        self._declaring = DeclaredReconciler(
            self._api,
            NetworkMetadataClient(wanted.proxy_address),
            default_image=wanted.image,
            now=lambda: datetime.now(UTC),
            may_write=lambda: self.elector.holds,
        )
        # Each look opens a connection to each controller and closes it: no news to anybody.
        logging.getLogger("popmq.common.protocol.frame_port").setLevel(logging.WARNING)
        self.declared = ReconcileQueue(
            self._declaring.reconcile,
            resync_s=wanted.declared_resync_ms / 1000,
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
        await self.elector.release()
        if self._watch is not None:
            with suppress(asyncio.CancelledError):
                await self._watch
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
            reading("operator_looks", counted.looks),
            reading("operator_looks_failed", counted.failed),
            reading("operator_look_seconds", counted.seconds),
            reading("operator_longest_look_seconds", self.workers.longest_reconcile_s),
            reading("operator_declared_changes", tally.changes),
            reading("operator_declared_drifts", tally.drifts),
            reading("operator_declared_looks_failed", self.declared.counted.failed),
        ]

    def _lead(self) -> None:
        if self._watch is None:
            logger.info("became the operator that acts")
            registry = registry_of(
                self._access, _ca_of(self._access.tls), self.workers.enqueue, self.declared.enqueue
            )
            self._watch = asyncio.get_running_loop().create_task(
                watch(registry, self._settings.namespaces, stop=self._stop, ready=self.watching)
            )
            self._watch.add_done_callback(self._watch_ended)

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


def _ca_of(tls: ssl.SSLContext | None) -> str | None:
    """What the context trusts, as PEM: kopf makes a context of its own."""
    if tls is None:
        return None
    found = tls.get_ca_certs(binary_form=True)
    return "".join(ssl.DER_cert_to_PEM_cert(one) for one in found)


class News:
    """Whether a cluster's controllers report what its status does not, between two reconciles.

    Kubernetes has an event of most of what moves, but none of an election after a cut in the
    network, nor of a copy that fell behind; and a whole reconcile at each beat would ask the API
    server for too much.  This is one request to the API server, and one to each controller.
    """

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
