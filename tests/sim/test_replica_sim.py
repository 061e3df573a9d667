"""Seeds in which a slave follows the simulated broker, is compared with it, and takes over; and
every mistake that is planted into following or promotion is found.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import sim_seeds

from popmq.broker.core import record_applier
from popmq.broker.log.commit_log import CommitLog
from popmq.broker.persistence.recovery import Recovery, SlaveRecoveryResult
from popmq.broker.store.slave_applier import SlaveApplier
from popmq.broker.timer.timer_service import TimerService
from popmq.testing.replica_worlds import ReplicaSimulator, TimerReplicaSimulator

Simulators = type[ReplicaSimulator] | type[TimerReplicaSimulator]
Patch = pytest.MonkeyPatch
STATES = (
    "comparisons",
    "failovers",
    "live failovers",
    "hashes",
    "crashes",
    "cuts",
    "copies",
    "applied",
)


def run(kind: Simulators, seeds: range) -> Counter[str]:
    """Stops at the first violation; returns how often each rare state was reached."""
    reached: Counter[str] = Counter()
    for seed in seeds:
        simulator = kind(seed)
        outcome = simulator.run()
        assert not outcome.violations, outcome.history(40)
        reached.update(simulator.reached())
    print(f"{len(seeds)} seeds from {seeds[0]}: {dict(reached)}")
    return reached


@pytest.mark.parametrize("kind", [ReplicaSimulator, TimerReplicaSimulator])
def test_a_slave_is_its_masters_equal(kind: Simulators) -> None:
    run(kind, range(1, 7))


@pytest.mark.more
@pytest.mark.parametrize("kind", [ReplicaSimulator, TimerReplicaSimulator])
def test_a_slave_is_its_masters_equal_and_takes_over(kind: Simulators) -> None:
    reached = run(kind, range(1, 91))
    assert [state for state in STATES if not reached[state]] == []


@pytest.mark.more
@pytest.mark.parametrize("kind", [ReplicaSimulator, TimerReplicaSimulator])
def test_a_failed_replica_seed_names_the_command_that_replays_it(kind: Simulators) -> None:
    outcome = kind(3).run()
    assert f"trace {outcome.digest}" in sim_seeds.replayed(outcome)


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [ReplicaSimulator, TimerReplicaSimulator])
def test_a_slave_is_its_masters_equal_in_the_seeds_of_the_day(kind: Simulators) -> None:
    sim_seeds.check_the_day(lambda seed: kind(seed).run(), 60)


def test_letters_of_a_parked_key_that_was_given_up_before_a_reset_are_sent_back() -> None:
    """Those that were never delivered, too: the oracle had forgotten them."""
    run(ReplicaSimulator, range(1_780_040, 1_780_041))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [ReplicaSimulator, TimerReplicaSimulator])
def test_a_slave_is_its_masters_equal_in_five_hundred_seeds(kind: Simulators) -> None:
    run(kind, range(10_000, 10_500))


# -- planted mistakes


def applies_what_is_not_confirmed(patch: Patch) -> None:
    patch.setattr(SlaveApplier, "bound", property(lambda self: self._commit.durable))


def takes_its_log_for_confirmed_at_a_start(patch: Patch) -> None:
    follow = Recovery.follow

    def wrong(self: Recovery, *arguments: Any) -> SlaveRecoveryResult:
        recovery = follow(self, *arguments)
        return SlaveRecoveryResult(
            recovery.begin, recovery.apply_from, self._log.end, recovery.passed
        )

    patch.setattr(Recovery, "follow", wrong)


def judges_timers_when_it_enqueues_them(patch: Patch) -> None:
    def wrong(self: TimerService) -> None:
        self.firing = False

    patch.setattr(TimerService, "run_as_slave", wrong)


def does_not_judge_at_the_mark(patch: Patch) -> None:
    patch.setattr(TimerService, "apply_classified", lambda self, offset: None)


def does_not_cut_physically(patch: Patch) -> None:
    patch.setattr(CommitLog, "truncate", lambda self, position, known: None)
    patch.setattr(SlaveApplier, "truncate", lambda self, position: None)


def fires_on_where_it_enqueued(patch: Patch) -> None:
    """A promoted slave goes on without judging what the old master had not."""

    def wrong(self: TimerService) -> None:
        self.firing = self.enqueue.classifying = True
        self.state.skip(self.queue.count)

    patch.setattr(TimerService, "promote", wrong)


def applies_no_moved_bodies(patch: Patch) -> None:
    apply = record_applier.RecordApplier.apply

    def wrong(self: record_applier.RecordApplier, record: object) -> None:
        if record.header.kind != 7:  # type: ignore[attr-defined]
            apply(self, record)  # type: ignore[arg-type]

    patch.setattr(record_applier.RecordApplier, "apply", wrong)


def forgets_what_it_read_of_a_block(patch: Patch) -> None:
    """A cut leaves the rest of a block in memory."""

    def wrong(self: SlaveApplier, position: int) -> None:
        return

    patch.setattr(SlaveApplier, "truncate", wrong)


@dataclass(frozen=True, slots=True)
class Planted:
    plant: Callable[[Patch], None]
    kind: Simulators
    seeds: int
    rare: bool = False  # half a minute of seeds and more


PLANTED = [
    Planted(applies_what_is_not_confirmed, ReplicaSimulator, 200, rare=True),
    Planted(takes_its_log_for_confirmed_at_a_start, ReplicaSimulator, 200),
    Planted(judges_timers_when_it_enqueues_them, TimerReplicaSimulator, 200),
    Planted(does_not_judge_at_the_mark, TimerReplicaSimulator, 100),
    Planted(does_not_cut_physically, ReplicaSimulator, 200),
    Planted(fires_on_where_it_enqueued, TimerReplicaSimulator, 100),
    Planted(applies_no_moved_bodies, ReplicaSimulator, 400, rare=True),
    Planted(forgets_what_it_read_of_a_block, ReplicaSimulator, 200, rare=True),
]


RARE = [pytest.mark.heavy, pytest.mark.timeout(600)]


def breaks(planted: Planted, seed: int) -> bool:
    return bool(planted.kind(seed).run().violations)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(item, id=item.plant.__name__, marks=RARE if item.rare else pytest.mark.more)
        for item in PLANTED
    ],
)
def test_a_planted_mistake_is_found(planted: Planted, monkeypatch: Patch) -> None:
    planted.plant(monkeypatch)
    name, seeds = planted.plant.__name__, range(1, planted.seeds)
    result = sim_seeds.found_at("replica", name, seeds, partial(breaks, planted))
    assert result, f"not seen in {planted.seeds} seeds"
