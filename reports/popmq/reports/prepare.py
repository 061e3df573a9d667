"""`popmq report prepare`: has Java keep Spark's classes, by reports of a broker that has nothing.

Every report is made once, from the broker and from a history, so that the classes are those that
reports need.  Nothing is asked of a network.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext

from popmq.common.errors import Code, Refused
from popmq.common.wire import report_pb2 as pb
from popmq.reports.class_archive import ClassArchive
from popmq.reports.history import KEPT, append_pinned, compact, read_history
from popmq.reports.history_progress import moment_of
from popmq.reports.java import cache_folder, find_java
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.report import BrokerMoment
from popmq.reports.report_builder import TABLES, ReportOptions, make_report
from popmq.reports.run import SMALL
from popmq.reports.session import spark_session
from popmq.reports.source.options import pin

WRITTEN_WITHIN_S = 300.0  # Java takes ten seconds of a core for it
_NOBODY = ReportEndpoint("127.0.0.1:1")
_NOTHING = [pb.BrokerTables(broker="broker", epoch=1)]


@dataclass(frozen=True, slots=True)
class _Nothing:
    """Tables without rows: by the data source, or out of the history in `folder`."""

    spark: Any
    folder: Path | None = None
    source: str = ""
    incomplete: str = ""
    moments: tuple[BrokerMoment, ...] = tuple(map(moment_of, _NOTHING))

    def table(self, name: str, columns: Sequence[str] = ()) -> Any:
        if self.folder is not None:
            return read_history(self.spark, self.folder, name)
        reader = self.spark.read.format("popmq").option("pinned", pin(_NOTHING))
        return reader.option("pushdown", "true").option("columns", ",".join(columns)).load(name)


def prepare() -> Path:
    """The file that reports start with from now on. Raises Refused when this Java writes none."""
    archive = ClassArchive(find_java(), Path(pyspark.__file__).parent)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as place:
        written = Path(place) / archive.path.name
        with spark_session("popmq-prepare", settings=SMALL, archive_to=written) as spark:
            _make_all(spark, Path(place) / "history")
            gateway = SparkContext._gateway
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()  # Java ends by that
        gateway.proc.wait(timeout=WRITTEN_WITHIN_S)
        if not written.exists():
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"{archive.java.home / 'bin' / 'java'} (version {archive.java.version}) keeps no "
                "classes; reports work without, and start slower",
            )
        return archive.keep(written)


def _make_all(spark: Any, folder: Path) -> None:
    for name in KEPT:  # one by one: Spark gives a stream's process ten seconds to start
        append_pinned(spark, _NOBODY, folder, _NOTHING, tables=(name,))
    for inputs in (_Nothing(spark), _Nothing(spark, folder)):
        for name in TABLES:
            make_report(name, inputs, ReportOptions())
    compact(spark, folder, keep_days=1, today="2000-01-01")
