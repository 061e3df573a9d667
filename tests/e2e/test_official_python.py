"""The official Python client, unmodified, against controller, broker and two proxies."""

from pathlib import Path

import pytest
from e2e import delay_scenario
from e2e.ledger import table
from e2e.official import PYTHON_MS_PER_MIB, Scenario, launch_python
from e2e.payloads import PYTHON_MAX_BODY
from e2e.processes import Cluster

SEED = 20_260_101

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("transport", ["grpcio", "lean"])
@pytest.mark.parametrize("count", [300, pytest.param(2_000, marks=pytest.mark.heavy)])
@pytest.mark.timeout(180)
def test_every_group_of_the_python_client_gets_every_message_once_and_a_tenth_twice(
    tmp_path: Path, count: int, transport: str
) -> None:
    scenario = Scenario(
        launch=launch_python,
        seed=SEED,
        count=count,
        max_body=PYTHON_MAX_BODY,
        client_ms_per_mib=PYTHON_MS_PER_MIB,
    )

    with Cluster(tmp_path, proxies=2, settings={"POPMQ_PROXY_TRANSPORT": transport}) as cluster:
        outcome = scenario.run(cluster, tmp_path)

    print(f"\nofficial Python client, seed {SEED}\n{table(outcome.reports)}")
    assert outcome.errors == []
    assert [report.faults for report in outcome.reports] == [[], [], []]
    assert [report.sent for report in outcome.reports] == [count] * 3


@pytest.mark.timeout(120)
def test_delivery_times_and_recall_with_the_python_client(tmp_path: Path) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        late_ms = delay_scenario.run(cluster, launch_python, tmp_path)
    print(f"\nofficial Python client, lateness of delays in ms: {sorted(late_ms)}")
