"""A broker with one and ten million records: all are there after kill -9; how long a start takes.

Every fact is asserted, no time is; the table that is printed goes into docs/benchmarks.md.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e import processes
from e2e.processes import LOCAL

from popmq.common.errors import Code, Refused
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, PopRequest, PutEntry, PutRequest
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb

TOPIC = "growth"
GROUP = "growth-group"
QUEUES = 8
BODY = 100
BATCH = 1_000
IN_FLIGHT = 8  # puts
POPS = 4
CALL_MS = 60_000
READY_S = 300.0  # for a start that reads the whole log


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(150_000, marks=[pytest.mark.heavy, pytest.mark.timeout(300)]),
        pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
        pytest.param(10_000_000, marks=[pytest.mark.long, pytest.mark.timeout(3_600)]),
    ],
)
def test_all_records_are_there_after_kill_nine_with_and_without_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    monkeypatch.setattr(processes, "READY_S", READY_S)
    broker = processes.Role(
        "broker",
        ["broker"],
        folder=tmp_path,
        settings={
            "POPMQ_HTTP_LISTEN": f"{LOCAL}:0",
            "POPMQ_BROKER_LISTEN": f"{LOCAL}:0",
            "POPMQ_BROKER_DATA": "data",
            "POPMQ_STORE_SEGMENT_BYTES": "64MiB",
            # Few records make one too; otherwise as by default.
            "POPMQ_STORE_SNAPSHOT_BYTES": "128MiB" if records > 150_000 else "16MiB",
        },
    )
    run = Run(broker, records)
    try:
        began = time.monotonic()
        with broker:
            run.drive(time.monotonic() - began)
    finally:
        shutil.rmtree(broker.folder / "data", ignore_errors=True)
    print(f"\n{run.table()}")


@dataclass(slots=True)
class Run:
    """One broker, filled once and started three times."""

    broker: processes.Role
    records: int
    rows: list[str] = field(default_factory=list)
    popped: set[bytes] = field(default_factory=set)

    def drive(self, first_start_s: float) -> None:
        asyncio.run(self._create())
        self._note("empty", f"{first_start_s:.2f}", 0)
        began = time.monotonic()
        asyncio.run(self._fill())
        rate = self.records / (time.monotonic() - began)
        asyncio.run(self._check())
        self._note(f"filled, {rate:,.0f} records/s", "", 0)

        snapshots = self.broker.folder / "data" / "snapshot"
        assert any(snapshots.iterdir()), "no snapshot was made while the log grew"
        self.broker.kill9()
        read = self._start_again("killed, with its snapshot")
        assert read < self.records

        self.broker.kill9()
        shutil.rmtree(snapshots)
        read = self._start_again("killed, without the snapshot")
        assert read >= self.records

    def table(self) -> str:
        head = f"| {self.records:,} records of {BODY} B | ready after s | records read | RSS MiB |"
        return "\n".join((head, "|---|---|---|---|", *self.rows))

    def _start_again(self, title: str) -> int:
        """Start the killed broker and check everything; returns the records that start read."""
        began = time.monotonic()
        self.broker.restart()
        took_s = time.monotonic() - began
        read = self.broker.metric("popmq_store_recovered_records")
        self._note(title, f"{took_s:.2f}", read)
        asyncio.run(self._check())
        return read

    def _note(self, title: str, took_s: str, read: int) -> None:
        resident = resident_mib(self.broker.pid)
        self.rows.append(f"| {title} | {took_s} | {read:,} | {resident} |")

    @asynccontextmanager
    async def _port(self) -> AsyncIterator[FramePort]:
        """The broker over its unix socket."""
        address = f"unix:{self.broker.folder}/data/frames.sock"
        port = FramePort(address, Hello(role=ProcessRole.PROXY, name="growth", cluster="popmq"))
        port.start()
        try:
            yield port
        finally:
            await port.close()

    async def _create(self) -> None:
        async with self._port() as port:
            topic = pb.Topic(name=TOPIC, queues=QUEUES, type="normal")
            request = pb.CreateTopicRequest(topic=topic).SerializeToString()
            new_call = await call(port, Kind.CREATE_TOPIC, request, CALL_MS)
            assert pb.TopicReply.FromString(new_call).status.code == Code.OK

    async def _fill(self) -> None:
        """Record number n goes to queue n % QUEUES, so its offset is known beforehand."""
        firsts = iter(range(0, self.records, BATCH))

        async def put_batches(port: FramePort) -> None:
            for first in firsts:
                entries = [entry(number) for number in range(first, first + BATCH)]
                request = hop.encode_put(PutRequest(TOPIC, entries))
                reply = await call(port, Kind.PUT, request, CALL_MS)
                places = [
                    (result.code, result.queue_offset) for result in hop.decode_put_reply(reply)
                ]
                assert places == [(Code.OK, (first + i) // QUEUES) for i in range(BATCH)]

        async with self._port() as port, asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(put_batches(port))

    async def _check(self) -> None:
        async with self._port() as port:
            for queue_id in range(QUEUES):
                await self._check_queue(port, queue_id)
            for _ in range(POPS):
                await self._pop_and_ack(port)

    async def _check_queue(self, port: FramePort, queue_id: int) -> None:
        """Its first, middle and last message are what was sent, and nothing follows the last."""
        count = self.records // QUEUES
        for offset in (0, count // 2, count - 1):
            messages = await find(port, queue_id, offset)
            assert [message.head for message in messages] == [body(offset * QUEUES + queue_id)]
        with pytest.raises(Refused):
            await find(port, queue_id, count)

    async def _pop_and_ack(self, port: FramePort) -> None:
        """What was acked before a kill does not come again."""
        request = PopRequest(TOPIC, GROUP, "growth", 32, 3_600_000, 1_000)
        reply = await call(port, Kind.POP, hop.encode_pop(request), CALL_MS)
        deliveries = hop.decode_pop_reply(reply).deliveries
        assert deliveries
        for delivery in deliveries:
            assert delivery.head == body(delivery.queue_offset * QUEUES + delivery.queue_id)
            assert delivery.attempt == 1
            assert delivery.head not in self.popped
            self.popped.add(delivery.head)
        acks = hop.AckRequest(TOPIC, GROUP, [item.handle for item in deliveries])
        results = hop.decode_ack_reply(await call(port, Kind.ACK, hop.encode_ack(acks), CALL_MS))
        assert {result.code for result in results} == {Code.OK}


async def find(port: FramePort, queue_id: int, offset: int) -> list[pb.FoundMessage]:
    request = pb.FindMessagesRequest(topic=TOPIC, queue_id=queue_id, queue_offset=offset)
    reply = await call(port, Kind.FIND_MESSAGES, request.SerializeToString(), CALL_MS)
    return list(pb.FindMessagesReply.FromString(reply).messages)


def body(number: int) -> bytes:
    return b"%0*d" % (BODY, number)


def entry(number: int) -> PutEntry:
    properties = b"\x1a\x20%032d" % number  # system_properties.message_id
    return PutEntry(MessageType.NORMAL, body(number), properties, 0, number % QUEUES)


def resident_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) >> 10
