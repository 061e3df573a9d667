"""The Spark session of a report: local by default, small, and quiet."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from popmq.common.errors import Code, Refused
from popmq.reports.java import java_home

_JAVA_OPTIONS = (
    "-XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr "
    f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties')}"
)
# Where a session lives for seconds, the second compiler of Java never pays for itself.
SHORT = {"spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 {_JAVA_OPTIONS}"}
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
    "spark.log.level": "ERROR",
}


@contextmanager
def spark_session(
    name: str, *, master: str = "local[2]", settings: dict[str, str] | None = None
) -> Iterator[Any]:
    """Ends with the block. Settings that are given go before ours."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise Refused(
            Code.PRECONDITION_FAILED,
            "reports need Spark, which is not installed: pip install 'popmq[reports]'",
        ) from None
    os.environ["JAVA_HOME"] = java_home()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in (_SETTINGS | (settings or {})).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
