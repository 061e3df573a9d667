"""Official clients of two namespaces with the same topic and groups, at the same time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.official import (
    PYTHON_MS_PER_MIB,
    Launch,
    Outcome,
    Scenario,
    ensure_node_client,
    launch_node,
    launch_python,
)
from e2e.official_java import launch_java
from e2e.processes import Cluster

COUNT = 60
SEEDS = {"eu": 20_261_122, "us": 20_261_123}

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    "language", ["python", "node", pytest.param("java", marks=pytest.mark.long)]
)
@pytest.mark.timeout(900)  # the first run installs the client
def test_clients_of_two_namespaces_get_their_own_messages_and_no_others(
    tmp_path: Path, language: str
) -> None:
    launch: Launch = launch_python
    if language == "node":
        ensure_node_client()
        launch = launch_node
    if language == "java":
        launch = launch_java("plain")

    def run(namespace: str) -> Outcome:
        scenario = Scenario(
            launch=launch,
            seed=SEEDS[namespace],
            count=COUNT,
            max_body=64 << 10,
            client_ms_per_mib=0 if language == "node" else PYTHON_MS_PER_MIB,
            namespace=namespace,
            late_ms=5_000,  # this is about whose they are; punctuality has tests of its own
        )
        return scenario.run(cluster, tmp_path / namespace)

    # A message of the other namespace would be one that nobody sent.
    with Cluster(tmp_path, proxies=2) as cluster, ThreadPoolExecutor(2) as threads:
        outcomes = dict(zip(SEEDS, threads.map(run, SEEDS), strict=True))
        topics = cluster.popmq("topic", "list")

    for namespace, outcome in outcomes.items():
        assert f"{namespace}%official" in topics
        outcome.check(f"namespace {namespace}, seed {SEEDS[namespace]}", sent=COUNT)
