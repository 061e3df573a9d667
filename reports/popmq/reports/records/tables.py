"""The tables that reports read, and the columns of each, with the types that Spark knows."""

from collections.abc import Sequence
from dataclasses import dataclass

from popmq.common.errors import Code, Refused

Columns = tuple[tuple[str, str], ...]  # name, type

_WHERE: Columns = (("broker", "string"),)
_WHEN: Columns = (("position", "bigint"), ("wall_time", "timestamp"), ("log_ms", "bigint"))
_SAMPLE: Columns = (
    *(("broker", "string"), ("epoch", "bigint"), ("sample", "bigint"), ("wall_ms", "bigint")),
    ("wall_time", "timestamp"),
)

REVIVE: Columns = (
    *_WHERE,
    ("kind", "string"),
    *_WHEN,
    *(("epoch", "bigint"), ("sequence", "bigint"), ("members", "bigint"), ("messages", "int")),
    *(("group", "string"), ("topic", "string"), ("queue", "int"), ("is_retry", "boolean")),
    *(("start_offset", "bigint"), ("next_offset", "bigint"), ("revive_at_ms", "bigint")),
    *(("old_epoch", "bigint"), ("old_sequence", "bigint"), ("client", "string")),
    *(("auto_renew", "boolean"), ("attempt", "int"), ("reason", "string")),
    *(("first_delivery_ms", "bigint"), ("last_delivery_ms", "bigint")),
    # Ids tell topics and groups apart that had the same name one after the other. `offset` is the
    # place of a retry, a dead letter or a parked message in topic `topic_id`.
    *((name, "bigint") for name in ("group_id", "topic_id", "first_topic_id", "offset")),
)
OFFSETS: Columns = (
    *_SAMPLE,
    *(("group", "string"), ("topic", "string"), ("read_topic", "string"), ("queue", "int")),
    *((name, "boolean") for name in ("fifo", "retry", "parked", "newest", "buffered", "first")),
    *((name, "bigint") for name in ("min_offset", "max_offset", "next_offset")),
    *((name, "bigint") for name in ("committed_offset", "ready", "in_flight", "blocked")),
    *((name, "bigint") for name in ("expired", "filtered", "oldest_ready_ms")),
    *((name, "bigint") for name in ("delivered", "acked", "returned", "dead")),
    *((name, "bigint") for name in ("group_id", "topic_id", "read_topic_id")),
)
TOPICS: Columns = (
    *_SAMPLE,
    *(("topic", "string"), ("queue", "int"), ("min_offset", "bigint"), ("max_offset", "bigint")),
    *(("stored", "bigint"), ("pending_timers", "bigint")),
)
TIMERS: Columns = (*_SAMPLE, ("kind", "string"), ("key", "bigint"), ("count", "bigint"))
_PLACE: Columns = (("topic", "string"), ("queue", "int"), ("offset", "bigint"))
FIRED: Columns = (
    *_WHERE,
    *_PLACE,
    *_WHEN,
    *(("wall_ms", "bigint"), ("due_ms", "bigint"), ("lateness_ms", "bigint")),
)
MESSAGES: Columns = (
    *_WHERE,
    *_PLACE,
    *_WHEN,
    *(("attempt", "int"), ("message_id", "string"), ("tag", "string"), ("keys", "string")),
    *(("message_group", "string"), ("body", "binary")),
)
TABLES: dict[str, Columns] = {
    "revive": REVIVE,
    "offsets": OFFSETS,
    "topics": TOPICS,
    "timers": TIMERS,
    "fired": FIRED,
    "messages": MESSAGES,
}
SAMPLES = ("offsets", "topics", "timers")


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table, or those columns of it that are wanted, in the table's order."""

    table: str
    columns: Columns

    @classmethod
    def of(cls, table: str, requested: Sequence[str] = ()) -> "TableSchema":
        known = TABLES.get(table)
        if known is None:
            raise Refused(
                Code.BAD_REQUEST, f"a table is one of {', '.join(TABLES)}, not {table[:100]!r}"
            )
        names = [name for name, _ in known]
        for name in requested:
            if name not in names:
                raise Refused(
                    Code.BAD_REQUEST,
                    f"table {table} has no column {name[:100]!r}, it has {', '.join(names)}",
                )
        return cls(
            table, tuple(column for column in known if not requested or column[0] in requested)
        )

    def ddl(self) -> str:
        """For Spark."""
        return ", ".join(f"`{name}` {kind}" for name, kind in self.columns)
