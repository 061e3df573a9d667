"""The report's head says of which day the seeds of the simulators are (sim_seeds.py).

`--dist loadgroup` gives tests that share processes to one worker, and each other test to any.
"""

import os
import signal
from functools import cache
from typing import Any

import pytest
import sim_seeds
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["costs", "failures"]

# How long an example takes says how busy the machine is.
settings.register_profile("popmq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("popmq")


# A run in the background of a script ignores SIGINT, and its children would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"seeds of the day: POPMQ_SEED_DAY={sim_seeds.DAY}"


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the shell that runs the tests are not settings of what they test."""
    for name in [name for name in os.environ if name.startswith("POPMQ_")]:
        monkeypatch.delenv(name)


class BySharedProcesses(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Its own instead of xdist's marks, which pytest 9 does not let into the names of tests."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return self._shared(file) or nodeid

    @cache  # noqa: B019 - it lives as long as the run
    def _shared(self, file: str) -> str:
        """What the tests of a file have in common: Spark's session, or fixtures of the module."""
        text = (self.config.rootpath / file).read_text(encoding="utf-8")
        if "spark: Any" in text:
            return "spark"
        return file if 'scope="module"' in text else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return BySharedProcesses(config, log) if config.getoption("dist") == "loadgroup" else None
