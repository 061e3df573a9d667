"""The CronJobs of a cluster's LagReports: applied at each reconcile of the cluster, with their
status."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from popmq.common.errors import ConfigError
from popmq.operator.kube.api_client import ApiClient, ApiError, NameTaken
from popmq.operator.model.conditions import FALSE, ConditionValue
from popmq.operator.model.images import ANY_IMAGE
from popmq.operator.model.lag_reports import (
    is_failing,
    read_report,
    report_status,
    report_status_of,
)
from popmq.operator.model.manifest import (
    CRON_JOB,
    LAG_REPORT,
    POD,
    Manifest,
    ResourceKind,
    at,
    is_owned_by,
    name_of,
)
from popmq.operator.model.names import (
    CLUSTER_LABEL,
    MANAGED_BY,
    OPERATOR_NAME,
    REPORT,
    REPORT_LABEL,
)
from popmq.operator.model.spec import ClusterSpec, check_image
from popmq.operator.resources.reports import cron_job, report_access

AT_ONCE = 16
NO_ROLE = ConditionValue(
    FALSE, "NoRole", "executors need operator.report_role: the ClusterRole that may make pods"
)


@dataclass(frozen=True, slots=True)
class ReportDefaults:
    """`image` is for reports that name none; `role` is the ClusterRole of those with executors;
    `images` are the rules for images that reports name (popmq.operator.model.images)."""

    image: str = "popmq-reports:latest"
    role: str = ""
    images: Sequence[str] = (ANY_IMAGE,)


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

    async def keep(self, spec: ClusterSpec, reports: Sequence[Manifest], *, has_ca: bool) -> int:
        """With the object goes its CronJob, which it owns.  A report that is refused says so in
        its own status; an error that may pass is raised when all others have been handled.
        Returns how many fail."""
        pods = await self._pods(spec) if reports else {}
        results: list[Manifest | ApiError] = []
        for start in range(0, len(reports), AT_ONCE):
            some = reports[start : start + AT_ONCE]
            results += await asyncio.gather(
                *(
                    self._isolated(spec, manifest, pods.get(name_of(manifest), []), has_ca)
                    for manifest in some
                )
            )
        for result in results:
            if isinstance(result, ApiError):
                raise result
        return sum(is_failing(result) for result in results if not isinstance(result, ApiError))

    async def without_cluster(self, namespace: str, cluster: str) -> None:
        """Nobody is there to be asked: what would run in vain goes."""
        selector = f"{CLUSTER_LABEL}={cluster},{MANAGED_BY}={OPERATOR_NAME}"
        reports = await self.of(namespace, cluster)
        uids = [report["metadata"]["uid"] for report in reports]
        for job in await self._api.list(CRON_JOB, namespace, selector):
            if any(is_owned_by(job, uid) for uid in uids):
                self._check()
                uid = job["metadata"]["uid"]
                await self._api.delete(CRON_JOB, namespace, name_of(job), uid=uid)
        why = f"there is no BrokerCluster {cluster} in namespace {namespace}"
        verdict = ConditionValue(FALSE, "NoCluster", why)
        for report in reports:
            await self._write_status(report, report_status_of(report, verdict, self._now()))

    async def of(self, namespace: str, cluster: str) -> Sequence[Manifest]:
        """The LagReports of a cluster.  Those that are being deleted do not count."""
        return [
            manifest
            for manifest in await self._api.list(LAG_REPORT, namespace)
            if at(manifest, "spec", "cluster") == cluster
            and "deletionTimestamp" not in manifest["metadata"]
        ]

    async def _pods(self, spec: ClusterSpec) -> dict[str, list[Manifest]]:
        """Of runs and their executors, by the report."""
        selector = ",".join(f"{key}={value}" for key, value in spec.names.selector(REPORT).items())
        pods: dict[str, list[Manifest]] = {}
        for pod in await self._api.list(POD, spec.namespace, selector):
            pods.setdefault(str(at(pod, "metadata", "labels", REPORT_LABEL)), []).append(pod)
        return pods

    async def _isolated(
        self, spec: ClusterSpec, manifest: Manifest, pods: Sequence[Manifest], has_ca: bool
    ) -> Manifest | ApiError:
        """Its status, or the error after which it is to be tried again soon."""
        try:
            status = await self._keep(spec, manifest, pods, has_ca)
            return await self._refuse(manifest, status) if isinstance(status, str) else status
        except ApiError as error:
            return error if error.is_transient else manifest.get("status") or {}

    async def _keep(
        self, spec: ClusterSpec, manifest: Manifest, pods: Sequence[Manifest], has_ca: bool
    ) -> Manifest | str:
        """The status that was written, or why the report is refused."""
        try:
            report = read_report(manifest, default_image=self._defaults.image)
            if report.executors is not None and not self._defaults.role:
                status = report_status_of(manifest, NO_ROLE, self._now())
                return await self._write_status(manifest, status)
            if report.image != self._defaults.image:
                check_image("spec.image", report.image, self._defaults.images)
            job = cron_job(spec, report, has_ca=has_ca)
        except (ConfigError, ValueError, TypeError) as error:
            return str(error)
        try:
            if report.executors is not None:
                for kind, access in report_access(spec, report, self._defaults.role):
                    await self._apply(spec, kind, access)
            applied = await self._apply(spec, CRON_JOB, job)
        except NameTaken as error:
            return f"CronJob {name_of(job)}: {error}"
        except ApiError as error:
            if error.is_transient:
                raise
            return str(error.refusal(f"CronJob {name_of(job)}"))
        return await self._write_status(manifest, report_status(report, applied, self._now(), pods))

    async def _apply(self, spec: ClusterSpec, kind: ResourceKind, desired: Manifest) -> Manifest:
        self._check()
        (owner,) = desired["metadata"]["ownerReferences"]
        known = await self._api.get(kind, spec.namespace, name_of(desired))
        if known is not None and spec.adopts:
            known = await self._api.adopted(kind, known, spec.names.labels(), owner)
        return await self._api.apply_owned(kind, desired, owner_uid=owner["uid"], known=known)

    async def _refuse(self, manifest: Manifest, why: str) -> Manifest:
        verdict = ConditionValue(FALSE, "InvalidSpec", why)
        status = report_status_of(manifest, verdict, self._now())
        await self._write_status(manifest, status)
        await self._api.recurring_event(manifest, "InvalidSpec", why)
        return status

    async def _write_status(self, manifest: Manifest, status: Manifest) -> Manifest:
        if status == (manifest.get("status") or {}):
            return status
        self._check()
        metadata = manifest["metadata"]
        written: Manifest = {
            "apiVersion": LAG_REPORT.api_version,
            "kind": LAG_REPORT.kind,
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": status,
        }
        await self._api.apply(LAG_REPORT, written, sub="status")
        return status
