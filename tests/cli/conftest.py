"""Commands read the settings of their environment: not those of the shell that runs the tests."""

import pytest


@pytest.fixture(autouse=True)
def _plain(plain_environment: None) -> None:
    """Before each test of this folder."""
