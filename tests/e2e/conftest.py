"""Makes the helpers beside the tests importable, and runs the tests with both transports."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

from e2e import processes  # noqa: E402 - importable only now

# Long and about brokers, without a proxy, or about transports themselves.
LEAN_ONLY = {
    "test_absent_group",
    "test_crash_ledger",
    "test_failover",
    "test_failover_official",
    "test_failover_timers",
    "test_full_disk",
    "test_isolated_master",
    "test_ledger",
    "test_processes",
    "test_shared_ledger",
    "test_growth",
    "test_kill_nine",
    "test_official_fifo",
    "test_official_java",
    "test_official_scenarios",
    "test_official_shared",
    "test_orphan_checks",
    "test_rolling_proxies",
    "test_rolling_upgrade",
    "test_official_tls",
    "test_real_time",
    "test_recreated",
    "test_prometheus",  # panels of the lean transport
    "test_replicas_stay_equal",
    "test_restore",
    "test_server_restart",
    "test_timers_killed",
    "test_transport_flag",
    "test_system_topics",
    "test_two_namespaces",
    "test_unhandled_exceptions",
    "test_wiped_slave",
    "test_workers",
}

# Which calls there are and what they answer; of the others few depend on who carries them.
GRPCIO_IN_CI = {
    "test_bad_input",
    "test_delay_commands",
    "test_official_python",
    "test_older_clients",
    "test_operator_commands",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The other transport's turn comes with the heavy tests, or by hand."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if "transport" in metafunc.fixturenames or name in LEAN_ONLY:
        return
    mark = pytest.mark.heavy if name in GRPCIO_IN_CI else pytest.mark.long
    both = ["lean", pytest.param("grpcio", marks=mark)]
    metafunc.parametrize("served_by", both, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def served_by(request: pytest.FixtureRequest) -> Iterator[None]:
    processes.SERVED_BY.append(getattr(request, "param", ""))
    yield
    processes.SERVED_BY.pop()
