"""The broker that most tests of pop begin with."""

import pytest

from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    """With a topic `orders` of four queues and a group `g`."""
    broker = CoreBroker()
    broker.topic("orders")
    broker.group("g")
    return broker
