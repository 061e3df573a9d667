"""The operator on a real control plane (make kube-assets): what only that one decides."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from kube.clusters import LARGE, read
from kube.control_plane import ROOT, ControlPlane
from kube.evictions import GRANTED, REFUSED, evict
from kube.fake_api import Object
from kube.faulty_way import FaultyWay, each_write_fails_twice
from kube.metrics_api import MetricsApi
from kube.running import Running, given
from kube.watched import Watched
from kube.whole import check_whole
from kube.world import NOW

from popmq.operator.cluster.desired import ClusterInputs, desired, first_shapes
from popmq.operator.model.conditions import verdict_in
from popmq.operator.model.manifest import OPTIONAL, kind_of, name_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        plane.define()
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    return _new_namespace(plane)


def _new_namespace(plane: ControlPlane) -> str:
    """With Pod Security `restricted` enforced."""
    name = f"t{time.monotonic_ns()}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.post(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    return name


def test_a_cluster_comes_up_where_pod_security_is_restricted(
    plane: ControlPlane, namespace: str
) -> None:
    plane.apply(given("demo", namespace))
    running = Running(plane)
    status = running.until("demo", namespace)
    assert status["summary"] == {"masters": "1/1", "inSync": "3/3", "proxies": "2/2"}
    shown = plane.kubectl("get", "bcl", "-n", namespace)
    assert "True    1/1       3/3       2/2" in shown
    before = {pod["metadata"]["uid"] for pod in running.pods(namespace)}
    versions = _versions(plane, namespace, "demo")
    running.until("demo", namespace)
    assert {pod["metadata"]["uid"] for pod in running.pods(namespace)} == before
    assert _versions(plane, namespace, "demo") == versions
    check_whole(plane, namespace, "demo")


def test_a_cluster_that_lost_a_broker_serves_and_says_that_it_is_degraded(
    plane: ControlPlane, namespace: str
) -> None:
    where, lost = ("-n", namespace), "demo-broker-0-1"
    unready = "test.popmq.dev/unready"
    running = Running(plane)
    plane.apply(given("demo", namespace))

    def told() -> Object:
        conditions = running.status("demo", namespace)["conditions"]
        return {condition["type"]: condition for condition in conditions}

    def is_degraded(expected: str) -> bool:
        return bool(running.until("demo", namespace) and told()["Degraded"]["status"] == expected)

    # With two of three it serves, and is not whole.
    plane.wait("the cluster", lambda: is_degraded("False"), limit_s=60)
    plane.kubectl("wait", "bcl/demo", "--for=condition=Degraded=False", "--timeout=60s", *where)
    running.now += timedelta(minutes=5)
    plane.kubectl("annotate", "pod", lost, f"{unready}=1", *where)
    plane.wait("the loss", lambda: is_degraded("True"), limit_s=60)
    first = told()
    assert first["Degraded"]["reason"] == "BrokerDown"
    assert first["Degraded"]["message"] == f"broker-0: 2 of 3 in sync ({lost} is not ready)"
    assert first["Degraded"]["lastTransitionTime"] == "2030-01-01T00:05:00Z"
    assert (first["Ready"]["status"], first["Progressing"]["status"]) == ("True", "False")
    running.now += timedelta(minutes=5)
    running.until("demo", namespace)
    assert told() == first
    assert _events(plane, namespace, "Degraded") == [("Warning", first["Degraded"]["message"])]
    shown = plane.kubectl("get", "bcl", "-o", "wide", *where).splitlines()
    columns = dict(zip(*(line.split() for line in shown), strict=False))
    assert (columns["READY"], columns["IN-SYNC"], columns["DEGRADED"]) == ("True", "2/3", "True")
    assert "DEGRADED" not in plane.kubectl("get", "bcl", *where)
    plane.kubectl("annotate", "pod", lost, f"{unready}-", *where)
    plane.wait("its return", lambda: is_degraded("False"), limit_s=60)
    assert told()["Degraded"]["lastTransitionTime"] == "2030-01-01T00:10:00Z"
    assert len(_events(plane, namespace, "Degraded")) == 1


def _events(plane: ControlPlane, namespace: str, reason: str) -> list[tuple[str, str]]:
    events = plane.items(f"/api/v1/namespaces/{namespace}/events?fieldSelector=reason={reason}")
    return [(event["type"], event["message"]) for event in events]


def _versions(
    plane: ControlPlane, namespace: str, name: str, *, of_status: bool = True
) -> dict[str, str]:
    """By object; without its status, where that is a thing of its own."""
    versions = {}
    for path in (
        f"/apis/apps/v1/namespaces/{namespace}/statefulsets",
        f"/apis/apps/v1/namespaces/{namespace}/deployments",
        f"/api/v1/namespaces/{namespace}/services",
        f"/api/v1/namespaces/{namespace}/configmaps",
        f"/api/v1/namespaces/{namespace}/secrets",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    ):
        for resource in plane.items(f"{path}?labelSelector=popmq.io/cluster={name}"):
            metadata = resource["metadata"]
            version = metadata["resourceVersion"]
            if not of_status:
                version = f"{metadata['uid']} {metadata.get('generation', version)}"
            versions[f"{path}/{metadata['name']}"] = version
    return versions


def test_three_clusters_of_two_names_and_two_namespaces_live_their_own_lives(
    plane: ControlPlane, namespace: str
) -> None:
    elsewhere = _new_namespace(plane)
    running = Running(plane)
    ours, others = ("demo", namespace), (("other", namespace), ("demo", elsewhere))
    for name, where in (ours, *others):
        plane.apply(given(name, where, brokers=_TWO, proxies={"replicas": 1}))
        running.until(name, where)
    quiet = [_life_of(plane, name, where) for name, where in others]
    with Watched(plane, namespace) as watched:
        plane.apply(given(*ours, brokers={**_TWO, "groups": 2, "replicas": 3}))
        running.until(*ours)
        check_whole(plane, namespace, "demo")
        changed: dict[str, Any] = {"image": "popmq:2", "config": {"pop.max_batch": "8"}}
        plane.apply(given(*ours, brokers={**_TWO, "groups": 2, "replicas": 3}, **changed))
        running.until(*ours)
        check_whole(plane, namespace, "demo")
        watched.retire(*(f"demo-broker-{number}" for number in ("0-2", "1-0", "1-1", "1-2")))
        plane.apply(given(*ours, brokers=_TWO, **changed))
        running.until(*ours)
        plane.wait("the pods to go", lambda: len(_brokers(plane, namespace, "demo")) == 2)
        check_whole(plane, namespace, "demo")
        watched.settle()
        assert max(watched.most_down.values()) == 1
    plane.kubectl("annotate", "bcl", "demo", "-n", namespace, f"{_PROTECTION}=true")
    running.until(*ours)
    plane.kubectl("delete", "bcl", "demo", "-n", namespace, "--wait=false")
    running.until(*ours)
    (ready,) = (
        condition
        for condition in running.status(*ours)["conditions"]
        if condition["type"] == "Ready"
    )
    assert "delete-protection" in ready["message"]
    assert len(_brokers(plane, namespace, "demo")) == 2
    plane.kubectl("annotate", "bcl", "demo", "-n", namespace, f"{_PROTECTION}-")
    running.until(*ours)
    plane.wait("the pods to go", lambda: _brokers(plane, namespace, "demo") == [], limit_s=60)
    assert [_life_of(plane, name, where) for name, where in others] == quiet


_TWO = {"replicas": 2, "durability": {"minInSync": 1}}
_PROTECTION = "popmq.io/delete-protection"


def _brokers(plane: ControlPlane, namespace: str, name: str) -> list[str]:
    query = f"labelSelector=popmq.io/cluster={name},app.kubernetes.io/component=broker"
    pods = plane.items(f"/api/v1/namespaces/{namespace}/pods?{query}")
    return [pod["metadata"]["uid"] for pod in pods]


def _life_of(plane: ControlPlane, name: str, namespace: str) -> tuple[list[str], dict[str, str]]:
    return _brokers(plane, namespace, name), _versions(plane, namespace, name, of_status=False)


def test_a_write_that_is_refused_or_never_answered_changes_nothing_of_the_end(
    plane: ControlPlane, namespace: str
) -> None:
    failed: dict[object, set[str]] = {}
    with FaultyWay(plane) as way:
        way.fault = each_write_fails_twice(failed)
        running = Running(plane, way.access, pause_s=0.02)
        plane.apply(given("demo", namespace, proxies={"replicas": 1}))
        running.until("demo", namespace)
        check_whole(plane, namespace, "demo")
        with Watched(plane, namespace) as watched:
            later: dict[str, Any] = {
                "image": "popmq:2",
                "config": {"pop.max_batch": "8"},
                "proxies": {},
            }
            larger = {"storage": {"size": "30Gi"}, "groups": 2}
            plane.apply(given("demo", namespace, brokers=larger, **later))
            running.grow_volumes("demo", namespace, "30Gi")
            check_whole(plane, namespace, "demo")
            watched.settle()
            assert watched.most_down["demo-broker-0"] == 1
            assert sorted(watched.gone).count("demo-broker-0-1") == 1
        plane.kubectl("delete", "bcl", "demo", "-n", namespace, "--wait=false")
        running.until("demo", namespace)
    plane.kubectl("wait", "--for=delete", "bcl/demo", "-n", namespace, "--timeout=60s")
    plane.wait("the pods to go", lambda: running.pods(namespace) == [], limit_s=60)
    assert len(plane.items(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")) == 6
    assert len(failed) > 40
    # An event that tells of one attempt is not worth another.
    written = {write: how for write, how in failed.items() if "'events'" not in str(write)}
    assert {write: how for write, how in written.items() if how != {"conflict", "lost"}} == {}


def test_all_that_a_cluster_can_consist_of_is_let_into_a_restricted_namespace(
    plane: ControlPlane, namespace: str
) -> None:
    """With warnings on, the server also says what pods of a template would be refused for."""
    warn = "pod-security.kubernetes.io/warn=restricted"
    plane.kubectl("label", "namespace", namespace, warn)
    spec = read({**LARGE, "metadata": {**LARGE["metadata"], "namespace": namespace}})
    results = desired(spec, first_shapes(spec), ClusterInputs(NOW))
    ours = [
        result for result in results if kind_of(result) not in OPTIONAL
    ]  # others need their operator
    assert len(ours) < len(results)
    output = _dry_run(plane, ours)
    assert output.count("serverside-applied") == len(ours)
    assert "Warning" not in output
    (bad,) = (
        manifest
        for manifest in ours
        if name_of(manifest) == "big-proxy" and manifest["kind"] == "Deployment"
    )
    del bad["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]
    assert "would violate PodSecurity" in _dry_run(plane, [bad])


def _dry_run(plane: ControlPlane, objects: list[Object]) -> str:
    """With what else was said about it."""
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    how = ("--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    return plane.kubectl("apply", *how, given=given, ok=False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"brokers": {"replicas": 2, "durability": {"minInSync": 3}}}, "raise replicas first"),
        ({"brokers": {"durability": {"flush": "Fsync"}}}, "with more use Quorum or Auto"),
        ({"brokers": {"replicas": 1, "durability": {"flush": "Quorum"}}}, "for one use Fsync"),
        ({"brokers": {"storage": {"size": "lots"}}}, "is a quantity such as 20Gi"),
        ({"brokers": {"retention": "3 days"}}, "such as 72h or 3d"),
        ({"brokers": {"grups": 2}}, 'unknown field "spec.brokers.grups"'),
        (
            {"proxies": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}},
            "may not exceed maxReplicas",
        ),
        ({"proxies": {"maxConnectionAge": "soon"}}, "such as 90s, 10m or 1h"),
        ({"tls": {"mode": "Secret"}}, "needs tls.secretName"),
        ({"config": {"batch": "1"}}, "is section.key"),
        ({"brokers": {"retention": "99999d"}}, "at most 876000h"),
        ({"brokers": {"template": {"labels": {"team": "a b!"}}}}, "template.labels"),
        ({"brokers": {"template": {"labels": {"a b!": "x"}}}}, "a key is NAME or PREFIX/NAME"),
        ({"proxies": {"template": {"tolerations": [{"operator": "Foo"}]}}}, '"Exists", "Equal"'),
        (
            {"proxies": {"template": {"tolerations": [{"operator": "Exists", "value": "x"}]}}},
            "operator Exists has no value",
        ),
        (
            {"controller": {"template": {"priorityClassName": "system-node-critical"}}},
            "are for Kubernetes' own parts",
        ),
        (
            {"proxies": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}}},
            "resources.requests may not exceed resources.limits",
        ),
        ({"proxies": {"service": {"loadBalancerClass": "x"}}}, "is for type LoadBalancer"),
        (
            {"proxies": {"template": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}}},
            "hostPath",
        ),
        (
            {"brokers": {"template": {"volumes": [{"name": "data", "emptyDir": {}}]}}},
            "are the operator's own",
        ),
        (
            {"console": {"template": {"env": [{"name": "POPMQ_ENDPOINT", "value": "x"}]}}},
            "a setting belongs into spec.config",
        ),
        ({"console": {"ingress": {}}}, "spec.console.ingress.host"),
        ({"console": {"ingress": {"host": "A b"}}}, "spec.console.ingress.host"),
        (
            {"remoting": {"groupPorts": 1}, "brokers": {"groups": 2}},
            "remoting.groupPorts is 0, or at least brokers.groups",
        ),
        (
            {"remoting": {}, "config": {"remoting.advertise": "a:1"}},
            "the settings remoting.* are made from spec.remoting",
        ),
        ({"remoting": {"advertise": "queue.example"}}, "spec.remoting.advertise"),
    ],
)
def test_the_api_server_refuses_what_cannot_be_and_says_what_to_do(
    plane: ControlPlane, spec: dict[str, Any], message: str
) -> None:
    assert message in plane.refusal(given("bad", "default", **spec))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.cluster"),
        ({"cluster": "demo", "name": "A B"}, "1 to 64 of a-z"),
        ({"cluster": "demo", "type": "Super"}, 'unknown field "spec.type"'),
        ({"cluster": "demo", "policy": [{"actions": ["Pub"]}]}, "resources"),
        (
            {"cluster": "demo", "policy": [{"resources": ["topic:*"], "actions": ["Fly"]}]},
            "Unsupported value",
        ),
        ({"cluster": "demo", "onDelete": "Keep"}, "Unsupported value"),
    ],
)
def test_the_api_server_refuses_users_that_cannot_be(
    plane: ControlPlane, spec: dict[str, Any], message: str
) -> None:
    metadata = {"name": "bad", "namespace": "default"}
    user = {"apiVersion": "popmq.io/v1beta1", "kind": "User", "metadata": metadata, "spec": spec}
    assert message in plane.refusal(user)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"since": "an hour"}, "spec.since is a duration such as 90s, 12h or 3d"),
        ({"deadline": "8d"}, "spec.deadline is a duration such as 90s, 30m or 2h, at most 7d"),
        ({"scratch": "1Mi"}, "spec.scratch is a quantity from 64Mi on"),
        (
            {"output": {"volumeClaim": "pages", "objectStore": {"url": "s3://bucket"}}},
            "spec.output has a volumeClaim or an objectStore",
        ),
        ({"output": {"objectStore": {"url": "ftp://host"}}}, "begins with s3://, gs:// or abfs://"),
        ({"output": {"pushgateway": "pushgateway:9091"}}, "spec.output.pushgateway is a URL"),
    ],
)
def test_the_api_server_refuses_reports_that_cannot_be(
    plane: ControlPlane, spec: dict[str, Any], message: str
) -> None:
    body = {"apiVersion": "popmq.io/v1beta1", "kind": "LagReport"}
    metadata = {"name": "bad", "namespace": "default"}
    asked = {**body, "metadata": metadata, "spec": {"cluster": "demo", **spec}}
    assert message in plane.refusal(asked)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("30Gi", {"size": "20Gi"}, "cannot shrink"),
        ("30Gi", {"size": "30Gi", "className": "fixed"}, "className cannot change"),
    ],
)
def test_the_api_server_refuses_changes_that_cannot_be(
    plane: ControlPlane, namespace: str, first: str, then: dict[str, Any], message: str
) -> None:
    plane.apply(given("demo", namespace, brokers={"storage": {"size": first}}))
    assert message in plane.refusal(given("demo", namespace, brokers={"storage": then}))


def test_a_node_that_is_emptied_gets_one_pod_of_a_group_at_a_time(
    plane: ControlPlane, namespace: str
) -> None:
    running = Running(plane)
    plane.apply(given("demo", namespace, brokers={"groups": 2}))
    running.until("demo", namespace)
    least = {"demo-broker-0": 2, "demo-proxy": 1, "demo-controller": 1}
    plane.wait("the budgets", lambda: set(_disruptions(plane, namespace).values()) == {1})
    nodes = [node["metadata"]["name"] for node in plane.items("/api/v1/nodes")]
    plane.kubectl("cordon", *nodes)  # what is evicted stays away
    try:
        left = {}
        for budget, count in least.items():
            first, second, *_ = _pods(plane, namespace, f"{budget}-")
            assert evict(plane, second, dry_run=True) == (GRANTED, "")
            assert evict(plane, first) == (GRANTED, "")
            answer, why = evict(plane, second)
            assert answer == REFUSED, budget
            assert f"budget {budget} needs {count} healthy pods" in why
            left[budget] = second
        # Another group has a budget of its own.
        assert evict(plane, _pods(plane, namespace, "demo-broker-1-")[0]) == (GRANTED, "")
        plane.wait("them to go", lambda: set(_disruptions(plane, namespace).values()) == {0})
        assert [evict(plane, manifest)[0] for manifest in left.values()] == [REFUSED] * len(left)
    finally:
        plane.kubectl("uncordon", *nodes)
    plane.wait("all of them", lambda: set(_disruptions(plane, namespace).values()) == {1})
    assert [evict(plane, manifest) for manifest in left.values()] == [(GRANTED, "")] * len(left)


def _disruptions(plane: ControlPlane, namespace: str) -> dict[str, int]:
    """How many pods of each budget may go now."""
    poddisruptionbudgets = plane.items(
        f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    )
    return {
        poddisruptionbudget["metadata"]["name"]: poddisruptionbudget["status"]["disruptionsAllowed"]
        for poddisruptionbudget in poddisruptionbudgets
    }


def _pods(plane: ControlPlane, namespace: str, prefix: str) -> list[Object]:
    pods = plane.items(f"/api/v1/namespaces/{namespace}/pods")
    return [pod for pod in pods if pod["metadata"]["name"].startswith(prefix)]


def test_a_reports_run_is_let_into_a_namespace_that_is_restricted(
    plane: ControlPlane, namespace: str
) -> None:
    running = Running(plane)
    metadata = {"name": "hourly", "namespace": namespace}
    body = {"apiVersion": "popmq.io/v1beta1", "kind": "LagReport", "metadata": metadata}
    plane.apply({**body, "spec": {"cluster": "demo", "schedule": "@daily", "group": "readers"}})
    plane.apply(given("demo", namespace, brokers={"replicas": 1}, proxies={"replicas": 1}))
    running.until("demo", namespace)
    where = ("-n", namespace)
    plane.kubectl("create", "job", "now", "--from=cronjob/demo-report-hourly", *where)
    plane.kubectl("wait", "--for=condition=Complete", "job/now", "--timeout=60s", *where)
    shown = plane.kubectl("get", "lagreports", "-o", "wide", *where)
    assert "hourly   True    demo      lag " in shown
    assert " @daily " in shown


def test_the_quickstart_is_a_cluster_with_an_operator(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl(
        "apply", "--server-side", "-f", f"{ROOT}/crds", "-f", f"{ROOT}/deploy/operator.yaml"
    )
    where = ("-n", "popmq-system")
    plane.kubectl("rollout", "status", "deployment/popmq-operator", "--timeout=60s", *where)
    plane.kubectl("apply", "-n", namespace, "-f", f"{ROOT}/deploy/quickstart.yaml")
    status = Running(plane).until("demo", namespace)
    assert status["summary"] == {"masters": "1/1", "inSync": "3/3", "proxies": "2/2"}
    ready = ("--for=condition=Ready", "brokercluster/demo", "--timeout=60s")
    plane.kubectl("wait", "-n", namespace, *ready)
    plane.kubectl("delete", "namespace", "popmq-system", "--wait=false")


def test_kubectl_scale_changes_the_proxies(plane: ControlPlane, namespace: str) -> None:
    running = Running(plane)
    plane.apply(given("demo", namespace))
    running.until("demo", namespace)
    plane.kubectl("scale", "bcl/demo", "-n", namespace, "--replicas=4")
    status = running.until("demo", namespace)
    assert status["summary"]["proxies"] == "4/4"


def test_an_autoscaler_changes_the_proxies_and_the_operator_leaves_it_alone(
    plane: ControlPlane, namespace: str
) -> None:
    """One cluster's by the CPU, the other's by how busy its loops are."""
    running = Running(plane)
    few, busy = {"minReplicas": 2, "maxReplicas": 5}, {"loopBusyMetric": "popmq_loop_busy_ratio"}
    scaled = {
        "cpu": {"autoscaling": few, "resources": {"requests": {"cpu": "1"}}},
        "loop": {"autoscaling": {**few, **busy}, "resources": {"requests": {"cpu": "9"}}},
    }

    def replicas(name: str) -> object:
        running.until(name, namespace)
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}-proxy"
        return (plane.get(path) or {})["spec"]["replicas"]

    def settled(**proxies: Any) -> None:
        for name, given_proxies in proxies.items():
            plane.apply(given(name, namespace, brokers={"replicas": 1}, proxies=given_proxies))
            running.until(name, namespace)

    settled(**{name: {"resources": manifest["resources"]} for name, manifest in scaled.items()})
    with MetricsApi(plane, cpu="1300m", figure="1400m"):  # twice 65 % of a core, twice 70 %
        settled(**scaled)
        for name in scaled:
            plane.wait(name, lambda name=name: replicas(name) == 4, limit_s=60)
            assert running.until(name, namespace)["summary"]["proxies"] == "4/4"
        plane.kubectl("scale", "bcl/cpu", "-n", namespace, "--replicas=3")
        status = running.until("cpu", namespace)
        assert verdict_in(status, "ReplicasIgnored").reason == "Autoscaled"
        assert status["summary"]["proxies"] == "4/4"
