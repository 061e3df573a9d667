"""The controller's shell: stores on threads, frames, the step loop."""

import asyncio
import threading
from pathlib import Path

import pytest
from controller.controller_rig import GROUP, Broker

from popmq.common.errors import ConfigError
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import ControllerSettings, Settings
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.file_store import FileStore
from popmq.controller.metadata_store import (
    BlockingStore,
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
)
from popmq.controller.process import ControllerProcess, ThreadedStore

FIRST = GroupRecord("a", 1, ("a",), 1)


class StuckStore:
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def read(self, key: str) -> GroupRecord | None:
        self.go.wait(20)
        return FIRST

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        self.go.wait(20)
        return WriteResult(WriteOutcome.WRITTEN, record)


class FailingStore:
    def read(self, key: str) -> GroupRecord | None:
        raise RuntimeError("a fault")

    def swap(self, key: str, expected_version: int, record: GroupRecord) -> WriteResult:
        raise RuntimeError("a fault")


async def test_a_store_that_hangs_is_answered_for_in_time_and_only_once() -> None:
    stuck = StuckStore()
    store = ThreadedStore(stuck, timeout_s=0.05)
    reads: list[GroupRecord | MetadataStoreUnavailable | None] = []
    swaps: list[WriteResult] = []
    answered = asyncio.Event()

    def swapped(result: WriteResult) -> None:
        swaps.append(result)
        answered.set()

    store.read("g", reads.append)
    store.swap("g", 0, FIRST, swapped)
    await answered.wait()
    stuck.go.set()
    done = asyncio.Event()
    ThreadedStore(stuck).read("g", lambda result: done.set())
    await done.wait()
    assert [type(item) for item in reads] == [MetadataStoreUnavailable]
    assert [swap.outcome for swap in swaps] == [WriteOutcome.UNKNOWN]
    assert "did not answer within 0.05 s" in swaps[0].reason
    store.stop()


async def test_a_fault_of_a_store_is_no_answer() -> None:
    store = ThreadedStore(FailingStore())
    write_results: list[WriteResult] = []
    answered = asyncio.Event()

    def swapped(result: WriteResult) -> None:
        write_results.append(result)
        answered.set()

    store.swap("g", 0, FIRST, swapped)
    await answered.wait()
    assert (write_results[0].outcome, write_results[0].reason) == (
        WriteOutcome.UNKNOWN,
        "the metadata store failed: a fault",
    )
    store.stop()


def settings(folder: Path) -> Settings:
    times = ControllerSettings(
        listen="127.0.0.1:0", store="file", data=str(folder), heartbeat_ms=50, dead_after_ms=200
    )
    return Settings(controller=times)


async def beat(port: FramePort, broker: Broker) -> pb.GroupState:
    body = await call(port, Kind.REGISTER, broker.heartbeat(), 5_000)
    broker.obey(pb.RegisterReply.FromString(body).state)
    return broker.reply


async def test_over_frames_and_files_two_controllers_make_one_master_and_then_the_next(
    tmp_path: Path,
) -> None:
    await one_master_and_then_the_next(settings(tmp_path), FileStore(str(tmp_path)))


async def one_master_and_then_the_next(each: Settings, records: BlockingStore) -> None:
    """A story of two brokers and two controllers that keep `records`."""
    controllers = [ControllerProcess(each) for _ in range(2)]
    ports = []
    for controller in controllers:
        controller.start()
        hello = Hello(role=ProcessRole.BROKER, name="b", cluster="popmq")
        port = FramePort(await controller.listen(), hello)
        port.start()
        ports.append(port)
    brokers = [Broker(f"node-{letter}", replicas=2, min_in_sync=1) for letter in "ab"]
    # Nobody listens at their addresses, and nobody has to: the hint only speeds it up.
    while brokers[0].role != pb.MASTER or brokers[1].role != pb.SLAVE:
        for port in ports:
            for broker in brokers:
                await beat(port, broker)
        await asyncio.sleep(0.02)
    while brokers[1].role != pb.MASTER:
        for port in ports:
            await beat(port, brokers[1])
        await asyncio.sleep(0.02)
    record = await asyncio.to_thread(records.read, GROUP)
    assert record == GroupRecord("store-node-b", 2, ("store-node-b",), 2)
    for port in ports:
        await port.close()
    for controller in controllers:
        await controller.stop()


async def test_a_watching_broker_whose_process_is_gone_is_replaced_without_waiting(
    tmp_path: Path,
) -> None:
    """With an hour of patience only the closed connection can tell."""

    hour = ControllerSettings(
        listen="127.0.0.1:0",
        store="file",
        data=str(tmp_path),
        heartbeat_ms=50,
        dead_after_ms=600_000,
    )
    FileStore(str(tmp_path)).swap(
        GROUP,
        0,
        GroupRecord("store-node-a", 1, ("store-node-a", "store-node-b"), 1),
    )
    controller = ControllerProcess(Settings(controller=hour))
    controller.start()
    where = await controller.listen()
    hello = Hello(role=ProcessRole.BROKER, name="b", cluster="popmq")
    node_a, node_b = (FramePort(where, hello) for _ in range(2))
    node_a.start()
    node_b.start()
    brokers = [
        Broker(f"node-{letter}", replicas=2, min_in_sync=1, epoch=1, address="127.0.0.1:1")
        for letter in "ab"
    ]
    brokers[0].role, brokers[1].role = pb.MASTER, pb.SLAVE
    await beat(node_a, brokers[0])
    state = await beat(node_b, brokers[1])
    watch = pb.WatchGroupRequest(
        cluster="popmq", group=GROUP, known_view=state.view, wait_ms=60_000
    )
    news = asyncio.create_task(call(node_b, Kind.WATCH_GROUP, watch.SerializeToString(), 60_000))
    watch.store_id = "store-node-a"
    node_a.request(Kind.WATCH_GROUP, watch.SerializeToString(), 60_000, lambda answer: None)
    await beat(node_a, brokers[0])  # answered behind the watch
    await node_a.close()
    group_state = pb.WatchGroupReply.FromString(await news).state
    assert [(member.broker.node, member.alive) for member in group_state.members] == [
        ("node-a", False),
        ("node-b", True),
    ]
    await node_b.close()
    await controller.stop()


def test_a_kubernetes_store_is_refused_where_there_is_no_kubernetes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"controller\.store = kubernetes: this is no pod"):
        ControllerProcess(Settings(controller=ControllerSettings(store="kubernetes")))
