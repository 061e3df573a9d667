"""The Python of Spark's workers: the installed pyspark, and everything else as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from popmq.reports.worker_python import worker_python

SAYS = "import os, sys; print(os.environ.get('PYTHONPATH')); print(sys.executable, *sys.argv[1:])"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("/spark/lib/pyspark.zip:/spark/lib/py4j-0.10.9.9-src.zip:/a.jar:/mine", "/a.jar:/mine"),
        ("/mine:/spark/lib/py4j-0.10.9.9-src.zip", "/mine:/spark/lib/py4j-0.10.9.9-src.zip"),
    ],
)
def test_sparks_zips_are_left_out_and_nothing_else(
    given: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    python = worker_python()
    done = subprocess.run(
        [python, "-c", SAYS, "a b", "$HOME"],
        env={**os.environ, "PYTHONPATH": given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [left, f"{sys.executable} a b $HOME"]
    assert worker_python() == python
    assert [one.name for one in (tmp_path / "a cache" / "popmq").iterdir()] == [Path(python).name]
