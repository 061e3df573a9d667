"""Which seeds a test of a simulator runs.

Those that ask for no violation begin somewhere else each UTC day, so that CI searches on:
POPMQ_SEED_DAY=N, which the head of every report prints, repeats those of a day. What has to be
reached, a rare state or a planted mistake, has seeds that do not change. SEED_SECONDS=N ends a
test of the seeds of the day after N seconds, as .ci/run does.

Also what the tests of all simulators have in common: to run seeds, to compare a run with and
without a planted mistake, to compare the traces of processes, and to replay a failed seed.
"""

import fcntl
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

import pytest
from programs import run_program

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.lives import SeedResult
from popmq.testing.sim.seed_runs import outcomes

Run = Callable[[int], SeedResult]
DAY_S = 86_400
DAY = int(os.environ.get("POPMQ_SEED_DAY") or time.time() // DAY_S)
SECONDS = float(os.environ.get("SEED_SECONDS") or "inf")
KNOWN = Path(__file__).with_name("known_seeds.json")  # world -> planted mistake -> seed
_FIRST, _A_DAY = 1_000_000, 1_000  # beyond the seeds of all other tests


def of_the_day(count: int) -> range:
    """`count` seeds that no other day has (within ten thousand)."""
    assert count <= _A_DAY
    first = _FIRST + DAY % 10_000 * _A_DAY
    print(f"seeds {first} to {first + count - 1}: POPMQ_SEED_DAY={DAY} repeats them")
    return range(first, first + count)


def checked(
    run: Run,
    seeds: range,
    *states: type[Enum],
    lines: int = 40,
    processes: int = 1,
    limit_s: float = math.inf,
) -> StateCounts:
    """Stops at the first violation, with the last `lines` of its history; counts rare states.

    No seed begins after `limit_s` seconds.
    """
    tally, began, count = StateCounts(*states), time.monotonic(), 0
    for outcome in outcomes(run, seeds, processes=processes):
        assert not outcome.violations, outcome.history(lines)
        tally.add(outcome.tally)
        count += 1
        if time.monotonic() - began > limit_s:
            break
    a_second = count / (time.monotonic() - began)
    print(f"{count} seeds from {seeds[0]}, {a_second:.1f} a second\n{tally.table()}")
    return tally


def check_the_day(run: Run, count: int, *states: type[Enum], lines: int = 40) -> None:
    """`count` seeds of the day, or as many as begin within SEED_SECONDS."""
    checked(run, of_the_day(count), *states, lines=lines, limit_s=SECONDS)


def breaks(plant: Callable[[pytest.MonkeyPatch], None], run: Run, seed: int) -> bool:
    """Whether the run is broken by the mistake and whole without it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        broken = bool(run(seed).violations)
    return broken and not run(seed).violations


def digests_under_hash_seeds(run: Run, seeds: range) -> set[str]:
    """What processes with other orders of sets print as the digests of the seeds."""
    code = (
        "import logging, pickle; logging.disable()\n"
        f"run = pickle.loads({pickle.dumps(run)!r})\n"
        f"print(*(run(seed).digest for seed in {seeds!r}))"
    )
    return {
        run_program(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }


def replayed(outcome: SeedResult) -> str:
    """What the command prints that the history of a failed seed names."""
    command = outcome.history().rpartition("replay: ")[2].split()
    assert command[0] == ".venv/bin/python"
    return run_program([sys.executable, *command[1:]]).stdout


def found_at(world: str, mistake: str, seeds: Iterable[int], breaks: Callable[[int], bool]) -> int:
    """The first seed that shows a planted mistake, 0 if none does.

    Where it was seen last is tried before the others. A change of the product gives the seeds
    other runs, so that it may be another one now: POPMQ_KNOWN_SEEDS=write notes it.
    """
    last = json.loads(KNOWN.read_text(encoding="utf-8"))[world].get(mistake, 0)
    if last and breaks(last):
        return int(last)
    for seed in seeds:
        if seed != last and breaks(seed):
            print(f"{KNOWN.name}: {mistake!r} of {world} was seen at {last}, and is at {seed} now")
            if os.environ.get("POPMQ_KNOWN_SEEDS") == "write":
                _write(world, mistake, seed)
            return seed
    return 0


def _write(world: str, mistake: str, seed: int) -> None:
    """Several processes of a test run may do so at a time."""
    with KNOWN.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = json.load(file)
        known[world][mistake] = seed
        file.seek(0)
        file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")
        file.truncate()
