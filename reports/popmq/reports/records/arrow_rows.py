"""Raw records to Arrow record batches, by columns: no loop over records but for messages.

numpy reads the fields where DESCRIBE says they are; only the columns that are wanted are made.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from popmq.common.record.message import DeadReason, RecordKind
from popmq.common.record.report_layouts import OffsetFlag, TimerRow
from popmq.common.topics import split_group_topic
from popmq.reports.records.id_names import IdNames
from popmq.reports.records.message_fields import Source, message_columns
from popmq.reports.records.record_layout import (
    DEAD,
    PARKED,
    REDRIVEN,
    RESETS,
    UNCOUNTED,
    WITH_LAST,
    RecordLayout,
)
from popmq.reports.records.tables import TableSchema

Array = Any  # of numpy or Arrow, which have no types here
_TYPES = {"u8": "u1", "u16": ">u2", "u32": ">u4", "u64": ">u8"}
ARROW_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
}
UNKNOWN = 0xFFFF_FFFF_FFFF_FFFF
_KINDS = ("", "CHECK_POINT", "ACK", "CHANGE", "LOST", "RETURNED", "UNPARKED", "UNDONE", "KEPT")
_ENDS = ("RETRY", "DEAD", "PARKED", "REDRIVEN", "UNDONE")
_REASONS = tuple(reason.name for reason in DeadReason)
_TIMER_ROWS = {int(row): row.name for row in TimerRow}


def arrow_schema(schema: TableSchema) -> Array:
    return pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in schema.columns])


def record_batch(schema: TableSchema, layout: RecordLayout, data: bytes, source: Source) -> Array:
    """Every record that says something, in order."""
    if layout.size == 0:
        columns = message_columns(schema, layout, data, source)
        arrays = [pa.array(columns[name], ARROW_TYPES[kind]) for name, kind in schema.columns]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))
    rows = np.frombuffer(data, dtype_of(layout))
    table = (schema.table, layout.name)
    picked = _PICKS[table](rows, source)
    rows = rows if picked.all() else rows[picked]
    makers = _MAKERS[table]
    arrays = [_typed(makers[name](rows, source), kind) for name, kind in schema.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))


def dtype_of(layout: RecordLayout) -> Array:
    return np.dtype(
        {
            "names": [column.name for column in layout.columns],
            "formats": [_TYPES[column.type] for column in layout.columns],
            "offsets": [column.offset for column in layout.columns],
            "itemsize": layout.size,
        }
    )


def _typed(values: Array, kind: str) -> Array:
    """An Arrow array of the column's type; numpy's masked arrays have NULL where masked."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    plain = np.ma.getdata(values)
    if kind == "timestamp":
        plain = (plain.astype("i8") * 1_000).view("datetime64[us]")
        return pa.array(plain, pa.timestamp("us"), mask=mask).cast(ARROW_TYPES[kind])
    narrow = {"bigint": "i8", "int": "i4", "boolean": "?"}[kind]
    return pa.array(plain.astype(narrow), ARROW_TYPES[kind], mask=mask)


# -- what columns are made of

Maker = Callable[[Array, Source], Array]


def _field(name: str) -> Maker:
    return lambda rows, source: rows[name]


def _newer_field(name: str) -> Maker:
    """NULL in records of brokers from before there was this field."""

    def make(rows: Array, source: Source) -> Array:
        return rows[name] if name in rows.dtype.names else pa.nulls(len(rows), pa.int64())

    return make


def _only(maker: Maker, *kinds: int) -> Maker:
    """NULL for records of another kind."""
    return lambda rows, source: np.ma.array(maker(rows, source), mask=~np.isin(rows["kind"], kinds))


def _flag(bit: int, name: str = "flags") -> Maker:
    return lambda rows, source: (rows[name] & bit) != 0


def _same(value: Callable[[Source], str | int | None]) -> Maker:
    def make(rows: Array, source: Source) -> Array:
        number = value(source)
        kind = pa.int32() if isinstance(number, int) else pa.string()
        return pa.repeat(pa.scalar(number, kind), len(rows))

    return make


