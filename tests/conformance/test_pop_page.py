"""pop.md names every row once, and only tests that exist."""

import re
from collections import Counter
from pathlib import Path

from conformance.page_tables import NAMED, names_in, rows, section, table

PAGE = (Path(__file__).parent / "pop.md").read_text(encoding="utf-8")
# Those left out are about parts that popmq does not have (revive threads' files, a key-value store,
# acting slaves), about sending, or about delays and transactions.
ROWS = {
    *range(1, 5), *range(6, 14), *range(15, 19), 20, *range(22, 40), *range(41, 46), 56, 58, 59,
    *range(61, 76), *range(77, 83), *range(91, 103), *range(107, 110), 111, 112, *range(114, 117),
}  # fmt: skip
DIFFERENCES_LIMIT = 25


def test_every_row_is_named_once() -> None:
    named = Counter(int(row[0]) for row in rows(PAGE))
    assert set(named) == ROWS
    assert [row for row, times in named.items() if times > 1] == []


def test_every_row_has_a_test() -> None:
    assert [row[0] for row in rows(PAGE) if not NAMED.search(row[2])] == []


def test_every_mistake_has_a_test_or_a_reason() -> None:
    mistakes = table(section(PAGE, "Mistakes that RocketMQ made and mended"))
    assert len(mistakes) > 40
    assert [row for row in mistakes if len(row) != 3 or not all(row)] == []


def test_every_promise_beyond_has_a_test() -> None:
    promises = table(section(PAGE, "What popmq promises beyond that"))
    assert promises
    assert [row for row in promises if not NAMED.search(row[1])] == []


def test_differences_are_few() -> None:
    assert 0 < len(rows(section(PAGE, "Differences"))) <= DIFFERENCES_LIMIT


def test_every_named_test_exists() -> None:
    found = set(NAMED.findall(PAGE))
    known = {path: names_in(path) for path, _ in found}
    assert sorted(f"{path}::{name}" for path, name in found if name not in known[path]) == []
    assert len(found) == len(set(re.findall(r"tests/[\w/]+\.py::\w+", PAGE)))
