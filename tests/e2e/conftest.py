"""Runs the tests with both transports."""

from collections.abc import Iterator

import pytest
from e2e import processes

# The others are about brokers, or about transports themselves. Which calls there are and what
# they answer is asked of grpcio in CI; what else depends on who carries a call, by hand.
GRPCIO = {
    **dict.fromkeys(
        (
            "test_bad_input",
            "test_delay_commands",
            "test_equal_ids",
            "test_official_python",
            "test_older_clients",
            "test_operator_commands",
        ),
        pytest.mark.heavy,
    ),
    **dict.fromkeys(
        (
            "test_clients",
            "test_official_node",
            "test_parked_groups",
            "test_proxy_killed",
            "test_supervised",
            "test_timers_moved",
            "test_transactions_killed",
            "test_two_groups",
        ),
        pytest.mark.long,
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = GRPCIO.get(metafunc.module.__name__.rpartition(".")[2])
    if mark is not None and "transport" not in metafunc.fixturenames:
        both = ["lean", pytest.param("grpcio", marks=mark)]
        metafunc.parametrize("served_by", both, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def served_by(request: pytest.FixtureRequest) -> Iterator[None]:
    processes.SERVED_BY.append(getattr(request, "param", ""))
    yield
    processes.SERVED_BY.pop()
