"""A slave's disk is wiped while 2,000 messages a second flow: it is back, with the same tables.

The messages come at their times, whether the broker keeps up or not; a latency is counted from
the time at which a message should have left.
"""

import asyncio
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.processes import Role
from e2e.replicated import GroupClient, ReplicatedGroup, agree_on_tables, put

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import AckRequest, Kind, PopRequest

TOPIC, CONSUMERS, FILLER = "orders", "workers", "filler"
RATE = 2_000  # messages a second
TICK_S = 0.005
BODY_BYTES = 512
FILL_BYTES = 96 << 20  # in the log before
CALM_S = 5.0  # measured before
ALONE_S = 2.0
WIPED_S = 90.0
DRAINED_S = 60.0
INVISIBLE_MS = 300_000
CONSUMING = 2

# Alone: it sends at a rate that a busy machine cannot keep.
pytestmark = [pytest.mark.heavy, pytest.mark.alone]


@pytest.mark.timeout(400)
def test_a_wiped_slave_is_back_in_the_set_while_2000_messages_a_second_flow(
    tmp_path: Path,
) -> None:
    settings = {"POPMQ_STORE_SNAPSHOT_BYTES": "8MiB"}
    with ReplicatedGroup(tmp_path, settings=settings) as group:
        run = Run(group)
        asyncio.run(run.drive())
    print(f"\n{run.table()}")
    assert run.flow.failed == 0
    assert len(run.flow.acknowledged) > RATE * CALM_S / 2
    assert run.flow.acknowledged <= run.received
    assert run.again == 0


@dataclass(slots=True)
class Run:
    group: ReplicatedGroup
    flow: "Flow" = field(init=False)
    received: set[bytes] = field(default_factory=set)
    again: int = 0
    wiped_s: float = 0.0
    copied_bytes: int = 0
    calm: list[float] = field(default_factory=list)
    waited_for: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    catching_up: list[float] = field(default_factory=list)
    _consuming: bool = True
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # something was received

    async def drive(self) -> None:
        async with GroupClient(self.group.address) as client:
            state = await client.in_sync(3)
            slave = next(
                broker for broker in self.group.brokers if broker is not self.group.master(state)
            )
            await client.ask(Kind.PUT, put(TOPIC, b"first"))
            for _ in range(FILL_BYTES // 900_000):
                await client.ask(Kind.PUT, put(FILLER, bytes(900_000)))
            self.flow = Flow(client)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CONSUMING):
                    tasks.create_task(self._consume())
                sending = tasks.create_task(self.flow.send())
                await self._wipe(client, slave)
                self.flow.running = False
                await sending
                await self._drained()
                self._consuming = False
            await agree_on_tables(self.group, client, FILLER)

    def table(self) -> str:
        return "\n".join(
            (
                f"{RATE} msg/s of {BODY_BYTES} bytes: {len(self.flow.acknowledged)} acknowledged,"
                f" {self.flow.skipped} not sent for too many under way, {self.flow.failed} refused;"
                f" wiped and back in the set after {self.wiped_s:.1f} s with"
                f" {self.copied_bytes >> 20} MiB",
                f"send latency before: {percentiles(self.calm)}",
                f"from its kill until it was out of the set: {percentiles(self.waited_for)}",
                f"while the slave was gone: {percentiles(self.alone)}",
                f"while it caught up: {percentiles(self.catching_up)}",
            )
        )

    async def _wipe(self, client: GroupClient, slave: Role) -> None:
        await asyncio.sleep(1)
        self.flow.take()
        await asyncio.sleep(CALM_S)
        self.calm = self.flow.take()
        await asyncio.to_thread(slave.kill9)
        identity = (self.group.data(slave) / "identity").read_text()
        await asyncio.to_thread(shutil.rmtree, self.group.data(slave))
        self.waited_for = await self._dropped(client)
        await asyncio.sleep(ALONE_S)
        self.alone = self.flow.take()
        began = time.monotonic()
        await asyncio.to_thread(slave.restart)
        await client.in_sync(3, within_s=WIPED_S)
        self.wiped_s = time.monotonic() - began
        self.catching_up = self.flow.take()
        assert (self.group.data(slave) / "identity").read_text() != identity
        state = await client.state()
        self.copied_bytes = max(member.end for member in state.members)

    async def _dropped(self, client: GroupClient) -> list[float]:
        """Until the set is smaller, and what waited for that was answered."""
        async with asyncio.timeout(WIPED_S):
            while True:
                if len((await client.state()).record.sync_state_set) == 2:
                    break
                await asyncio.sleep(0.05)
        await asyncio.sleep(ALONE_S)
        return self.flow.take()

    async def _consume(self) -> None:
        request = hop.encode_pop(PopRequest(TOPIC, CONSUMERS, CONSUMERS, 32, INVISIBLE_MS, 500))
        async with GroupClient(self.group.address) as client:
            while self._consuming:
                deliveries = hop.decode_pop_reply(await client.once(Kind.POP, request)).deliveries
                if not deliveries:
                    continue
                self.again += sum(delivery.head in self.received for delivery in deliveries)
                self.received |= {delivery.head for delivery in deliveries}
                self._news.set()
                acks = AckRequest(TOPIC, CONSUMERS, [delivery.handle for delivery in deliveries])
                reply = await client.once(Kind.ACK, hop.encode_ack(acks))
                assert {result.code for result in hop.decode_ack_reply(reply)} == {Code.OK}

    async def _drained(self) -> None:
        async with asyncio.timeout(DRAINED_S):
            while self.flow.acknowledged - self.received:
                await self._news.wait()
                self._news.clear()


class Flow:
    """Sends at its rate while `running`; at most 2 s of it are under way."""

    def __init__(self, client: GroupClient) -> None:
        self.running = True
        self.acknowledged: set[bytes] = set()
        self.failed = self.skipped = 0
        self._client = client
        self._latencies: list[float] = []
        self._under_way = 0
        self._count = 0

    def take(self) -> list[float]:
        """Latencies (ms) of what was answered since the last time."""
        results, self._latencies = self._latencies, []
        return results

    async def send(self) -> None:
        master = await self._client.master()
        began, sent = time.monotonic(), 0
        while self.running or self._under_way:
            due = int((time.monotonic() - began) * RATE) if self.running else sent
            for number in range(sent, due):
                if self._under_way < 2 * RATE:
                    self._send_one(master, began + number / RATE)
                else:
                    self.skipped += 1
            sent = due
            await asyncio.sleep(TICK_S)

    def _send_one(self, master: hop.Port, at: float) -> None:
        self._count += 1
        body = b"%d" % self._count
        body += b"." * (BODY_BYTES - len(body))

        def answered(reply: bytes | PopmqError) -> None:
            self._under_way -= 1
            if isinstance(reply, PopmqError) or hop.decode_put_reply(reply)[0].code != Code.OK:
                self.failed += 1
                return
            self.acknowledged.add(body)
            self._latencies.append((time.monotonic() - at) * 1000)

        self._under_way += 1
        master.request(Kind.PUT, put(TOPIC, body), 30_000, answered)


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"p50 {p50:.1f} p99 {p99:.1f} max {ordered[-1]:.1f} ms of {len(ordered)}"
