"""The official Python and Node clients over TLS.

The Java client speaks TLS in test_official_java.py.
"""

import datetime
from pathlib import Path

import pytest
from e2e.official import (
    PYTHON_MS_PER_MIB,
    Launch,
    Scenario,
    ensure_node_client,
    launch_node,
    launch_python,
    over_tls,
)
from e2e.processes import LOCAL, Cluster

from popmq.proxy.transport.lean import self_signed

SEED = 20_260_104
COUNT = 120
MAX_BODY = 1 << 20  # larger ones are late in the Python client, whatever carries them

pytestmark = [pytest.mark.heavy, pytest.mark.alone, pytest.mark.timeout(480)]


@pytest.mark.parametrize("launch", [launch_python, launch_node], ids=["python", "node"])
def test_every_group_of_a_client_over_tls_gets_every_message_once_and_a_tenth_twice(
    tmp_path: Path, launch: Launch
) -> None:
    if launch is launch_node:
        ensure_node_client()
    now = datetime.datetime.now(datetime.UTC)
    certificate, key = self_signed.kept_in(tmp_path / "tls", [LOCAL], now)
    scenario = Scenario(
        launch=over_tls(launch, certificate),
        seed=SEED,
        count=COUNT,
        max_body=MAX_BODY,
        client_ms_per_mib=PYTHON_MS_PER_MIB,
    )
    settings = {"POPMQ_PROXY_TLS_CERTIFICATE": certificate, "POPMQ_PROXY_TLS_KEY": key}
    with Cluster(tmp_path, proxies=2, settings=settings) as cluster:
        outcome = scenario.run(cluster, tmp_path)
        refused = [
            proxy.metric('popmq_proxy_lean_tls_refused_total{why="handshake"}')
            for proxy in cluster.proxies
        ]
    outcome.check(f"over TLS, seed {SEED}", sent=COUNT)
    assert refused == [0, 0]
