"""Official clients share a group, fail at random and are killed: nothing is lost, all is told.

E2E_SEED repeats a run's choices.
"""

import os
import random
from pathlib import Path

import pytest
from e2e.official import ensure_node_client
from e2e.shared_group import SharedGroup

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)


def settle_all(run: SharedGroup) -> None:
    print(f"\nseed {run.seed}: {run.count} messages, {run.keys} keys, kinds {run.kinds}")
    report = run.run()
    print(
        f"{run.took_s:.0f} s, {run.kills} x kill -9 of a consumer ({run.killed()})\n"
        f"{report.table()}"
    )
    assert report.faults == []
    assert report.sent == run.count
    assert report.acked + report.dead == run.count
    assert (report.lost, report.unknown) == (0, 0)


@pytest.mark.more
@pytest.mark.parametrize("keys", [0, 50])
@pytest.mark.timeout(120)
def test_killed_consumers_of_the_python_client_leave_nothing_behind(
    tmp_path: Path, keys: int
) -> None:
    settle_all(
        SharedGroup(
            tmp_path,
            SEED,
            count=300,
            kills=2,
            keys=keys,
            invisible_s=3,
            kinds=("python-push", "python-simple", "python-simple"),
            # A killed push consumer is waited for for 30 s: not every day.
            victims=("python-simple",),
        )
    )


HEAVY, LONG = pytest.mark.heavy, pytest.mark.long


@pytest.mark.parametrize(
    ("count", "kills"),
    [pytest.param(2_000, 6, marks=HEAVY), pytest.param(10_000, 20, marks=LONG)],
)
@pytest.mark.timeout(480)  # the first run installs the client
def test_python_and_node_consumers_share_a_group_while_they_fail_and_are_killed(
    tmp_path: Path, count: int, kills: int
) -> None:
    ensure_node_client()
    settle_all(SharedGroup(tmp_path, SEED, count=count, kills=kills))


@pytest.mark.parametrize(
    ("count", "kills"),
    [pytest.param(2_000, 4, marks=HEAVY), pytest.param(10_000, 12, marks=LONG)],
)
@pytest.mark.timeout(480)
def test_200_keys_stay_in_order_while_their_consumers_fail_and_are_killed(
    tmp_path: Path, count: int, kills: int
) -> None:
    ensure_node_client()
    settle_all(SharedGroup(tmp_path, SEED, count=count, kills=kills, keys=200))
