"""One report from start to end: session, inputs, plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from popmq.reports.executors import INSTANCES, SCRATCH
from popmq.reports.history import append, compact
from popmq.reports.inputs import HistoryInputs, Inputs, LiveInputs
from popmq.reports.records.endpoint import PATIENCE_S
from popmq.reports.report import Report
from popmq.reports.report_builder import TABLES, OnProgress, ReportOptions, make_report
from popmq.reports.session import SHORT, spark_session

# Small tables: to compile their plans takes longer than to run them.
SMALL = SHORT | {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
}


@dataclass(frozen=True, slots=True)
class SparkTarget:
    """Where Spark works: `master` as Spark has it ("": `local[2]`, or what spark-submit was told);
    `conf` are settings of Spark's. The others are for a master on Kubernetes."""

    master: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)
    executors: int = 0  # 0: as many as Spark's settings say
    ca_secret: str = ""
    user_secret: str = ""
    scratch: str = SCRATCH

    @property
    def settings(self) -> dict[str, str]:
        return {INSTANCES: str(self.executors), **self.conf} if self.executors else {**self.conf}


def run(
    name: str,
    options: ReportOptions,
    *,
    endpoint: str = "",
    history: str = "",
    place: SparkTarget | None = None,
    skip_down: bool = False,
    patience_s: float = PATIENCE_S,
    tell: OnProgress = lambda text: None,
) -> Report:
    """Of the brokers behind `endpoint`, or of a `history`. Raises PopmqError when a broker group
    does not answer, unless `skip_down`. `tell` hears what is being done."""
    settings = {} if name == "revive" else SMALL
    place = place or SparkTarget()
    tell("starting Spark")
    with spark_session(
        f"popmq-{name}",
        master=place.master,
        settings=settings,
        conf=place.settings,
        ca_secret=place.ca_secret,
        user_secret=place.user_secret,
        scratch=place.scratch,
    ) as spark:
        inputs: Inputs
        tell(f"asking {history or endpoint} what there is")
        if history:
            inputs = HistoryInputs(spark, history, TABLES[name])
        else:
            inputs = LiveInputs(
                spark, endpoint, TABLES[name], skip_down=skip_down, patience_s=patience_s
            )
        return make_report(name, inputs, options, tell)


def add_to_history(
    endpoint: str, folder: Path, *, master: str, keep_days: int, patience_s: float
) -> dict[str, int]:
    """What came since the last time, put together by day; rows that were added, by table."""
    with spark_session("popmq-history", master=master) as spark:
        added = append(spark, endpoint, folder, patience_s=patience_s)
        today = datetime.now(UTC).date().isoformat()
        compact(spark, folder, keep_days=keep_days, today=today)
        return added
