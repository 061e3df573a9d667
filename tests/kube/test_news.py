"""What nobody wakes the operator for: it asks, and looks where there is news."""

import asyncio
from collections.abc import Callable

import pytest
from kube.world import World, play, running

from popmq.operator.cluster.cluster_secrets import PlaneAccess
from popmq.operator.cluster.reconcile import ReconcileResult
from popmq.operator.cluster.reconcile_queue import ReconcileQueue
from popmq.operator.kube.event_watch import Clusters
from popmq.operator.process import News


def _cut_off(world: World) -> None:
    world.brokers.cut.add("demo-broker-0-2")


def _elected(world: World) -> None:
    world.brokers.masters["apps/demo", "broker-0"] = "demo-broker-0-1"


def _silent(world: World) -> None:
    world.brokers.away = True


@pytest.mark.parametrize("change", [_elected, _cut_off, _silent])
def test_there_is_news_until_the_status_says_the_same(change: Callable[[World], None]) -> None:
    async def story(world: World) -> None:
        await running(world)
        clusters: Clusters = {}
        news = News(
            clusters, world.brokers, {("apps", "demo"): PlaneAccess()}, default_image="popmq:1"
        )

        async def has_news() -> bool:
            watched = world.api.get("brokerclusters", "apps", "demo")
            assert watched is not None
            clusters["apps", "demo"] = watched
            return await news.from_manifest("apps", "demo")

        assert not await has_news()
        change(world)
        assert await has_news()
        await world.look()
        assert not await has_news()
        world.brokers.away = change is not _silent
        assert await has_news()

    play(story)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cluster_is_looked_at_again_where_there_is_news_and_only_there(fails: bool) -> None:
    """The time until the next look would otherwise be an hour."""

    loop = asyncio.get_running_loop()
    looks: list[str] = []
    asked: list[str] = []
    again = asyncio.Event()

    async def look(namespace: str, name: str) -> ReconcileResult:
        looks.append(name)
        if len(looks) == 2:
            again.set()
        return ReconcileResult(soon=False, ready=True)

    async def news(namespace: str, name: str) -> bool:
        asked.append(name)
        if fails and len(asked) == 2:
            raise RuntimeError("unheard of")
        return len(asked) == 3

    workers = ReconcileQueue(
        look, resync_s=3600, monotonic=loop.time, lost=lambda: None, news=news, news_s=0.01
    )
    try:
        workers.enqueue("apps", "demo")
        async with asyncio.timeout(30):
            await again.wait()
        assert len(asked) == 3
    finally:
        await workers.stop()
