"""LagReports: the CronJob of each, and what its status says of the last run."""

import json
from typing import Any

import pytest
from kube.clusters import cluster, read
from kube.fake_api import Object
from kube.world import NOW, World, play, running

from popmq.operator.model.lag_reports import read_report, report_status
from popmq.operator.reports.report_reconcile import ReportDefaults
from popmq.operator.resources.proxies import tls_secret
from popmq.operator.resources.reports import SUMMARY_FILE, cron_job

SUMMARY = ("--summary", SUMMARY_FILE)


def report(name: str = "hourly", **spec: Any) -> Object:
    metadata = {"name": name, "namespace": "apps", "uid": f"uid-of-{name}", "generation": 1}
    return {
        "apiVersion": "popmq.io/v1beta1",
        "kind": "LagReport",
        "metadata": metadata,
        "spec": {"cluster": "demo", **spec},
    }


def built(given: Object | None = None, /, **spec: Any) -> Object:
    item = read_report(report(**spec), default_image="popmq-reports:1")
    return cron_job(read(given or cluster()), item)


def pod_of(results: Object) -> Object:
    spec: Object = results["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec


def condition(world: World, kind: str, name: str = "hourly") -> Object:
    lagreports = world.api.get("lagreports", "apps", name)
    assert lagreports is not None
    return next(item for item in lagreports["status"]["conditions"] if item["type"] == kind)


def test_a_run_asks_the_proxies_and_has_no_rights() -> None:
    results = built(schedule="5 4 * * *", report="revive", group="readers", arguments=["--json"])
    assert results["spec"]["schedule"] == "5 4 * * *"
    assert results["spec"]["timeZone"] == "Etc/UTC"
    assert results["spec"]["concurrencyPolicy"] == "Forbid"
    pod = pod_of(results)
    (container,) = pod["containers"]
    assert container["args"] == [
        *("report", "revive", "--group", "readers", "--summary", SUMMARY_FILE, "--json"),
    ]
    assert container["env"] == [
        {"name": "POPMQ_ENDPOINT", "value": "demo-proxy.apps.svc:8081"},
        {"name": "POPMQ_ADMIN_ENDPOINT", "value": "demo-admin.apps.svc:8082"},
    ]
    assert container["image"] == "popmq-reports:1"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_a_run_signs_as_the_user_of_a_secret_and_over_tls_alone() -> None:
    (container,) = pod_of(built(userSecret="demo-user-reporter", executors={}))["containers"]
    variables = {item["name"]: item for item in container["env"]}
    assert variables["POPMQ_ENDPOINT"]["value"] == "tls://demo-proxy.apps.svc:8081"
    for name, key in (("POPMQ_ACCESS_KEY", "access_key"), ("POPMQ_SECRET", "secret")):
        reference = {"secretKeyRef": {"name": "demo-user-reporter", "key": key}}
        assert variables[name] == {"name": name, "valueFrom": reference}
    at = container["args"].index("--executor-user")
    assert container["args"][at + 1] == "demo-user-reporter"


def test_where_only_tls_is_taken_a_run_trusts_the_clusters_own_authority() -> None:
    given = cluster(tls={"mode": "Own", "plainText": False})
    pod = pod_of(built(given))
    (container,) = pod["containers"]
    assert container["env"] == [
        {"name": "POPMQ_ENDPOINT", "value": "tls://demo-proxy.apps.svc:8081"},
        {"name": "POPMQ_ADMIN_ENDPOINT", "value": "tls://demo-admin.apps.svc:8082"},
        {"name": "POPMQ_TLS_CA", "value": "/etc/popmq-tls/ca.crt"},
    ]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
    # Not the key.
    assert volume["secret"] == {
        "secretName": tls_secret(read(given)),
        "items": [{"key": "ca.crt", "path": "ca.crt"}],
    }


def arguments_of(results: Object) -> list[str]:
    (container,) = pod_of(results)["containers"]
    args: list[str] = container["args"]
    return args


def settings_of(results: Object) -> dict[str, str]:
    words = arguments_of(results)
    pairs = [words[at + 1].partition("=") for at, word in enumerate(words) if word == "--conf"]
    return {key: value for key, _, value in pairs}


def test_executors_are_made_by_a_run_that_may_and_are_what_the_spec_says() -> None:
    given = cluster(imagePullPolicy="Always", imagePullSecrets=[{"name": "a"}, {"name": "b"}])
    asked = {"instances": 3, "cpu": "1500m", "memory": "2Gi"}
    results = built(given, executors=asked, arguments=["--json"])
    pod, words = pod_of(results), arguments_of(results)
    assert pod["serviceAccountName"] == "demo-report-hourly"
    assert pod["automountServiceAccountToken"] is True
    assert words[:6] == [
        *("report", "lag", "--master", "k8s://https://kubernetes.default.svc"),
        *("--executors", "3"),
    ]
    assert words[-1] == "--json"
    settings = settings_of(results)
    sizes = [settings[f"spark.executor.{name}"] for name in ("cores", "memory", "memoryOverhead")]
    assert sizes == ["2", "1228m", "820m"]
    kubernetes = {
        key.removeprefix("spark.kubernetes."): value
        for key, value in settings.items()
        if key.startswith("spark.kubernetes.")
    }
    assert kubernetes.pop("executor.label.popmq.io/report") == "hourly"
    assert kubernetes.pop("executor.label.popmq.io/cluster") == "demo"
    assert {key: kubernetes[key] for key in kubernetes if "label" not in key} == {
        "namespace": "apps",
        "driver.pod.name": "$(POD_NAME)",
        "authenticate.executor.serviceAccountName": "demo-popmq",
        "container.image": "popmq-reports:1",
        "container.image.pullPolicy": "Always",
        "container.image.pullSecrets": "a,b",
        "executor.request.cores": "1500m",
    }


def test_a_report_stays_on_a_volume_claim_when_its_pod_is_gone() -> None:
    output = {"volumeClaim": "pages", "pushgateway": "http://push:9091"}
    results = built(output=output, since="90m")
    assert arguments_of(results) == [
        *("report", "lag", "--since", "90m", "--save", "/reports/hourly"),
        *("--prometheus", "http://push:9091", *SUMMARY),
    ]
    pod = pod_of(results)
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "output")
    assert volume["persistentVolumeClaim"] == {"claimName": "pages"}
    (container,) = pod["containers"]
    assert {"name": "output", "mountPath": "/reports"} in container["volumeMounts"]
    assert container["terminationMessagePath"] == SUMMARY_FILE
    assert pod["securityContext"]["fsGroup"]  # or the run could not write there


