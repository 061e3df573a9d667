"""What SQL filters mean: a table of expressions and results, and another of refusals."""

import pytest

from popmq.broker.filter.sql92 import SqlFilter
from popmq.broker.filter.sql_parser import parse_sql
from popmq.broker.filter.sql_program import compiled
from popmq.common.errors import Code, PopmqError, Refused

T, F, U = True, False, None
Table = dict[tuple[bool | None, bool | None], bool | None]

# `m` and `n` are missing everywhere.
PROPERTIES = {
    "a": "1",
    "b": "2",
    "c": "10",
    "half": "0.5",
    "neg": "-3.5",
    "big": "9007199254740993",
    "s": "hello",
    "S": "HELLO",
    "empty": "",
    "t": "true",
    "f": "False",
    "x": "abc",
    "blank": " 1",
    "q": "it's",
    "u": "straße",
    "pct": "100%",
    "low": "a_b",
    "lines": "one\ntwo",
    "$d": "5",
    "_p": "6",
    "TAGS": "red",
}

EQUALITY = [
    ("a = 1", T),
    ("a = 2", F),
    ("a <> 1", F),
    ("a <> 2", T),
    ("1 = a", T),
    ("2 <> a", T),
    ("a = 1.0", T),
    ("a = 1e0", T),
    ("a = 10E-1", T),
    ("a = +1", T),
    ("a = -1", F),
    ("neg = -3.5", T),
    ("neg = - 3.5", T),
    ("half = .5", T),
    ("half = 0.50", T),
    ("half = 5e-1", T),
    ("big = 9007199254740993", T),
    ("big = 9007199254740992", F),
    ("big = 9007199254740993L", T),
    ("a = 001", T),
    ("a = '1'", T),
    ("a = '01'", F),
    ("a = '1.0'", F),
    ("s = 'hello'", T),
    ("s = 'HELLO'", F),
    ("S = 'HELLO'", T),
    ("s <> 'hello'", F),
    ("s <> 'x'", T),
    ("'hello' = s", T),
    ("q = 'it''s'", T),
    ("empty = ''", T),
    ("empty <> ''", F),
    ("u = 'straße'", T),
    ("lines = 'one\ntwo'", T),
    ("a = b", F),
    ("a = a", T),
    ("a <> b", T),
    ("$d = 5", T),
    ("_p = 6", T),
    ("TAGS = 'red'", T),
    ("t = TRUE", T),
    ("t = FALSE", F),
    ("f = FALSE", T),
    ("f = true", F),
    ("t <> TRUE", F),
    ("TRUE = t", T),
    ("1 = 1", T),
    ("1 = 2", F),
    ("'a' = 'a'", T),
    ("TRUE = TRUE", T),
    ("TRUE <> FALSE", T),
]

UNKNOWN = [
    ("m = 1", U),
    ("m <> 1", U),
    ("m = 'x'", U),
    ("m <> 'x'", U),
    ("m = n", U),
    ("m = a", U),
    ("m = TRUE", U),
    ("m > 1", U),
    ("m BETWEEN 1 AND 2", U),
    ("m NOT BETWEEN 1 AND 2", U),
    ("m IN ('x')", U),
    ("m NOT IN ('x')", U),
    ("m LIKE '%'", U),
    ("m NOT LIKE '%'", U),
    ("m CONTAINS 'x'", U),
    ("m NOT CONTAINS 'x'", U),
    ("m STARTSWITH 'x'", U),
    ("m ENDSWITH 'x'", U),
    ("m", U),
    ("NOT m", U),
    ("NULL", U),
    ("NOT NULL", U),
]

TYPE_ERRORS = [
    ("s = 1", U),
    ("s <> 1", U),
    ("s > 1", U),
    ("s = TRUE", U),
    ("s <> FALSE", U),
    ("a = TRUE", U),
    ("empty = 0", U),
    ("empty = FALSE", U),
    ("blank = 1", U),
    ("s > a", U),
    ("a > s", U),
    ("s BETWEEN 1 AND 2", U),
    ("t = 1", U),
    ("NOT s = 1", U),
    ("s = 1 OR a = 1", T),
    ("s = 1 AND a = 1", U),
    ("s = 1 AND a = 2", F),
    ("s IN (1, 'x')", U),
    ("s IN (1, 'hello')", T),
]

