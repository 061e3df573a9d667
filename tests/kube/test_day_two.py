"""Day 2 against a small API server: more, less, larger, paused, fenced, gone."""

from datetime import timedelta

import pytest
from kube.asked import Asked
from kube.clusters import cluster
from kube.fake_api import Object
from kube.world import World, play, running, versions


def test_the_number_of_groups_and_replicas_grows_at_once() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"replicas": 2}))
        world.change(brokers={"groups": 2, "replicas": 3})
        await world.run()
        assert len(world.pods()) == 6
        assert world.status()["summary"]["inSync"] == "6/6"

    play(story)


@pytest.mark.more
def test_fewer_replicas_take_the_last_away_and_never_the_master() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.brokers.masters["apps/demo", "broker-0"] = "demo-broker-0-2"
        world.change(brokers={"replicas": 2})
        await world.run()
        assert world.brokers.handed_over[0][1] == "demo-broker-0-2"
        assert world.pods() == ["demo-broker-0-0", "demo-broker-0-1"]
        assert world.api.get("persistentvolumeclaims", "apps", "data-demo-broker-0-2")
        assert world.down["demo-broker-0"] <= 1

    play(story)


def test_a_group_goes_when_it_is_drained_and_not_before() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"groups": 2}))
        world.brokers.left["broker-1"] = 7
        world.change(brokers={"groups": 1})
        for _ in range(5):
            await world.look()
        assert len(world.pods()) == 6
        assert world.condition("ScaleInBlocked")["reason"] == "Draining"
        assert "7 messages" in world.condition("ScaleInBlocked")["message"]
        world.brokers.left["broker-1"] = 0
        await world.run()
        assert len(world.pods()) == 3
        assert world.api.get("statefulsets", "apps", "demo-broker-1") is None
        assert world.api.get("services", "apps", "demo-broker-1") is None
        assert world.api.get("persistentvolumeclaims", "apps", "data-demo-broker-1-0")
        assert world.condition("ScaleInBlocked") == {}

    play(story)


def test_a_group_that_is_wanted_again_takes_messages_again() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"groups": 2}))
        world.brokers.left["broker-1"] = 7
        world.change(brokers={"groups": 1})
        for _ in range(3):
            await world.look()
        assert world.brokers.draining == {("apps/demo", "broker-1"): True}
        world.change(brokers={"groups": 2})
        await world.run()
        assert world.brokers.draining == {("apps/demo", "broker-1"): False}

    play(story)


def test_volumes_grow_and_pods_stay() -> None:
    async def story(world: World) -> None:
        world.api.put(
            "storageclasses", {"metadata": {"name": "plain"}, "allowVolumeExpansion": True}
        )
        await running(world)
        world.restarted.clear()
        world.change(brokers={"storage": {"size": "40Gi"}})
        await world.run()
        for claim in world.api.all("persistentvolumeclaims"):
            assert claim["spec"]["resources"]["requests"]["storage"] == "40Gi"
        group = world.api.get("statefulsets", "apps", "demo-broker-0")
        assert group is not None
        (template,) = group["spec"]["volumeClaimTemplates"]
        assert template["spec"]["resources"]["requests"]["storage"] == "40Gi"
        assert world.restarted == []

    play(story)


def test_volumes_of_a_class_that_cannot_grow_stay_and_the_status_says_why() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(brokers={"storage": {"size": "40Gi"}})
        await world.run()
        assert world.condition("StorageBlocked")["reason"] == "ClassCannotGrow"
        assert "allowVolumeExpansion" in world.condition("StorageBlocked")["message"]

    play(story)


def test_a_clusters_certificate_is_renewed_in_time_and_no_pod_restarts() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        seen = []
        for _ in range(3):  # of ninety days, the last thirty are for renewal
            secrets = [world.api.get("secrets", "apps", f"demo-{name}") for name in ("tls", "ca")]
            seen.append([(secret or {})["data"]["tls.crt"] for secret in secrets])
            world.now += timedelta(days=31)
            await world.run()
        first, second, third = seen
        assert first == second
        assert third[0] != second[0]
        assert third[1] == second[1]
        assert world.restarted == []

    play(story)


