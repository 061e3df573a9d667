"""What a session starts with: the pyspark that is installed."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


def test_workers_import_the_pyspark_that_is_installed(spark: Any) -> None:
    def places(_: object) -> Iterator[str]:
        import pyspark

        yield pyspark.__file__

    import pyspark

    result = spark.sparkContext.range(2).mapPartitions(places).collect()
    assert set(result) == {pyspark.__file__}
