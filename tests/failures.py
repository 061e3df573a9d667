"""CI_FAILURES=FILE appends each failure of a test run as a line of JSON (tools/repeat_failures.py).

A failure is `exact` when a repeated run proves nothing: an assertion about messages that were lost,
doubled, early or out of order, any failure in a world without a real clock, a worker that crashed,
a test that cannot be collected, a run that stopped.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = os.environ.get("CI_FAILURES", "")
# Simulators and replicas in one process: their clocks are virtual.
EXACT_FOLDERS = ("tests/cluster/", "tests/ha/", "tests/replica/", "tests/sim/")
# Their assertions compare what clients saw with a ledger of what was acknowledged.
LEDGERS = frozenset(
    f"tests/{name}.py"
    for name in (
        "e2e/test_absent_group",
        "e2e/test_failover",
        "e2e/test_failover_official",
        "e2e/test_failover_timers",
        "e2e/test_full_disk",
        "e2e/test_growth",
        "e2e/test_isolated_master",
        "e2e/test_keys_rotated",
        "e2e/test_kill_nine",
        "e2e/test_nemesis",
        "e2e/test_official_fifo",
        "e2e/test_official_node",
        "e2e/test_official_python",
        "e2e/test_official_shared",
        "e2e/test_official_tls",
        "e2e/test_orphan_checks",
        "e2e/test_proxy_killed",
        "e2e/test_recreated",
        "e2e/test_remoting_go",
        "e2e/test_remoting_java",
        "e2e/test_replicas_stay_equal",
        "e2e/test_restore",
        "e2e/test_rolling_proxies",
        "e2e/test_rolling_upgrade",
        "e2e/test_timers_killed",
        "e2e/test_timers_moved",
        "e2e/test_transactions_killed",
        "e2e/test_two_groups",
        "e2e/test_wiped_slave",
        "spark/test_report_histories",
        "spark/test_reports_agree",
    )
)
_IS_CONTROLLER = "PYTEST_XDIST_WORKER" not in os.environ


def is_exact(nodeid: str, error: type[BaseException]) -> bool:
    """Whether a failure counts although the test would pass in a second run."""
    if nodeid.startswith(EXACT_FOLDERS):
        return True
    return nodeid.partition("::")[0] in LEDGERS and issubclass(error, AssertionError)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In the worker, where the exception is; xdist carries the attribute to the controller."""
    report: Any = yield
    if call.excinfo is not None:
        report.is_exact = is_exact(item.nodeid, call.excinfo.type)
    return report  # type: ignore[no-any-return]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # A crashed worker has no exception, and so no attribute.
        _append(report.nodeid, _first_line(report), getattr(report, "is_exact", True))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _append(report.nodeid, "cannot be collected", True)


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, 5):
        _append("pytest", f"the run ended with status {int(exitstatus)}", True)


def _append(nodeid: str, error: str, exact: bool) -> None:
    if FILE and _IS_CONTROLLER:
        line = json.dumps({"test": nodeid, "error": error, "exact": exact})
        with Path(FILE).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return next(iter(text.strip().splitlines()), "no message")
