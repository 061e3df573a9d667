"""Compiles an SQL-92 filter's tree into closures over a message's properties.

A closure says True, False, or None for unknown (the standard's three-valued logic).  A property's
value is a text: compared with a number it is read as one, with TRUE or FALSE as one of these, and
what cannot be read so makes the comparison unknown, as a missing property does.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, assert_never

from popmq.broker.filter.lexer import number
from popmq.broker.filter.like import like
from popmq.broker.filter.sql_tree import (
    And,
    BooleanOperand,
    Comparison,
    ComparisonOperator,
    Constant,
    InList,
    IsNull,
    Like,
    Node,
    Not,
    Number,
    Operand,
    Or,
    Property,
    StringOperator,
    StringPredicate,
)

Properties = Mapping[str, str]
Test = Callable[[Properties], bool | None]
_V = TypeVar("_V", str, Number, bool)
_Read = Callable[[Properties], _V | None]

_ORDERS: dict[ComparisonOperator, Callable[[Number, Number], bool]] = {
    ComparisonOperator.EQUAL: lambda left, other: left == other,
    ComparisonOperator.NOT_EQUAL: lambda left, other: left != other,
    ComparisonOperator.LESS: lambda left, other: left < other,
    ComparisonOperator.LESS_EQUAL: lambda left, other: left <= other,
    ComparisonOperator.GREATER: lambda left, other: left > other,
    ComparisonOperator.GREATER_EQUAL: lambda left, other: left >= other,
}
_BOOLEANS = {"true": True, "false": False}


def compiled(node: Node) -> Test:
    match node:
        case Comparison():
            return _comparison(node)
        case IsNull(operand):
            return _is_null(operand)
        case InList():
            return _among(node)
        case Like(name, pattern, escape):
            return _of_text(name, like(pattern, escape))
        case StringPredicate():
            return _has(node)
        case BooleanOperand(operand):
            return _boolean_of(operand)
        case Not(inner):
            return _negated(compiled(inner))
        case And(nodes):
            return _every([compiled(node) for node in nodes])
        case Or(nodes):
            return _some([compiled(node) for node in nodes])
        case _:
            assert_never(node)


def names_in(node: Node) -> Iterator[str]:
    """Every property that the tree looks at, some more than once."""
    match node:
        case Comparison(_, left, right):
            yield from (operand.name for operand in (left, right) if isinstance(operand, Property))
        case IsNull(Property(name)) | BooleanOperand(Property(name)):
            yield name
        case InList(name) | Like(name) | StringPredicate(_, name):
            yield name
        case Not(inner):
            yield from names_in(inner)
        case And(nodes) | Or(nodes):
            for operand in nodes:
                yield from names_in(operand)


# -- predicates


def _is_null(operand: Operand) -> Test:
    if isinstance(operand, Constant):
        null = operand.value is None
        return lambda properties: null
    name = operand.name
    return lambda properties: name not in properties


def _comparison(node: Comparison) -> Test:
    """Compared as what the constant is; two properties as texts, or as numbers for their order."""
    compare, operands = node.compare, (node.left, node.right)
    kinds = {type(operand.value) for operand in operands if isinstance(operand, Constant)}
    if bool in kinds:
        return _equality(compare, _boolean_of(node.left), _boolean_of(node.right))
    if str in kinds or not (kinds or compare.of_order):
        return _equality(compare, _text_of(node.left), _text_of(node.right))
    left, right, order = _number_of(node.left), _number_of(node.right), _ORDERS[compare]

    def test(properties: Properties) -> bool | None:
        value, other = left(properties), right(properties)
        return None if value is None or other is None else order(value, other)

    return test


def _equality(compare: ComparisonOperator, left: _Read[_V], right: _Read[_V]) -> Test:
    requested = compare is ComparisonOperator.EQUAL

    def test(properties: Properties) -> bool | None:
        value, other = left(properties), right(properties)
        return None if value is None or other is None else (value == other) is requested

    return test


def _text_of(operand: Operand) -> _Read[str]:
    if isinstance(operand, Constant):
        value = operand.value if isinstance(operand.value, str) else None
        return lambda properties: value
    name = operand.name
    return lambda properties: properties.get(name)


def _number_of(operand: Operand) -> _Read[Number]:
    if isinstance(operand, Constant):
        value = operand.value if isinstance(operand.value, Number) else None
        return lambda properties: value
    return _converted(operand.name, number)


def _boolean_of(operand: Operand) -> _Read[bool]:
    if isinstance(operand, Constant):
        value = operand.value if isinstance(operand.value, bool) else None
        return lambda properties: value
    return _converted(operand.name, _boolean)


def _converted(name: str, convert: Callable[[str], _V | None]) -> _Read[_V]:
    def read(properties: Properties) -> _V | None:
        text = properties.get(name)
        return None if text is None else convert(text)

    return read


def _boolean(text: str) -> bool | None:
    return _BOOLEANS.get(text.lower()) if len(text) <= 5 else None


def _among(node: InList) -> Test:
    """As if the values were compared one after the other, joined by OR."""
    name = node.name
    texts = frozenset(value for value in node.values if isinstance(value, str))
    numbers = frozenset(value for value in node.values if not isinstance(value, str))

    def test(text: str) -> bool | None:
        if text in texts:
            return True
        if not numbers:
            return False
        value = number(text)
        return None if value is None else value in numbers

    return _of_text(name, test)


def _has(node: StringPredicate) -> Test:
    requested = node.text
    match node.search:
        case StringOperator.CONTAINS:
            return _of_text(node.name, lambda text: requested in text)
        case StringOperator.STARTSWITH:
            return _of_text(node.name, lambda text: text.startswith(requested))
        case StringOperator.ENDSWITH:
            return _of_text(node.name, lambda text: text.endswith(requested))
        case _:
            assert_never(node.search)


def _of_text(name: str, test: Callable[[str], bool | None]) -> Test:
    def run(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else test(text)

    return run


# -- joints


def _negated(inner: Test) -> Test:
    def test(properties: Properties) -> bool | None:
        value = inner(properties)
        return None if value is None else not value

    return test


def _every(tests: list[Test]) -> Test:
    def test(properties: Properties) -> bool | None:
        known = True
        for condition in tests:
            value = condition(properties)
            if value is False:
                return False
            known = known and value is True
        return True if known else None

    return test


def _some(tests: list[Test]) -> Test:
    def test(properties: Properties) -> bool | None:
        known = True
        for condition in tests:
            value = condition(properties)
            if value is True:
                return True
            known = known and value is False
        return False if known else None

    return test
