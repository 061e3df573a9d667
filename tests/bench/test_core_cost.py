"""The core bench: both ends of a send, a receive and an ack in one process, and its table."""

from pathlib import Path

import pytest

from bench import core
from bench.core_cost import Core, measure
from popmq.cli.load.http2 import HEADER_VARIANTS


@pytest.mark.parametrize("headers", HEADER_VARIANTS)
def test_every_call_of_a_round_is_answered_and_takes_the_lane(tmp_path: Path, headers: str) -> None:
    world = Core(str(tmp_path), headers)
    world.turn()
    assert set(measure(world, 256)) == set(core.OPERATIONS)
    # A round has 256 sends, 8 receives of 32 and 256 acks.
    by_lane = sum(n for (_, path), n in world.proxy.metrics.calls_by_path.items() if path == "lane")
    assert by_lane > 0.8 * (256 + 8 + 256)


def test_a_change_is_told_against_the_better_of_the_two_earlier_series() -> None:
    least = {
        "before": dict.fromkeys(core.OPERATIONS, 10.0),
        "again": dict.fromkeys(core.OPERATIONS, 11.0),
        "now": dict.fromkeys(core.OPERATIONS, 12.0),
    }
    assert "| send | 10.00 | 12.00 | +20.0 % | 9.1 % |" in core.table("main", least, "one round")
