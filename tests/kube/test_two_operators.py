"""Two installations of the operator that watch one cluster: a Lease names the one in charge."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest
from kube.access import token_access
from kube.clusters import cluster
from kube.world import World, play

from popmq.operator.cluster.charges import ClusterCharges
from popmq.operator.cluster.reconcile import Reconciler, ReconcileResult
from popmq.operator.kube.api_client import ApiClient, ApiUnavailable

RESYNC_S = 300.0
LEASE = "popmq.demo.operator"


@dataclass
class Installation:
    charges: ClusterCharges
    reconciler: Reconciler

    async def look(self) -> ReconcileResult:
        return await self.reconciler.reconcile("apps", "demo")


@dataclass
class Clock:
    """Of every machine."""

    world: World
    passed_s: float = 0.0

    def move(self, seconds: float) -> None:
        self.passed_s += seconds
        self.world.now += timedelta(seconds=seconds)


@asynccontextmanager
async def installed(
    world: World, clock: Clock, identity: str, image: str
) -> AsyncIterator[Installation]:
    api = ApiClient(token_access(world.api.url), timeout_s=5.0)
    charges = ClusterCharges(
        api,
        identity=identity,
        resync_s=RESYNC_S,
        monotonic=lambda: clock.passed_s,
        now=lambda: world.now,
    )
    reconciler = Reconciler(
        api, world.brokers, default_image=image, now=lambda: world.now, charges=charges
    )
    try:
        yield Installation(charges, reconciler)
    finally:
        await api.close()


def test_the_second_leaves_a_cluster_alone_and_the_first_says_so() -> None:
    async def story(world: World) -> None:
        clock = Clock(world)
        async with (
            installed(world, clock, "one/popmq-operator", "popmq:1") as first,
            installed(world, clock, "two/popmq-operator", "popmq:2") as second,
        ):
            world.add(cluster())
            while (await first.look()).soon:
                pass
            for _ in range(3):
                await second.look()
            assert world.images() == {"popmq:1"}
            (event,) = world.events("TwoOperators")
            assert "operator one/popmq-operator is in charge of this cluster" in event["message"]
            assert world.condition("TwoOperators") == {}
            clock.move(RESYNC_S)
            await first.look()
            condition = world.condition("TwoOperators")
            assert condition["status"] == "True"
            assert "operator two/popmq-operator watches this cluster" in condition["message"]
            clock.move(RESYNC_S * 4)
            await first.look()
            assert world.condition("TwoOperators") == {}, "the other was not there for long"

    play(story)


def test_another_takes_over_when_the_first_is_gone_or_stops() -> None:
    async def story(world: World) -> None:
        clock = Clock(world)
        async with (
            installed(world, clock, "one/popmq-operator", "popmq:1") as first,
            installed(world, clock, "two/popmq-operator", "popmq:1") as second,
        ):
            world.add(cluster())
            await first.look()

            def holder() -> str:
                lease = world.api.get("leases", "apps", LEASE)
                assert lease is not None
                name: str = lease["spec"]["holderIdentity"]
                return name

            for _ in range(3):  # its own marks do not make it wait for longer
                await second.look()
                assert holder() == "one/popmq-operator"
                clock.move(RESYNC_S * 1.1)
            await second.look()
            assert holder() == "two/popmq-operator"
            await first.look()
            assert holder() == "two/popmq-operator"
            await second.charges.release()
            await first.look()
            assert holder() == "one/popmq-operator"

    play(story)


def test_a_cluster_is_looked_at_again_soon_when_its_lease_cannot_be_read_or_written() -> None:
    async def story(world: World) -> None:
        async with installed(world, Clock(world), "one/popmq-operator", "popmq:1") as first:
            world.add(cluster())
            world.api.fault = lambda asked: "error" if asked.plural == "leases" else ""
            with pytest.raises(ApiUnavailable, match=LEASE):
                await first.look()
            assert world.events("TwoOperators") == []
            world.api.fault = lambda asked: ""
            await first.look()
            assert world.pods()

    play(story)


def test_the_lease_goes_with_its_cluster() -> None:
    async def story(world: World) -> None:
        async with installed(world, Clock(world), "one/popmq-operator", "popmq:1") as first:
            world.add(cluster())
            await first.look()
            assert world.api.get("leases", "apps", LEASE) is not None
            world.api.remove("brokerclusters", "apps", "demo")
            assert world.api.get("leases", "apps", LEASE) is None

    play(story)


def test_an_idle_cluster_has_its_lease_renewed_once_a_look() -> None:
    async def story(world: World) -> None:
        clock = Clock(world)
        async with installed(world, clock, "one/popmq-operator", "popmq:1") as first:
            world.add(cluster())
            while (await first.look()).soon:
                pass
            clock.move(RESYNC_S)
            before = len(world.api.asked)
            await first.look()
            await first.look()
            leases = [asked.verb for asked in world.api.asked[before:] if asked.plural == "leases"]
            assert leases == ["get", "update"]

    play(story)