def test_a_report_stays_in_an_object_store_whose_keys_are_variables() -> None:
    store = {"url": "s3://bucket/reports/?scheme=http", "secret": "store-keys"}
    results = built(output={"objectStore": store})
    words = arguments_of(results)
    assert words[words.index("--save") + 1] == "s3://bucket/reports/hourly?scheme=http"
    (container,) = pod_of(results)["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "store-keys"}}]


def test_a_run_has_a_deadline_and_each_pod_room_for_temporary_files() -> None:
    results = built(deadline="20m", scratch="512Mi", executors={})
    assert results["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 1_200
    (volume,) = (item for item in pod_of(results)["volumes"] if item["name"] == "tmp")
    assert volume["emptyDir"] == {"sizeLimit": "512Mi"}
    words = arguments_of(results)
    assert words[words.index("--executor-scratch") + 1] == "512Mi"
    usual = built()
    assert usual["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 3_600


FIGURES = {
    **{"verdict": "FAILING", "groups": 7, "failing": 1, "stopped": 2, "lag": 4_010},
    "oldest": "12m",
    "worst": [{"group": "billing", "topic": "orders", "verdict": "FAILING", "lag": 4_000}],
}


def run_of(message: str, at: str, *, code: int = 0, name: str = "report") -> Object:
    """The pod of a run that ended."""
    end = {"exitCode": code, "finishedAt": at, "message": message}
    labels = {"popmq.io/report": "hourly", **read(cluster()).names.labels("report")}
    return {
        "metadata": {"name": f"run-{at}", "namespace": "apps", "labels": labels},
        "status": {"containerStatuses": [{"name": name, "state": {"terminated": end}}]},
    }


def test_the_status_has_the_figures_of_the_last_report_that_was_made() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report())
        older = json.dumps({**FIGURES, "lag": 1})
        world.api.put("pods", run_of(older, "2030-01-01T09:00:30Z"))
        world.api.put("pods", run_of(json.dumps(FIGURES), "2030-01-01T10:00:30Z"))
        world.api.put("pods", run_of("Traceback", "2030-01-01T11:00:30Z", code=1))
        world.api.put("pods", run_of("no JSON", "2030-01-01T11:00:31Z"))
        world.api.put("pods", run_of(older, "2030-01-01T11:00:32Z", name="executor"))
        await world.look()
        for _ in range(2):
            status = (world.api.get("lagreports", "apps", "hourly") or {})["status"]
            assert {name: status[name] for name in FIGURES} == FIGURES
            for pod in world.api.all("pods"):  # they stay when the runs are deleted
                if pod["metadata"]["name"].startswith("run-"):
                    world.api.remove("pods", "apps", pod["metadata"]["name"])
            await world.look()

    play(story)


def test_where_only_tls_is_taken_executors_trust_the_clusters_own_authority_too() -> None:
    given = cluster(tls={"mode": "Own", "plainText": False})
    words = arguments_of(built(given, executors={}))
    assert words[words.index("--executor-ca") + 1] == tls_secret(read(given))


def test_a_master_of_kubernetes_asks_for_executors_and_another_does_not() -> None:
    words = arguments_of(built(master="k8s://https://10.0.0.1:6443"))
    assert words[2:6] == ["--master", "k8s://https://10.0.0.1:6443", "--executors", "2"]
    results = built(master="local[8]")
    assert arguments_of(results) == ["report", "lag", "--master", "local[8]", *SUMMARY]
    assert pod_of(results)["automountServiceAccountToken"] is False


def test_a_report_with_executors_gets_an_account_bound_to_the_role_that_is_given() -> None:
    async def story(world: World) -> None:
        world.reports = ReportDefaults(role="may-make-pods")
        await running(world)
        world.api.put("lagreports", report(executors={}))
        await world.run()
        assert condition(world, "Ready")["reason"] == "Scheduled"
        account = world.api.get("serviceaccounts", "apps", "demo-report-hourly")
        binding = world.api.get("rolebindings", "apps", "demo-report-hourly")
        assert account is not None
        assert binding is not None
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (
            "ClusterRole",
            "may-make-pods",
        )
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == ("demo-report-hourly", "apps")
        world.api.remove("lagreports", "apps", "hourly")
        for plural in ("serviceaccounts", "rolebindings", "cronjobs"):
            assert world.api.get(plural, "apps", "demo-report-hourly") is None, plural

    play(story)


def test_without_a_role_to_give_a_report_with_executors_does_not_run_and_says_so() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report(executors={}))
        await world.run()
        assert condition(world, "Ready")["reason"] == "NoRole"
        assert "operator.report_role" in condition(world, "Ready")["message"]
        for plural in ("rolebindings", "cronjobs"):
            assert world.api.get(plural, "apps", "demo-report-hourly") is None, plural

    play(story)


def test_runs_are_let_in_where_clients_are_named() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(networkPolicy={"clients": []}))
        policy = world.api.get("networkpolicies", "apps", "demo-proxy")
        assert policy is not None
        labels = built()["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
        let_in = [
            item["podSelector"]["matchLabels"] for item in policy["spec"]["ingress"][0]["from"]
        ]
        assert any(item.items() <= labels.items() for item in let_in)

    play(story)


@pytest.mark.parametrize("name", ["a" * 253, "b." * 100 + "c"])
def test_a_long_name_makes_a_name_that_kubernetes_takes(name: str) -> None:
    new_cron_job = cron_job(read(cluster()), read_report(report(name), default_image="x"))
    again = cron_job(read(cluster()), read_report(report(f"{name[:-1]}z"), default_image="x"))
    assert len(new_cron_job["metadata"]["name"]) <= 52
    assert new_cron_job["metadata"]["name"] != again["metadata"]["name"]


def test_a_report_gets_its_cron_job_and_takes_it_along() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report(keep=0))
        await world.run()
        cronjobs = world.api.get("cronjobs", "apps", "demo-report-hourly")
        assert cronjobs is not None
        assert cronjobs["spec"]["successfulJobsHistoryLimit"] == 1
        assert cronjobs["spec"]["failedJobsHistoryLimit"] == 1
        assert condition(world, "Ready")["reason"] == "Scheduled"
        assert condition(world, "Succeeded")["reason"] == "NotYet"
        cronjobs["spec"]["schedule"] = "0 0 1 1 *"  # somebody else's idea
        world.api.put("cronjobs", cronjobs)
        await world.run()
        kept = world.api.get("cronjobs", "apps", "demo-report-hourly")
        assert kept is not None
        assert kept["spec"]["schedule"] == "0 * * * *"
        world.api.remove("lagreports", "apps", "hourly")
        assert world.api.get("cronjobs", "apps", "demo-report-hourly") is None

    play(story)


