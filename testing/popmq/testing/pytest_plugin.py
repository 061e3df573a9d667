"""The pytest fixture `popmq_broker`, there wherever popmq is installed (entry point pytest11)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from popmq.testing import broker

if TYPE_CHECKING:
    from popmq.testing.running_broker import RunningBroker


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "popmq(data=..., freeze=..., settings=..., users=...): options for popmq_broker"
    )


@pytest.fixture
def popmq_broker(request: pytest.FixtureRequest) -> Iterator[RunningBroker]:
    """A popmq of this test's own, in memory; options by `@pytest.mark.popmq(freeze=True)`."""
    marker = request.node.get_closest_marker("popmq")
    with broker(**(marker.kwargs if marker else {})) as running:
        yield running
