"""`popmq keys rotate` ten times under load, with three replicas: nothing is lost or refused."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from e2e.raw_client import NoAnswer, RawClient, Received, Refused
from e2e.replicated import GroupClient, ReplicatedGroup

pytestmark = pytest.mark.heavy

ROTATIONS = 10
APART_S = 0.7
SENDERS, RECEIVERS = 2, 2
HELD = 20  # handles that are kept over all rotations, and as many transactions
INVISIBLE_MS = 600_000
LONGEST_GAP_S = 1.0


@dataclass
class Books:
    running: bool = True
    receiving: bool = True
    sent: set[str] = field(default_factory=set)
    sent_at: list[float] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    acked: set[str] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.mark.timeout(180)
def test_ten_rotations_under_load_lose_and_refuse_nothing_also_after_a_failover(
    tmp_path: Path,
) -> None:
    books = Books()
    with ReplicatedGroup(tmp_path, proxies=1) as group:
        group.create(topic="orders", groups=["g"])
        group.create(topic="held", groups=["holders"])
        group.popmq("topic", "create", "deals", "--type", "transaction")
        asyncio.run(_drive(group, books))
    gaps = [after - before for before, after in itertools.pairwise(sorted(books.sent_at))]
    print(
        f"\n{ROTATIONS} rotations: sent {len(books.sent)}, unknown {len(books.unknown)}, acked "
        f"{len(books.acked)}, refused {len(books.refused)}, longest gap {max(gaps):.2f} s"
    )
    assert books.unknown == []
    assert books.refused == []
    assert books.acked == books.sent
    assert len(books.sent) > 200
    assert max(gaps) < LONGEST_GAP_S


async def _drive(group: ReplicatedGroup, books: Books) -> None:
    (endpoint,) = group.endpoints
    async with GroupClient(group.address) as frames, RawClient(endpoint, "holder") as holder:
        state = await frames.in_sync(3)
        for number in range(HELD):
            await holder.send("held", f"held-{number}", b"x")
        halves = {
            f"half-{n}": await holder.send("deals", f"half-{n}", b"x", half=True)
            for n in range(HELD)
        }
        held: list[Received] = []
        while len(held) < HELD:
            held += await holder.receive(
                "holders", "held", limit=8, invisible_ms=INVISIBLE_MS, poll_ms=500
            )
        async with asyncio.TaskGroup() as tasks:
            senders = [
                tasks.create_task(_send(endpoint, books, number)) for number in range(SENDERS)
            ]
            for number in range(RECEIVERS):
                tasks.create_task(_receive(endpoint, books, number))
            for rotation in range(1, ROTATIONS + 1):
                await asyncio.sleep(APART_S)
                printed = await asyncio.to_thread(group.popmq, "keys", "rotate")
                assert len(printed.splitlines()) == rotation + 2, printed
            books.running = False
            await asyncio.gather(*senders)
            await _until_acked(books)
            books.receiving = False
        after = await frames.state()
        assert after.record.epoch == state.record.epoch  # no election
        # The next master has the keys from its log.
        master = group.master(after)
        await asyncio.to_thread(master.stop)
        await frames.in_sync(2)
        for message in held:
            await _answered(partial(holder.ack, "holders", "held", message))
        for message_id, transaction_id in halves.items():
            await _answered(partial(holder.end, "deals", message_id, transaction_id, commit=True))


async def _send(endpoint: str, books: Books, number: int) -> None:
    async with RawClient(endpoint, f"sender-{number}") as client:
        for count in itertools.count():
            if not books.running:
                return
            message_id = f"{number}-{count}"
            try:
                await client.send("orders", message_id, b"x" * 200)
            except NoAnswer:
                books.unknown.append(message_id)
                continue
            books.sent.add(message_id)
            books.sent_at.append(time.monotonic())
            await asyncio.sleep(0.01)


async def _receive(endpoint: str, books: Books, number: int) -> None:
    """Each message is acked about a second after it came: behind another rotation."""
    late: list[tuple[float, Received]] = []
    async with RawClient(endpoint, f"receiver-{number}") as client:
        while books.receiving:
            got = await client.receive("g", "orders", limit=16, invisible_ms=60_000, poll_ms=200)
            late += [(time.monotonic() + 1.0, message) for message in got]
            while late and late[0][0] <= time.monotonic():
                _, message = late.pop(0)
                try:
                    await client.ack("g", "orders", message)
                except Refused as error:
                    books.refused.append(str(error))
                books.acked.add(message.message_id)
                books.news.set()


async def _until_acked(books: Books) -> None:
    async with asyncio.timeout(60):
        while books.acked != books.sent:
            books.news.clear()
            await books.news.wait()


async def _answered(ask: Callable[[], Awaitable[None]]) -> None:
    """Ask until there is an answer: the next master may not serve yet. A refusal fails."""
    async with asyncio.timeout(30):
        while True:
            try:
                await ask()
                return
            except NoAnswer:
                await asyncio.sleep(0.1)
