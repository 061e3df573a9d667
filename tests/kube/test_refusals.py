"""What the operator does not do although the spec asks for it, and why a cluster is not ready."""

from datetime import timedelta

import pytest
from kube.clusters import cluster, read
from kube.world import NOW, World, play, running

from popmq.operator.cluster.observed import GroupHealth, Observed
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.cluster.status import cluster_status
from popmq.operator.model.conditions import verdict_in
from popmq.operator.model.manifest import DEPLOYMENT, SERVICE


async def _looks(world: World, count: int = 5) -> None:
    for _ in range(count):
        await world.look()


def test_the_group_that_owns_the_topics_stays_and_is_not_drained() -> None:
    async def story(world: World) -> None:
        world.brokers.owner = "broker-1"
        await running(world, cluster(brokers={"groups": 2}))
        world.change(brokers={"groups": 1})
        await _looks(world)
        assert world.condition("ScaleInBlocked")["reason"] == "OwnsTopics"
        assert "broker-1" in world.condition("ScaleInBlocked")["message"]
        assert len(world.pods()) == 6
        assert world.brokers.draining == {}

    play(story)


def test_a_group_of_which_nobody_tells_stays() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"groups": 2}))
        world.brokers.away = True
        world.change(brokers={"groups": 1})
        await _looks(world)
        assert world.condition("ScaleInBlocked")["reason"] == "Unknown"
        assert len(world.pods()) == 6

    play(story)


def test_a_group_goes_with_what_it_has_only_where_that_is_asked_for() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"groups": 2}))
        world.brokers.left["broker-1"] = 7
        world.change(brokers={"groups": 1})
        await _looks(world)
        assert len(world.pods()) == 6
        world.annotate("popmq.io/remove-undrained", "true")
        await world.run()
        assert len(world.pods()) == 3
        assert world.condition("ScaleInBlocked") == {}

    play(story)


def test_a_replica_that_is_needed_stays_until_the_others_are_in_sync() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.unready.add("demo-broker-0-1")
        world.settle()
        world.change(brokers={"replicas": 2, "durability": {"minInSync": 1}})
        await _looks(world)
        blocked = world.condition("ScaleInBlocked")
        assert blocked["reason"] == "NotSafe"
        assert "demo-broker-0-1 is not in sync" in blocked["message"]
        assert len(world.pods()) == 3
        world.unready.clear()
        world.settle()
        await world.run()
        assert world.pods() == ["demo-broker-0-0", "demo-broker-0-1"]

    play(story)


def test_volumes_are_never_made_smaller() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"storage": {"size": "40Gi"}}))
        world.change(brokers={"storage": {"size": "30Gi"}})
        await _looks(world)
        assert world.condition("StorageBlocked")["reason"] == "CannotShrink"
        assert "40Gi" in world.condition("StorageBlocked")["message"]
        for claim in world.api.all("persistentvolumeclaims"):
            assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"

    play(story)


@pytest.mark.parametrize(
    ("pause", "status", "reason"),
    [
        (None, "False", "NotPaused"),
        ("true", "True", "Annotated"),
        ("soon", "Unknown", "InvalidSpec"),
    ],
)
def test_a_spec_that_cannot_be_has_every_condition_that_a_good_one_has(
    pause: str | None, status: str, reason: str
) -> None:
    async def story(world: World) -> None:
        await running(world)
        whole = [condition["type"] for condition in world.status()["conditions"]]
        since = world.condition("Paused")["lastTransitionTime"]
        world.now += timedelta(minutes=5)
        world.annotate("popmq.io/pause", pause)
        world.change(brokers={"replicas": 2, "durability": {"minInSync": 3}})
        await world.look()
        assert [condition["type"] for condition in world.status()["conditions"]] == whole
        assert world.condition("Ready")["reason"] == "InvalidSpec"
        paused = world.condition("Paused")
        assert (paused["status"], paused["reason"]) == (status, reason)
        assert (paused["lastTransitionTime"] == since) is (status == "False")
        assert {condition["observedGeneration"] for condition in world.status()["conditions"]} == {
            world.status()["observedGeneration"]
        }
        world.annotate("popmq.io/pause", None)
        world.change(brokers={"replicas": 3})
        await world.run()
        assert world.condition("Ready")["reason"] == "Serving"
        assert world.condition("Paused")["status"] == "False"

    play(story)


