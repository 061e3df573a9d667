"""Requests that fail and operators that are killed change nothing of the end."""

from collections.abc import Callable

import pytest
import sim_seeds
from kube.asked import Asked
from kube.clusters import cluster
from kube.world import World, play, running

from popmq.operator.cluster.reconcile import LeaseLost
from popmq.operator.kube.api_client import ApiError, ApiUnavailable

WAYS = ("conflict", "error", "lost", "drop")


def _writes(world: World) -> int:
    return sum(1 for asked in world.api.asked if asked.writes)


def _once(world: World, number: int, kind: str) -> Callable[[Asked], str]:
    """The write with this number, counted from now, gets this answer."""
    seen = [0]

    def fault(asked: Asked) -> str:
        if asked.writes and asked.plural != "events":
            seen[0] += 1
            if seen[0] == number:
                return kind
        return ""

    return fault


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_any_write_that_fails_once_changes_nothing_of_the_end() -> None:
    """Each in another way; within four days each of them in all ways."""
    print(f"POPMQ_SEED_DAY={sim_seeds.DAY} repeats which write fails how")

    async def story(world: World) -> None:
        world.add(cluster())
        number = 0
        while True:  # a cluster from nothing, then a roll, with each write failing in turn
            number += 1
            kind = WAYS[(number + sim_seeds.DAY) % len(WAYS)]
            world.api.fault = _once(world, number, kind)
            world.change(image=f"popmq:{number + 1}")
            await world.run()
            assert world.images() == {f"popmq:{number + 1}"}
            assert len(world.pods()) == 3
            if number >= 45:
                break
        assert world.down["demo-broker-0"] <= 1
        names = [key for key in world.api.objects if key[0] not in ("events", "pods")]
        assert len(names) == len(set(names))

    play(story)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_an_operator_that_is_killed_at_any_step_of_a_roll_is_followed_by_one_that_goes_on() -> None:
    class Killed(BaseException):
        pass

    async def story(world: World) -> None:
        await running(world)
        for number in range(1, 60):
            left = [number]

            def die(left: list[int] = left) -> bool:
                left[0] -= 1
                if left[0] == 0:
                    raise Killed
                return True

            world.change(image=f"popmq:{number + 1}")
            doomed = world.operator()
            doomed._may_write = die
            try:
                for _ in range(40):
                    if not (await doomed.reconcile("apps", "demo")).soon:
                        break
            except (Killed, ApiError, ApiUnavailable):
                pass
            await world.run()
            assert world.images() == {f"popmq:{number + 1}"}
        assert world.down["demo-broker-0"] <= 1

    play(story)


def test_an_operator_without_the_lease_writes_nothing() -> None:
    async def story(world: World) -> None:
        world.add(cluster())
        operator = world.operator()
        operator._may_write = lambda: False
        with pytest.raises(LeaseLost):
            await operator.reconcile("apps", "demo")
        assert _writes(world) == 0

    play(story)
