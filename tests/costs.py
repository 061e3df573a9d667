"""TEST_COSTS=FILE writes what each test costs: CPU seconds, wall seconds, name.

CPU is user and system time of the worker and of the processes that it waited for, so that it says
the same on a busy machine; wall time far above it is waiting. A fixture that several tests share
counts for the first (its start) and the last of them (its processes). `sort -rn FILE` ranks them.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = os.environ.get("TEST_COSTS", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not FILE:
        return (yield)
    began, cpu = time.monotonic(), sum(os.times()[:4])
    result = yield
    spent, wall = sum(os.times()[:4]) - cpu, time.monotonic() - began
    with Path(FILE).open("a", encoding="utf-8") as file:  # one short write, also of several workers
        file.write(f"{spent:8.2f} {wall:8.2f} {item.nodeid}\n")
    return result
