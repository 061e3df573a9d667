"""What an operator asks the API server for when nothing happens."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from kube.access import token_access
from kube.asked import Asked
from kube.clusters import LARGE
from kube.desk import Desk
from kube.test_declared import play as play_declared
from kube.world import World, play, running

from popmq.operator.declared.declared_reconcile import LIST_S, DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.model.manifest import is_unchanged, with_digest
from popmq.testing.running_broker import RunningBroker


@pytest.fixture(scope="module")
def popmq() -> Iterator[RunningBroker]:
    with RunningBroker() as started:
        yield started


def test_objects_that_are_as_they_are_wanted_are_not_applied() -> None:
    async def story(world: World) -> None:
        await running(world)
        before = len(world.api.asked)
        await world.look()
        asked = world.api.asked[before:]
        assert [request for request in asked if request.writes] == []
        # With one look in five minutes, five requests a minute.
        assert len(asked) <= 25, Counter(f"{request.verb} {request.plural}" for request in asked)

    play(story)


@pytest.mark.parametrize(
    ("plural", "name"), [("services", "demo-proxy"), ("roles", "demo-controller")]
)
def test_what_others_change_or_remove_is_applied_again(plural: str, name: str) -> None:
    async def story(world: World) -> None:
        await running(world)
        wanted = world.api.get(plural, "apps", name)
        assert wanted is not None
        part = "rules" if plural == "roles" else "spec"
        world.api.put(plural, {**wanted, part: []})
        await world.look()
        again = world.api.get(plural, "apps", name)
        assert again is not None
        assert again[part] == wanted[part]
        world.api.remove(plural, "apps", name)
        await world.look()
        assert world.api.get(plural, "apps", name) is not None

    play(story)


def test_a_field_that_is_not_wanted_any_more_is_taken_back() -> None:
    async def story(world: World) -> None:
        await running(world, {**LARGE, "metadata": {**LARGE["metadata"], "name": "demo"}})
        service = world.api.get("services", "apps", "demo-proxy")
        assert service is not None
        assert "example.com/lb" in service["metadata"]["annotations"]
        world.change(proxies={"service": {"type": "LoadBalancer"}})
        await world.look()
        service = world.api.get("services", "apps", "demo-proxy")
        assert service is not None
        assert "example.com/lb" not in service["metadata"]["annotations"]

    play(story)


def test_an_object_is_unchanged_when_it_has_all_that_is_wanted_and_the_digest() -> None:
    wanted = with_digest({"metadata": {"name": "a", "labels": {"x": "1"}}, "spec": {"ports": [1]}})
    defaults = {"type": "ClusterIP"}
    stored = {
        "metadata": {**wanted["metadata"], "uid": "u"},
        "spec": {**wanted["spec"], **defaults},
    }
    assert is_unchanged(wanted, stored)
    assert not is_unchanged(wanted, {**stored, "spec": {"ports": [1, 2]}})
    assert not is_unchanged(with_digest({**wanted, "spec": {}}), stored)
    assert not is_unchanged(wanted, {**stored, "metadata": {"labels": {"x": "1"}}})


def test_what_is_declared_is_listed_every_five_minutes_and_when_something_moved(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        now_s = 0.0
        desk.declare("Topic", "plain")
        await desk.settle()
        client, operator = remembering(desk, popmq, lambda: now_s)

        async def asked() -> int:
            before = len(desk.api.asked)
            await operator.reconcile("apps", "demo")
            return len(desk.api.asked) - before

        try:
            assert await asked() == 4
            assert await asked() == 0
            desk.alter("plain", permission="r")  # drift is found without the API server
            await operator.reconcile("apps", "demo")
            assert desk.topics()["plain"].permission == "rw"
            operator.forget("apps", "demo")
            assert await asked() == 4
            now_s += LIST_S
            assert await asked() == 4
        finally:
            await client.close()

    play_declared(popmq, story)


def test_an_object_that_is_declared_while_the_list_is_made_is_not_missed(
    popmq: RunningBroker,
) -> None:
    async def story(desk: Desk) -> None:
        desk.declare("Topic", "plain")
        await desk.settle()
        client, operator = remembering(desk, popmq, lambda: 0.0)

        def declare_late(asked: Asked) -> str:
            if asked.plural == "brokerclusters":  # read after the topics and groups
                desk.api.fault = lambda asked: ""
                desk.declare("Topic", "late")
                operator.forget("apps", "demo")
            return ""

        desk.api.fault = declare_late
        try:
            await operator.reconcile("apps", "demo")
            await operator.reconcile("apps", "demo")
            assert "late" in desk.topics()
        finally:
            await client.close()

    play_declared(popmq, story)


def remembering(
    desk: Desk, popmq: RunningBroker, monotonic: Callable[[], float]
) -> tuple[ApiClient, DeclaredReconciler]:
    """An operator that keeps its lists, as the process does."""
    client = ApiClient(token_access(desk.api.url), timeout_s=5.0)
    plane = NetworkMetadataClient(popmq.endpoint)
    return client, DeclaredReconciler(
        client, plane, default_image="popmq:1", now=lambda: desk.now, monotonic=monotonic
    )
