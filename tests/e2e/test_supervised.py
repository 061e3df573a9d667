"""`popmq up --groups N`: a cluster of real processes, supervised; whoever is killed."""

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.many import Many
from e2e.processes import RoleFailed, tail

from popmq.cli.client import Client
from popmq.common.errors import PopmqError
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api

pytestmark = pytest.mark.more

WAIT_S = 30.0


def is_alive(pid: int) -> bool:
    """A zombie, which somebody else has to wait for, is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(what: str, look: Callable[[], object], many: Many) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, f"not {what}:\n{tail(many.log)}"
        time.sleep(0.05)


def message(number: int) -> api.Message:
    properties = api.SystemProperties(message_id=f"m-{number}", body_encoding=api.IDENTITY)
    return api.Message(
        topic=api.Resource(name="orders"),
        body=str(number).encode(),
        system_properties=properties,
    )


def received(client: Client, count: int) -> list[str]:
    """Bodies of so many messages, acked."""
    bodies: list[str] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(bodies) < count and time.monotonic() < deadline_s:
        got = client.receive(
            "g",
            api.MessageQueue(topic=api.Resource(name="orders")),
            limit=32,
            wait_ms=500,
            invisible_ms=20_000,
        )
        bodies += [item.body.decode() for item in got]
        if got:
            client.ack("g", "orders", got)
    return bodies


def groups_known(client: Client) -> int:
    """To the controller; 0 while the proxy cannot ask it."""
    try:
        return len(
            client.call_admin(
                admin.ListBrokersRequest(group=""), admin.ListBrokersReply
            ).found.groups
        )
    except PopmqError:
        return 0


def test_two_groups_run_as_processes_and_a_killed_broker_comes_back(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many, Client(many.ready.endpoint) as client:
        client.topic(admin.CreateTopicRequest(topic=admin.Topic(name="orders", queues=4)))
        assert sorted(process["name"] for process in many.state["processes"]) == [
            "broker-a-0",
            "broker-b-0",
            "controller",
            "proxy",
        ]
        for number in range(40):
            client.send(message(number))
        before = many.process("broker-a-0")
        os.kill(before["pid"], signal.SIGKILL)
        until("started again", lambda: many.process("broker-a-0")["starts"] == 2, many)
        for number in range(40, 80):
            client.send(message(number))
        after = many.process("broker-a-0")
        assert after["listens"] == before["listens"]
        assert sorted(map(int, received(client, 80))) == list(range(80))
        assert "a process ended and is started again" in many.log.read_text()
        pids = many.pids()
    assert [pid for pid in pids if is_alive(pid)] == []
    for name in ("broker-a-0", "broker-b-0", "controller", "proxy"):
        # The log of each ends with a clean stop.
        last = (many.data / "logs" / f"{name}.log").read_text().splitlines()[-1]
        assert json.loads(last)["event"] == "stopped"


async def asked_without_the_secret(address: str) -> str:
    hello = Hello(role=ProcessRole.BROKER, name="made-up", cluster="popmq")
    port = FramePort(address, hello, peer_name=address)
    port.start()
    try:
        await call(port, Kind.FETCH, b"", 5_000)
    except PopmqError as refusal:
        return str(refusal)
    finally:
        await port.close()
    return "answered"


def test_processes_of_one_machine_speak_over_private_sockets_and_prove_the_secret(
    tmp_path: Path,
) -> None:
    with Many(tmp_path, "--replicas", "2") as many:
        frames = [
            where
            for process in many.state["processes"]
            for key, where in process["listens"].items()
            if key in ("broker.listen", "controller.listen")
        ]
        assert len(frames) == 3
        for where in frames:
            path = Path(where.removeprefix("unix:"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            refusal = asyncio.run(asked_without_the_secret(where))
            assert "offers no proof of the cluster's secret" in refusal


def test_a_data_folder_with_a_long_name_has_its_sockets_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with Many(deep, "--groups", "2") as many:
        where = many.process("controller")["listens"]["controller.listen"]
        elsewhere = Path(where.removeprefix("unix:")).parent
        assert len(where) < 100
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    assert not elsewhere.exists()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["controller", "proxy"])
def test_a_killed_controller_or_proxy_comes_back_at_its_address(tmp_path: Path, name: str) -> None:
    with Many(tmp_path, "--groups", "2") as many:
        before = many.process(name)
        os.kill(before["pid"], signal.SIGKILL)
        until("started again", lambda: many.process(name)["starts"] == 2, many)
        log = Path(before["log"])
        until("serving", lambda: log.read_text().count('"event": "serving"') == 2, many)
        with Client(many.ready.endpoint) as client:
            until("known", lambda: groups_known(client) == 2, many)
        assert many.process(name)["listens"] == before["listens"]


def test_a_supervisor_that_is_killed_leaves_no_orphans(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many:
        pids = many.pids()
        assert all(map(is_alive, pids))
        many.kill9()
        until("gone", lambda: not any(map(is_alive, pids)), many)
        many.start()  # the data folder is free again
        assert len(many.pids()) == 4


@pytest.mark.heavy
def test_a_stopped_child_is_gone_with_its_supervisor_too(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many:
        pids = many.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        many.kill9()
        until("gone", lambda: not any(map(is_alive, pids)), many)


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    many = Many(tmp_path, "--groups", "2")
    blocked = many.data / "broker-b-0"
    many.data.mkdir()
    blocked.write_text("a file where the data should be")
    with pytest.raises(RoleFailed, match="broker-b-0"):
        many.start()
    blocked.unlink()
    with many:
        assert len(many.pids()) == 4


def test_a_folder_of_another_shape_is_refused(tmp_path: Path) -> None:
    with Many(tmp_path, "--groups", "2") as many:
        assert len(many.pids()) == 4
    for arguments, why in (
        ((), r"holds 2 broker groups of 1: start it with --groups 2 --replicas 1"),
        (("--groups", "27"), r"'27' is not a number from 1 to 26"),
        (("--replicas", "2"), r"would leave some of them out"),
    ):
        other = Many(tmp_path, *arguments)
        with pytest.raises(RoleFailed, match=why):
            other.start()
