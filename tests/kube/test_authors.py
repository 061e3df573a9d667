"""What the author of a spec can have done by the operator: nothing that he could not do himself."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kube.clusters import cluster, read
from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.running import given
from kube.test_lag_reports import built, condition, pod_of, report
from kube.world import World, play, running

from popmq.common.settings.settings import OperatorSettings
from popmq.operator.model.images import is_allowed, repository
from popmq.operator.model.spec import SpecError, read_spec
from popmq.operator.process import images_of
from popmq.operator.reports.report_reconcile import ReportDefaults
from popmq.operator.resources.proxies import proxies

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("image", "rule", "allowed"),
    [
        ("registry.example/popmq:2", "registry.example/popmq", True),
        ("registry.example/popmq", "registry.example/popmq", True),
        ("registry.example/popmq/next:2", "registry.example/popmq", True),
        ("registry.example/popmq-other:2", "registry.example/popmq", False),
        ("registry.example/popmq-other:2", "registry.example/", True),
        ("evil.example/registry.example/popmq:2", "registry.example/popmq", False),
        ("popmq:2", "popmq:", True),
        ("popmq/evil:2", "popmq:", False),
        (f"registry.example/x@{DIGEST}", DIGEST, True),
        ("registry.example/x:2", DIGEST, False),
        ("anything", "*", True),
    ],
)
def test_a_rule_allows_whole_parts_of_a_name_or_a_digest(
    image: str, rule: str, allowed: bool
) -> None:
    assert is_allowed(image, (rule,)) is allowed
    assert is_allowed(image, ()) is False


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("popmq:1", "popmq"),
        ("registry:5000/popmq", "registry:5000/popmq"),
        (f"registry:5000/popmq:1@{DIGEST}", "registry:5000/popmq"),
    ],
)
def test_where_no_rule_is_set_only_the_operators_own_images_are_allowed(
    image: str, name: str
) -> None:
    assert repository(image) == name
    rules = images_of(OperatorSettings(image=image, report_image="reports:1"))
    assert is_allowed(f"{name}:next", rules)
    assert is_allowed(f"{name}@{DIGEST}", rules)
    assert is_allowed("reports:2", rules)
    assert not is_allowed(f"{name}-other:1", rules)
    assert images_of(OperatorSettings(image=image, images=("x/",))) == ("x/",)


def test_an_image_that_no_rule_allows_is_refused_with_the_rules() -> None:
    refused = r"spec\.image = evil:1: operator\.images allows popmq:"
    with pytest.raises(SpecError, match=refused):
        read_spec(cluster(image="evil:1"), default_image="popmq:1", images=("popmq:",))
    assert read_spec(cluster(), default_image="else:1", images=("popmq:",)).image == "else:1"


def test_a_report_whose_image_no_rule_allows_makes_no_pod() -> None:
    async def story(world: World) -> None:
        world.reports = ReportDefaults(images=("popmq-reports:",))
        await running(world)
        world.api.put("lagreports", report("bad", image="evil:1"))
        world.api.put("lagreports", report("good", image="popmq-reports:2"))
        await world.look()
        assert [job["metadata"]["name"] for job in world.api.all("cronjobs")] == [
            "demo-report-good"
        ]
        assert condition(world, "Ready", "bad")["reason"] == "InvalidSpec"
        assert "evil:1" in condition(world, "Ready", "bad")["message"]

    play(story)


@pytest.mark.parametrize("mode", ["Own", "Secret"])
def test_proxies_mount_a_certificate_and_nothing_else_of_the_secret(mode: str) -> None:
    spec = read(cluster(tls={"mode": mode, "secretName": "mine"}))
    (deployment,) = (proxy for proxy in proxies(spec) if proxy["kind"] == "Deployment")
    volumes = {
        volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]
    }
    assert volumes["tls"]["secret"]["items"] == [
        {"key": "tls.crt", "path": "tls.crt"},
        {"key": "tls.key", "path": "tls.key"},
    ]


def test_a_report_trusts_its_images_authorities_where_the_secret_names_none() -> None:
    async def story(world: World) -> None:
        secret = {"apiVersion": "v1", "kind": "Secret", "data": {"tls.crt": "eA==", "tls.key": ""}}
        world.api.put("secrets", {**secret, "metadata": {"name": "mine", "namespace": "apps"}})
        tls = {"mode": "Secret", "secretName": "mine", "plainText": False}
        await running(world, cluster(tls=tls))
        world.api.put("lagreports", report())
        await world.look()
        (job,) = world.api.all("cronjobs")
        (container,) = pod_of(job)["containers"]
        assert [item["name"] for item in container["env"]] == [
            "POPMQ_ENDPOINT",
            "POPMQ_ADMIN_ENDPOINT",
        ]
        assert [volume["name"] for volume in pod_of(job)["volumes"]] == ["tmp"]

    play(story)
    with_one = pod_of(built(cluster(tls={"mode": "Own", "plainText": False})))
    assert [volume["name"] for volume in with_one["volumes"]] == ["tmp", "tls"]


# -- with a real API server, whose admission knows who asks

AUTHOR, NAMESPACE = "author", "authors"
TEMPLATE = {"labels": {"app": "shop"}}
TRIES: tuple[tuple[str, Object, str], ...] = (
    ("BrokerCluster", {"image": "evil:1"}, "spec.image"),
    ("BrokerCluster", {"tls": {"mode": "Secret", "secretName": "db"}}, "spec.tls.secretName"),
    ("BrokerCluster", {"imagePullSecrets": [{"name": "pull"}]}, "spec.imagePullSecrets"),
    ("BrokerCluster", {"brokers": {"template": TEMPLATE}}, "spec.brokers.template"),
    ("BrokerCluster", {"proxies": {"template": TEMPLATE}}, "spec.proxies.template"),
    ("BrokerCluster", {"controller": {"template": TEMPLATE}}, "spec.controller.template"),
    ("BrokerCluster", {"console": {"template": TEMPLATE}}, "spec.console.template"),
    ("BrokerCluster", {"console": {"image": "evil:1"}}, "spec.console.image"),
    ("BrokerCluster", {"console": {"ingress": {"host": "a.example"}}}, "spec.console.ingress"),
    ("BrokerCluster", {"proxies": {"service": {"type": "NodePort"}}}, "spec.proxies.service"),
    ("BrokerCluster", {"proxies": {"service": {"annotations": {"a": "b"}}}}, "proxies.service"),
    ("BrokerCluster", {"networkPolicy": {"clients": [{"podSelector": {}}]}}, "networkPolicy"),
    ("BrokerCluster", {"networkPolicy": {"console": [{"podSelector": {}}]}}, "networkPolicy"),
    (
        "BrokerCluster",
        {"brokers": {"template": {"priorityClassName": "system-node-critical"}}},
        "Kubernetes' own parts",
    ),
    ("BrokerCluster", {"brokers": {"template": {"hostNetwork": True}}}, "field not declared"),
    ("LagReport", {"image": "evil:1"}, "spec.image"),
    ("LagReport", {"executors": {}}, "spec.executors"),
    ("LagReport", {"arguments": ["--conf", "spark.jars=x"]}, "spec.arguments"),
)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """With the chart's policies, and an author who has rights on popmq.io alone."""
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=False) as plane:
        plane.define()
        plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "operator.yaml"))
        plane.kubectl("create", "namespace", NAMESPACE)
        plane.kubectl("create", "serviceaccount", AUTHOR, "-n", NAMESPACE)
        what = ("--verb=*", "--resource=brokerclusters.popmq.io,lagreports.popmq.io")
        plane.kubectl("create", "role", AUTHOR, "-n", NAMESPACE, *what)
        client = ("--role", AUTHOR, f"--serviceaccount={NAMESPACE}:{AUTHOR}")
        plane.kubectl("create", "rolebinding", AUTHOR, "-n", NAMESPACE, *client)
        yield plane


