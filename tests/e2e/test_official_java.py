"""The official Java client, unmodified, over TLS as it does by default and in plain text."""

from pathlib import Path
from typing import Literal

import pytest
from e2e import delay_scenario
from e2e.lane_share import check_that_calls_take_their_lane
from e2e.official import (
    Scenario,
    check_that_connections_may_end,
    check_that_it_makes_our_messages,
)
from e2e.official_java import launch_java
from e2e.payloads import PYTHON_MAX_BODY
from e2e.processes import Cluster

SEED = 20_260_103
COUNT = 1_000
# Four cold virtual machines share two cores with the cluster.
JAVA_MS_PER_MIB = 50

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Speaks = Literal["tls", "plain"]


def test_java_makes_the_same_messages(tmp_path: Path) -> None:
    launch = launch_java("plain")
    check_that_it_makes_our_messages(launch, SEED, tmp_path, count=COUNT, max_body=PYTHON_MAX_BODY)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("speaks", ["tls", "plain"])
def test_every_group_of_the_java_client_gets_every_message_once_and_a_tenth_twice(
    tmp_path: Path, speaks: Speaks, workers: str
) -> None:
    scenario = Scenario(
        launch=launch_java(speaks),
        seed=SEED,
        count=COUNT,
        max_body=PYTHON_MAX_BODY,
        client_ms_per_mib=JAVA_MS_PER_MIB,
    )
    settings = {"POPMQ_PROXY_WORKERS": workers}
    with Cluster(tmp_path, proxies=2, settings=settings) as cluster:
        outcome = scenario.run(cluster, tmp_path)
    outcome.check(f"official Java client, {speaks}, seed {SEED}", sent=COUNT)


@pytest.mark.parametrize("speaks", ["tls", "plain"])
def test_delivery_times_and_recall_with_the_java_client(tmp_path: Path, speaks: Speaks) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        late_ms = delay_scenario.run(cluster, launch_java(speaks), tmp_path)
    print(f"\nofficial Java client, {speaks}, lateness of delays in ms: {sorted(late_ms)}")


@pytest.mark.parametrize("speaks", ["tls", "plain"])
def test_the_calls_of_the_java_client_take_their_lane(tmp_path: Path, speaks: Speaks) -> None:
    name = f"official Java client, {speaks}"
    check_that_calls_take_their_lane(launch_java(speaks), tmp_path, name)


def test_the_java_client_loses_nothing_while_its_connections_reach_their_age(
    tmp_path: Path,
) -> None:
    check_that_connections_may_end(launch_java("tls"), SEED, tmp_path, transport="lean")
