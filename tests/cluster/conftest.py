"""Makes the helpers beside the tests importable as `cluster.planted_model` and so on."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of elections are no news here."""
    logger = logging.getLogger("popmq")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
