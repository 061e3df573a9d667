"""The official Java client, unmodified, over TLS as it does by default and in plain text."""

from pathlib import Path
from typing import Literal

import pytest
from e2e import delay_scenario
from e2e.ledger import table
from e2e.official import OfficialClient, Scenario
from e2e.official_java import launch_java
from e2e.payloads import PYTHON_MAX_BODY, payload
from e2e.processes import Cluster

SEED = 20_260_103
COUNT = 1_000
# Four cold virtual machines share two cores with the cluster.
JAVA_MS_PER_MIB = 50

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Speaks = Literal["tls", "plain"]


def test_java_makes_the_same_messages(tmp_path: Path) -> None:
    launch = launch_java("plain")
    with OfficialClient("payloads", launch("payloads"), folder=tmp_path) as java:
        java.tell(op="start", seed=SEED, count=COUNT, max_body=PYTHON_MAX_BODY)
        java.wait(lambda: java.count("ready") > 0, "all messages made", within_s=60)
        made = java.of("payload")
    assert len(made) == COUNT
    for k, event in enumerate(made):
        expected = payload(seed=SEED, k=k, max_body=PYTHON_MAX_BODY).fields()
        assert event == {
            "event": "payload",
            "k": k,
            "sha256": expected.sha256,
            "size": expected.size,
            "keys": list(expected.keys),
            "tag": expected.tag,
            "properties": expected.properties,
        }


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
    print(f"\nofficial Java client, {speaks}, seed {SEED}\n{table(outcome.reports)}")
    assert outcome.errors == []
    assert [report.faults for report in outcome.reports] == [[], [], []]
    assert [report.sent for report in outcome.reports] == [COUNT] * 3


@pytest.mark.parametrize("speaks", ["tls", "plain"])
def test_delivery_times_and_recall_with_the_java_client(tmp_path: Path, speaks: Speaks) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        late_ms = delay_scenario.run(cluster, launch_java(speaks), tmp_path)
    print(f"\nofficial Java client, {speaks}, lateness of delays in ms: {sorted(late_ms)}")


def test_the_java_client_loses_nothing_while_its_connections_reach_their_age(
    tmp_path: Path,
) -> None:
    scenario = Scenario(
        launch=launch_java("tls"),
        seed=SEED,
        count=300,
        max_body=1 << 20,
    )
    ages = {"POPMQ_LEAN_MAX_AGE_MS": "5000", "POPMQ_LEAN_MAX_AGE_GRACE_MS": "12000"}
    with Cluster(tmp_path, proxies=2, settings=ages) as cluster:
        outcome = scenario.run(cluster, tmp_path)
        aged = [proxy.metric("popmq_proxy_lean_aged_total") for proxy in cluster.proxies]
    print(f"\n{aged} connections reached their age\n{table(outcome.reports)}")
    assert outcome.errors == []
    assert [report.faults for report in outcome.reports] == [[], [], []]
    assert min(aged) > 2
