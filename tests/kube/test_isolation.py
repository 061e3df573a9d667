"""A refused object harms only itself: the rest of its cluster goes on, and its status says so."""

import pytest
from kube.asked import Asked, Fault
from kube.clusters import cluster
from kube.fake_api import Object
from kube.test_lag_reports import condition as report_condition
from kube.test_lag_reports import report
from kube.world import World, play, running


def _refuses(plural: str, name: str = "") -> Fault:
    def fault(asked: Asked) -> str:
        hit = asked.plural == plural and name in ("", asked.name) and asked.verb == "patch"
        return "invalid" if hit and not asked.sub else ""

    return fault


def test_a_refused_report_stops_neither_the_roll_nor_the_other_reports() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report("bad"))
        world.api.put("lagreports", report("good"))
        world.api.fault = _refuses("cronjobs", "demo-report-bad")
        world.change(image="popmq:2")
        await world.run()
        assert world.images() == {"popmq:2"}
        bad = report_condition(world, "Ready", "bad")
        assert (bad["status"], bad["reason"]) == ("False", "InvalidSpec")
        assert bad["message"] == "CronJob demo-report-bad: spec.refused: the test refuses it"
        assert report_condition(world, "Ready", "good")["status"] == "True"
        (event,) = world.events("InvalidSpec")
        assert event["involvedObject"]["kind"] == "LagReport"

    play(story)


def test_a_report_whose_quantities_cannot_be_read_is_refused_by_itself() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report("bad", executors={"memory": "much"}))
        world.api.put("lagreports", report("good"))
        world.reports = None
        await world.look()
        assert report_condition(world, "Ready", "good")["status"] == "True"
        assert report_condition(world, "Ready", "bad")["status"] == "False"

    play(story)


@pytest.mark.more
def test_a_refused_object_is_named_and_the_roll_and_the_fence_go_on() -> None:
    async def story(world: World) -> None:
        await running(world)
        assert world.condition("Reconciled")["status"] == "True"
        world.api.fault = _refuses("services", "demo-proxy")
        world.annotate("popmq.io/fence", "demo-broker-0-2")
        world.change(image="popmq:2", proxies={"service": {"annotations": {"a": "b"}}})
        await world.look()
        refused = world.condition("Reconciled")
        assert (refused["status"], refused["reason"]) == ("False", "Refused")
        assert refused["message"] == "Service demo-proxy: spec.refused: the test refuses it"
        pod = world.api.get("pods", "apps", "demo-broker-0-2")
        assert pod is not None
        assert pod["metadata"]["labels"]["popmq.io/fenced"] == "true"
        world.annotate("popmq.io/fence", None)
        await world.run()
        assert world.images() == {"popmq:2"}
        world.api.fault = lambda asked: ""
        await world.look()
        assert world.condition("Reconciled")["status"] == "True"

    play(story)


def test_a_refused_workload_never_costs_a_pod() -> None:
    async def story(world: World) -> None:
        await running(world)
        before = list(world.restarted)
        world.api.fault = _refuses("statefulsets")
        world.change(image="popmq:2")
        for _ in range(5):
            await world.look()
        brokers = [name for name in world.restarted[len(before) :] if "broker" in name]
        assert brokers == []
        assert "StatefulSet demo-broker-0" in world.condition("Reconciled")["message"]

    play(story)


def test_a_refusal_that_recurs_is_one_event_that_counts_up() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.fault = _refuses("services", "demo-proxy")
        world.change(proxies={"service": {"annotations": {"a": "b"}}})
        for _ in range(3):
            await world.restart_operator()  # what it counts is in the event, not in its memory
            await world.look()
        (event,) = world.events("Refused")
        assert event["count"] == 3
        assert event["type"] == "Warning"
        assert event["firstTimestamp"] <= event["lastTimestamp"]

    play(story)


