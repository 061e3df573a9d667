"""LagReports: reads their specs, and makes their status from CronJobs and pods. Pure."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from popmq.common.metric_table.verdicts import Verdict
from popmq.common.quantities import parse_duration_ms
from popmq.operator.model.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionValue,
    conditions,
    verdict_in,
)
from popmq.operator.model.manifest import Manifest, at
from popmq.operator.model.names import REPORT, REPORT_LABEL

KINDS = ("lag", "revive", "delay")
# Fields of the summary that a run writes when it ends (popmq.reports.report.Report.summary).
FIGURES = ("verdict", "groups", "failing", "stopped", "lag", "oldest", "worst")

IN_CLUSTER = "k8s://https://kubernetes.default.svc"


@dataclass(frozen=True, slots=True)
class Executors:
    """Spark's pods beside the pod of the run; `cpu` and `memory` are quantities per pod."""

    instances: int
    cpu: str
    memory: str


@dataclass(frozen=True, slots=True)
class ReportOutput:
    """Where a report is kept when its pod is deleted. Empty fields are not used."""

    claim: str = ""
    url: str = ""  # of an object store
    secret: str = ""  # its keys are environment variables of the object store's client
    pushgateway: str = ""


@dataclass(frozen=True, slots=True)
class LagReport:
    """A LagReport resource, which the API server has validated (crds/lagreport.yaml)."""

    name: str
    report: str
    schedule: str
    time_zone: str
    group: str
    topic: str
    arguments: Sequence[str]
    master: str
    executors: Executors | None  # None: Spark works in the pod of the run
    image: str
    suspend: bool
    keep: int
    resources: Manifest
    manifest: Manifest
    user_secret: str = ""  # the Secret with the user as which a run signs in at proxies
    since: str = ""
    deadline_s: int = 3_600
    scratch: str = "4Gi"  # size of the scratch volume of each pod
    output: ReportOutput = ReportOutput()


def read_report(manifest: Manifest, *, default_image: str) -> LagReport:
    spec = manifest.get("spec") or {}
    keep = spec.get("keep")
    executors = _executors(spec)
    return LagReport(
        name=manifest["metadata"]["name"],
        report=str(spec.get("report") or KINDS[0]),
        schedule=str(spec.get("schedule") or "0 * * * *"),
        time_zone=str(spec.get("timeZone") or "Etc/UTC"),
        group=str(spec.get("group") or ""),
        topic=str(spec.get("topic") or ""),
        arguments=tuple(spec.get("arguments") or ()),
        master=str(spec.get("master") or (IN_CLUSTER if executors else "")),
        executors=executors,
        image=str(spec.get("image") or default_image),
        suspend=bool(spec.get("suspend")),
        keep=3 if keep is None else int(keep),
        resources=spec.get("resources") or {},
        manifest=manifest,
        user_secret=str(spec.get("userSecret") or ""),
        since=str(spec.get("since") or ""),
        deadline_s=max(1, parse_duration_ms(str(spec.get("deadline") or "1h")) // 1_000),
        scratch=str(spec.get("scratch") or "4Gi"),
        output=_output(spec.get("output") or {}),
    )


def _output(output: Manifest) -> ReportOutput:
    store = output.get("objectStore") or {}
    return ReportOutput(
        str(output.get("volumeClaim") or ""),
        str(store.get("url") or ""),
        str(store.get("secret") or ""),
        str(output.get("pushgateway") or ""),
    )


def _executors(spec: Manifest) -> Executors | None:
    executors = spec.get("executors")
    if executors is None and not str(spec.get("master") or "").startswith("k8s://"):
        return None
    executors = executors or {}
    return Executors(
        int(executors.get("instances") or 2),
        str(executors.get("cpu") or "1"),
        str(executors.get("memory") or "1536Mi"),
    )


def report_status(
    report: LagReport, cron_job: Manifest, now: datetime, pods: Iterable[Manifest] = ()
) -> Manifest:
    """The new status; `cron_job` and `pods` are as the API server returned them."""
    ready = ConditionValue(TRUE, "Scheduled", f"the CronJob is {cron_job['metadata']['name']}")
    if report.suspend:
        ready = ConditionValue(FALSE, "Suspended", "spec.suspend is true")
    verdicts = {"Ready": ready, "Succeeded": _succeeded(cron_job)}
    status = _status(report.manifest, verdicts, now)
    for field, source in (("lastRun", "lastScheduleTime"), ("lastSuccess", "lastSuccessfulTime")):
        if time := at(cron_job, "status", source):
            status[field] = time
    return {**_kept(report.manifest, FIGURES), **figures_of(pods), **status}


def figures_of(pods: Iterable[Manifest]) -> Manifest:
    """The figures of the newest report that one of these runs made; empty if there is none."""
    ended = [
        container["state"]["terminated"]
        for pod in pods
        for container in at(pod, "status", "containerStatuses") or ()
        if container["name"] == REPORT and at(container, "state", "terminated")
    ]
    made = [end for end in ended if end.get("exitCode") == 0 and end.get("message")]
    for end in sorted(made, key=lambda end: str(end.get("finishedAt", "")), reverse=True):
        try:
            figures = json.loads(end["message"])
            if figures["verdict"] in Verdict.__members__:
                return {name: figures[name] for name in FIGURES if name in figures}
        except (ValueError, KeyError, TypeError):
            continue
    return {}


def report_status_of(manifest: Manifest, verdict: ConditionValue, now: datetime) -> Manifest:
    """The status of a report whose CronJob differs from its spec; facts of its last run stay."""
    kept = _kept(manifest, ("lastRun", "lastSuccess", *FIGURES))
    return {**kept, **_status(manifest, {"Ready": verdict}, now)}


def _kept(manifest: Manifest, names: Sequence[str]) -> Manifest:
    before = manifest.get("status") or {}
    return {name: before[name] for name in names if name in before}


def is_failing(status: Manifest) -> bool:
    """Whether the report is missing: its last run failed, or its spec was refused."""
    ready, succeeded = verdict_in(status, "Ready"), verdict_in(status, "Succeeded")
    refused = ready.status == FALSE and ready.reason != "Suspended"
    return refused or succeeded.status == FALSE


def _succeeded(cron_job: Manifest) -> ConditionValue:
    status = cron_job.get("status") or {}
    ran, succeeded = status.get("lastScheduleTime"), status.get("lastSuccessfulTime")
    if status.get("active"):
        return ConditionValue(UNKNOWN, "Running", f"since {ran}")
    if not ran:
        return ConditionValue(UNKNOWN, "NotYet", "it has not run yet")
    # Both are texts of RFC 3339 in UTC and whole seconds, which sort by time.
    if succeeded and succeeded >= ran:
        return ConditionValue(TRUE, "Made", f"at {succeeded}")
    name = at(cron_job, "metadata", "labels", REPORT_LABEL)
    log_command = f"kubectl logs -n {cron_job['metadata']['namespace']} -l {REPORT_LABEL}={name}"
    return ConditionValue(
        FALSE, "Failed", f"the run of {ran} made no report; its log: {log_command}"
    )


def _status(manifest: Manifest, verdicts: dict[str, ConditionValue], now: datetime) -> Manifest:
    before = manifest.get("status") or {}
    generation = manifest["metadata"].get("generation", 0)
    return {
        "observedGeneration": generation,
        "conditions": conditions(verdicts, before, generation, now),
    }
