"""The condition Degraded: what a cluster lacks of what it is to have, serving or not."""

from datetime import timedelta

import pytest
from kube.clusters import cluster, read
from kube.world import NOW, World, play, running

from popmq.operator.cluster.observed import GroupHealth, GroupSet, Observed, Pod
from popmq.operator.cluster.plan import ClusterPlan
from popmq.operator.cluster.status import cluster_status
from popmq.operator.model.conditions import ConditionValue, verdict_in
from popmq.operator.model.manifest import Manifest

LOST = "demo-broker-0-1"


def pod(name: str, *, ready: bool = True, going: bool = False, fenced: bool = False) -> Pod:
    return Pod(
        name=name,
        uid=name,
        ordinal=int(name[-1]),
        template="t",
        ready=ready,
        works=ready,
        is_deleting=going,
        fenced=fenced,
        restart=False,
    )


def group_set(index: int, replicas: int = 3, *, going: bool = False) -> GroupSet:
    return GroupSet(index, f"demo-broker-{index}", replicas, "t", "20Gi", True, going)


def health(*names: str, master: str = "demo-broker-0-0") -> GroupHealth:
    return GroupHealth(master=master, epoch=3, in_sync=frozenset(names), alive=frozenset(names))


NAMES = [f"demo-broker-0-{number}" for number in range(3)]
PODS = [pod(name) for name in NAMES]


def degraded(observed: Observed, **brokers: int) -> ConditionValue:
    spec = read(cluster(brokers=brokers))
    return verdict_in(cluster_status(spec, observed, ClusterPlan(), {}, NOW), "Degraded")


def of_one_group(pods: list[Pod], known: GroupHealth | None) -> ConditionValue:
    answer = None if known is None else {"broker-0": known}
    return degraded(Observed(sets={0: group_set(0)}, pods={0: pods}, health=answer))


def test_a_cluster_with_all_its_copies_is_not_degraded() -> None:
    whole = of_one_group(PODS, health(*NAMES))
    assert (whole.status, whole.reason) == ("False", "Whole")


@pytest.mark.parametrize(
    ("pods", "problem"),
    [
        ([PODS[0], PODS[2]], "is missing"),
        ([PODS[0], pod(LOST, ready=False), PODS[2]], "is not ready"),
        ([PODS[0], pod(LOST, going=True), PODS[2]], "is told to go"),
        ([PODS[0], pod(LOST, fenced=True), PODS[2]], "is fenced"),
    ],
)
def test_a_broker_that_does_not_work_is_named_with_its_group_and_the_copies_left(
    pods: list[Pod], problem: str
) -> None:
    result = of_one_group(pods, health(NAMES[0], NAMES[2]))
    message = f"broker-0: 2 of 3 in sync ({LOST} {problem})"
    assert result == ConditionValue("True", "BrokerDown", message)


def test_a_broker_that_is_ready_and_behind_is_told_apart() -> None:
    condition = of_one_group(PODS, health(NAMES[0], NAMES[2]))
    message = f"broker-0: 2 of 3 in sync ({LOST} is not in sync)"
    assert condition == ConditionValue("True", "NotInSync", message)


def test_a_group_without_a_master_is_the_worst_and_says_what_else_it_lacks() -> None:
    condition = of_one_group([pod(NAMES[0], ready=False), *PODS[1:]], health(master=""))
    assert condition.reason == "NoMaster"
    assert condition.message == (
        "broker-0: 0 of 3 in sync (it has no master, demo-broker-0-0 is not ready, "
        "demo-broker-0-1 is not in sync, demo-broker-0-2 is not in sync)"
    )


def test_without_controllers_only_what_pods_tell_is_concluded() -> None:
    assert of_one_group(PODS, None).status == "Unknown"
    condition = of_one_group([PODS[0], PODS[2]], None)
    assert (condition.status, condition.reason) == ("True", "BrokerDown")
    assert "no controller says how many" in condition.message


def test_every_group_that_lacks_something_is_named_and_the_worst_is_the_reason() -> None:
    expected = 12
    observed = Observed(
        sets={index: group_set(index) for index in range(expected)},
        pods={0: PODS},
        health={"broker-0": health(NAMES[0], NAMES[2])},
    )
    condition = degraded(observed, groups=expected)
    assert condition.reason == "NoMaster"
    parts = condition.message.split("; ")
    assert parts[0].startswith("broker-0: 2 of 3 in sync")
    assert parts[7].startswith("broker-7: 0 of 3 in sync")
    assert parts[8:] == ["and 4 more broker groups"]


