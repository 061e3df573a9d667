"""`--workers N` as an operator gives it: one endpoint, several processes, of which any may die."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.processes import READY_S, Cluster, Role, role_environment, run_command
from programs import run_program

from popmq.cli.client import Client
from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

MESSAGING = "/apache.rocketmq.v2.MessagingService/"
ME = (("x-mq-client-id", "me@1"),)


@contextmanager
def up(folder: Path, *flags: str) -> Iterator[Role]:
    ports = ["--data", "data", "--port", "0", "--http-port", "0"]
    with Role("up", ["up", *ports, "--workers", "2", *flags], folder=folder, settings={}) as role:
        yield role


def children(pid: int) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def until(met: Callable[[], bool], within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def beat(endpoint: str, credentials: grpc.ChannelCredentials | None = None) -> int:
    """A heartbeat over a connection of its own; the code of the answer."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    secure_channel: Any = (
        grpc.secure_channel(endpoint, credentials, options=options)
        if credentials
        else grpc.insecure_channel(endpoint, options=options)
    )
    with secure_channel as channel:
        call = channel.unary_unary(MESSAGING + "Heartbeat")
        answer = service.HeartbeatResponse.FromString(call(b"", metadata=ME, timeout=10))
    return int(answer.status.code)


def calls(role: Role, worker: int) -> int:
    return role.metric(f'popmq_proxy_lean_calls_total{{worker="{worker}"}}')


@pytest.mark.more
def test_connections_are_shared_out_and_one_page_shows_every_worker(tmp_path: Path) -> None:
    with up(tmp_path) as role:
        roots = (role.folder / "data" / "tls" / "certificate.pem").read_bytes()
        secure = grpc.ssl_channel_credentials(roots)
        for _ in range(20):
            assert beat(role.ready.endpoint)
            assert beat(role.ready.endpoint, secure)
        until(lambda: calls(role, 1) + calls(role, 2) >= 40)
        assert calls(role, 1) > 0
        assert calls(role, 2) > 0
        assert role.metric("popmq_proxy_workers") == 2
        assert role.metric("popmq_proxy_worker_restarts_total") == 0
        assert role.metric('popmq_proxy_worker_resident_bytes{worker="2"}') > 10 << 20


@pytest.mark.more
def test_messages_pass_whoever_takes_the_call_and_a_worker_that_dies_comes_back(
    tmp_path: Path,
) -> None:
    with up(tmp_path) as role:
        sent: set[bytes] = set()
        for number in range(6):
            with_own_connection = Client(role.ready.endpoint)
            message = pb.Message(topic=pb.Resource(name="hello"), body=b"%d" % number)
            message.system_properties.message_id = f"01{number:032X}"
            message.system_properties.message_type = pb.MessageType.NORMAL
            with_own_connection.send(message)
            with_own_connection.close()
            sent.add(message.body)
        first, second = children(role.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: role.metric("popmq_proxy_worker_restarts_total") == 1)
        until(lambda: role.metric("popmq_proxy_workers") == 2)
        assert second in children(role.pid)
        assert first not in children(role.pid)
        for _ in range(10):
            assert beat(role.ready.endpoint)
        client = Client(role.ready.endpoint)
        queue = pb.MessageQueue(topic=pb.Resource(name="hello"), id=-1)
        got: set[bytes] = set()
        while got < sent:
            for delivery in client.receive(
                "g", queue, limit=32, wait_ms=5_000, invisible_ms=60_000
            ):
                client.ack("g", "hello", [delivery])
                got.add(delivery.body)
        client.close()
        assert got == sent


def poll(endpoint: str, answers: list[Any]) -> None:
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="g"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="hello"), id=-1),
        batch_size=1,
    )
    request.long_polling_timeout.seconds = 20
    request.invisible_duration.seconds = 60
    insecure_channel: Any = grpc.insecure_channel(endpoint)
    with insecure_channel as channel:
        call = channel.unary_stream(MESSAGING + "ReceiveMessage")
        parts = list(call(request.SerializeToString(), metadata=ME, timeout=60))
    answers.append(service.ReceiveMessageResponse.FromString(parts[0]).status.code)


