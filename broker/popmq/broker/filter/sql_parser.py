"""SqlParser: from the text of an SQL-92 filter to its tree.

The precedence is that of the standard: OR, AND, NOT, then predicates.  (RocketMQ binds NOT to
the next operand, so that its `NOT a IS NULL` asks whether `NOT a` is null.)

    or        := and {OR and}
    and       := not {AND not}
    not       := {NOT} predicate
    predicate := operand [tail] | ( or ) [tail]       a tail behind ( ) if an operand is in it
    tail      := = <> < <= > >=  operand
               | IS [NOT] NULL
               | [NOT] BETWEEN operand AND operand
               | [NOT] IN ( text or number, ... )
               | [NOT] LIKE text [ESCAPE text]
               | [NOT] CONTAINS | STARTSWITH | ENDSWITH  text
    operand   := name | text | [+ | -] number | TRUE | FALSE | NULL | ( operand )
"""

from collections.abc import Callable
from typing import TypeVar

from popmq.broker.filter.lexer import Token, TokenType, bad_expression, number, tokens
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

R = TypeVar("R")

DEPTH_LIMIT = 64  # parentheses in each other

_COMPARES = {compare.value: compare for compare in ComparisonOperator}
_SEARCHES = {search.value: search for search in StringOperator}


def parse_sql(expression: str) -> Node:
    """Raises ILLEGAL_FILTER_EXPRESSION, which names the column."""
    return SqlParser(expression).parse()


