"""SQL filters against the reference, and against bytes that are no filter at all."""

import random

import pytest
from filter import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from popmq.broker.filter.like import like
from popmq.broker.filter.sql_parser import parse_sql
from popmq.broker.filter.sql_program import Test, compiled
from popmq.common.errors import Code, PopmqError

RESULTS = {"T": True, "F": False, "U": None}

names = st.sampled_from(["a", "b", "c", "missing"])
texts = st.text("ab%_'1 ", max_size=6)
numbers = st.one_of(
    st.integers(-3, 12).map(str),
    st.sampled_from(["0.5", "-0.5", "1.0", "10e-1", ".5", "1e1", "1e300", "-2.", "0"]),
)
values = st.one_of(texts, numbers, st.sampled_from(["true", "FALSE", "TRUE", "", "é", "+1", "1_0"]))
name = st.tuples(st.just("name"), names)
number = st.tuples(st.just("number"), numbers)
text = st.tuples(st.just("text"), texts)
boolean = st.tuples(st.just("bool"), st.booleans())
signs = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
numeric = st.one_of(name, number)


def in_order(low: str, high: str) -> bool:
    fraction, other = reference.fraction(low), reference.fraction(high)
    return fraction is not None and other is not None and fraction <= other


ranges = st.one_of(
    st.tuples(number, number).filter(lambda pair: in_order(pair[0][1], pair[1][1])),
    st.tuples(name, numeric),
    st.tuples(numeric, name),
)
predicates = st.one_of(
    st.tuples(signs, numeric, numeric),
    st.tuples(st.sampled_from(["=", "<>"]), name, st.one_of(text, boolean)),
    st.tuples(st.sampled_from(["=", "<>"]), text, name),
    st.tuples(st.just("null"), st.one_of(name, text)),
    st.tuples(st.just("bare"), st.one_of(name, boolean)),
    st.tuples(numeric, ranges).map(lambda entry: ("between", entry[0], *entry[1])),
    st.tuples(st.just("in"), names, st.lists(st.one_of(text, number), min_size=1, max_size=4)),
    st.tuples(st.just("like"), names, texts),
    st.tuples(
        st.just("has"), st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"]), names, texts
    ),
)
trees = st.recursive(
    predicates,
    lambda inner: st.one_of(
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=12,
)
properties = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, max_size=3)


expressions = given(trees, properties, st.randoms(use_true_random=False))


@settings(max_examples=150, deadline=None)
@expressions
def test_a_filter_means_what_the_reference_says(
    tree: reference.Tree, properties: dict[str, str], rng: random.Random
) -> None:
    means_what_the_reference_says(tree, properties, rng)


@pytest.mark.more
@settings(max_examples=1_500, deadline=None)
@expressions
def test_many_filters_mean_what_the_reference_says(
    tree: reference.Tree, properties: dict[str, str], rng: random.Random
) -> None:
    means_what_the_reference_says(tree, properties, rng)


def means_what_the_reference_says(
    tree: reference.Tree, results: dict[str, str], rng: random.Random
) -> None:
    written = reference.text(tree, rng)
    assert compiled(parse_sql(written))(results) is RESULTS[reference.value(tree, results)], written


@settings(max_examples=1_000, deadline=None)
@given(st.text("ab%_", max_size=12), st.text("ab", max_size=14))
def test_like_matches_what_trying_every_way_does(pattern: str, content: str) -> None:
    assert like(pattern, "")(content) is reference.likes(content, pattern)


@settings(max_examples=1_000, deadline=None)
@given(st.text("ab!%_", max_size=8), st.text("ab!%_", max_size=8))
def test_an_escaped_text_is_like_itself_alone(content: str, other: str) -> None:
    escaped = "".join("!" + sign if sign in "!%_" else sign for sign in content)
    test = like(escaped, "!")
    assert test(content)
    assert test(other) is (other == content)


WORDS = ["a", "b", "1", "2.5", "'x'", "'%'", "(", ")", ",", "=", "<>", "<", ">=", "-", "TRUE"]
WORDS += ["AND", "OR", "NOT", "IS", "NULL", "IN", "LIKE", "BETWEEN", "ESCAPE", "CONTAINS"]


@settings(max_examples=700, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join)))
def test_any_text_is_a_filter_or_refused_at_a_column_of_it(written: str) -> None:
    test, refusal = outcome(written)
    if test is not None:
        assert test({"a": "1", "b": "x"}) in (True, False, None)
    elif refusal is not None:
        assert refusal.code is Code.ILLEGAL_FILTER_EXPRESSION
        column = int(str(refusal).split("column ")[1].split(":")[0])
        assert 1 <= column <= len(written) + 1


def outcome(written: str) -> tuple[Test | None, PopmqError | None]:
    try:
        return compiled(parse_sql(written)), None
    except PopmqError as error:
        return None, error
