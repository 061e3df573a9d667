"""How a role's process ends."""

import subprocess
import sys

HANGS_WHILE_IT_STOPS = """
import asyncio
from popmq.cli.roles import life

life.STOP_S = 0.1

async def role():
    running = life.RoleRunner()
    running.end({code})
    await running.wait()
    await asyncio.sleep({stop_s})

asyncio.run(role())
raise SystemExit(7)
"""


def run(code: int, stop_s: float) -> int:
    script = HANGS_WHILE_IT_STOPS.format(code=code, stop_s=stop_s)
    return subprocess.run([sys.executable, "-c", script], timeout=60).returncode


def test_a_role_that_failed_ends_although_its_stop_hangs() -> None:
    assert run(code=1, stop_s=3600) == 1


def test_a_role_that_is_asked_to_end_may_take_its_time() -> None:
    assert run(code=0, stop_s=0.5) == 7
