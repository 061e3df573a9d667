"""The Python of Spark's workers: the installed pyspark, and everything else as it was."""

import os
import sys
from pathlib import Path

import pytest
from programs import run_program

from popmq.reports.session import worker_python

SAYS = "import os, sys; print(os.environ.get('PYTHONPATH')); print(sys.executable, *sys.argv[1:])"


# As Spark says it, and something of the user's.
LIB = "/spark/python/lib"
ZIPS = f"{LIB}/pyspark.zip:{LIB}/py4j-0.10.9.9-src.zip"
GIVEN = f"/spark/jars/core.jar:{ZIPS}:/spark/jars/core.jar:{ZIPS}:/a folder/*:/mine/pyspark.zip"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (GIVEN, "/spark/jars/core.jar:/spark/jars/core.jar:/a folder/*:/mine/pyspark.zip"),
        ("/mine", "/mine"),
        ("", ""),
    ],
)
def test_sparks_zips_are_left_out_and_nothing_else(
    given: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    python = worker_python()
    done = run_program(
        [python, "-c", SAYS, "a b", "$HOME"], env={**os.environ, "PYTHONPATH": given}, check=True
    )
    assert done.stdout.splitlines() == [left, f"{sys.executable} a b $HOME"]
    assert worker_python() == python
    assert [item.name for item in (tmp_path / "a cache" / "popmq").iterdir()] == [Path(python).name]
