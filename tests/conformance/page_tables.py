"""Reads the pages that name a test for each behaviour."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def table(text: str) -> list[list[str]]:
    """The cells of its rows, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row for row, below in zip(cells, [*cells[1:], [""]], strict=True)
        if not row[0].startswith("---") and not below[0].startswith("---")
    ]  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """The rows that begin with numbers of RocketMQ's list, one for each number."""
    tables = table(text)
    numbers = [re.split(r", ", row[0]) for row in tables]
    return [
        [number, *row[1:]]
        for row, some in zip(tables, numbers, strict=True)
        for number in some
        if number.isdigit() and len(number) < 4
    ]


def names_in(path: str) -> set[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE))