ORDER = [
    ("b > 1", T),
    ("b > 2", F),
    ("b >= 2", T),
    ("b < 2", F),
    ("b <= 2", T),
    ("b < 10", T),
    ("c > 9", T),
    ("c > b", T),
    ("b > c", F),
    ("1 < b", T),
    ("neg < 0", T),
    ("neg < -3", T),
    ("neg > -4", T),
    ("half > 0.49", T),
    ("big > 9007199254740992", T),
    ("b > 1.999", T),
    ("b < 2e0", F),
    ("1 < 2", T),
    ("b BETWEEN 1 AND 3", T),
    ("b BETWEEN 2 AND 2", T),
    ("b BETWEEN 3 AND 4", F),
    ("b NOT BETWEEN 3 AND 4", T),
    ("b NOT BETWEEN 1 AND 2", F),
    ("b BETWEEN a AND c", T),
    ("a BETWEEN b AND c", F),
    ("b BETWEEN m AND 1", F),
    ("b BETWEEN m AND 3", U),
    ("b BETWEEN -1 AND +3", T),
    ("b between 1 and 3 and a = 1", T),
]

NULLS = [
    ("m IS NULL", T),
    ("m IS NOT NULL", F),
    ("a IS NULL", F),
    ("a IS NOT NULL", T),
    ("empty IS NULL", F),
    ("NULL IS NULL", T),
    ("1 IS NULL", F),
    ("(m) IS NULL", T),
    ("NOT m IS NULL", F),
    ("NOT a IS NULL", T),
    ("m is null or m = 1", T),
]

LISTS = [
    ("s IN ('x', 'hello')", T),
    ("s IN ('x')", F),
    ("s NOT IN ('x')", T),
    ("s NOT IN ('hello')", F),
    ("a IN ('1')", T),
    ("a IN ('1.0')", F),
    ("a IN (1.0)", T),
    ("a IN (2, 3)", F),
    ("a NOT IN (2, 3)", T),
    ("a IN (-1, +1)", T),
    ("q IN ('it''s')", T),
    ("empty IN ('')", T),
]

TEXTS = [
    ("s LIKE 'hello'", T),
    ("s LIKE 'hell'", F),
    ("s LIKE 'h%'", T),
    ("s LIKE '%o'", T),
    ("s LIKE '%ell%'", T),
    ("s LIKE 'h_llo'", T),
    ("s LIKE '_____'", T),
    ("s LIKE '____'", F),
    ("s LIKE '%'", T),
    ("empty LIKE '%'", T),
    ("empty LIKE '_'", F),
    ("empty LIKE ''", T),
    ("s LIKE 'H%'", F),
    ("s NOT LIKE 'x%'", T),
    ("s NOT LIKE 'h%'", F),
    ("s LIKE 'h%o'", T),
    ("s LIKE 'hello%hello'", F),
    ("s LIKE 'hel%llo'", F),
    ("s LIKE '%l%l%'", T),
    ("s LIKE '%l%l%l%'", F),
    ("s LIKE '%_o'", T),
    ("s LIKE 'h%%%o'", T),
    ("lines LIKE 'one%two'", T),
    ("lines LIKE 'one_two'", T),
    ("u LIKE 'stra_e'", T),
    ("pct LIKE '100!%' ESCAPE '!'", T),
    ("a LIKE '1!%' ESCAPE '!'", F),
    ("low LIKE 'a!_b' ESCAPE '!'", T),
    ("x LIKE 'a!_c' ESCAPE '!'", F),
    ("x LIKE 'a.c'", F),
    ("s CONTAINS 'ell'", T),
    ("s CONTAINS 'x'", F),
    ("s NOT CONTAINS 'x'", T),
    ("s CONTAINS ''", T),
    ("s STARTSWITH 'he'", T),
    ("s STARTSWITH 'e'", F),
    ("s NOT STARTSWITH 'e'", T),
    ("s ENDSWITH 'lo'", T),
    ("s ENDSWITH 'l'", F),
    ("s NOT ENDSWITH 'l'", T),
    ("pct CONTAINS '%'", T),
]

