"""A proxy dies by kill -9 between receive and ack: its handles are good at the other proxy.

Controller, broker and two proxies are processes; the proxies die in turn.  E2E_SEED repeats a
run's choices.
"""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.processes import Cluster, Role
from e2e.raw_client import NoAnswer, RawClient, Received, Refused

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC, GROUP, EMPTY_TOPIC = "orders", "workers", "empty"
INVISIBLE_MS = 6_000
EXTENDED_MS = 9_000
SHORTENED_MS = 50
# Longer than anything received may stay invisible.
LAST_POLL_MS = EXTENDED_MS + 1_000
READY_S = 10.0


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(5, marks=pytest.mark.heavy), pytest.param(200, marks=pytest.mark.long)],
)
@pytest.mark.timeout(900)
def test_handles_of_a_killed_proxy_are_good_at_the_other_one(tmp_path: Path, rounds: int) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        cluster.create(topic=TOPIC, groups=[GROUP])
        cluster.create(topic=EMPTY_TOPIC, groups=[])
        run = Run(cluster, random.Random(SEED))
        started = time.monotonic()
        for number in range(rounds):
            asyncio.run(run.round(number))
        took_s = time.monotonic() - started
        left = asyncio.run(run.left_over())
        labels = f'{{group="{GROUP}",topic="{TOPIC}"}}'
        in_flight = cluster.broker.metric(f"popmq_consumer_inflight_messages{labels}")
        ready = cluster.broker.metric(f"popmq_consumer_ready_messages{labels}")
        revived = cluster.broker.metric("popmq_pop_revive_retry_messages_total")
        dead = cluster.broker.metric("popmq_send_to_dlq_messages_total")
    print(
        f"\n{rounds} x kill -9 of a proxy between receive and ack, seed {SEED}: {run.sent} sent,"
        f" {run.acked} acked ({run.in_batches} in batches), {run.extended} extended,"
        f" {run.shortened} given back on purpose, {len(run.redelivered)} redelivered,"
        f" {len(run.refused)} refused, {took_s:.1f} s"
    )
    assert run.redelivered == []
    assert run.refused == []
    assert left == []
    assert run.acked == run.sent
    assert (in_flight, ready, dead) == (0, 0, 0)
    assert revived == run.shortened


@dataclass(slots=True)
class Run:
    """What the consumer did, and what it did not expect."""

    cluster: Cluster
    dice: random.Random
    sent: int = 0
    acked: int = 0
    in_batches: int = 0
    extended: int = 0
    shortened: int = 0
    redelivered: list[Received] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def round(self, number: int) -> None:
        """Receive through one proxy, kill it, settle everything through the other."""
        first, second = self.cluster.proxies[:: 1 if number % 2 else -1]
        await answers(first)
        await answers(second)
        ids = [f"{number:04d}-{name}" for name in ("single", "long", "short", "b1", "b2", "b3")]
        async with RawClient(first.ready.endpoint, "consumer") as client:
            for message_id in ids:
                await client.send(TOPIC, message_id, message_id.encode())
            self.sent += len(ids)
            held = await self._receive(client, ids)
            first.kill9()
        # The same consumer, connected anew at once.
        async with RawClient(second.ready.endpoint, "consumer") as client:
            await self._settle(client, [held[message_id] for message_id in ids])
        await asyncio.to_thread(first.restart)

    async def left_over(self) -> list[Received]:
        """What comes while everything that was ever received would have to come back."""
        endpoint = self.cluster.proxies[0].ready.endpoint
        await answers(self.cluster.proxies[0])
        async with RawClient(endpoint, "consumer") as client:
            return await client.receive(
                GROUP, TOPIC, limit=32, invisible_ms=INVISIBLE_MS, poll_ms=LAST_POLL_MS
            )

    async def _receive(
        self, client: RawClient, ids: list[str], *, attempt: int = 1
    ) -> dict[str, Received]:
        """These messages; anything else that comes meanwhile is noted as redelivered."""
        held: dict[str, Received] = {}
        while held.keys() != set(ids):
            got = await client.receive(
                GROUP, TOPIC, limit=32, invisible_ms=INVISIBLE_MS, poll_ms=INVISIBLE_MS // 2
            )
            assert got, f"only {sorted(held)} of {ids} came"
            for message in got:
                if message.attempt == attempt and message.message_id in ids:
                    held[message.message_id] = message
                else:
                    self.redelivered.append(message)
        return held

    async def _settle(self, client: RawClient, held: list[Received]) -> None:
        single, long, short, *batch = held
        deeds = [
            self._ack(client, single),
            self._extend(client, long),
            self._shorten(client, short),
            self._ack(client, *batch),
        ]
        self.dice.shuffle(deeds)
        for deed in deeds:
            try:
                await deed
            except (Refused, NoAnswer) as error:
                self.refused.append(repr(error))

    async def _ack(self, client: RawClient, *messages: Received) -> None:
        await client.ack(GROUP, TOPIC, *messages)
        self.acked += len(messages)
        self.in_batches += len(messages) if len(messages) > 1 else 0

    async def _extend(self, client: RawClient, message: Received) -> None:
        renewed = await client.change(GROUP, TOPIC, message, invisible_ms=EXTENDED_MS)
        self.extended += 1
        with pytest.raises(Refused, match="superseded"):
            await client.ack(GROUP, TOPIC, message)
        await self._ack(client, renewed)

    async def _shorten(self, client: RawClient, message: Received) -> None:
        """It comes back as attempt 2, once, and long before its first time is over."""
        await client.change(GROUP, TOPIC, message, invisible_ms=SHORTENED_MS)
        self.shortened += 1
        message_id = message.message_id
        again = await self._receive(client, [message_id], attempt=2)
        await self._ack(client, again[message_id])


async def answers(proxy: Role) -> None:
    """Return once the proxy, which prints its ready line earlier, has a way to the broker."""
    until = time.monotonic() + READY_S
    async with RawClient(proxy.ready.endpoint, "probe") as client:
        while True:
            try:
                await client.receive(
                    GROUP, EMPTY_TOPIC, limit=1, invisible_ms=INVISIBLE_MS, poll_ms=0
                )
                return
            except NoAnswer:
                assert time.monotonic() < until, f"{proxy.name} has no broker after {READY_S:g} s"
                await asyncio.sleep(0.01)