def test_a_group_that_goes_lacks_nothing_and_one_that_is_being_drained_does() -> None:
    sets = {0: group_set(0), 1: group_set(1, going=True)}
    known = {"broker-0": health(*NAMES)}
    assert degraded(Observed(sets=sets, pods={0: PODS}, health=known)).status == "False"
    sets[1] = group_set(1, replicas=2)
    condition = degraded(Observed(sets=sets, pods={0: PODS}, health=known))
    assert "broker-1: 0 of 2 in sync" in condition.message


def test_a_replica_that_is_to_go_is_not_missed() -> None:
    observed = Observed(
        sets={0: group_set(0)}, pods={0: PODS[:2]}, health={"broker-0": health(*NAMES[:2])}
    )
    assert degraded(observed, replicas=2).status == "False"


def events(world: World, reason: str) -> list[Manifest]:
    return [event for event in world.api.all("events") if event["reason"] == reason]


def test_a_lost_broker_is_told_once_and_so_is_its_return() -> None:
    async def story(world: World) -> None:
        await running(world)
        since = world.condition("Degraded")["lastTransitionTime"]
        world.now += timedelta(minutes=5)
        await world.look()
        assert world.condition("Degraded")["lastTransitionTime"] == since
        world.unready.add(LOST)
        world.settle()
        world.now += timedelta(minutes=1)
        for _ in range(3):
            await world.look()
            world.now += timedelta(minutes=1)
        condition = world.condition("Degraded")
        assert condition["status"] == "True"
        assert LOST in condition["message"]
        assert condition["lastTransitionTime"] == "2030-01-01T00:06:00Z"
        assert world.condition("Ready")["status"] == "True"
        assert world.condition("Progressing")["status"] == "False"
        (reported_events,) = events(world, "Degraded")
        assert (reported_events["type"], reported_events["message"]) == (
            "Warning",
            condition["message"],
        )
        world.unready.clear()
        world.settle()
        await world.run()
        assert world.condition("Degraded")["status"] == "False"
        assert len(events(world, "Degraded")) == 1
        # Once when it came up, too.
        (whole,) = events(world, "Whole")
        assert (whole["type"], whole["count"]) == ("Normal", 2)

    play(story)


def test_a_change_in_what_is_lacking_moves_no_time_and_makes_no_second_event() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.unready.add(LOST)
        world.settle()
        await world.look()
        first = world.condition("Degraded")
        world.now += timedelta(hours=1)
        world.unready.add("demo-broker-0-2")
        world.settle()
        await world.look()
        then = world.condition("Degraded")
        assert "demo-broker-0-2" in then["message"]
        assert then["lastTransitionTime"] == first["lastTransitionTime"]
        assert len(events(world, "Degraded")) == 1

    play(story)


def test_a_copy_that_catches_up_is_looked_at_again_soon() -> None:
    """Kubernetes has no event of it."""

    async def story(world: World) -> None:
        await running(world)
        world.unready.add(LOST)
        world.api.remove("pods", "apps", LOST)
        world.settle()
        assert not (await world.look()).soon
        world.unready.clear()
        world.settle()
        outcome = await world.look()
        assert world.condition("Degraded")["reason"] == "NotInSync"
        assert outcome.soon
        await world.run()
        assert world.condition("Degraded")["status"] == "False"

    play(story)


@pytest.mark.more
def test_a_restart_by_the_operator_and_a_new_group_are_no_warnings() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(image="popmq:2")
        await world.look()
        world.unready.add(LOST)  # the first that is restarted takes its time
        await world.look()
        await world.look()
        assert world.condition("Degraded")["status"] == "True"
        world.unready.clear()
        world.settle()
        await world.run()
        world.change(brokers={"groups": 2})
        await world.run()
        assert [event["type"] for event in events(world, "Degraded")] == ["Normal", "Normal"]
        assert world.condition("Degraded")["status"] == "False"

    play(story)


def test_a_spec_that_cannot_be_leaves_it_unknown() -> None:
    async def story(world: World) -> None:
        await running(world)
        world.change(config={"pop.max_batch": "1000"})
        await world.look()
        assert world.condition("Degraded")["status"] == "Unknown"

    play(story)