def waiting(role: Role) -> int:
    return sum(
        role.metric(f'popmq_proxy_waiting_receives{{worker="{worker}"}}') for worker in (1, 2)
    )


@pytest.mark.more
def test_sigterm_answers_who_waits_at_every_worker_and_leaves_nobody_behind(
    tmp_path: Path,
) -> None:
    with up(tmp_path) as role:
        environment = role_environment({"POPMQ_ENDPOINT": role.ready.endpoint})
        command = [sys.executable, "-m", "popmq.cli", "topic", "create", "hello"]
        subprocess.run(command, env=environment, check=True, timeout=READY_S, capture_output=True)
        answers: list[Any] = []
        polls = [
            threading.Thread(target=poll, args=(role.ready.endpoint, answers)) for _ in range(8)
        ]
        for item in polls:
            item.start()
        until(lambda: waiting(role) == 8)
        workers = children(role.pid)
        role.terminate()
        for item in polls:
            item.join(20)
        assert answers == [Code.MESSAGE_NOT_FOUND] * 8
        assert all(map(is_gone, workers))


@pytest.mark.more
def test_workers_whose_parent_was_killed_end_by_themselves(tmp_path: Path) -> None:
    with up(tmp_path) as role:
        workers = children(role.pid)
        assert len(workers) == 2
        role.kill9()
        until(lambda: all(map(is_gone, workers)))


@pytest.mark.more
def test_a_port_that_somebody_has_is_refused_also_if_it_is_shared_there(tmp_path: Path) -> None:
    with up(tmp_path) as role:
        port = role.ready.endpoint.rpartition(":")[2]
        for workers in ("1", "2"):
            flags = ["--data", "other", "--port", port, "--http-port", "0", "--workers", workers]
            done = run_program(
                [sys.executable, "-m", "popmq.cli", "up", *flags],
                cwd=tmp_path,
                env=role_environment({}),
                timeout=READY_S,
            )
            assert done.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}: another process does" in done.stderr
            assert done.stdout == ""


@pytest.mark.more
def test_a_worker_that_cannot_start_is_the_end_of_the_role(tmp_path: Path) -> None:
    settings = {"POPMQ_PROXY_TLS_CERTIFICATE": "absent.pem", "POPMQ_PROXY_TLS_KEY": "absent.pem"}
    done = run_program(
        [sys.executable, "-m", "popmq.cli", "proxy", "--workers", "2"],
        cwd=tmp_path,
        env=role_environment({**settings, "POPMQ_PROXY_LISTEN": "127.0.0.1:0"}),
        timeout=READY_S,
    )
    assert done.returncode == 1
    assert "proxy.tls_certificate = absent.pem: No such file" in done.stderr
    assert "worker 1 did not start; its error stands above" in done.stderr


@pytest.mark.more
@pytest.mark.parametrize("killed", [False, True])
def test_a_proxy_of_a_cluster_may_have_workers(tmp_path: Path, killed: bool) -> None:
    with Cluster(tmp_path, settings={"POPMQ_PROXY_WORKERS": "2"}) as cluster:
        (proxy,) = cluster.proxies
        cluster.create(topic="orders", groups=["g"])
        if killed:
            for pid in children(proxy.pid):
                os.kill(pid, signal.SIGKILL)
            until(lambda: proxy.metric("popmq_proxy_worker_restarts_total") == 2)
            until(lambda: proxy.metric("popmq_proxy_workers") == 2)
        cluster.popmq("send", "orders", "first message")
        assert "first message" in cluster.popmq("recv", "orders", "--group", "g", "--ack")


@pytest.mark.more
@pytest.mark.parametrize("flags", [(), ("--admin-port", "0")])
def test_workers_share_the_admin_port_so_commands_do_not_notice_that_one_dies(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with up(tmp_path, *flags) as role:
        for worker in children(role.pid)[:2]:
            until(lambda: role.metric("popmq_proxy_workers") == 2)
            os.kill(worker, signal.SIGKILL)
            until(lambda worker=worker: is_gone(worker))  # type: ignore[misc]
            printed = run_command(role.ready.endpoint, tmp_path, "topic", "list")
            assert "no topic" in printed
