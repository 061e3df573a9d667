"""Makes the rig beside the tests importable."""

import random
import sys
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

from report.reports_rig import CoreReports  # noqa: E402 - importable only now

from popmq.testing.harness.core_broker import CoreBroker  # noqa: E402


@pytest.fixture
def reports() -> CoreReports:
    core = CoreBroker(seed=random.randrange(1 << 30))
    core.topic("orders", queues=2)
    core.group("g", max_attempts=2)
    return CoreReports(core)
