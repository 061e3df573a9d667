"""The Spark session of a report: local by default, small, and quiet.

In a process that spark-submit started it goes by what that was told.
"""

import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from popmq.common.errors import Code, Refused
from popmq.reports.executors import KUBERNETES, SCRATCH, executor_settings
from popmq.reports.java import cache_folder, hash_of, java_home

_JAVA_OPTIONS = (
    "-XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr "
    f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
)
# Where a session lives for seconds, the second compiler of Java never pays for itself.
SHORT = {
    f"spark.{role}.extraJavaOptions": f"-XX:TieredStopAtLevel=1 {_JAVA_OPTIONS}"
    for role in ("driver", "executor")
}
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,  # of the same image
    "spark.log.level": "ERROR",
}


@contextmanager
def spark_session(
    name: str,
    *,
    master: str = "",
    settings: Mapping[str, str] | None = None,
    conf: Mapping[str, str] | None = None,
    ca_secret: str = "",
    user_secret: str = "",
    scratch: str = SCRATCH,
) -> Iterator[Any]:
    """Ends with the block. `settings` win over ours, those of spark-submit over `settings`, and
    `conf` over all; so does `master`, which is `local[2]` without a choice. For executors in
    pods: they trust proxies by `ca.crt` of the Secret `ca_secret`, and sign calls as the user of
    which the Secret `user_secret` has `access_key` and `secret`; `scratch` is the largest size of
    the temporary files of each."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise Refused(
            Code.PRECONDITION_FAILED,
            "reports need Spark, which is not installed: pip install 'popmq[reports]'",
        ) from None
    submitted = _submitted()
    if not submitted:
        os.environ["JAVA_HOME"] = java_home()
        if master.startswith("local") or not master:
            os.environ.setdefault("PYSPARK_PYTHON", worker_python())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    master = master or submitted.get("spark.master", "local[2]")
    given = {**submitted, **(conf or {})}
    with tempfile.TemporaryDirectory(prefix="popmq-report-") as folder:
        chosen = {**_SETTINGS, **(settings or {})}
        if master.startswith(KUBERNETES):
            chosen |= executor_settings(given, Path(folder), ca_secret, user_secret, scratch)
        elif master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.appName(name)
        for key, value in {**chosen, **given, "spark.master": master}.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


def _submitted() -> dict[str, str]:
    """What spark-submit was told; nothing in a process that it did not start."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


# Spark lists each zip twice on the path.
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
    """A program for PYSPARK_PYTHON that starts this Python; made once, by rename.

    Spark puts its own pyspark and py4j before the installed ones, in zips, out of which Python
    compiles each module anew in each worker: more than half of what its start costs.
    """
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
