"""The broker dies by kill -9, again and again, under load: nothing that got an OK is lost.

E2E_KILLS and E2E_SEED make the run of make test-more longer or repeat it.
"""

import asyncio
import itertools
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.crash_ledger import Ack, Seen, check_crashes
from e2e.processes import Cluster
from e2e.raw_client import NoAnswer, RawClient, Received, Refused

KILLS = int(os.environ.get("E2E_KILLS", "5"))
SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC = "kill-nine"
GROUP = "kill-nine-group"
SENDERS = 8
RECEIVERS = 4
INVISIBLE_MS = 3_000
POLL_MS = 1_000
DRAIN_S = 45.0
# No delivery for this long: nothing is left that could still come back.
QUIET_S = INVISIBLE_MS / 1000 + 1.5
# Between tries while the broker is away, so that the loops do not spin.
PAUSE_S = 0.05


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(KILLS, marks=pytest.mark.more),
        pytest.param(20, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(120 + 10 * max(KILLS, 20))
def test_nothing_with_an_ok_is_lost_when_the_broker_is_killed_again_and_again(
    tmp_path: Path, kills: int
) -> None:
    with Cluster(tmp_path, proxies=1) as cluster:
        cluster.create(topic=TOPIC, groups=[GROUP])
        run = Run(cluster.endpoints[0], random.Random(SEED))
        started = time.monotonic()
        asyncio.run(run.drive(cluster, kills))
        took_s = time.monotonic() - started

    report = check_crashes(
        sent_ok=run.sent_ok,
        sent_unknown=run.sent_unknown,
        deliveries=run.seen,
        invisible_ms=INVISIBLE_MS,
    )
    print(
        f"\n{kills} x kill -9 of the broker, {SENDERS} senders, {RECEIVERS} receivers,"
        f" seed {SEED}, {took_s:.0f} s; ready again after {run.restarts()}\n{report.table()}"
    )
    assert len(run.restart_s) == kills
    assert report.sent_ok > 0
    assert run.drained, f"messages still arrived {DRAIN_S:g} s after the last restart"
    assert report.faults == []


@dataclass(slots=True)
class Run:
    """The load, the killer, and what the clients can swear to."""

    endpoint: str
    dice: random.Random
    sent_ok: list[str] = field(default_factory=list)
    sent_unknown: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    drained: bool = False
    _sending: bool = True
    _receiving: bool = True

    async def drive(self, cluster: Cluster, kills: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(SENDERS):
                tasks.create_task(self._send_loop(number))
            for number in range(RECEIVERS):
                tasks.create_task(self._receive_loop(number))
            await self._kill_loop(cluster, kills)
            self._sending = False
            await self._drain()
            self._receiving = False

    def restarts(self) -> str:
        ordered = sorted(self.restart_s)
        return f"{ordered[0]:.2f} to {ordered[-1]:.2f} s"

    async def _kill_loop(self, cluster: Cluster, kills: int) -> None:
        for _ in range(kills):
            await asyncio.sleep(self.dice.uniform(0.2, 2.0))
            cluster.broker.kill9()
            killed = time.monotonic()
            await asyncio.to_thread(cluster.broker.restart)
            self.restart_s.append(time.monotonic() - killed)

    async def _send_loop(self, number: int) -> None:
        async with RawClient(self.endpoint, f"sender-{number}") as client:
            for count in itertools.count():
                if not self._sending:
                    return
                message_id = f"{number:02d}-{count:06d}"
                body = message_id.encode() * self.dice.randrange(1, 64)
                try:
                    await client.send(TOPIC, message_id, body)
                except NoAnswer:
                    self.sent_unknown.append(message_id)
                    await asyncio.sleep(PAUSE_S)
                else:
                    self.sent_ok.append(message_id)

    async def _receive_loop(self, number: int) -> None:
        async with (
            RawClient(self.endpoint, f"receiver-{number}") as client,
            asyncio.TaskGroup() as acks,
        ):
            while self._receiving:
                asked_ms = now_ms()
                try:
                    messages = await client.receive(
                        GROUP, TOPIC, limit=16, invisible_ms=INVISIBLE_MS, poll_ms=POLL_MS
                    )
                except NoAnswer:
                    await asyncio.sleep(PAUSE_S)
                    continue
                for message in messages:
                    assert message.body.startswith(message.message_id.encode())
                    seen = Seen(message.message_id, message.attempt, asked_ms, now_ms())
                    self.seen.append(seen)
                    # One first delivery in twenty is left to expire.
                    if message.attempt > 1 or self.dice.random() >= 0.05:
                        seen.ack = Ack.UNKNOWN
                        acks.create_task(acknowledge(client, message, seen))

    async def _drain(self) -> None:
        """Wait until nothing has arrived for QUIET_S, at most DRAIN_S."""
        until = time.monotonic() + DRAIN_S
        quiet_since_ms = now_ms()
        while time.monotonic() < until and not self.drained:
            await asyncio.sleep(0.1)
            last_ms = max(quiet_since_ms, self.seen[-1].received_ms if self.seen else 0.0)
            self.drained = now_ms() - last_ms > QUIET_S * 1000


async def acknowledge(client: RawClient, message: Received, seen: Seen) -> None:
    try:
        await client.ack(GROUP, TOPIC, message)
    except Refused:
        seen.ack = Ack.REFUSED
    except NoAnswer:
        seen.ack = Ack.UNKNOWN
    else:
        seen.ack = Ack.OK
    seen.ack_ms = now_ms()


def now_ms() -> float:
    return time.monotonic() * 1000
