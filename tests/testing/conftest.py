"""A broker in the test's process; `testing.receivers` is made importable."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from popmq.testing import broker
from popmq.testing.running_broker import RunningBroker

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)


@pytest.fixture
def b() -> Iterator[RunningBroker]:
    with broker() as running:
        yield running


@pytest.fixture
def waiting(b: RunningBroker) -> Iterator[ThreadPoolExecutor]:
    """Threads for receives that wait; ended before the broker is."""
    with ThreadPoolExecutor() as threads:
        yield threads
