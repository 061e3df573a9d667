"""Seeds in which push consumers live on while brokers end: what they have stays, what they never
had comes back; and a broker that gives up more, or less, than its rule says is found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import sim_seeds

from popmq.broker.core import record_applier
from popmq.broker.core.broker import Broker
from popmq.broker.persistence import epoch_start
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.sim.lives import SeedResult
from popmq.testing.sim.pushes import PushSimulator

Patch = pytest.MonkeyPatch


def run_push_seed(seed: int) -> SeedResult:
    return PushSimulator(seed).run()


def run(seeds: range) -> StateCounts:
    return sim_seeds.checked(run_push_seed, seeds)


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.more)])
def test_what_live_consumers_have_stays_and_what_they_never_had_comes_back(seeds: int) -> None:
    tally = run(range(1, seeds + 1))
    assert tally.counts[Sometimes.RENEWED]


@pytest.mark.more
@pytest.mark.timeout(300)
def test_live_consumers_in_the_seeds_of_the_day() -> None:
    sim_seeds.check_the_day(run_push_seed, 100)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_live_consumers_in_five_hundred_seeds() -> None:
    run(range(10_000, 10_500))


@pytest.mark.more
def test_a_failed_push_seed_names_the_command_that_replays_it() -> None:
    outcome = run_push_seed(1)
    assert f"trace {outcome.digest}" in sim_seeds.replayed(outcome)


def gives_up_all_that_was_delivered(patch: Patch) -> None:
    patch.setattr(EpochStart, "after", lambda newest, answer: EpochStart(0))


def gives_up_what_is_twice_as_old(patch: Patch) -> None:
    patch.setattr(epoch_start, "UNANSWERED_MS", 2 * epoch_start.UNANSWERED_MS)


def gives_up_after_a_clean_stop(patch: Patch) -> None:
    def wrong(self: Broker) -> None:
        begin(self)
        self.store.stopped_cleanly = False

    begin = Broker._begin
    patch.setattr(Broker, "_begin", wrong)


def gives_up_nothing(patch: Patch) -> None:
    patch.setattr(EpochStart, "after", lambda newest, answer: EpochStart())


def gives_up_only_what_is_of_the_newest_record(patch: Patch) -> None:
    patch.setattr(epoch_start, "UNANSWERED_MS", 0)


def forgets_at_the_next_start_what_it_gave_up(patch: Patch) -> None:
    class Forgets:
        @staticmethod
        def decode(body: bytes) -> EpochStart:
            return EpochStart()

    patch.setattr(record_applier, "EpochStart", Forgets)


@dataclass(frozen=True, slots=True)
class Planted:
    plant: Callable[[Patch], None]
    seeds: int


PLANTED = [
    Planted(gives_up_all_that_was_delivered, 60),
    Planted(gives_up_what_is_twice_as_old, 60),
    Planted(gives_up_after_a_clean_stop, 150),
    Planted(gives_up_nothing, 200),
    Planted(gives_up_only_what_is_of_the_newest_record, 300),
    Planted(forgets_at_the_next_start_what_it_gave_up, 60),
]


@pytest.mark.more
@pytest.mark.parametrize(
    "planted", [pytest.param(item, id=item.plant.__name__) for item in PLANTED]
)
def test_a_broker_that_gives_up_more_or_less_than_it_says_is_found(planted: Planted) -> None:
    breaks = partial(sim_seeds.breaks, planted.plant, run_push_seed)
    name, seeds = planted.plant.__name__, range(1, planted.seeds + 1)
    result = sim_seeds.found_at("pushes", name, seeds, breaks)
    assert result, f"not seen in {planted.seeds} seeds"
