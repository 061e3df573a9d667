"""What holds for every page that names a test for each behaviour."""

import re
from collections import Counter
from pathlib import Path

import pytest
from conformance.page_tables import NAMED, names_in, rows, section, table

# Those of pop.md that are left out are about parts that popmq does not have (revive threads' files,
# a key-value store, acting slaves), about sending, or about transactions.
POP_ROWS = {
    *range(1, 5), *range(6, 14), *range(15, 19), 20, *range(22, 40), *range(41, 46), 56, 58, 59,
    *range(61, 76), *range(77, 83), *range(91, 103), *range(107, 110), 111, 112, *range(114, 117),
}  # fmt: skip
TIMER_ROWS = {*range(1, 34), 36, 37, 38, *range(91, 94)}
ROWS = {"pop.md": POP_ROWS, "timer.md": TIMER_ROWS}
DIFFERENCES_LIMIT = {"pop.md": 25, "timer.md": 10}
MISTAKES = "Mistakes that RocketMQ made and mended"
pages = pytest.mark.parametrize("page", ROWS)


def text_of(page: str) -> str:
    return (Path(__file__).parent / page).read_text(encoding="utf-8")


@pages
def test_every_row_is_named_once(page: str) -> None:
    named = Counter(int(row[0]) for row in rows(text_of(page)))
    assert set(named) == ROWS[page]
    assert [row for row, times in named.items() if times > 1] == []


@pages
def test_every_row_has_a_test(page: str) -> None:
    assert [row[0] for row in rows(text_of(page)) if not NAMED.search(row[2])] == []


@pages
def test_every_mistake_has_a_test_or_a_reason(page: str) -> None:
    mistakes = table(section(text_of(page), MISTAKES))
    assert len(mistakes) >= 20
    assert [row for row in mistakes if len(row) != 3 or not all(row)] == []


def test_every_mistake_of_timers_has_a_test() -> None:
    mistakes = table(section(text_of("timer.md"), MISTAKES))
    assert [row[0] for row in mistakes if not NAMED.search(row[2])] == []


def test_every_commit_that_mended_timers_is_named_once() -> None:
    mistakes = table(section(text_of("timer.md"), MISTAKES))
    commits = [commit for row in mistakes for commit in re.findall(r"[0-9a-f]{10}", row[0])]
    assert len(commits) == len(set(commits)) == 36


@pages
def test_every_promise_beyond_has_a_test(page: str) -> None:
    promises = table(section(text_of(page), "What popmq promises beyond that"))
    assert promises
    assert [row for row in promises if not NAMED.search(row[1])] == []


@pages
def test_differences_are_few(page: str) -> None:
    differences = table(section(text_of(page), "Differences"))
    assert 0 < len(differences) <= DIFFERENCES_LIMIT[page]


@pages
def test_every_named_test_exists(page: str) -> None:
    matches = set(NAMED.findall(text_of(page)))
    known = {path: names_in(path) for path, _ in matches}
    assert sorted(f"{path}::{name}" for path, name in matches if name not in known[path]) == []
    assert len(matches) == len(set(re.findall(r"tests/[\w/]+\.py::\w+", text_of(page))))