def _as_author(plane: ControlPlane, kind: str, spec: dict[str, Any]) -> str:
    body = given("demo", NAMESPACE, **spec)
    if kind == "LagReport":
        body = {**body, "kind": kind, "spec": {"cluster": "demo", **spec}}
    client = f"--as=system:serviceaccount:{NAMESPACE}:{AUTHOR}"
    how = ("--server-side", "--dry-run=server", "--validate=strict", client, "-f", "-")
    return plane.kubectl("apply", *how, given=json.dumps(body), ok=False)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_an_author_with_rights_on_popmq_alone_gets_no_others(plane: ControlPlane) -> None:
    report = next(attempt for attempt in TRIES if attempt[0] == "LagReport")
    plane.wait("the policies", lambda: "spec.image" in _as_author(plane, *TRIES[0][:2]), limit_s=60)
    plane.wait("the others", lambda: "spec.image" in _as_author(plane, *report[:2]), limit_s=60)
    assert "serverside-applied" in _as_author(plane, "BrokerCluster", {"brokers": {"groups": 2}})
    assert "serverside-applied" in _as_author(plane, "LagReport", {})
    for kind, spec, message in TRIES:
        answer = _as_author(plane, kind, spec)
        assert message in answer, (kind, spec, answer)
        assert "serverside-applied" not in answer, (kind, spec)
    # With the rights to do it himself he may have the operator do it.
    plane.kubectl("create", "role", "more", "-n", NAMESPACE, "--verb=*", "--resource=pods,secrets")
    client = ("--role=more", f"--serviceaccount={NAMESPACE}:{AUTHOR}")
    plane.kubectl("create", "rolebinding", "more", "-n", NAMESPACE, *client)
    executors = next(attempt for attempt in TRIES if "executors" in attempt[1])
    for kind, spec, _ in (TRIES[0], TRIES[1], TRIES[3], executors):
        assert "serverside-applied" in _as_author(plane, kind, spec), (kind, spec)
