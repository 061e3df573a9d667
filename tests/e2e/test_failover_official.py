"""Official clients of both languages send, delay, receive and acknowledge while masters die.

Three brokers, a controller and a proxy are processes, and so is each client.  E2E_SEED repeats a
run's choices.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from e2e.flow import NEXT_SEND_S, command, has, judge, percentiles, sent_after, settle
from e2e.official import START_S, OfficialClient, ensure_node_client
from e2e.replicated import GROUP, GroupClient, ReplicatedGroup, agree

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC, LATER = "flow", "flow-later"
BOTH = ("python", "node")
INVISIBLE_S = 10
GAP_MS = 1_000  # of a planned hand-over
# An answer that was on its way when the master died says nothing of the next one.
ON_ITS_WAY_MS = 50


@pytest.mark.parametrize(
    ("kills", "languages"),
    [
        pytest.param(4, BOTH, marks=[pytest.mark.heavy, pytest.mark.timeout(300)], id="4"),
        pytest.param(50, BOTH, marks=[pytest.mark.long, pytest.mark.timeout(2_400)], id="50"),
        pytest.param(10, ("java",), marks=[pytest.mark.long, pytest.mark.timeout(900)], id="java"),
    ],
)
def test_official_clients_lose_nothing_when_masters_are_killed(
    tmp_path: Path, kills: int, languages: tuple[str, ...]
) -> None:
    ensure_node_client()
    dice = random.Random(SEED)
    with flowing(tmp_path, *languages) as (group, clients):
        killed_ms = [kill_master(group, clients, dice) for _ in range(kills)]
        settle(group, clients)
        asyncio.run(all_agree(group))
    sent = sorted(item["at_ms"] for client in clients for item in client.of("sent"))
    gaps = [next(at for at in sent if at > ms + ON_ITS_WAY_MS) - ms for ms in killed_ms]
    print(f"\n{kills} x kill -9 of the master, seed {SEED}; from the kill to the next acknowledged")
    print(f"send: {percentiles(gaps)}")
    for client in clients:
        judge(client)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_planned_hand_over_keeps_official_clients_waiting_for_a_second_at_most(
    tmp_path: Path,
) -> None:
    with flowing(tmp_path, "python") as (group, clients):
        moved = [hand_over(group, clients) for _ in range(5)]
        settle(group, clients)
        asyncio.run(all_agree(group))
    (client,) = clients
    gaps = [longest_pause_ms(client, began, ended) for began, ended in moved]
    print(f"\nplanned hand-overs; longest pause between acknowledged sends: {percentiles(gaps)}")
    judge(client)
    assert client.of("send_failed") == []
    assert max(gaps) <= GAP_MS


@contextmanager
def flowing(
    folder: Path, *languages: str
) -> Iterator[tuple[ReplicatedGroup, list[OfficialClient]]]:
    """A group in sync, and a client of each language at work; each has a group of its own."""
    with ExitStack() as stack:
        # What a push consumer was given by a master that died before it could say so.
        settings = {"POPMQ_POP_INVISIBLE_DEFAULT_MS": f"{INVISIBLE_S * 1_000}"}
        group = stack.enter_context(ReplicatedGroup(folder, proxies=1, settings=settings))
        asyncio.run(in_sync(group))
        group.popmq("topic", "create", TOPIC)
        group.popmq("topic", "create", LATER, "--type", "delay")
        clients = []
        for language in languages:
            group.popmq("group", "create", f"flow-{language}", "--max-attempts", "100")
            client = OfficialClient(f"flow-{language}", command(language), folder=folder)
            clients.append(stack.enter_context(client))
            client.tell(
                op="start",
                endpoint=group.endpoints[0],
                topic=TOPIC,
                later=LATER,
                group=client.name,
                invisible_s=INVISIBLE_S,
            )
        for client in clients:
            client.wait(partial(has, client, "ready", 1), "being ready", within_s=START_S)
            client.tell(op="go")
        for client in clients:
            client.wait(partial(has, client, "acked", 20), "20 acks", within_s=START_S)
        yield group, clients


def kill_master(group: ReplicatedGroup, clients: list[OfficialClient], dice: random.Random) -> int:
    """Wall time of the kill (ms). On return all three replicas are in the set again."""
    time.sleep(dice.uniform(0.2, 1.5))
    before = asyncio.run(in_sync(group))
    master = group.master(before)
    killed_ms = time.time_ns() // 1_000_000
    master.kill9()
    for client in clients:
        went_on = partial(sent_after, client, killed_ms + ON_ITS_WAY_MS)
        client.wait(went_on, "a send after the kill", within_s=NEXT_SEND_S)
    master.restart()
    after = asyncio.run(in_sync(group))
    assert after.record.epoch > before.record.epoch
    return killed_ms


def hand_over(group: ReplicatedGroup, clients: list[OfficialClient]) -> tuple[int, int]:
    """Wall times (ms) around one, up to the next sends on the new master."""
    before = asyncio.run(in_sync(group))
    began_ms = time.time_ns() // 1_000_000
    group.popmq("failover", GROUP, "--yes")
    ended_ms = time.time_ns() // 1_000_000
    for client in clients:
        went_on = partial(sent_after, client, ended_ms + ON_ITS_WAY_MS)
        client.wait(went_on, "a send after the hand-over", within_s=NEXT_SEND_S)
    after = asyncio.run(in_sync(group))
    assert after.record.leader != before.record.leader
    return began_ms, time.time_ns() // 1_000_000


def longest_pause_ms(client: OfficialClient, began_ms: int, ended_ms: int) -> int:
    at: list[int] = sorted(manifest["at_ms"] for manifest in client.of("sent"))
    at = [ms for ms in at if began_ms - 1_000 <= ms <= ended_ms]
    return max(later - sooner for sooner, later in itertools.pairwise(at))


async def in_sync(group: ReplicatedGroup) -> Any:
    async with GroupClient(group.address) as client:
        return await client.in_sync(3)


async def all_agree(group: ReplicatedGroup) -> None:
    async with GroupClient(group.address) as client:
        await agree(group, client)
