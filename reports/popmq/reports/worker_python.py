"""The Python that Spark starts its workers with: this one, which imports the installed pyspark.

Spark puts its own pyspark and py4j before those, in zips, out of which Python compiles each module
anew in each of a report's dozen of workers: more than half of what a worker's start costs.
"""

import os
import shlex
import stat
import sys
import tempfile
from pathlib import Path

from popmq.reports.java import cache_folder, hash_of

# Spark says its zips twice.
_LAUNCHER = """#!/bin/sh
left=
IFS=:
set -f
for one in $PYTHONPATH; do
    case $one in
    */python/lib/pyspark.zip | */python/lib/py4j-*-src.zip) ;;
    *) left=${{left:+$left:}}$one ;;
    esac
done
PYTHONPATH=$left exec {python} "$@"
"""


def worker_python() -> str:
    """A program for PYSPARK_PYTHON; made once, by rename."""
    text = _LAUNCHER.format(python=shlex.quote(sys.executable))
    launcher = cache_folder() / f"python-{hash_of(text):x}"
    if not launcher.exists():
        launcher.parent.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(dir=launcher.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(new).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
        os.replace(new, launcher)
    return str(launcher)
