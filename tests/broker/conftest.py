"""The broker that most tests of pop begin with; `broker.damages` is made importable."""

import sys
from pathlib import Path

import pytest

from popmq.testing.harness.core_broker import CoreBroker

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)


@pytest.fixture
def core() -> CoreBroker:
    """With a topic `orders` of four queues and a group `g`."""
    made = CoreBroker()
    made.topic("orders")
    made.group("g")
    return made
