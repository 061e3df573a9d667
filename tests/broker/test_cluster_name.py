"""A data directory belongs to the cluster that made it: real files, the broker as a process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.node.broker_process import BrokerProcess
from popmq.cli.__main__ import main
from popmq.common.errors import ConfigError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, TopicConfig
from popmq.testing.harness.core_broker import SMALL, pop

pytestmark = pytest.mark.usefixtures("plain_environment")

Use = Callable[[BrokerProcess], Awaitable[None]]


def settings_of(folder: Path, cluster: str, formerly: str = "") -> Settings:
    return replace(
        SMALL,
        cluster=ClusterSettings(name=cluster, formerly=formerly),
        broker=replace(SMALL.broker, data=str(folder)),
    )


def run(settings: Settings, use: Use) -> None:
    async def life() -> None:
        process = BrokerProcess(settings)
        try:
            await process.start()
            await use(process)
        finally:
            await process.stop()

    asyncio.run(life())


async def nothing(process: BrokerProcess) -> None:
    return


async def send_four_and_ack_two(process: BrokerProcess) -> None:
    process.broker.registry.create_topic(TopicConfig(0, "orders", 1))
    for number in range(4):
        entry = hop.PutEntry(MessageType.NORMAL, b"%d" % number, b"")
        await ask(process.port, Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    popped = await ask(process.port, Kind.POP, pop("orders", "readers", limit=2))
    handles = [delivery.handle for delivery in hop.decode_pop_reply(popped).deliveries]
    assert len(handles) == 2
    body = hop.encode_ack(hop.AckRequest("orders", "readers", handles))
    await ask(process.port, Kind.ACK, body)


async def ask(port: Port, kind: Kind, body: bytes) -> bytes:
    return await call(port, kind, body, 5_000)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_broker_does_not_start_on_the_directory_of_another_cluster(tmp_path: Path) -> None:
    run(settings_of(tmp_path, "shop"), send_four_and_ack_two)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} belongs to cluster shop, .* is bank"):
        run(settings_of(tmp_path, "bank"), nothing)
    assert contents(tmp_path) == before
    run(settings_of(tmp_path, "shop"), nothing)


def test_a_store_that_is_taken_over_has_its_messages_and_its_acks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a snapshot, as it is stopped cleanly, and the revive topic under its new name."""
    received: list[bytes] = []

    async def receive(process: BrokerProcess) -> None:
        popped = await ask(process.port, Kind.POP, pop("orders", "readers"))
        received.extend(delivery.head for delivery in hop.decode_pop_reply(popped).deliveries)

    run(settings_of(tmp_path, "shop"), send_four_and_ack_two)
    run(settings_of(tmp_path, "bank", formerly="shop"), receive)
    assert received == [b"2", b"3"]
    run(settings_of(tmp_path, "bank"), nothing)
    capsys.readouterr()
    assert main(["doctor", "--data", str(tmp_path), "--json"]) == 0
    *findings, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert {finding["what"] for finding in findings} == {"queue of no topic"}
    assert all(
        finding["path"].startswith("system/rmq_sys_REVIVE_LOG_shop@3/") for finding in findings
    )
    assert (summary["cluster"], summary["in_flight"]) == ("bank", 2)


def test_the_doctor_tells_whose_a_store_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings_of(tmp_path, "shop"), send_four_and_ack_two)
    capsys.readouterr()
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    assert ["cluster", "shop"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    (tmp_path / "identity").unlink()
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    assert "not named yet: that of the next start" in capsys.readouterr().out


def test_the_doctor_sees_a_damaged_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(settings_of(tmp_path, "shop"), send_four_and_ack_two)
    path = tmp_path / "identity"
    path.write_bytes(path.read_bytes().replace(b"shop", b"shoq"))
    capsys.readouterr()
    assert main(["doctor", "--data", str(tmp_path), "--json"]) == 1
    *findings, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(finding["what"], finding["path"]) for finding in findings] == [
        ("damaged identity", "identity")
    ]
    assert not summary["starts"]