class SqlParser:
    def __init__(self, expression: str) -> None:
        self._tokens = tokens(expression)
        # What `_is` and `_take` look at, some ten times for each word.
        self._fixed = [
            token.text if token.word is TokenType.KEYWORD or token.word is TokenType.SIGN else ""
            for token in self._tokens
        ]
        self._at = 0
        self._depth = 0

    @property
    def words(self) -> int:
        return len(self._tokens)

    def parse(self) -> Node:
        token = self._next
        node = self._truth(token, self._or())
        if self._next.word is not TokenType.END:
            raise _unexpected(self._next, "AND, OR or the end")
        return node

    # -- the joints

    def _or(self) -> Node | Operand:
        first = self._next
        node = self._and()
        if not self._is("OR"):
            return node
        nodes = [self._truth(first, node)]
        while self._take("OR"):
            token = self._next
            nodes.append(self._truth(token, self._and()))
        return Or(tuple(nodes))

    def _and(self) -> Node | Operand:
        first = self._next
        node = self._not()
        if not self._is("AND"):
            return node
        nodes = [self._truth(first, node)]
        while self._take("AND"):
            token = self._next
            nodes.append(self._truth(token, self._not()))
        return And(tuple(nodes))

    def _not(self) -> Node | Operand:
        if not self._is("NOT"):
            return self._predicate()
        odd = False
        while self._take("NOT"):
            odd = not odd
        token = self._next
        node = self._truth(token, self._predicate())
        return Not(node) if odd else node

    def _truth(self, token: Token, node: Node | Operand) -> Node:
        """What stands where something true or false must; a property or a boolean may."""
        if isinstance(node, Constant) and not isinstance(node.value, bool | None):
            raise bad_expression(token.column, f"{token.shown} is neither true nor false")
        return BooleanOperand(node) if isinstance(node, Property | Constant) else node

    # -- predicates

    def _predicate(self) -> Node | Operand:
        token = self._next
        if not self._take("("):
            return self._tail(token, self._operand())
        inner = self._within(token, self._or, "AND, OR or ')'")
        return self._tail(token, inner) if isinstance(inner, Property | Constant) else inner

    def _within(self, token: Token, read: Callable[[], R], expected: str) -> R:
        """What is between the parenthesis at that token and the one that closes it."""
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise bad_expression(
                token.column, f"more than {DEPTH_LIMIT} parentheses are in each other"
            )
        inner = read()
        if not self._take(")"):
            raise _unexpected(self._next, expected)
        self._depth -= 1
        return inner

    def _tail(self, token: Token, left: Operand) -> Node | Operand:
        """The rest of a predicate whose first operand, at that token, was read."""
        compare = _COMPARES.get(self._next.text) if self._next.word is TokenType.SIGN else None
        if compare is not None:
            self._at += 1
            return self._comparison(token, compare, left)
        if self._take("IS"):
            turned = self._take("NOT")
            if not self._take("NULL"):
                raise _unexpected(self._next, "NULL, as in IS [NOT] NULL")
            return Not(IsNull(left)) if turned else IsNull(left)
        turned = self._take("NOT")
        node = self._of_property(token, left)
        if node is None:
            if turned:
                raise _unexpected(self._next, "BETWEEN, IN, LIKE, CONTAINS, STARTSWITH or ENDSWITH")
            return left
        return Not(node) if turned else node

    def _of_property(self, token: Token, left: Operand) -> Node | None:
        """A predicate that may be turned by a NOT before it; None when there is none."""
        keyword = self._next
        if keyword.word is not TokenType.KEYWORD:
            return None
        if self._take("BETWEEN"):
            return self._between(token, left)
        if keyword.text != "IN" and keyword.text != "LIKE" and keyword.text not in _SEARCHES:
            return None
        if not isinstance(left, Property):
            raise bad_expression(
                token.column, f"{keyword.text} needs a property before it, not {token.shown}"
            )
        self._at += 1
        if keyword.text == "IN":
            return InList(left.name, self._list())
        if keyword.text == "LIKE":
            return self._like(left.name)
        return StringPredicate(
            _SEARCHES[keyword.text], left.name, self._text(f"after {keyword.text}").text
        )

    def _comparison(self, token: Token, compare: ComparisonOperator, left: Operand) -> Comparison:
        _check_comparable(compare, token, left)
        token = self._next
        right = self._operand()
        _check_comparable(compare, token, right)
        kinds = {_kind(operand) for operand in (left, right) if isinstance(operand, Constant)}
        if len(kinds) > 1:
            raise bad_expression(
                token.column, f"{' and '.join(sorted(kinds))} cannot be compared with each other"
            )
        return Comparison(compare, left, right)

    def _between(self, token: Token, left: Operand) -> Node:
        _check_comparable(ComparisonOperator.LESS, token, left)
        first = self._next
        low = self._operand()
        _check_comparable(ComparisonOperator.LESS, first, low)
        if not self._take("AND"):
            raise _unexpected(self._next, "AND, as in BETWEEN low AND high")
        second = self._next
        high = self._operand()
        _check_comparable(ComparisonOperator.LESS, second, high)
        if isinstance(low, Constant) and isinstance(high, Constant):
            lowest, highest = _number_of(low), _number_of(high)
            if lowest > highest:
                raise bad_expression(
                    first.column, f"nothing is BETWEEN {lowest} AND {highest}: swap them"
                )
        return And(
            (
                Comparison(ComparisonOperator.GREATER_EQUAL, left, low),
                Comparison(ComparisonOperator.LESS_EQUAL, left, high),
            )
        )

    def _list(self) -> tuple[str | Number, ...]:
        if not self._take("("):
            raise _unexpected(self._next, "'(' after IN")
        values: list[str | Number] = []
        while True:
            token = self._next
            operand = self._operand()
            value = operand.value if isinstance(operand, Constant) else None
            if value is None or isinstance(value, bool):
                raise bad_expression(token.column, f"IN takes texts and numbers, not {token.shown}")
            values.append(value)
            if self._take(")"):
                return tuple(values)
            if not self._take(","):
                raise _unexpected(self._next, "',' or ')' in the list of IN")

    def _like(self, name: str) -> Like:
        pattern = self._text("after LIKE")
        escape = ""
        if self._take("ESCAPE"):
            token = self._text("after ESCAPE")
            escape = token.text
            if len(escape) != 1:
                raise bad_expression(token.column, "ESCAPE takes one character in quotes")
            rest = pattern.text.replace(escape * 2, "")
            if any(part[:1] not in ("%", "_") for part in rest.split(escape)[1:]):
                raise bad_expression(
                    pattern.column, f"{escape!r} may only stand before %, _ and itself"
                )
        return Like(name, pattern.text, escape)

    # -- operands

    def _operand(self) -> Operand:
        token = self._next
        self._at += 1
        match token.word:
            case TokenType.NAME:
                return Property(token.text)
            case TokenType.TEXT:
                return Constant(token.text)
            case TokenType.NUMBER:
                return Constant(number(token.text))
            case TokenType.KEYWORD if token.text in ("TRUE", "FALSE"):
                return Constant(token.text == "TRUE")
            case TokenType.KEYWORD if token.text == "NULL":
                return Constant(None)
            case TokenType.SIGN if token.text in "+-":
                return self._signed(token)
            case TokenType.SIGN if token.text == "(":
                return self._within(token, self._operand, "')'")
        self._at -= 1
        raise _unexpected(
            self._next, "a property, a text in single quotes, a number, TRUE or FALSE"
        )

    def _signed(self, sign: Token) -> Constant:
        token = self._next
        if token.word is not TokenType.NUMBER:
            raise bad_expression(sign.column, f"{sign.text!r} stands before a number only")
        self._at += 1
        return Constant(number(sign.text + token.text))

    def _text(self, where: str) -> Token:
        token = self._next
        if token.word is not TokenType.TEXT:
            raise _unexpected(self._next, f"a text in single quotes {where}")
        self._at += 1
        return token

    # -- words

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _is(self, text: str) -> bool:
        return self._fixed[self._at] == text

    def _take(self, text: str) -> bool:
        if self._fixed[self._at] != text:
            return False
        self._at += 1
        return True


def _unexpected(token: Token, expected: str) -> Exception:
    if token.word is TokenType.SIGN and token.text in "+-":
        return bad_expression(token.column, f"there is no arithmetic: {token.shown}")
    return bad_expression(token.column, f"expected {expected}, found {token.shown}")


def _check_comparable(compare: ComparisonOperator, token: Token, operand: Operand) -> None:
    if isinstance(operand, Property):
        return
    if operand.value is None:
        raise bad_expression(token.column, f"nothing is {compare.value} NULL: write IS NULL")
    if compare.of_order and _kind(operand) != "a number":
        raise bad_expression(
            token.column, f"{token.shown} has no order: {_only(compare)} compare numbers"
        )


def _only(compare: ComparisonOperator) -> str:
    return f"{compare.value} and its like"


def _kind(constant: Constant) -> str:
    if isinstance(constant.value, bool):
        return "a boolean"
    return "a text" if isinstance(constant.value, str) else "a number"


def _number_of(constant: Constant) -> Number:
    assert isinstance(constant.value, Number), "BETWEEN takes numbers"
    return constant.value
