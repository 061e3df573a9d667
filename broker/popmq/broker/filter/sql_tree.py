"""What an SQL-92 filter says, as a tree: predicates over properties, joined by AND, OR and NOT."""

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

Number = Decimal


class ComparisonOperator(Enum):
    EQUAL = "="
    NOT_EQUAL = "<>"
    LESS = "<"
    LESS_EQUAL = "<="
    GREATER = ">"
    GREATER_EQUAL = ">="

    @property
    def of_order(self) -> bool:
        return self not in (ComparisonOperator.EQUAL, ComparisonOperator.NOT_EQUAL)


class StringOperator(Enum):
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
    compare: ComparisonOperator
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class InList:
    """IN"""

    name: str
    values: tuple[str | Number, ...]


@dataclass(frozen=True, slots=True)
class Like:
    name: str
    pattern: str
    escape: str  # one character, or none


@dataclass(frozen=True, slots=True)
class StringPredicate:
    """CONTAINS, STARTSWITH, ENDSWITH"""

    search: StringOperator
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class BooleanOperand:
    """An operand that stands for itself: TRUE, or a property whose text is `true`."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    node: "Node"


@dataclass(frozen=True, slots=True)
class And:
    """AND of two or more."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """OR of two or more."""

    nodes: tuple["Node", ...]


Node = Comparison | IsNull | InList | Like | StringPredicate | BooleanOperand | Not | And | Or
