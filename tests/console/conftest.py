"""A broker in this process, and the console of its proxy, for all tests of a file."""

from collections.abc import Iterator

import pytest
from console.console_site import Site

from popmq.testing.running_broker import RunningBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture(scope="module")
def site(broker: RunningBroker) -> Iterator[Site]:
    with Site(broker.endpoint) as served:
        yield served