@pytest.mark.more
def test_a_paused_cluster_is_left_alone_and_goes_on_later() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.annotate("popmq.io/pause", "true")
        world.change(image="popmq:2")
        await world.look()
        assert world.images() == {"popmq:1"}
        assert world.condition("Paused")["status"] == "True"
        world.annotate("popmq.io/pause", None)
        await world.run()
        assert world.images() == {"popmq:2"}

    play(story)


def test_a_master_that_is_fenced_hands_over_and_is_cut_off() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.annotate("popmq.io/fence", "demo-broker-0-0")
        await world.run()
        pod = world.api.get("pods", "apps", "demo-broker-0-0")
        assert pod is not None
        assert pod["metadata"]["labels"]["popmq.io/fenced"] == "true"
        assert world.brokers.handed_over == [("broker-0", "demo-broker-0-0", "demo-broker-0-1")]
        world.annotate("popmq.io/fence", None)
        await world.run()
        pod = world.api.get("pods", "apps", "demo-broker-0-0")
        assert pod is not None
        assert "popmq.io/fenced" not in pod["metadata"]["labels"]

    play(story)


@pytest.mark.more
def test_a_restart_annotation_rolls_all_and_one_on_a_pod_that_pod() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.restarted.clear()
        pod = world.api.get("pods", "apps", "demo-broker-0-1")
        assert pod is not None
        pod["metadata"]["annotations"]["popmq.io/restart-pod"] = "true"
        world.api.put("pods", pod)
        await world.run()
        assert world.restarted == ["demo-broker-0-1"]
        world.annotate("popmq.io/restart", "monday")
        await world.run()
        assert [n for n in world.restarted if "broker" in n][1:] == [
            "demo-broker-0-1",
            "demo-broker-0-2",
            "demo-broker-0-0",
        ]

    play(story)


def test_an_autoscaler_takes_the_proxies_over_without_a_step_down() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(proxies={"replicas": 5}))
        least = [5]

        def watching(asked: Asked) -> str:
            least.append(len(world.pods("proxy")))
            return ""

        world.api.fault = watching
        world.change(proxies={"autoscaling": {"minReplicas": 2, "maxReplicas": 9}})
        await world.run()
        deployment = world.api.get("deployments", "apps", "demo-proxy")
        assert deployment is not None
        deployment["spec"]["replicas"] = 7  # the autoscaler's work
        world.api.put("deployments", deployment)
        await world.run()
        assert len(world.pods("proxy")) == 7
        assert min(least) == 5

    play(story)


def test_what_is_not_wanted_any_more_goes() -> None:
    async def story(world: World) -> None:
        given = cluster(controller={"replicas": 3}, proxies={"autoscaling": {}})
        await running(world, given)
        world.change(controller={"replicas": 1}, networkPolicy={"enabled": False})
        world.change(proxies={"autoscaling": {"enabled": False}}, tls={"mode": "Disabled"})
        await world.run()
        assert len(world.api.all("deployments")) == 2
        assert world.api.all("networkpolicies") == []
        assert world.api.all("horizontalpodautoscalers") == []
        secrets = [secret["metadata"]["name"] for secret in world.api.all("secrets")]
        assert secrets == ["demo-cluster-secret"]

    play(story)


def test_what_somebody_else_made_is_never_deleted() -> None:
    async def story(world: World) -> None:
        other = {"metadata": {"name": "mine", "namespace": "apps", "labels": {}}, "spec": {}}
        world.api.put("services", other)
        labelled = {**other, "metadata": {**other["metadata"], "name": "theirs"}}
        labelled["metadata"]["labels"] = {"popmq.io/cluster": "demo"}
        world.api.put("services", labelled)
        await running(world)
        assert world.api.get("services", "apps", "mine")
        assert world.api.get("services", "apps", "theirs")

    play(story)


@pytest.mark.more
def test_two_clusters_of_a_namespace_and_two_of_a_name_do_not_meet() -> None:
    async def story(world: World) -> None:
        world.add(cluster("demo", "apps"))
        world.add(cluster("other", "apps"))
        world.add(cluster("demo", "else"))
        for name, namespace in (("demo", "apps"), ("other", "apps"), ("demo", "else")):
            await world.run(name, namespace)
        assert len(world.pods("broker", "demo", "apps")) == 3
        assert len(world.pods("broker", "other", "apps")) == 3
        assert len(world.pods("broker", "demo", "else")) == 3
        world.change("demo", "apps", image="popmq:2")
        await world.run("demo", "apps")
        assert world.images("else") == {"popmq:1"}
        world.api.remove("brokerclusters", "apps", "demo")
        await world.look("demo", "apps")
        assert world.pods("broker", "demo", "apps") == []
        assert len(world.pods("broker", "other", "apps")) == 3
        assert len(world.pods("broker", "demo", "else")) == 3

    play(story)


