"""The report's head says of which day the seeds of the simulators are (sim_seeds.py)."""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import sim_seeds  # noqa: E402 - importable only now


def pytest_report_header() -> str:
    return f"seeds of the day: POPMQ_SEED_DAY={sim_seeds.DAY}"
