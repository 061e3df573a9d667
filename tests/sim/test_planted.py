"""Every planted mistake is found: a simulator that finds nothing may just be blind."""

from functools import partial
from pathlib import Path

import pytest
import sim_seeds
from sim import planted_retention, planted_store
from sim.planted import HEAVY, PLANTED, Planted

from popmq.testing.simulator import run_seed

# Of each kind of promise; make test-more has the others.
EVERY_DAY = (
    "reply before fsync",
    "ack not logged",
    "next of a key while one is in flight",
    "reset leaves deliveries",
    "undone attempt counted",
    "topic expires too early",
)


def marks(planted: Planted) -> list[pytest.MarkDecorator]:
    """Rare ones take thousands of seeds, and that on a busy machine too."""
    if not planted.rare:
        return [] if planted.name in EVERY_DAY else [pytest.mark.more, pytest.mark.timeout(300)]
    if planted.seeds > HEAVY:
        return [pytest.mark.long, pytest.mark.timeout(7_200)]
    return [pytest.mark.heavy, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "planted",
    [pytest.param(p, id=p.name, marks=marks(p)) for p in PLANTED],
)
def test_planted_mistake_is_found(planted: Planted) -> None:
    breaks = partial(sim_seeds.breaks, planted.plant, run_seed)
    seeds = planted.numbers(planted.seeds)
    result = sim_seeds.found_at("broker", planted.name, seeds, breaks)
    assert result, f"{planted.name}: not seen in {planted.seeds} seeds"


def where(planted: Planted) -> str:
    names = [mark.name for mark in marks(planted)]
    if "long" in names or "heavy" in names:
        return "long" if "long" in names else "heavy"
    return "make test-more" if names else "make test"


def test_the_page_names_every_mistake_of_the_store_and_within_how_many_seeds_it_is_found() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "planted-mistakes.md"
    modules = {planted_store.__name__, planted_retention.__name__}
    rows = [
        f"| {bug.name} | {bug.seeds:,}{' with retention' if bug.retains else ''} | {where(bug)} |"
        for bug in PLANTED
        if bug.plant.__module__ in modules
    ]
    assert len(rows) > 30
    text = page.read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_how_often_each_planted_mistake_is_found() -> None:
    counts: dict[str, int] = {}
    for planted in PLANTED:
        if planted.rare:
            continue
        seeds = planted.numbers(100)
        with pytest.MonkeyPatch.context() as patch:
            planted.plant(patch)
            counts[planted.name] = sum(bool(run_seed(seed).violations) for seed in seeds)
        print(f"{planted.name:45} {counts[planted.name]:4} of {len(seeds)} seeds")
    assert all(
        counts[planted.name] for planted in PLANTED if planted.seeds <= 100 and not planted.rare
    )