def test_a_new_cluster_that_cannot_be_has_its_conditions_at_the_first_look() -> None:
    async def story(world: World) -> None:
        world.add(cluster(brokers={"replicas": 2, "durability": {"minInSync": 3}}))
        await world.look()
        statuses = {
            condition["type"]: condition["status"] for condition in world.status()["conditions"]
        }
        unseen = {"Degraded": "Unknown", "Progressing": "False", "Paused": "False"}
        assert statuses == {"Ready": "False", **unseen, "Reconciled": "False"}

    play(story)


@pytest.mark.parametrize(
    ("master", "in_sync", "proxies", "reason"),
    [
        ("demo-broker-0-0", 3, 1, "Serving"),
        ("demo-broker-0-0", 2, 1, "Serving"),
        ("", 3, 1, "NoMaster"),
        ("demo-broker-0-0", 1, 1, "NotInSync"),
        ("demo-broker-0-0", 3, 0, "NoProxy"),
    ],
)
def test_why_nobody_is_served_is_told_by_its_reason(
    master: str, in_sync: int, proxies: int, reason: str
) -> None:
    names = frozenset(f"demo-broker-0-{number}" for number in range(in_sync))
    deployment = {"spec": {"replicas": 2}, "status": {"readyReplicas": proxies}}
    observed = Observed(
        objects={(DEPLOYMENT, "demo-proxy"): deployment},
        health={"broker-0": GroupHealth(master=master, in_sync=names, alive=names)},
    )
    verdict = verdict_in(cluster_status(read(cluster()), observed, ClusterPlan(), {}, NOW), "Ready")
    assert (verdict.reason, verdict.status) == (reason, str(reason == "Serving"))


def test_volumes_that_are_larger_on_paper_than_on_the_disk_are_told() -> None:
    grown = cluster_status(read(cluster()), Observed(), ClusterPlan(growing=True), {}, NOW)
    assert verdict_in(grown, "StorageResizing").reason == "Growing"
    same = cluster_status(read(cluster()), Observed(), ClusterPlan(), {}, NOW)
    assert verdict_in(same, "StorageResizing").status == ""


@pytest.mark.parametrize(
    ("ingress", "addresses"),
    [
        ([], None),
        ([{"ip": "203.0.113.7"}], ["203.0.113.7:8081"]),
        (
            [{"hostname": "lb.example"}, {"ip": "2001:db8::1"}],
            ["lb.example:8081", "[2001:db8::1]:8081"],
        ),
    ],
)
def test_the_addresses_of_a_load_balancer_are_in_the_status(
    ingress: list[dict[str, str]], addresses: list[str] | None
) -> None:
    service = {
        "spec": {"ports": [{"port": 8081, "nodePort": 30081}]},
        "status": {"loadBalancer": {"ingress": ingress}},
    }
    observed = Observed(objects={(SERVICE, "demo-proxy"): service})
    status = cluster_status(read(cluster()), observed, ClusterPlan(), {}, NOW)
    assert status["proxies"].get("addresses") == addresses
    assert status["proxies"]["nodePort"] == 30081


def test_a_cluster_without_proxies_says_so_and_is_not_looked_at_again_and_again() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(proxies={"replicas": 0}))
        ready = world.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ProxiesAtZero")
        assert not (await world.look()).soon
        world.change(proxies={"replicas": 1})
        await world.run()
        assert world.condition("Ready")["status"] == "True"

    play(story)


@pytest.mark.parametrize("requests", [{}, {"cpu": "1"}])
def test_an_autoscaler_without_a_cpu_request_is_told(requests: dict[str, str]) -> None:
    async def story(world: World) -> None:
        scaled = {"autoscaling": {"minReplicas": 1}, "resources": {"requests": requests}}
        await running(world, cluster(proxies=scaled))
        blocked = world.condition("ScalingBlocked")
        assert blocked.get("reason") == (None if requests else "NoCpuRequest")

    play(story)
