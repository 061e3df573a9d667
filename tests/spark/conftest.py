"""One session of Spark for all of these tests: to start it costs more than any of them."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    # The everyday tests collect this file too, and know no Spark.
    from popmq.reports.run import SMALL
    from popmq.reports.session import spark_session

    with spark_session("popmq-tests", master="local[2,2]", settings=SMALL) as session:
        yield session
