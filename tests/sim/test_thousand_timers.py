"""A thousand timers and a crash at every write, under three models of what a crash takes."""

import time
from collections.abc import Callable, Iterable

import pytest
import sim_seeds
from sim import planted_timers as planted

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.timer_world.crash_everywhere import (
    CrashEverywhere,
    CrashEverywhereResult,
    OneCrash,
    everywhere,
)
from popmq.testing.timer_world.thousand_timers import (
    LOSSES,
    MOST,
    REACHED,
    TIMERS,
    CrashedAt,
    ThousandTimers,
    seed_of,
)

HEAVY = 14  # runs of each loss


def run(seed: int) -> ThousandTimers:
    world = ThousandTimers(seed)
    outcome = world.run()
    assert not outcome.violations, outcome.history(40)
    assert world.acknowledged >= TIMERS
    return world


def operations(script: int) -> int:
    """How many a run has in which nothing crashes."""
    world = run(seed_of(first=MOST - 1, loss=0, script=script))
    assert world.crashes == 0
    return world.operations


def run_all(seeds: Iterable[int]) -> StateCounts:
    """What happened in them, added up."""
    tally, began = StateCounts(CrashedAt), time.monotonic()
    runs = crashes = timers = 0
    for seed in seeds:
        world = run(seed)
        assert world.crashes > 0
        tally.add(world.tally)
        runs, crashes, timers = runs + 1, crashes + world.crashes, timers + world.acknowledged
    print(f"{runs} runs, {timers} timers, {crashes} crashes, {time.monotonic() - began:.0f} s")
    print("crashed at\n" + tally.table() + "\nwhat happened")
    for state in REACHED:
        print(f"{state.value:<60} {tally.counts[state]:>8}")
    return tally


@pytest.mark.parametrize(
    "loss",
    [0, *(pytest.param(loss, marks=pytest.mark.more) for loss in range(1, len(LOSSES)))],
    ids=[f"lost: {loss.value}" for loss in LOSSES],
)
def test_a_thousand_timers_outlive_a_broker_that_crashes_all_the_time(loss: int) -> None:
    run_all([seed_of(first=1_000, loss=loss)])


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_none_of_a_thousand_timers_is_early_lost_or_twice_wherever_it_crashes_first() -> None:
    """At some of the writes, as far apart as time allows, of another script for each loss."""
    seeds = []
    for loss in range(len(LOSSES)):
        last = operations(script=loss)
        firsts = range(last // HEAVY // 2, last, last // HEAVY + 1)
        seeds += [seed_of(first=first, loss=loss, script=loss) for first in firsts]
    tally = run_all(seeds)
    assert not tally.never
    assert [state.value for state in REACHED if not tally.counts[state]] == []


def crash_everywhere(
    script: int, wants: Callable[[int, int], bool] = everywhere
) -> CrashEverywhereResult:
    """Also prints what it came to."""
    began, world = time.monotonic(), CrashEverywhere(script, copies=2, wants=wants)
    result = world.run_all()
    print(
        f"script {script}: {world.operations} operations, {result.points} crash points, "
        f"{result.same} of them in a state that was seen; {result.crashes} crashes, "
        f"{result.timers} timers, {len(result.stories)} runs with violations; "
        f"{time.monotonic() - began:.0f} s"
    )
    return result


@pytest.mark.long
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("script", [0, 1, 2])
def test_none_of_a_thousand_timers_is_early_lost_or_twice_with_a_crash_at_every_write(
    script: int,
) -> None:
    result = crash_everywhere(script)
    print("crashed at\n" + result.tally.table())
    assert result.stories == []
    assert result.points >= 3 * TIMERS
    assert not result.tally.never


@pytest.mark.heavy
def test_a_copy_of_the_run_that_crashes_is_the_run_that_crashes_there() -> None:
    result = crash_everywhere(0, lambda at, loss: at in (1, 1_033) and loss != at % 3)
    assert len(result.digests) + result.same == result.points == 4
    assert {seed: OneCrash(seed).run().digest for seed in result.digests} == result.digests


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "promise", "script"),
    [
        (planted.cursor_not_moved_at_recovery, "I12 cursor", 0),
        (planted.recall_forgotten_at_recovery, "I16 counts-true", 0),
        (planted.late_ones_not_in_the_snapshot, "I2 no-limbo", 2),  # one has some at a snapshot
        (planted.queue_cursor_one_too_far, "I1 no-loss", 0),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_planted_mistake_is_seen_by_a_copy_that_crashes(
    plant: Callable[[pytest.MonkeyPatch], None],
    promise: str,
    script: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    result = crash_everywhere(script, lambda at, loss: at % 151 == 0)
    assert promise in "\n".join(result.stories)
    assert "--one-crash --seed " in result.stories[0]


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "promises"),
    [
        (planted.fired_a_slot_early, {"I3 no-early"}),
        (planted.pending_body_not_moved, {"I1 no-loss"}),
        (planted.rolled_unit_dropped, {"I1 no-loss", "I2 no-limbo"}),
        (planted.fired_again_after_a_start, {"I4 exactly-once"}),
        (planted.cursor_not_moved_at_recovery, {"I12 cursor", "I12 function-of-the-log"}),
        (planted.slot_cleared_before_its_firings_are_confirmed, {"I1 no-loss", "I2 no-limbo"}),
        (planted.recall_not_written, {"I11 recall"}),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_planted_mistake_is_seen_in_a_thousand_timers(
    plant: Callable[[pytest.MonkeyPatch], None], promises: set[str]
) -> None:
    def breaks(seed: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            broken = {violation.invariant for violation in ThousandTimers(seed).run().violations}
        return bool(broken & promises)

    losses = range(len(LOSSES))
    seeds = [seed_of(first=first, loss=loss) for first in range(1, 2_000, 67) for loss in losses]
    assert sim_seeds.found_at("thousand", plant.__name__, seeds, breaks)
