"""What an SQL-92 filter says, as a tree: predicates over properties, joined by AND, OR and NOT."""

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

Number = Decimal


class Compare(Enum):
    EQUAL = "="
    NOT_EQUAL = "<>"
    LESS = "<"
    LESS_EQUAL = "<="
    GREATER = ">"
    GREATER_EQUAL = ">="

    @property
    def of_order(self) -> bool:
        return self not in (Compare.EQUAL, Compare.NOT_EQUAL)


class Search(Enum):
    CONTAINS = "CONTAINS"
    STARTSWITH = "STARTSWITH"
    ENDSWITH = "ENDSWITH"


@dataclass(frozen=True, slots=True)
class Property:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A text, a number, TRUE, FALSE, or None for NULL."""

    value: str | Number | bool | None


Operand = Property | Constant


@dataclass(frozen=True, slots=True)
class Comparison:
    compare: Compare
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Among:
    """IN"""

    name: str
    values: tuple[str | Number, ...]


@dataclass(frozen=True, slots=True)
class Like:
    name: str
    pattern: str
    escape: str  # one character, or none


@dataclass(frozen=True, slots=True)
class Has:
    """CONTAINS, STARTSWITH, ENDSWITH"""

    search: Search
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Truth:
    """An operand that stands for itself: TRUE, or a property whose text is `true`."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    node: "Node"


@dataclass(frozen=True, slots=True)
class Every:
    """AND of two or more."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Some:
    """OR of two or more."""

    nodes: tuple["Node", ...]


Node = Comparison | IsNull | Among | Like | Has | Truth | Not | Every | Some
