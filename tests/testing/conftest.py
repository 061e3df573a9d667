"""A broker in the test's process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from popmq.testing import broker
from popmq.testing.running_broker import RunningBroker


@pytest.fixture
def b() -> Iterator[RunningBroker]:
    with broker() as running:
        yield running


@pytest.fixture
def waiting(b: RunningBroker) -> Iterator[ThreadPoolExecutor]:
    """Threads for receives that wait; ended before the broker is."""
    with ThreadPoolExecutor() as threads:
        yield threads
