"""A broker whose reports are read."""

import random

import pytest
from report.reports_rig import CoreReports

from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def reports() -> CoreReports:
    core = CoreBroker(seed=random.randrange(1 << 30))
    core.topic("orders", queues=2)
    core.group("g", max_attempts=2)
    return CoreReports(core)
