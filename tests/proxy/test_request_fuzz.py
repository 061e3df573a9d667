"""A share of the fuzzing of tests/proxy/request_fuzz.py, another one each day."""

import re
import sys
from pathlib import Path

import pytest
import sim_seeds
from programs import run_program

TESTS = Path(__file__).resolve().parents[1]
INPUTS = 1_500
# Calls that were served, refused by a handler, by their size and by their frames.
OUTCOMES = ("code 20000", "code 40000", "status 0", "status 8", "connection refused")


@pytest.mark.more
def test_requests_and_frames_of_the_day_crash_nothing_and_cost_little() -> None:
    """In a process of its own, so that its memory is that of the server."""
    (day, *_) = sim_seeds.of_the_day(1)
    words = ["--inputs", str(INPUTS), "--seed", str(day * 1_000)]
    done = run_program([sys.executable, "-m", "proxy.request_fuzz", *words], cwd=TESTS)
    print(done.stdout, done.stderr[-3_000:])
    assert done.returncode == 0
    counts = {name: int(count) for count, name in re.findall(r"^ +(\d+) (.+)$", done.stdout, re.M)}
    assert min(counts.get(name, 0) for name in OUTCOMES) > 10
