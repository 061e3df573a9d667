"""Inputs: the tables that jobs calculate from, live from brokers or out of a history."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from popmq.common.errors import Code, Refused
from popmq.reports.history import read_history
from popmq.reports.history_progress import HistoryProgress, moment_of
from popmq.reports.records.endpoint import PATIENCE_S, ReportEndpoint
from popmq.reports.records.tables import SAMPLES
from popmq.reports.report import BrokerMoment
from popmq.reports.source.options import pin, since_option

DataFrame = Any
EVER: Mapping[str, int] = MappingProxyType({})


class Inputs(Protocol):
    """Every table as it was at one moment."""

    @property
    def source(self) -> str: ...
    @property
    def moments(self) -> tuple[BrokerMoment, ...]: ...
    @property
    def incomplete(self) -> str: ...
    def table(
        self, name: str, columns: Sequence[str] = (), since: Mapping[str, int] = EVER
    ) -> DataFrame:
        """`since`, by broker group: in log time, and of samples in wall time."""


@dataclass(slots=True)
class LiveInputs:
    """Asks the brokers once what there is; every table is read up to there, and no further."""

    spark: Any
    endpoint: str
    tables: Sequence[str]
    topics: Sequence[str] = ()
    skip_down: bool = False
    patience_s: float = PATIENCE_S
    moments: tuple[BrokerMoment, ...] = field(default=(), init=False)
    incomplete: str = field(default="", init=False)
    _pinned: str = field(default="", init=False)

    def __post_init__(self) -> None:
        with ReportEndpoint(self.endpoint, patience_s=self.patience_s) as endpoint:
            tables, self.incomplete = endpoint.describe(
                self.tables, topics=self.topics, partial=self.skip_down
            )
        self._pinned = pin(tables)
        self.moments = tuple(map(moment_of, tables))

    @property
    def source(self) -> str:
        return self.endpoint

    def table(
        self, name: str, columns: Sequence[str] = (), since: Mapping[str, int] = EVER
    ) -> DataFrame:
        reader = self.spark.read.format("popmq").option("endpoint", self.endpoint)
        for key, value in {
            "pinned": self._pinned,
            "pushdown": "true",
            "columns": ",".join(columns),
            "since": since_option(since),
            "patienceSeconds": str(self.patience_s),
            "failOnDataLoss": "false" if self.skip_down else "true",
        }.items():
            reader = reader.option(key, value)
        return reader.load(name)


@dataclass(slots=True)
class HistoryInputs:
    """Parquet as `popmq report history` writes it: the same tables, as they were at its end."""

    spark: Any
    folder: str
    tables: Sequence[str]
    incomplete: str = ""
    moments: tuple[BrokerMoment, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.moments = HistoryProgress.load(Path(self.folder)).shared(self.tables)
        if not self.moments:  # an empty report would look as if all were well
            raise Refused(
                Code.NOT_FOUND,
                f"{self.folder} has no history of {', '.join(self.tables)} that is complete: "
                f"popmq report history --history {self.folder}",
            )

    @property
    def source(self) -> str:
        return self.folder

    def table(
        self, name: str, columns: Sequence[str] = (), since: Mapping[str, int] = EVER
    ) -> DataFrame:
        within = self._within(name, since)
        frame = read_history(self.spark, Path(self.folder), name).where(within)
        return frame.select(*columns) if columns else frame

    def _within(self, table: str, since: Mapping[str, int]) -> Any:
        """Tables are appended one by one: what only some of them have yet does not count."""
        from pyspark.sql import functions as F

        within = F.lit(False)
        time = F.col("wall_ms" if table in SAMPLES else "log_ms")
        for moment in self.moments:
            if table in SAMPLES:
                earlier = F.col("epoch") < moment.epoch
                same = (F.col("epoch") == moment.epoch) & (F.col("sample") <= moment.sample)
                inside = earlier | same
            else:
                inside = F.col("position") < moment.end_position
            if since.get(moment.broker):
                inside &= time >= since[moment.broker]
            within |= (F.col("broker") == moment.broker) & inside
        return within


def made_now_ms() -> int:
    return time.time_ns() // 1_000_000
