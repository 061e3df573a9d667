"""clients.md: every scenario says for each client what shows it, or that nothing does yet."""

from pathlib import Path

from conformance.page_tables import NAMED, names_in, rows, section, table

PAGE = (Path(__file__).parent / "clients.md").read_text(encoding="utf-8")
# What pop.md leaves to this page of the list of RocketMQ's tests.
ROWS = {60, *range(84, 91), *range(103, 107), 110, 113, 117, 118, 120, 121}
CLIENTS = 3
DIFFERENCES_LIMIT = 6
NOT_YET = "not yet"


def test_every_row_is_named_once_with_a_test() -> None:
    found_rows = rows(section(PAGE, "Through the proxy")) + rows(section(PAGE, "Differences"))
    assert sorted(int(row[0]) for row in found_rows) == sorted(ROWS)
    assert [row[0] for row in found_rows if not NAMED.search(row[2])] == []


def test_differences_are_few() -> None:
    assert 0 < len(table(section(PAGE, "Differences"))) <= DIFFERENCES_LIMIT


def test_every_scenario_has_an_answer_for_each_client() -> None:
    scenarios = table(section(PAGE, "Scenarios"))
    assert len(scenarios) >= 20
    for scenario, *cells in scenarios:
        assert len(cells) == CLIENTS, scenario
        assert all(cell == NOT_YET or NAMED.search(cell) for cell in cells), scenario


def test_every_named_test_exists() -> None:
    matches = set(NAMED.findall(PAGE))
    known = {path: names_in(path) for path, _ in matches}
    assert sorted(f"{path}::{name}" for path, name in matches if name not in known[path]) == []