@pytest.mark.more
def test_a_deleted_cluster_goes_and_its_volumes_and_records_stay() -> None:
    async def story(world: World) -> None:
        await running(world)
        _lease(world)
        world.api.remove("brokerclusters", "apps", "demo")
        await world.look()
        kinds = {key[0] for key in world.api.objects} - {"events"}
        assert kinds == {"persistentvolumeclaims", "leases"}

    play(story)


def test_a_cluster_goes_when_no_operator_runs() -> None:
    async def story(world: World) -> None:
        await running(world, cluster(brokers={"storage": {"onDelete": "Delete"}}))
        world.api.remove("brokerclusters", "apps", "demo")
        assert world.api.get("brokerclusters", "apps", "demo") is None
        assert world.pods() == []

    play(story)


def test_a_finalizer_of_an_earlier_operator_goes() -> None:
    async def story(world: World) -> None:
        given = cluster()
        given["metadata"]["finalizers"] = ["popmq.io/operator", "example.com/mine"]
        await running(world, given)
        kept = world.api.get("brokerclusters", "apps", "demo")
        assert kept is not None
        assert kept["metadata"]["finalizers"] == ["example.com/mine"]

    play(story)


@pytest.mark.more
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("kept", ["volumes", "no volumes"])
def test_a_cluster_made_again_has_the_records_of_the_volumes_that_are_left(
    kept: str, labelled: bool
) -> None:
    async def story(world: World) -> None:
        await running(world)
        _lease(world)
        world.api.remove("brokerclusters", "apps", "demo")
        for claim in world.api.all("persistentvolumeclaims"):
            if kept == "no volumes":
                world.api.remove("persistentvolumeclaims", "apps", claim["metadata"]["name"])
            elif not labelled:  # as somebody makes them of snapshots
                world.api.put("persistentvolumeclaims", {**claim, "metadata": _plain(claim)})
        await running(world)
        leases = {lease["metadata"]["name"] for lease in world.api.all("leases")}
        everything = {"popmq.demo.broker-0", "popmq.demo.cluster.owner"}
        assert leases == (everything if kept == "volumes" else set())

    play(story)


def test_a_new_group_has_no_record_of_one_that_is_gone() -> None:
    async def story(world: World) -> None:
        await running(world)
        _lease(world, "broker-0", "broker-1", "cluster.owner")
        world.change(brokers={"groups": 2})
        await world.run()
        leases = {lease["metadata"]["name"] for lease in world.api.all("leases")}
        assert leases == {"popmq.demo.broker-0", "popmq.demo.cluster.owner"}

    play(story)


def _plain(claim: Object) -> Object:
    return {"name": claim["metadata"]["name"], "namespace": "apps"}


def _lease(world: World, *groups: str) -> None:
    for group in groups or ("broker-0", "cluster.owner"):
        world.api.put("leases", {"metadata": {"name": f"popmq.demo.{group}", "namespace": "apps"}})


def test_a_protected_cluster_stays_until_the_annotation_goes() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.annotate("popmq.io/delete-protection", "true")
        await world.look()
        world.api.remove("brokerclusters", "apps", "demo")
        await world.look()
        assert len(world.pods()) == 3
        assert "delete-protection" in world.condition("Ready")["message"]
        world.annotate("popmq.io/delete-protection", None)
        await world.look()
        assert world.pods() == []

    play(story)


def test_a_spec_that_cannot_be_changes_nothing_and_says_why() -> None:
    async def story(world: World) -> None:
        await running(world)
        before = versions(world)
        world.change(config={"pop.max_batch": "1000"})
        await world.look()
        changed = {key[0] for key, version in versions(world).items() if before[key] != version}
        assert changed == {"brokerclusters"}
        assert (
            "spec.config[pop.max_batch] = 1000: at most 64" in world.condition("Ready")["message"]
        )
        assert world.status()["summary"]["masters"] == "1/1"

    play(story)
