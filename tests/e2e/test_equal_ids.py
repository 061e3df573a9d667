"""Two clients give their messages the same ids: whatever was OK is delivered, kills or not.

E2E_HISTORIES and E2E_SEED make the run longer or repeat it.
"""

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from e2e.processes import Cluster
from e2e.raw_client import NoAnswer, RawClient

HISTORIES = int(os.environ.get("E2E_HISTORIES", "10"))
SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPICS = {"plain": "normal", "ordered": "fifo", "delayed": "delay", "halves": "transaction"}
CLIENTS = ("a", "b")
OPERATIONS = 24
DELAY_MS = 800
DRAIN_S = 30.0

Message = tuple[str, str, bytes]  # topic, id, body


class History:
    """One run of sends, and which of them have to be there in the end."""

    def __init__(self, number: int, rng: random.Random, clients: dict[str, RawClient]) -> None:
        self._rng = rng
        self._clients = clients
        self._name = f"h{number:03d}"
        # Of each message the clients whose send was OK and not taken back later.
        self.promised: defaultdict[Message, set[str]] = defaultdict(set)

    async def run(self) -> None:
        for _ in range(OPERATIONS):
            topic = self._rng.choice(list(TOPICS))
            message = (
                topic,
                f"{self._name}-{self._rng.randrange(3)}",
                f"{self._name} {topic} {self._rng.randrange(3)}".encode(),
            )
            try:
                await self._send(message, self._rng.choice(CLIENTS))
            except NoAnswer:  # the broker is away: who knows
                await asyncio.sleep(0.02)

    async def _send(self, message: Message, name: str) -> None:
        topic, message_id, body = message
        client, rng = self._clients[name], self._rng
        match topic:
            case "ordered":
                await client.send(topic, message_id, body, key=rng.choice("xy"))
            case "delayed":
                due_ms = time.time_ns() // 1_000_000 + DELAY_MS
                handle = await client.send(topic, message_id, body, due_ms=due_ms)
                if rng.random() < 0.3:
                    self.promised[message].discard(name)
                    await client.recall(topic, handle)
                    return
            case "halves":
                transaction = await client.send(topic, message_id, body, half=True)
                commit = rng.random() < 0.7
                await client.end(topic, message_id, transaction, commit=commit)
                if not commit:
                    return
            case _:
                await client.send(topic, message_id, body)
        self.promised[message].add(name)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_send_that_was_ok_is_delivered_whatever_has_its_id(tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {HISTORIES} histories")
    with Cluster(tmp_path, proxies=1) as cluster:
        for topic, kind in TOPICS.items():
            cluster.popmq("topic", "create", topic, "--type", kind)
            group = "fifo" if kind == "fifo" else "normal"
            cluster.popmq("group", "create", f"readers-of-{topic}", "--type", group)
        promised, delivered = asyncio.run(_drive(cluster))
    missing = {
        message: (sorted(clients), delivered[message])
        for message, clients in promised.items()
        if delivered[message] < len(clients)
    }
    print(f"{len(promised)} promised, {delivered.total()} delivered")
    assert len(promised) > 5 * HISTORIES
    assert not missing


async def _drive(cluster: Cluster) -> tuple[dict[Message, set[str]], Counter[Message]]:
    rng = random.Random(SEED)
    promised: dict[Message, set[str]] = {}
    async with AsyncExitStack() as stack:
        endpoint = cluster.endpoints[0]
        clients = {
            name: await stack.enter_async_context(RawClient(endpoint, name)) for name in CLIENTS
        }
        for number in range(HISTORIES):
            history = History(number, rng, clients)
            sends = asyncio.create_task(history.run())
            if number % 3 == 0:
                await asyncio.sleep(rng.random() * 0.2)
                cluster.broker.kill9()
                await asyncio.to_thread(cluster.broker.restart)
            await sends
            promised |= history.promised
        await asyncio.sleep(DELAY_MS / 1000)
        delivered = Counter[Message]()
        for topic in TOPICS:
            wanted = {message: len(names) for message, names in promised.items()}
            missing = {message for message in wanted if message[0] == topic}
            await _receive(clients["a"], topic, delivered, wanted, missing)
    return promised, delivered


async def _receive(
    client: RawClient,
    topic: str,
    delivered: Counter[Message],
    wanted: dict[Message, int],
    missing: set[Message],
) -> None:
    """Until nothing is missing; for as long as something may come."""
    end = time.monotonic() + DRAIN_S
    group = f"readers-of-{topic}"
    while missing and time.monotonic() < end:
        try:
            got = await client.receive(group, topic, limit=32, invisible_ms=30_000, poll_ms=1_000)
            for message in got:
                await client.ack(group, topic, message)
        except NoAnswer:
            await asyncio.sleep(0.05)
            continue
        delivered.update((topic, message.message_id, message.body) for message in got)
        missing = {message for message in missing if delivered[message] < wanted[message]}