# Every pair of values under AND and OR, by what they stand for: a = 1, a = 2, m = 1.
WORDS = {T: "a = 1", F: "a = 2", U: "m = 1"}
AND: Table = {(T, T): T, (T, F): F, (T, U): U, (F, T): F, (F, F): F, (F, U): F}
AND |= {(U, T): U, (U, F): F, (U, U): U}
OR: Table = {(T, T): T, (T, F): T, (T, U): T, (F, T): T, (F, F): F, (F, U): U}
OR |= {(U, T): T, (U, F): U, (U, U): U}
LOGIC = [
    *((f"{WORDS[left]} AND {WORDS[right]}", value) for (left, right), value in AND.items()),
    *((f"{WORDS[left]} OR {WORDS[right]}", value) for (left, right), value in OR.items()),
    ("NOT a = 1", F),
    ("NOT a = 2", T),
    ("NOT m = 1", U),
    ("NOT NOT a = 1", T),
    ("NOT NOT NOT a = 1", F),
    ("t", T),
    ("f", F),
    ("NOT f", T),
    ("t AND NOT f", T),
    ("TRUE", T),
    ("FALSE", F),
    ("NOT (FALSE)", T),
    ("(a) = 1", T),
    ("((a)) = ((1))", T),
]

PRECEDENCE = [
    ("a = 1 OR a = 2 AND a = 2", T),
    ("(a = 1 OR a = 2) AND a = 2", F),
    ("a = 2 AND a = 2 OR a = 1", T),
    ("a = 2 AND (a = 2 OR a = 1)", F),
    ("NOT a = 2 AND a = 2", F),
    ("NOT (a = 2 AND a = 2)", T),
    ("NOT a = 1 OR a = 1", T),
    ("NOT (a = 1 OR a = 1)", F),
    ("NOT a = 1 AND m = 1", F),
    ("a = 1 AND b = 2 AND c = 10", T),
    ("a = 2 OR b = 1 OR c = 10", T),
    ("a = 1 AND NOT b = 1 OR m = 1", T),
    ("b BETWEEN 1 AND 3 OR m = 1", T),
    ("NOT b BETWEEN 1 AND 3", F),
    ("NOT s IN ('x')", T),
    ("NOT s LIKE 'x%'", T),
]

WRITING = [
    ("  a=1  ", T),
    ("a=1and b=2", T),
    ("a = 1 aNd b = 2 oR c = 3", T),
    ("not A is null", F),
    ("a\n=\t1", T),
    ("a = 1 -- the rest is a comment", T),
    ("a /* a comment */ = 1", T),
    ("s = '--'", F),
    ("s = '/* no comment */'", F),
    ("In_ IS NULL", T),
]
WRITING += [("nota IS NULL", T), ("s='hello'AND a=1", T)]

TABLE = [
    *EQUALITY,
    *UNKNOWN,
    *TYPE_ERRORS,
    *ORDER,
    *NULLS,
    *LISTS,
    *TEXTS,
    *LOGIC,
    *PRECEDENCE,
    *WRITING,
]


@pytest.mark.parametrize(("expression", "result"), TABLE)
def test_an_expression_is_true_false_or_unknown(expression: str, result: bool | None) -> None:
    assert compiled(parse_sql(expression))(PROPERTIES) is result


def test_the_table_is_long_and_says_nothing_twice() -> None:
    expressions = [expression for expression, _ in TABLE]
    assert len(expressions) >= 150
    assert len(set(expressions)) == len(expressions)