def test_a_transient_error_of_one_object_does_not_keep_the_others_from_being_applied() -> None:
    async def story(world: World) -> None:
        await running(world)
        failing = {"demo-popmq"}
        world.api.fault = lambda asked: (
            "error" if asked.plural == "serviceaccounts" and asked.name in failing else ""
        )
        world.change(proxies={"replicas": 4})
        with pytest.raises(Exception, match="InternalError"):
            await world.look()
        deployment = world.api.get("deployments", "apps", "demo-proxy")
        assert deployment is not None
        assert deployment["spec"]["replicas"] == 4

    play(story)


FOREIGN: tuple[tuple[str, Object], ...] = (
    ("secrets", {"kind": "Secret", "metadata": {"name": "demo-cluster-secret"}, "data": {}}),
    ("secrets", {"kind": "Secret", "metadata": {"name": "demo-ca"}, "data": {"x": "eA=="}}),
    ("services", {"kind": "Service", "metadata": {"name": "demo-proxy"}, "spec": {"ports": []}}),
    ("configmaps", {"kind": "ConfigMap", "metadata": {"name": "demo-config"}, "data": {"a": "b"}}),
    ("serviceaccounts", {"kind": "ServiceAccount", "metadata": {"name": "demo-controller"}}),
)


@pytest.mark.parametrize(
    ("plural", "foreign"), FOREIGN, ids=[foreign["metadata"]["name"] for _, foreign in FOREIGN]
)
@pytest.mark.parametrize("labelled", [False, True])
def test_an_object_of_another_owner_is_neither_changed_nor_deleted(
    plural: str, foreign: Object, labelled: bool
) -> None:
    async def story(world: World) -> None:
        labels = {"popmq.io/cluster": "demo", "app.kubernetes.io/managed-by": "popmq-operator"}
        name = foreign["metadata"]["name"]
        metadata = {"name": name, "namespace": "apps", "labels": labels if labelled else {}}
        world.api.put(plural, {"apiVersion": "v1", **foreign, "metadata": metadata})
        before = world.api.get(plural, "apps", name)
        world.add(cluster())
        for _ in range(5):
            await world.look()
        taken = world.condition("Reconciled")
        assert (taken["status"], taken["reason"]) == ("False", "NameTaken")
        assert f"{foreign['kind']} {name}" in taken["message"]
        assert world.api.get(plural, "apps", name) == before
        assert world.pods(), "the rest of the cluster is made"
        world.change(tls={"mode": "Disabled"})
        await world.look()
        assert world.api.get(plural, "apps", name) == before
        world.api.remove("brokerclusters", "apps", "demo")
        await world.look()
        assert world.api.get(plural, "apps", name) == before

    play(story)


@pytest.mark.parametrize(
    "spec",
    [
        {"config": {"store.nope": "1"}},
        {"brokers": {"replicas": 2, "durability": {"minInSync": 3}}},
        {"brokers": "none"},
        {"tls": {"mode": "Secret"}},
    ],
)
def test_a_cluster_is_deleted_whatever_its_spec_says(spec: Object) -> None:
    async def story(world: World) -> None:
        await running(world)
        world.annotate("popmq.io/delete-protection", "true")
        world.change(**spec)
        await world.look()
        world.api.remove("brokerclusters", "apps", "demo")
        assert world.api.get("brokerclusters", "apps", "demo") is not None, "the finalizer holds it"
        world.annotate("popmq.io/delete-protection", None)
        await world.look()
        assert world.api.get("brokerclusters", "apps", "demo") is None

    play(story)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"config": {"store.nope": "1"}}, "spec.config[store.nope]"),
        ({"config": {"store.segment_bytes": "x"}}, "spec.config[store.segment_bytes]"),
        ({"brokers": {"retention": "99999999d"}}, "brokers.retention"),
    ],
)
def test_a_spec_that_cannot_be_is_told_by_its_field_and_not_by_a_variable(
    spec: Object, path: str
) -> None:
    async def story(world: World) -> None:
        world.add(cluster(**spec))
        await world.look()
        message = world.condition("Ready")["message"]
        assert path in message
        assert "POPMQ_" not in message

    play(story)
