"""The CronJobs of a cluster's LagReports: applied at each look at the cluster, and told of."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.conditions import FALSE, ConditionValue
from popmq.operator.model.lag_reports import (
    LagReport,
    read_report,
    report_status,
    status_without_cluster,
)
from popmq.operator.model.manifest import CRON_JOB, LAG_REPORT, Manifest, at, name_of
from popmq.operator.model.names import CLUSTER_LABEL, MANAGED_BY, OPERATOR_NAME
from popmq.operator.model.spec import ClusterSpec
from popmq.operator.resources.reports import cron_job, report_access

AT_ONCE = 16
NO_ROLE = ConditionValue(
    FALSE, "NoRole", "executors need operator.report_role: the ClusterRole that may make pods"
)


@dataclass(frozen=True, slots=True)
class ReportDefaults:
    """`image` is for reports that name none; `role` is the ClusterRole of those with executors."""

    image: str = "popmq-reports:latest"
    role: str = ""


class ReportReconciler:
    """`check` raises when this operator may not write any more."""

    def __init__(
        self,
        api: ApiClient,
        *,
        defaults: ReportDefaults,
        now: Callable[[], datetime],
        check: Callable[[], None],
    ) -> None:
        self._api = api
        self._defaults = defaults
        self._now = now
        self._check = check

    async def keep(self, spec: ClusterSpec) -> None:
        """With the object goes its CronJob, which it owns."""
        reports = await self._reports(spec.namespace, spec.name)
        for start in range(0, len(reports), AT_ONCE):
            some = reports[start : start + AT_ONCE]
            await asyncio.gather(*(self._keep(spec, one) for one in some))

    async def without_cluster(self, namespace: str, cluster: str) -> None:
        """Nobody is there to be asked: what would run in vain goes."""
        selector = f"{CLUSTER_LABEL}={cluster},{MANAGED_BY}={OPERATOR_NAME}"
        for one in await self._api.list(CRON_JOB, namespace, selector):
            self._check()
            uid = one["metadata"]["uid"]
            await self._api.delete(CRON_JOB, namespace, name_of(one), uid=uid)
        why = f"there is no BrokerCluster {cluster} in namespace {namespace}"
        for report in await self._reports(namespace, cluster):
            verdict = ConditionValue(FALSE, "NoCluster", why)
            await self._tell(report, status_without_cluster(report, verdict, self._now()))

    async def _reports(self, namespace: str, cluster: str) -> Sequence[LagReport]:
        return [
            read_report(one, default_image=self._defaults.image)
            for one in await self._api.list(LAG_REPORT, namespace)
            if at(one, "spec", "cluster") == cluster and "deletionTimestamp" not in one["metadata"]
        ]

    async def _keep(self, spec: ClusterSpec, one: LagReport) -> None:
        if one.executors is not None:
            if not self._defaults.role:
                return await self._tell(one, status_without_cluster(one, NO_ROLE, self._now()))
            for kind, access in report_access(spec, one, self._defaults.role):
                self._check()
                await self._api.apply(kind, access)
        self._check()
        made = await self._api.apply(CRON_JOB, cron_job(spec, one))
        await self._tell(one, report_status(one, made, self._now()))

    async def _tell(self, one: LagReport, status: Manifest) -> None:
        if status == (one.manifest.get("status") or {}):
            return
        self._check()
        metadata = one.manifest["metadata"]
        told: Manifest = {
            "apiVersion": LAG_REPORT.api_version,
            "kind": LAG_REPORT.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await self._api.apply(LAG_REPORT, told, sub="status")
