"""The disk runs full: sends are refused, all that was acknowledged can be drained, none is lost.

The disk is a tmpfs of its own, so this needs the right to mount: it is skipped otherwise.
"""

import asyncio
import itertools
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e import processes
from e2e.small_disks import filled_up, mount, small_disk
from programs import run_program

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import (
    Delivery,
    Kind,
    PopRequest,
    PutEntry,
    PutRequest,
)
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb

TOPIC = "full-disk"
GROUP = "full-disk-group"
QUEUES = 8
BODY = 2_048
BATCH = 16
SENDERS = 4
RECEIVERS = 4
REFUSALS = 100  # in a row for each sender: the disk is full, and not just for a moment
LEFT_IN_FLIGHT = 32  # popped before the kill and never acked
INVISIBLE_MS = 2_000  # of those
LONG_MS = 600_000  # of all others: none comes back by itself
POLL_MS = 500
QUIET_S = INVISIBLE_MS / 1000 + 1.5
CALL_MS = 10_000
BOUND_S = 90.0  # for each part
PAUSE_S = 0.05
REASON = re.compile(r"store\.disk_stop_percent|next segment")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 MB."""
    with small_disk(tmp_path / "disk", "size=200m") as folder:
        yield folder


@pytest.mark.heavy
@pytest.mark.timeout(480)
def test_a_full_disk_refuses_sends_loses_nothing_and_goes_on_when_it_has_grown(
    disk: Path, tmp_path: Path
) -> None:
    role = processes.Role(
        "up",
        ["up", "--data", str(disk), "--port", "0", "--http-port", "0"],
        folder=tmp_path,
        settings={"POPMQ_STORE_SEGMENT_BYTES": "16MiB"},
    )
    with role:
        run = Run(role, disk)
        asyncio.run(run.fill())
        run.note("full")
        asyncio.run(run.drain(len(run.sent_ok) // 2))
        run.note("half drained")
        asyncio.run(run.leave_some_in_flight())

        role.kill9()
        began = time.monotonic()
        role.restart()
        run.note(f"killed, ready again after {time.monotonic() - began:.2f} s")
        asyncio.run(run.still_refuses())
        with filled_up(disk):
            role.terminate()  # insists on exit code 0
        assert "stopped without a last snapshot" in role.log.read_text(encoding="utf-8")
        role.restart()
        run.note("stopped while not a byte was free, and started again")
        asyncio.run(run.drain(len(run.sent_ok)))
        run.note("drained")

        assert mount(disk, "remount,size=400m") == ""
        run.note(f"grown to 400 MB, sends taken again after {asyncio.run(run.resume()):.2f} s")

    print(f"\n{run.table()}")
    assert not run.faults()


@pytest.mark.heavy
def test_a_read_only_data_directory_is_refused_with_its_name_and_left_as_it_is(disk: Path) -> None:
    data = disk / "data"
    data.mkdir()
    assert mount(disk, "remount,ro") == ""
    refused = run_program(
        [sys.executable, "-m", "popmq.cli", "up", "--data", str(data), "--port", "0"],
        env=processes.role_environment({"POPMQ_HTTP_LISTEN": f"{processes.LOCAL}:0"}),
        stdin=subprocess.DEVNULL,
        timeout=processes.READY_S,
    )
    assert refused.returncode == 1
    assert (
        f"data directory {data} cannot be written: Read-only file system (broker.data, --data)"
        in refused.stderr
    )
    assert list(data.iterdir()) == []


@dataclass(slots=True)
class Run:
    """What the clients can swear to; sends end in OK or in a refusal, or the test fails."""

    role: processes.Role
    disk: Path
    sent_ok: set[bytes] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    deliveries: Counter[bytes] = field(default_factory=Counter)
    acked: set[bytes] = field(default_factory=set)
    left: set[bytes] = field(default_factory=set)
    rows: list[str] = field(default_factory=list)
    _next: "itertools.count[int]" = field(default_factory=itertools.count)

    def faults(self) -> list[str]:
        delivered = set(self.deliveries)
        again = {name for name, count in self.deliveries.items() if count > 1}
        results = {
            "OK and never delivered": self.sent_ok - delivered,
            "OK and never acked": self.sent_ok - self.acked,
            "delivered without an OK": delivered - self.sent_ok,
            "delivered again without a cause": again - self.left,
            "left in flight and not delivered again": self.left - again,
        }
        return [f"{len(names)} {what}" for what, names in results.items() if names]

    def note(self, title: str) -> None:
        usage = shutil.disk_usage(self.disk)
        self.rows.append(
            f"{title}: {100 * usage.used / usage.total:.1f} % of the disk used,"
            f" {len(self.sent_ok)} sends OK, {sum(self.refused.values())} refused,"
            f" {len(self.acked)} acked"
        )

    def table(self) -> str:
        again = sum(count - 1 for count in self.deliveries.values())
        reasons = (f"refused {count} times: {text}" for text, count in self.refused.items())
        end = f"lost {len(self.sent_ok - self.acked)}, delivered again {again} of {len(self.left)}"
        return "\n".join((*self.rows, *reasons, f"{end} left in flight"))

    async def fill(self) -> None:
        """Send until every sender is refused REFUSALS times in a row."""
        async with self._port() as port:
            topic = pb.Topic(name=TOPIC, queues=QUEUES, type="normal")
            group = pb.Group(name=GROUP, type="normal", start_at="oldest")
            create_topic = pb.CreateTopicRequest(topic=topic).SerializeToString()
            await call(port, Kind.CREATE_TOPIC, create_topic, CALL_MS)
            create_group = pb.CreateGroupRequest(group=group).SerializeToString()
            await call(port, Kind.CREATE_GROUP, create_group, CALL_MS)
            async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as tasks:
                for _ in range(SENDERS):
                    tasks.create_task(self._send_until_refused(port))

    async def _send_until_refused(self, port: FramePort) -> None:
        in_a_row = 0
        while in_a_row < REFUSALS:
            if await self._send(port):
                in_a_row = 0
            else:
                in_a_row += 1
                await asyncio.sleep(PAUSE_S)  # as a client would, and the guard looks each second

    async def _send(self, port: FramePort) -> bool:
        """One request of BATCH messages: False when it was refused for want of room."""
        names = [b"%0*d" % (BODY, next(self._next)) for _ in range(BATCH)]
        entries = [PutEntry(MessageType.NORMAL, name, b"") for name in names]
        request = hop.encode_put(PutRequest(TOPIC, entries))
        try:
            results = hop.decode_put_reply(await call(port, Kind.PUT, request, CALL_MS))
        except PopmqError as error:
            self._refused(error.code, str(error), BATCH)
            return False
        for name, result in zip(names, results, strict=True):
            if result.code == Code.OK:
                self.sent_ok.add(name)
            else:
                self._refused(result.code, result.message, 1)
        return all(result.code == Code.OK for result in results)

    def _refused(self, code: int, text: str, count: int) -> None:
        reason = REASON.search(text)
        assert code == Code.TOO_MANY_REQUESTS, f"{code}: {text}"
        assert reason is not None, text
        self.refused[f"{code}, {reason[0]}"] += count

    async def still_refuses(self) -> None:
        async with self._port() as port:
            assert not await self._send(port)

    async def drain(self, expected: int) -> None:
        """Receive and ack until `expected` messages are acked; when that is all, until it is quiet.

        No reply and no refusal is put up with: receives and acks work on a full disk.
        """
        async with self._port() as port, asyncio.timeout(BOUND_S), asyncio.TaskGroup() as tasks:
            for _ in range(RECEIVERS):
                tasks.create_task(self._receive_and_ack(port, expected))

    async def _receive_and_ack(self, port: FramePort, expected: int) -> None:
        last = time.monotonic()
        everything = expected == len(self.sent_ok)
        while len(self.acked) < expected or (everything and time.monotonic() - last < QUIET_S):
            deliveries = await self._receive(port, LONG_MS)
            if deliveries:
                last = time.monotonic()
                acks = hop.AckRequest(TOPIC, GROUP, [delivery.handle for delivery in deliveries])
                reply = await call(port, Kind.ACK, hop.encode_ack(acks), CALL_MS)
                results = hop.decode_ack_reply(reply)
                assert {(result.code, result.message) for result in results} == {(Code.OK, "")}
                self.acked.update(delivery.head for delivery in deliveries)

    async def leave_some_in_flight(self) -> None:
        async with self._port() as port:
            while len(self.left) < LEFT_IN_FLIGHT:
                self.left.update(
                    delivery.head for delivery in await self._receive(port, INVISIBLE_MS)
                )

    async def _receive(self, port: FramePort, invisible_ms: int) -> list[Delivery]:
        request = PopRequest(TOPIC, GROUP, "full-disk", 32, invisible_ms, POLL_MS)
        reply = await call(port, Kind.POP, hop.encode_pop(request), CALL_MS)
        deliveries = list(hop.decode_pop_reply(reply).deliveries)
        self.deliveries.update(delivery.head for delivery in deliveries)
        return deliveries

    async def resume(self) -> float:
        """Send until one is taken, and receive and ack that too; the seconds until it was."""
        began = time.monotonic()
        async with self._port() as port, asyncio.timeout(BOUND_S):
            taken = await self._send(port)
            while not taken:
                await asyncio.sleep(PAUSE_S)
                taken = await self._send(port)
            took_s = time.monotonic() - began
        await self.drain(len(self.sent_ok))
        return took_s

    @asynccontextmanager
    async def _port(self) -> AsyncIterator[FramePort]:
        """The broker over its unix socket."""
        hello = Hello(role=ProcessRole.PROXY, name="full-disk", cluster="popmq")
        port = FramePort(f"unix:{self.disk}/frames.sock", hello)
        port.start()
        try:
            yield port
        finally:
            await port.close()
