"""One session of Spark for all of these tests: to start it costs more than any of them."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

from e2e.processes import role_environment  # noqa: E402 - importable only now

PREPARED_WITHIN_S = 250


@pytest.fixture(scope="session")
def kept_classes() -> Path:
    """What the session's Java starts with, which is made once for a machine."""
    import pyspark

    from popmq.reports.class_archive import ClassArchive
    from popmq.reports.java import cache_folder, find_java

    archive = ClassArchive(find_java(), Path(pyspark.__file__).parent)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of other workers
        if not archive.path.exists():
            done = subprocess.run(
                [sys.executable, "-m", "popmq.cli", "report", "prepare"],
                env=role_environment({}),
                capture_output=True,
                text=True,
                timeout=PREPARED_WITHIN_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"kept: {archive.path}\n"
    return archive.path


@pytest.fixture(scope="session")
def spark(kept_classes: Path) -> Iterator[Any]:
    # The everyday tests collect this file too, and know no Spark.
    from popmq.reports.run import SMALL
    from popmq.reports.session import spark_session

    with spark_session("popmq-tests", master="local[2,2]", settings=SMALL) as session:
        yield session
