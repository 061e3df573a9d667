"""What a session starts with: the classes that were kept, and the pyspark that is installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]


def test_java_starts_with_the_classes_that_were_kept(spark: Any, kept_classes: Path) -> None:
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    assert str(kept_classes) in Path(f"/proc/{pid}/maps").read_text()


def test_workers_import_the_pyspark_that_is_installed(spark: Any) -> None:
    def places(_: object) -> Iterator[str]:
        import pyspark

        yield pyspark.__file__

    import pyspark

    found = spark.sparkContext.range(2).mapPartitions(places).collect()
    assert set(found) == {pyspark.__file__}
