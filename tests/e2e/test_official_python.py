"""The official Python client, unmodified, against controller, broker and two proxies."""

from pathlib import Path

import pytest
from e2e import delay_scenario
from e2e.lane_share import check_that_calls_take_their_lane
from e2e.official import PYTHON_MS_PER_MIB, Scenario, check_that_connections_may_end, launch_python
from e2e.payloads import PYTHON_MAX_BODY
from e2e.processes import Cluster

SEED = 20_260_101

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("count", "transport", "workers", "max_body"),
    [
        (300, "lean", "1", PYTHON_MAX_BODY),
        (120, "grpcio", "1", PYTHON_MAX_BODY),
        # Larger bodies are late in the client, whatever carries them, and two more processes on
        # the same cores leave it less of them.
        pytest.param(120, "lean", "2", 1 << 20, marks=pytest.mark.heavy),
        pytest.param(2_000, "lean", "1", PYTHON_MAX_BODY, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(180)
def test_every_group_of_the_python_client_gets_every_message_once_and_a_tenth_twice(
    tmp_path: Path, count: int, transport: str, workers: str, max_body: int
) -> None:
    scenario = Scenario(
        launch=launch_python,
        seed=SEED,
        count=count,
        max_body=max_body,
        client_ms_per_mib=PYTHON_MS_PER_MIB,
    )

    settings = {"POPMQ_PROXY_TRANSPORT": transport, "POPMQ_PROXY_WORKERS": workers}
    with Cluster(tmp_path, proxies=2, settings=settings) as cluster:
        outcome = scenario.run(cluster, tmp_path)

    outcome.check(f"official Python client, seed {SEED}", sent=count)


@pytest.mark.timeout(120)
def test_delivery_times_and_recall_with_the_python_client(tmp_path: Path) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        late_ms = delay_scenario.run(cluster, launch_python, tmp_path)
    print(f"\nofficial Python client, lateness of delays in ms: {sorted(late_ms)}")


@pytest.mark.parametrize("transport", ["lean"])  # the one that has lanes
@pytest.mark.timeout(180)
def test_the_calls_of_the_python_client_take_their_lane(tmp_path: Path, transport: str) -> None:
    check_that_calls_take_their_lane(launch_python, tmp_path, "official Python client")


@pytest.mark.heavy
@pytest.mark.parametrize("transport", ["lean"])
@pytest.mark.timeout(180)
def test_the_python_client_loses_nothing_while_its_connections_reach_their_age(
    tmp_path: Path, transport: str
) -> None:
    check_that_connections_may_end(
        launch_python, SEED, tmp_path, transport=transport, client_ms_per_mib=PYTHON_MS_PER_MIB
    )
