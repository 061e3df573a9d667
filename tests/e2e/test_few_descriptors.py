"""More queues than the process may open files: sends, a checkpoint, a kill and a start go well."""

import asyncio
import time
from pathlib import Path

import pytest
from e2e.processes import Role
from e2e.raw_client import RawClient

LIMIT = 300  # of descriptors
TOPICS, QUEUES = 50, 8
CHECKPOINT_S = 12.0  # a checkpoint comes each 10 s


class LimitedRole(Role):
    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *super().command()]


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_more_queues_than_descriptors_end_nothing_and_lose_nothing(tmp_path: Path) -> None:
    role = LimitedRole(
        "up",
        ["up", "--data", str(tmp_path / "data"), "--port", "0", "--http-port", "0"],
        folder=tmp_path,
        settings={"POPMQ_TOPIC_AUTO_CREATE": "true", "POPMQ_TOPIC_QUEUES": str(QUEUES)},
    )
    with role:
        asyncio.run(_send(role.ready.endpoint))
        made = role.metric("popmq_store_checkpoints_total")
        end = time.monotonic() + CHECKPOINT_S
        while role.metric("popmq_store_checkpoints_total") == made and time.monotonic() < end:
            time.sleep(0.2)
        assert role.metric("popmq_store_checkpoints_total") > made
        role.kill9()
        role.restart()
        assert asyncio.run(_receive(role.ready.endpoint)) == TOPICS * QUEUES


async def _send(endpoint: str) -> None:
    async with RawClient(endpoint, "sender") as client:
        for topic in range(TOPICS):
            for number in range(QUEUES):
                await client.send(f"topic-{topic}", f"{topic}-{number}", b"body")


async def _receive(endpoint: str) -> int:
    count = 0
    async with RawClient(endpoint, "reader") as client:
        for topic in range(TOPICS):
            left = QUEUES
            while left:
                got = await client.receive(
                    "readers", f"topic-{topic}", limit=32, invisible_ms=30_000, poll_ms=3_000
                )
                assert got
                await client.ack("readers", f"topic-{topic}", *got)
                left -= len(got)
            count += QUEUES
    return count
