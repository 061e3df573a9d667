"""The operator against a small API server: what it makes, keeps, and rolls."""

from typing import Any

import pytest
from kube.asked import Asked
from kube.clusters import cluster
from kube.world import World, play, running, versions


def test_a_cluster_comes_up_and_says_so_at_a_glance() -> None:
    async def story(world: World) -> None:
        await running(world)
        status = world.status()
        assert status["summary"] == {"masters": "1/1", "inSync": "3/3", "proxies": "2/2"}
        assert world.condition("Ready")["status"] == "True"
        assert world.condition("Progressing")["status"] == "False"
        assert status["plan"] == []
        assert status["proxies"]["selector"].startswith("app.kubernetes.io/component=proxy,")
        assert len(world.pods()) == 3
        assert len(world.pods("controller")) == 2

    play(story)


def test_a_cluster_says_whether_anybody_can_connect_without_tls() -> None:
    async def story(world: World) -> None:
        await running(world)
        verdict = world.condition("OpenToAnybody")
        assert (verdict["status"], verdict["reason"]) == ("True", "PlainText")
        world.change(tls={"mode": "Own", "plainText": False})
        await world.run()
        verdict = world.condition("OpenToAnybody")
        assert (verdict["status"], verdict["reason"]) == ("False", "Encrypted")

    play(story)


def test_a_second_look_changes_nothing() -> None:
    async def story(world: World) -> None:
        await running(world)
        before = versions(world)
        await world.look()
        assert versions(world) == before

    play(story)


def test_what_others_change_is_put_right() -> None:
    async def story(world: World) -> None:
        await running(world)
        service = world.api.get("services", "apps", "demo-proxy")
        assert service is not None
        service["spec"]["selector"] = {"app": "else"}
        world.api.put("services", service)
        world.api.remove("networkpolicies", "apps", "demo-broker")
        await world.run()
        service = world.api.get("services", "apps", "demo-proxy")
        assert service is not None
        assert service["spec"]["selector"]["popmq.io/cluster"] == "demo"
        assert world.api.get("networkpolicies", "apps", "demo-broker")

    play(story)


def test_a_change_of_the_proxies_alone_is_progress_until_they_have_other_pods() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(proxies={"resources": {"requests": {"cpu": "1"}}})
        await world.look()
        assert world.condition("Progressing")["reason"] == "RollingOut"
        assert "demo-proxy" in world.condition("Progressing")["message"]
        assert world.condition("Progressing")["observedGeneration"] == 2
        await world.run()
        assert world.condition("Progressing")["status"] == "False"
        left = world.api.objects["deployments", "apps", "demo-proxy"].body["status"]
        left["replicas"] = 3  # one of before is still there
        await world.look()
        assert world.condition("Progressing")["status"] == "True"

    play(story)


def test_a_new_image_goes_to_slaves_first_and_to_the_master_after_a_hand_over() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        world.change(image="popmq:2")
        await world.run()
        assert world.images() == {"popmq:2"}
        order = [name for name in world.restarted if "broker" in name]
        assert order == ["demo-broker-0-1", "demo-broker-0-2", "demo-broker-0-0"]
        assert world.brokers.handed_over == [("broker-0", "demo-broker-0-0", "demo-broker-0-1")]
        assert world.down["demo-broker-0"] <= 1

    play(story)


@pytest.mark.more
def test_the_version_is_that_of_the_pods_and_both_while_they_are_replaced() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(image="registry:5000/popmq:1.0"))
        assert world.status()["version"] == "1.0"
        world.change(image="registry:5000/popmq:1.1")
        shown: list[str] = []
        while not shown or world.status()["version"] != "1.1":
            await world.look()
            shown.append(world.status()["version"])
        assert shown[0] == "1.0"
        assert "1.0, 1.1" in shown
        digest = "sha256:" + "a" * 64
        world.change(image=f"registry:5000/popmq@{digest}")
        await world.run()
        assert world.status()["version"] == digest[:19]

    play(story)


def test_each_step_of_a_roll_is_an_event_by_its_reason() -> None:
    async def story(world: World) -> None:
        await running(world)
        before = len(world.events())
        world.change(image="popmq:2")
        await world.run()
        events = world.events()[before:]
        assert [event["reason"] for event in events] == [
            "DeletePod",
            "DeletePod",
            "HandOver",
            "DeletePod",
        ]
        assert {event["type"] for event in events} == {"Normal"}
        assert {event["involvedObject"]["kind"] for event in events} == {"BrokerCluster"}
        assert events[0]["message"] == "restart demo-broker-0-1: its template changed"

    play(story)


@pytest.mark.more
def test_groups_are_rolled_one_after_the_other() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"groups": 2}))
        world.restarted.clear()
        world.change(image="popmq:2")
        await world.run()
        groups = [name.rpartition("-")[0] for name in world.restarted if "broker" in name]
        assert groups == ["demo-broker-0"] * 3 + ["demo-broker-1"] * 3

    play(story)


def test_a_roll_waits_while_a_replica_is_not_in_sync() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        world.unready.add("demo-broker-0-2")
        world.settle()
        world.change(image="popmq:2")
        for _ in range(10):
            await world.look()
        # The one that does not work is the only one that may be tried anew.
        assert set(world.restarted) & set(world.pods()) <= {"demo-broker-0-2"}
        assert world.condition("RollBlocked")["status"] == "True"
        world.unready.clear()
        world.settle()
        await world.run()
        assert world.images() == {"popmq:2"}
        assert world.down["demo-broker-0"] <= 1

    play(story)


def test_nothing_is_rolled_while_no_controller_answers() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        world.brokers.away = True
        world.change(image="popmq:2")
        for _ in range(5):
            await world.look()
        assert not [name for name in world.restarted if "broker" in name]
        assert world.condition("Ready")["status"] == "Unknown"
        assert "no controller" in world.condition("RollBlocked")["message"]

    play(story)


@pytest.mark.more
def test_a_broken_image_stops_at_the_first_pod_and_the_next_one_mends_it() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.broken_images.add("popmq:bad")
        world.change(image="popmq:bad")
        for _ in range(10):
            await world.look()
        assert world.down["demo-broker-0"] == 1
        assert "not ready" in world.condition("RollBlocked")["message"]
        world.change(image="popmq:3")
        await world.run()
        assert world.images() == {"popmq:3"}
        assert world.down["demo-broker-0"] == 1

    play(story)


def test_the_plan_is_in_the_status_before_anything_is_done() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(image="popmq:2")
        await world.look()  # the StatefulSet takes its new template
        deletions: list[list[str]] = []

        def watching(asked: Asked) -> str:
            if asked.verb == "delete" and asked.plural == "pods":
                deletions.append(world.status()["plan"])
            return ""

        world.api.fault = watching
        await world.look()
        assert deletions == [["restart demo-broker-0-1: its template changed"]]

    play(story)


@pytest.mark.parametrize(
    "given", [{}, {"proxies": {"autoscaling": {}}}, {"tls": {"mode": "Disabled"}}]
)
def test_nothing_is_asked_that_could_hurt_others(given: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        await running(world, cluster(**given))
        asked = {(item.verb, item.plural) for item in world.api.asked}
        assert not {("list", "secrets"), ("delete", "persistentvolumeclaims")} & asked
        assert not {plural for _, plural in asked} & {"nodes", "clusterroles"}

    play(story)