def test_reports_of_other_clusters_are_left_alone() -> None:
    async def story(world: World) -> None:
        world.api.put("lagreports", {**report(), "spec": {"cluster": "other"}})
        await running(world)
        assert world.api.all("cronjobs") == []

    play(story)


def test_without_its_cluster_a_report_runs_no_more_and_says_so() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report())
        await world.run()
        world.api.remove("brokerclusters", "apps", "demo")
        await world.run()  # lets the cluster go
        assert world.api.get("brokerclusters", "apps", "demo") is None
        await world.look()
        assert world.api.all("cronjobs") == []
        assert condition(world, "Ready")["reason"] == "NoCluster"

    play(story)


def test_the_status_tells_whether_the_last_run_made_a_report() -> None:
    item = read_report(report(), default_image="x")
    new_cron_job = cron_job(read(cluster()), item)

    def told(**status: Any) -> tuple[str, str]:
        status_of = report_status(item, {**new_cron_job, "status": status}, NOW)
        result = next(c for c in status_of["conditions"] if c["type"] == "Succeeded")
        return result["status"], result["reason"]

    ran = "2030-01-01T10:00:00Z"
    assert told() == ("Unknown", "NotYet")
    assert told(lastScheduleTime=ran, active=[{}]) == ("Unknown", "Running")
    assert told(lastScheduleTime=ran) == ("False", "Failed")
    before, after = "2030-01-01T09:00:30Z", "2030-01-01T10:00:30Z"
    assert told(lastScheduleTime=ran, lastSuccessfulTime=before) == ("False", "Failed")
    assert told(lastScheduleTime=ran, lastSuccessfulTime=after) == ("True", "Made")
    status = report_status(
        item,
        {**new_cron_job, "status": {"lastScheduleTime": ran, "lastSuccessfulTime": before}},
        NOW,
    )
    assert (status["lastRun"], status["lastSuccess"]) == (ran, before)
    assert "-l popmq.io/report=hourly" in status["conditions"][1]["message"]


@pytest.mark.more
def test_reports_that_fail_are_counted() -> None:
    async def story(world: World) -> None:
        await running(world)
        ran = "2030-01-01T10:00:00Z"
        for name in ("failed", "made", "new"):
            world.api.put("lagreports", report(name))
        world.api.put("lagreports", report("suspended", suspend=True))
        world.api.put("lagreports", report("refused", executors={}))  # there is no role
        assert (await world.look()).failing_reports == 1
        for name, status in (
            ("failed", {"lastScheduleTime": ran}),
            ("made", {"lastScheduleTime": ran, "lastSuccessfulTime": ran}),
        ):
            stored = world.api.objects["cronjobs", "apps", f"demo-report-{name}"]
            stored.body["status"] = status
        assert (await world.look()).failing_reports == 2
        world.api.remove("lagreports", "apps", "refused")
        assert (await world.look()).failing_reports == 1

    play(story)


def test_a_suspended_report_says_so() -> None:
    item = read_report(report(suspend=True), default_image="x")
    new_cron_job = cron_job(read(cluster()), item)
    assert new_cron_job["spec"]["suspend"] is True
    assert report_status(item, new_cron_job, NOW)["conditions"][0]["reason"] == "Suspended"
