"""RecordLayout: takes fixed-width records apart by what a broker's DESCRIBE says of them.

Here in plain Python, record by record, for recounts and tests; `arrow_rows.py` does it by columns.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from popmq.common.errors import Code, Refused
from popmq.common.record.report_layouts import WIDTHS
from popmq.common.wire import report_pb2 as pb

_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
Row = dict[str, int]


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    offset: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """`size` 0: records of any size, each with its size in its first four bytes."""

    name: str
    version: int
    size: int
    columns: tuple[Column, ...]

    @classmethod
    def from_wire(cls, layout: pb.Layout) -> "RecordLayout":
        """Raises when a field is of a type that this build does not know, or beside the record."""
        for field in layout.fields:
            width = WIDTHS.get(field.type)
            if width is None or (layout.size and field.offset + width > layout.size):
                raise Refused(
                    Code.UNSUPPORTED,
                    f"field {field.name} of layout {layout.name} is a {field.type} at byte "
                    f"{field.offset} of {layout.size}: reports need a newer popmq",
                )
        columns = tuple(Column(one.name, one.type, one.offset) for one in layout.fields)
        return cls(layout.name, layout.version, layout.size, columns)

    def rows(self, data: bytes) -> Iterator[Row]:
        """Every record; blanks and what cannot be read any more have zeros."""
        passes = [(_struct(some, self.size), some) for some in _apart(self.columns)]
        size = self.size
        at = 0
        while at < len(data):
            end = at + (size or int.from_bytes(data[at : at + 4], "big"))
            row: Row = {}
            for layout, columns in passes:
                piece = data[at:end][: layout.size].ljust(layout.size, b"\0")
                row.update(zip((one.name for one in columns), layout.unpack(piece), strict=True))
            yield row
            at = end


def _apart(columns: Sequence[Column]) -> list[list[Column]]:
    """Columns that lie over each other (two readings of the same bytes) in lists of their own."""
    lists: list[list[Column]] = []
    for column in sorted(columns, key=lambda one: one.offset):
        for some in lists:
            if some[-1].offset + WIDTHS[some[-1].type] <= column.offset:
                some.append(column)
                break
        else:
            lists.append([column])
    return lists


def _struct(columns: Sequence[Column], size: int) -> struct.Struct:
    parts, at = [">"], 0
    for column in columns:
        parts.append(f"{column.offset - at}x{_CODES[column.type]}")
        at = column.offset + WIDTHS[column.type]
    return struct.Struct("".join(parts) + f"{max(0, size - at)}x")