REFUSED = [
    ("", 1, "found the end"),
    ("a = ", 5, "found the end"),
    ("a = 1 AND", 10, "found the end"),
    ("a = 1 b = 2", 7, "expected AND, OR or the end, found 'b'"),
    ("a == 1", 4, "found '='"),
    ("a != 1", 3, "write <>"),
    ("= 1", 1, "found '='"),
    ('a = "x"', 5, "single quotes"),
    ("`a` = 1", 1, "names are not quoted"),
    ("a = 'x", 5, "no closing quote"),
    ("a.b = 1", 2, "a name has letters"),
    ("größe = 1", 3, "belongs into no filter"),
    ("a-b = 1", 2, "no arithmetic: '-'"),
    ("a + 1 > 2", 3, "no arithmetic: '+'"),
    ("a * 2 = 4", 3, "no arithmetic"),
    ("a = 1; b", 6, "belongs into no filter"),
    ("-a > 3", 1, "before a number only"),
    ("a = 1 = 2", 7, "expected AND, OR or the end"),
    ("a > 'x'", 5, "has no order"),
    ("'x' < a", 1, "has no order"),
    ("a >= TRUE", 6, "has no order"),
    ("a = NULL", 5, "write IS NULL"),
    ("NULL <> a", 1, "write IS NULL"),
    ("a IS 1", 6, "expected NULL"),
    ("a IS NOT", 9, "expected NULL"),
    ("a NOT = 1", 7, "expected BETWEEN, IN, LIKE"),
    ("a BETWEEN 3 AND 1", 11, "swap them"),
    ("a BETWEEN 1 OR 3", 13, "expected AND"),
    ("a BETWEEN 'x' AND 'y'", 11, "has no order"),
    ("a BETWEEN NULL AND 1", 11, "write IS NULL"),
    ("a IN ()", 7, "found ')'"),
    ("a IN 'x'", 6, "expected '('"),
    ("a IN ('x' 'y')", 11, "expected ',' or ')'"),
    ("a IN ('x',", 11, "found the end"),
    ("a IN (b)", 7, "IN takes texts and numbers"),
    ("a IN (NULL)", 7, "IN takes texts and numbers"),
    ("'x' IN ('x')", 1, "needs a property"),
    ("a LIKE 5", 8, "expected a text"),
    ("a LIKE b", 8, "expected a text"),
    ("1 LIKE 'x'", 1, "needs a property"),
    ("a LIKE 'x' ESCAPE 'ab'", 19, "one character"),
    ("a LIKE '!x' ESCAPE '!'", 8, "may only stand before"),
    ("a LIKE 'x!' ESCAPE '!'", 8, "may only stand before"),
    ("a CONTAINS 5", 12, "expected a text"),
    ("'x' = 1", 7, "cannot be compared"),
    ("TRUE = 1", 8, "cannot be compared"),
    ("'x'", 1, "neither true nor false"),
    ("NOT 5", 5, "neither true nor false"),
    ("a = 1 OR 5", 10, "neither true nor false"),
    ("(a = 1", 7, "expected AND, OR or ')'"),
    ("a = 1)", 6, "expected AND, OR or the end"),
    ("a = (1", 7, "expected ')'"),
    ("a = (b = 1)", 8, "expected ')'"),
    ("a = " + "(" * 65 + "1" + ")" * 65, 69, "more than 64 parentheses"),
    ("(a = 1) = TRUE", 9, "expected AND, OR or the end"),
    ("a AND", 6, "found the end"),
    ("AND a", 1, "found 'AND'"),
    ("a = " + "9" * 65, 5, "too long or too large"),
    ("a = 1e1000", 5, "too long or too large"),
    ("(" * 65 + "t" + ")" * 65, 65, "more than 64 parentheses"),
]


@pytest.mark.parametrize(("expression", "column", "reason"), REFUSED)
def test_what_is_wrong_is_named_with_its_column(expression: str, column: int, reason: str) -> None:
    with pytest.raises(PopmqError) as caught:
        parse_sql(expression)
    assert caught.value.code is Code.ILLEGAL_FILTER_EXPRESSION
    assert str(caught.value).startswith(f"SQL filter, column {column}: ")
    assert reason in str(caught.value)


def test_64_parentheses_may_be_in_each_other() -> None:
    assert compiled(parse_sql("(" * 64 + "t" + ")" * 64))(PROPERTIES) is True


def test_five_hundred_terms_side_by_side_are_no_depth() -> None:
    assert compiled(parse_sql(" AND ".join(["a = 1"] * 500)))(PROPERTIES) is True
    assert compiled(parse_sql("NOT " * 2_001 + "a = 1"))(PROPERTIES) is False


def test_a_filter_has_a_limit_of_words_and_of_bytes() -> None:
    assert parse_sql("NOT " * 2_047 + "a")
    with pytest.raises(Refused, match="column 8193: there are more than 2048 words and signs"):
        parse_sql("NOT " * 2_048 + "a")
    assert SqlFilter(f"a = '{'x' * 4_090}'")
    with pytest.raises(Refused, match="SQL filter of 4097 bytes is over the limit of 4096 bytes"):
        SqlFilter(f"a = '{'x' * 4_091}'")
