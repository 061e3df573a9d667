"""The lanes recognise nothing that was never tried."""

import sys
from pathlib import Path

import pytest
from programs import run_program
from proxy.branches import Branches

from proxy import lane_branches

TESTS = Path(__file__).resolve().parents[1]


def length(number: int, text: str | None) -> str:
    if 0 < number < 10 or text is None:
        return "short"
    return "long"


def test_a_branch_that_is_taken_one_way_only_is_named() -> None:
    branches = Branches([length])
    with branches.watched():
        length(5, "")
        length(0, None)
    assert len(branches.missed()) == 2
    assert all("length" in line for line in branches.missed())
    with branches.watched():
        length(10, "")
    assert branches.missed() == []


@pytest.mark.more
@pytest.mark.timeout(300)
def test_each_branch_of_each_recogniser_is_taken_both_ways() -> None:
    done = run_program([sys.executable, "-m", lane_branches.__name__], cwd=TESTS)
    print(done.stdout, done.stderr[-3_000:])
    assert done.returncode == 0
