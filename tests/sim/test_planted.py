"""Every planted mistake is found: a simulator that finds nothing may just be blind."""

import pytest
from sim.planted import HEAVY, PLANTED, Planted

from popmq.testing.simulator import run_seed


def marks(planted: Planted) -> list[pytest.MarkDecorator]:
    """Rare ones take thousands of seeds, and that on a busy machine too."""
    if not planted.rare:
        return []
    if planted.seeds > HEAVY:
        return [pytest.mark.long, pytest.mark.timeout(7_200)]
    return [pytest.mark.heavy, pytest.mark.timeout(900)]


def found_at(planted: Planted) -> int:
    """The first seed whose run is broken by the mistake and whole without it; 0 if none is."""
    for seed in planted.numbers(planted.seeds):
        with pytest.MonkeyPatch.context() as patch:
            planted.plant(patch)
            broken = bool(run_seed(seed).violations)
        if broken and not run_seed(seed).violations:
            return seed
    return 0


@pytest.mark.parametrize(
    "planted",
    [pytest.param(p, id=p.name, marks=marks(p)) for p in PLANTED],
)
def test_planted_mistake_is_found(planted: Planted) -> None:
    assert found_at(planted), f"{planted.name}: not seen in {planted.seeds} seeds"


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
