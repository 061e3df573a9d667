"""The entry point that Spark calls in pods of its own making: this process becomes a part of it."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from popmq.common.errors import Code, Refused
from popmq.reports.executors import driver_command, executor_command
from popmq.reports.java import java_home


def exec_spark_role(role: str, arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """`driver` or `executor`.  Raises Refused outside of such a pod."""
    import pyspark

    spark = Path(pyspark.__file__).parent
    own = {**environ, "JAVA_HOME": java_home(), "SPARK_HOME": str(spark)}
    own["PYSPARK_PYTHON"] = sys.executable
    try:
        command = (
            driver_command(spark, own, arguments)
            if role == "driver"
            else executor_command(spark, own)
        )
    except KeyError as error:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"popmq {role} is for Spark, which starts it in a pod: {error.args[0]} is not set",
        ) from None
    sys.stdout.flush()
    os.execve(command[0], command, own)
