"""SourceOptions: what `.option(...)` of the data source says, checked."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field

from popmq.common.errors import Code, Refused
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.endpoint import PATIENCE_S
from popmq.reports.records.tables import TABLES, TableSchema

ROWS_PER_PARTITION = 500_000
_KNOWN = (
    *("endpoint", "path", "table", "topics", "columns", "onbrokerdown", "patienceseconds"),
    *("rowsperpartition", "maxrows", "failondataloss", "pinned", "pushdown", "since"),
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Spark gives names in lower case. Secrets are no options, because plans show them."""

    endpoint: str
    schema: TableSchema
    topics: tuple[str, ...] = ()
    skip_down: bool = False
    patience_s: float = PATIENCE_S
    rows_per_partition: int = ROWS_PER_PARTITION
    max_rows: int = 0  # of one batch of a stream; 0: all
    fail_on_data_loss: bool = True
    pinned: str = ""  # a DescribeReply: read these ranges and no others
    pushdown: bool = False
    # By broker group: records from this time on, which is log time, and of samples wall time.
    since: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, options: Mapping[str, str]) -> "SourceOptions":
        given = {name.lower(): value for name, value in options.items()}
        for name in given:
            if name not in _KNOWN:
                raise Refused(
                    Code.BAD_REQUEST,
                    f"option {name!r} is unknown; there are {', '.join(_KNOWN)}",
                )
        table = given.get("table") or given.get("path") or ""
        if not table:
            raise Refused(
                Code.BAD_REQUEST, f'which table? `.load("revive")`, or one of {", ".join(TABLES)}'
            )
        return cls(
            endpoint=given.get("endpoint", "127.0.0.1:8081"),
            schema=TableSchema.of(table, _list(given.get("columns", ""))),
            topics=_list(given.get("topics", "")),
            skip_down=_choice(given, "onbrokerdown", "fail", "skip") == "skip",
            patience_s=_number(given, "patienceseconds", PATIENCE_S),
            rows_per_partition=int(_number(given, "rowsperpartition", ROWS_PER_PARTITION, 1)),
            max_rows=int(_number(given, "maxrows", 0)),
            fail_on_data_loss=_choice(given, "failondataloss", "true", "false") == "true",
            pinned=given.get("pinned", ""),
            pushdown=_choice(given, "pushdown", "false", "true") == "true",
            since=_since(given.get("since", "")),
        )

    def pinned_brokers(self) -> list[pb.BrokerTables]:
        return list(pb.DescribeReply.FromString(base64.b64decode(self.pinned)).brokers)


def pin(brokers: list[pb.BrokerTables]) -> str:
    """For the option `pinned`, so that several tables are read as they were at one moment."""
    return base64.b64encode(pb.DescribeReply(brokers=brokers).SerializeToString()).decode()


def since_option(since: Mapping[str, int]) -> str:
    return ",".join(f"{broker}={ms}" for broker, ms in sorted(since.items()))


def _since(text: str) -> dict[str, int]:
    try:
        pairs = [pair.rsplit("=", 1) for pair in _list(text)]
        return {broker: int(ms) for broker, ms in pairs}
    except ValueError:
        raise Refused(
            Code.BAD_REQUEST, f"option since is BROKER=MILLISECONDS,..., not {text[:100]!r}"
        ) from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def _choice(given: Mapping[str, str], name: str, *choices: str) -> str:
    """The first is what it is when nothing is said."""
    value = given.get(name, choices[0]).lower()
    if value not in choices:
        raise Refused(Code.BAD_REQUEST, f"option {name} is {' or '.join(choices)}, not {value!r}")
    return value


def _number(given: Mapping[str, str], name: str, default: float, least: float = 0) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = -1
    if value < least:
        raise Refused(
            Code.BAD_REQUEST, f"option {name} is a number from {least:g} on, not {given[name]!r}"
        )
    return value
