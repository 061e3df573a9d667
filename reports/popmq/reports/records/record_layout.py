"""RecordLayout: what a broker's DESCRIBE says of its fixed-width records, and some of their values.

`arrow_rows.py` takes them apart by columns.
"""

from dataclasses import dataclass

from popmq.common.errors import Code, Refused
from popmq.common.record.report_layouts import WIDTHS
from popmq.common.wire import report_pb2 as pb

UNCOUNTED = 8  # flag of a returned delivery that nobody saw
WITH_LAST = 2  # that says when the delivery was; 0 there: nobody saw it
DEAD, REDRIVEN, PARKED = 1, 2, 4  # flags of a token
RESETS = (3, 4)  # reasons of an offset record: an operator set it, a pull consumer said so


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
        columns = tuple(Column(field.name, field.type, field.offset) for field in layout.fields)
        return cls(layout.name, layout.version, layout.size, columns)
