"""Objects of a cluster that is there again under another uid, as after a restore from a backup."""

from typing import Any

import pytest
from kube.clusters import cluster
from kube.fake_api import Object
from kube.test_lag_reports import condition, report
from kube.world import World, play, running

ADOPT = "popmq.io/adopt"
KINDS = (
    *("secrets", "configmaps", "services", "deployments", "statefulsets", "serviceaccounts"),
    *("roles", "rolebindings", "networkpolicies", "poddisruptionbudgets"),
)


def _owners(world: World) -> set[str]:
    """Of all objects of the cluster."""
    nobody: Object = {"uid": ""}
    return {
        str(owner["uid"])
        for plural in KINDS
        for item in world.api.all(plural, "apps")
        for owner in item["metadata"].get("ownerReferences") or [nobody]
    }


def _restored(world: World, owner: Object | None) -> Object:
    """All objects of the cluster are as they were, with `owner` or none; it has another uid."""
    for plural in KINDS:
        for item in world.api.all(plural, "apps"):
            owners: list[Object] = [] if owner is None else [owner]
            item["metadata"]["ownerReferences"] = owners
            world.api.put(plural, item)
    new = world.api.get("brokerclusters", "apps", "demo")
    assert new is not None
    stored = world.api.objects["brokerclusters", "apps", "demo"]
    stored.body["metadata"]["uid"] = "uid-of-the-restored"
    return new


def _data(world: World) -> dict[str, Any]:
    return {item["metadata"]["name"]: item.get("data") for item in world.api.all("secrets", "apps")}


GONE: Object = {
    "apiVersion": "popmq.io/v1beta1",
    "kind": "BrokerCluster",
    "name": "demo",
    "uid": "of-the-old-cluster",
}


@pytest.mark.parametrize("owner", [None, GONE], ids=["no owner", "the old cluster"])
def test_a_restored_cluster_takes_its_objects_over_when_it_is_told_to(
    owner: Object | None,
) -> None:
    async def story(world: World) -> None:
        await running(world, cluster(auth={"mode": "On"}))
        secrets, pods = _data(world), len(world.restarted)
        assert len(secrets) == 5
        _restored(world, owner)
        for _ in range(3):
            await world.look()
        assert world.condition("Reconciled")["reason"] == "NameTaken"
        assert "popmq.io/adopt" in world.condition("Reconciled")["message"]
        assert "uid-of-the-restored" not in _owners(world)
        world.annotate(ADOPT, "true")
        await world.run()
        assert _owners(world) == {"uid-of-the-restored"}
        assert world.condition("Reconciled")["status"] == "True"
        assert world.condition("Ready")["status"] == "True"
        assert _data(world) == secrets
        assert len(world.restarted) == pods, "no pod is made again"
        world.annotate(ADOPT, None)
        await world.run()
        assert world.condition("Reconciled")["status"] == "True"

    play(story)


@pytest.mark.parametrize(
    ("labels", "owner"),
    [
        ({}, None),
        ({"popmq.io/cluster": "demo"}, None),
        ({"popmq.io/cluster": "other", "app.kubernetes.io/managed-by": "popmq-operator"}, None),
        (
            {"popmq.io/cluster": "demo", "app.kubernetes.io/managed-by": "popmq-operator"},
            {**GONE, "name": "other"},
        ),
        (
            {"popmq.io/cluster": "demo", "app.kubernetes.io/managed-by": "popmq-operator"},
            {**GONE, "kind": "Deployment", "apiVersion": "apps/v1"},
        ),
    ],
    ids=["no labels", "one label", "another cluster's", "its owner", "its workload"],
)
def test_an_object_that_no_cluster_of_that_name_left_is_not_taken_over(
    labels: dict[str, str], owner: Object | None
) -> None:
    async def story(world: World) -> None:
        metadata: Object = {"name": "demo-ca", "namespace": "apps", "labels": labels}
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"a": "eA=="}}
        world.api.put("secrets", body)
        before = world.api.get("secrets", "apps", "demo-ca")
        given = cluster()
        given["metadata"]["annotations"][ADOPT] = "true"
        world.add(given)
        for _ in range(5):
            await world.look()
        assert world.condition("Reconciled")["reason"] == "NameTaken"
        assert world.api.get("secrets", "apps", "demo-ca") == before

    play(story)


def test_a_report_that_was_restored_takes_its_cron_job_over() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.api.put("lagreports", report())
        await world.run()
        job = world.api.get("cronjobs", "apps", "demo-report-hourly")
        assert job is not None
        (owner,) = job["metadata"]["ownerReferences"]
        job["metadata"]["ownerReferences"] = [{**owner, "uid": "of-the-old-report"}]
        world.api.put("cronjobs", job)
        await world.run()
        assert condition(world, "Ready")["reason"] == "InvalidSpec"
        world.annotate(ADOPT, "true")
        await world.run()
        assert condition(world, "Ready")["reason"] == "Scheduled"
        job = world.api.get("cronjobs", "apps", "demo-report-hourly")
        assert job is not None
        assert job["metadata"]["ownerReferences"] == [owner]

    play(story)


def test_a_paused_cluster_takes_nothing_over() -> None:
    async def story(world: World) -> None:
        await running(world)
        _restored(world, GONE)
        world.annotate("popmq.io/pause", "true")
        world.annotate(ADOPT, "true")
        await world.look()
        assert _owners(world) == {GONE["uid"]}

    play(story)