def _nothing(kind: str) -> Maker:
    return lambda rows, source: pa.nulls(len(rows), ARROW_TYPES[kind])


def _placed(field: str) -> Maker:
    """NULL for records that do not say their group, as ends of earlier brokers."""
    return lambda rows, source: np.ma.array(rows[field], mask=_unplaced(rows))


def _unplaced(rows: Array) -> Array:
    return ~np.isin(rows["kind"], _PLACED) | (rows["group_id"] == 0)


def _named(
    field: str,
    name: Callable[[IdNames, int], str | None],
    masked: Callable[[Array], Array] | None = None,
) -> Maker:
    """Ids to texts; each different one is looked up once."""

    def make(rows: Array, source: Source) -> Array:
        mask = masked(rows) if masked is not None else None
        ids = pa.array(_native(rows[field]), mask=mask).dictionary_encode()
        texts = [name(source.names, number) for number in ids.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(ids.indices)

    return make


def _native(values: Array) -> Array:
    """In this machine's byte order, which Arrow asks for."""
    return values.astype(values.dtype.newbyteorder("="))


def _of(texts: tuple[str | None, ...], values: Callable[[Array], Array]) -> Maker:
    words = pa.array(texts, pa.string())

    def make(rows: Array, source: Source) -> Array:
        return words.take(pa.array(np.minimum(values(rows), len(texts) - 1).astype("i8")))

    return make


def _below(rows: Array, source: Source) -> Array:
    if not source.end_position:
        return np.ones(len(rows), bool)
    return rows["position"] < source.end_position


_CK, _ACK, _CHANGE, _LOST, _RETURNED = 1, 2, 3, 4, 5
_PLACED = (_CK, _ACK, _CHANGE, _LOST, _RETURNED)
_UNDONE, _KEPT = _KINDS.index("UNDONE"), _KINDS.index("KEPT")
_RECORD: dict[str, Maker] = {
    "broker": _same(lambda source: source.broker),
    "position": _field("position"),
    "wall_time": _field("wall_ms"),
    "wall_ms": _field("wall_ms"),
    "log_ms": _field("log_ms"),
}
_REVIVE_RECORD: dict[str, Maker] = _RECORD | {
    "kind": _of((*_KINDS, "UNKNOWN"), lambda rows: _kind(rows)),
    "epoch": _field("epoch"),
    "sequence": _field("sequence"),
    "members": lambda rows, source: rows["members"].astype("u8").view("i8"),
    "messages": lambda rows, source: np.bitwise_count(rows["members"].astype("u8")),
    "group": _named("group_id", IdNames.group, _unplaced),
    "topic": _named("topic_id", IdNames.base_topic, _unplaced),
    "queue": _placed("queue_id"),
    "is_retry": lambda rows, source: _retry(rows, source),
    "start_offset": _only(_field("start_offset"), _CK, _CHANGE),
    "next_offset": _only(_field("link"), _CK),
    "revive_at_ms": _only(_field("revive_at_ms"), _CK, _CHANGE),
    "old_epoch": _only(_field("old_epoch"), _CHANGE),
    "old_sequence": _only(_field("link"), _CHANGE),
    "client": _named("client", IdNames.client, lambda rows: ~np.isin(rows["kind"], (_CK, _CHANGE))),
    "auto_renew": _only(_flag(1), _CK, _CHANGE),
    "attempt": _nothing("int"),
    "reason": _nothing("string"),
    "first_delivery_ms": _nothing("bigint"),
    "last_delivery_ms": _nothing("bigint"),
    "group_id": _placed("group_id"),
    "topic_id": _placed("topic_id"),
    "first_topic_id": _nothing("bigint"),
    "offset": _nothing("bigint"),
}
_REVIVE_HEAD: dict[str, Maker] = _RECORD | {
    "kind": _of(_ENDS, lambda rows: _ending(rows)),
    "epoch": lambda rows, source: _of_check_point(rows, "epoch"),
    "sequence": lambda rows, source: _of_check_point(rows, "sequence"),
    "members": lambda rows, source: np.left_shift(np.uint64(1), rows["member"].astype("u8")).view(
        "i8"
    ),
    "messages": lambda rows, source: np.ones(len(rows), "i4"),
    "group": _same(lambda source: split_group_topic(source.topic)[0]),
    "topic": _named("first_topic_id", IdNames.base_topic),
    "queue": _field("first_queue_id"),
    "is_retry": _nothing("boolean"),
    "start_offset": _field("first_offset"),
    "next_offset": _nothing("bigint"),
    "revive_at_ms": _nothing("bigint"),
    # A dead letter out of a parking topic: that topic's id, and the offset there.
    "old_epoch": lambda rows, source: _of_parked(rows, "epoch"),
    "old_sequence": lambda rows, source: _of_parked(rows, "sequence"),
    "client": _nothing("string"),
    "auto_renew": _nothing("boolean"),
    "attempt": _field("attempt"),
    "reason": lambda rows, source: _reason(rows),
    "first_delivery_ms": lambda rows, source: _known(rows["first_log_ms"]),
    "last_delivery_ms": lambda rows, source: _known(
        np.where(rows["token"] == 2, rows["last_log_ms"], 0)
    ),
    "group_id": _nothing("bigint"),
    "topic_id": _field("log_topic_id"),
    "first_topic_id": _field("first_topic_id"),
    "offset": _field("log_offset"),
}
# A reset: `start_offset` is where the group reads on.
_REVIVE_OFFSET: dict[str, Maker] = _RECORD | {
    "kind": _same(lambda source: "RESET"),
    "epoch": _nothing("bigint"),
    "sequence": _nothing("bigint"),
    "members": lambda rows, source: np.zeros(len(rows), "i8"),
    "messages": lambda rows, source: np.zeros(len(rows), "i4"),
    "group": _named("group_id", IdNames.group),
    "topic": _named("topic_id", IdNames.base_topic),
    "queue": _field("queue_id"),
    "is_retry": _nothing("boolean"),
    "start_offset": _field("queue_offset"),
    **{
        name: _nothing("bigint")
        for name in (
            *("next_offset", "revive_at_ms", "old_epoch", "old_sequence", "first_delivery_ms"),
            *("last_delivery_ms", "first_topic_id", "offset"),
        )
    },
    **{name: _nothing("string") for name in ("client", "reason")},
    "auto_renew": _nothing("boolean"),
    "attempt": _nothing("int"),
    "group_id": _field("group_id"),
    "topic_id": _field("topic_id"),
}
_SAMPLE: dict[str, Maker] = {
    "broker": _same(lambda source: source.broker),
    **{name: _field(name) for name in ("epoch", "sample", "wall_ms")},
    "wall_time": _field("wall_ms"),
}
_OFFSETS: dict[str, Maker] = _SAMPLE | {
    "group": _named("group_id", IdNames.group),
    "topic": _named("topic_id", IdNames.topic),
    "read_topic": _named("read_topic_id", IdNames.topic),
    "queue": _field("queue_id"),
    **{flag.name.lower(): _flag(flag) for flag in OffsetFlag},
    **{
        name: _field(name)
        for name in (
            *("min_offset", "max_offset", "next_offset", "committed_offset", "ready"),
            *("in_flight", "blocked", "expired", "filtered", "delivered", "acked"),
            *("group_id", "topic_id", "read_topic_id"),
        )
    },
    "oldest_ready_ms": lambda rows, source: _known(rows["oldest_ready_ms"]),
    **{name: _newer_field(name) for name in ("returned", "dead")},
}
_TOPICS: dict[str, Maker] = _SAMPLE | {
    "topic": _named("topic_id", IdNames.topic),
    "queue": _field("queue_id"),
    **{name: _field(name) for name in ("min_offset", "max_offset", "stored", "pending_timers")},
}
_TIMERS: dict[str, Maker] = _SAMPLE | {
    "kind": _named("kind", lambda names, kind: _TIMER_ROWS.get(kind)),
    "key": _field("key"),
    "count": _field("count"),
}
_FIRED: dict[str, Maker] = _RECORD | {
    "topic": _same(lambda source: source.topic),
    "queue": _same(lambda source: source.queue),
    "offset": _field("log_offset"),
    "due_ms": _field("due_ms"),
    "lateness_ms": lambda rows, source: rows["wall_ms"].astype("i8") - rows["due_ms"].astype("i8"),
}
_MAKERS: dict[tuple[str, str], dict[str, Maker]] = {
    ("revive", "revive"): _REVIVE_RECORD,
    ("revive", "head"): _REVIVE_HEAD,
    ("revive", "offset"): _REVIVE_OFFSET,
    ("offsets", "offsets"): _OFFSETS,
    ("topics", "topics"): _TOPICS,
    ("timers", "timers"): _TIMERS,
    ("fired", "head"): _FIRED,
}
_FIRING = 4  # version of a firing's token
_PICKS: dict[tuple[str, str], Maker] = {
    ("revive", "revive"): lambda rows, source: (
        (rows["record_kind"] == RecordKind.REVIVE) & _below(rows, source)
    ),
    ("revive", "head"): lambda rows, source: (
        (rows["record_kind"] == RecordKind.MESSAGE)
        & (rows["token_size"] > 0)
        & np.isin(rows["token"], (1, 2))
        & _below(rows, source)
    ),
    ("revive", "offset"): lambda rows, source: (
        (rows["record_kind"] == RecordKind.OFFSET)
        & np.isin(rows["reason"], RESETS)
        & _below(rows, source)
    ),
    ("fired", "head"): lambda rows, source: (
        (rows["token_size"] > 0) & (rows["token"] == _FIRING) & _below(rows, source)
    ),
    **{
        (table, table): lambda rows, source: rows["version"] > 0
        for table in ("offsets", "topics", "timers")
    },
}


def _kind(rows: Array) -> Array:
    """Number in _KINDS; a newer broker may write others."""
    kinds = rows["kind"].astype("i8")
    uncounted = (rows["flags"] & UNCOUNTED) != 0
    known = np.where(kinds < _UNDONE, kinds, len(_KINDS))
    known = np.where(uncounted & (kinds == _RETURNED), _UNDONE, known)
    return np.where(uncounted & (kinds == _LOST), _KEPT, known)


def _ending(rows: Array) -> Array:
    """Number in _ENDS: a dead letter out of a parking topic is dead."""
    flags = rows["token_flags"]
    unseen = (rows["token"] == WITH_LAST) & (rows["last_log_ms"] == 0)
    return np.select(
        [(flags & REDRIVEN) != 0, (flags & DEAD) != 0, (flags & PARKED) != 0, unseen],
        [3, 1, 2, 4],
        0,
    )


def _of_check_point(rows: Array, name: str) -> Array:
    """Tokens of parked and redriven messages name something else in a check point's place."""
    return np.ma.array(rows[name], mask=(rows["token_flags"] & (REDRIVEN | PARKED)) != 0)


def _of_parked(rows: Array, name: str) -> Array:
    flags = DEAD | PARKED
    return np.ma.array(rows[name], mask=(rows["token_flags"] & (flags | REDRIVEN)) != flags)


def _reason(rows: Array) -> Array:
    words = pa.array((*_REASONS, "UNKNOWN"), pa.string())
    numbers = np.minimum(rows["token_flags"] >> 8, len(_REASONS)).astype("i8")
    return words.take(pa.array(numbers, mask=_ending(rows) != 1))


def _retry(rows: Array, source: Source) -> Array:
    ids, places = np.unique(rows["topic_id"], return_inverse=True)
    is_retry = np.array([source.names.is_retry(int(topic_id)) for topic_id in ids], bool)
    return np.ma.array(is_retry[places], mask=~np.isin(rows["kind"], (_CK, _CHANGE)))


def _known(values: Array) -> Array:
    """0 is none, and UNKNOWN was not looked up: no numbers to calculate with."""
    return np.ma.array(values, mask=(values == 0) | (values == UNKNOWN))
