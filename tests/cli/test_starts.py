"""Starts that fail leave nothing behind, and a store keeps what it was made with."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from e2e.processes import Cluster, Role, role_environment, run_command

from popmq.cli.__main__ import main
from popmq.testing.running_broker import RunningBroker

LOCAL = {"POPMQ_HTTP_LISTEN": "127.0.0.1:0"}


@pytest.mark.more
@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_an_up_whose_port_is_taken_makes_no_store(flag: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        ports = {"--port": "0", "--http-port": "0", flag: taken}
        words = [word for pair in ports.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "popmq", "up", "--data", str(data), *words],
            env=role_environment({}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}" in done.stderr
    assert flag in done.stderr
    assert not (data / "commitlog").exists()


@pytest.mark.more
def test_a_broker_that_others_could_reach_without_a_secret_makes_no_store(tmp_path: Path) -> None:
    settings = {"POPMQ_BROKER_LISTEN": "0.0.0.0:0", "POPMQ_BROKER_DATA": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-m", "popmq", "broker"],
        env=role_environment({**LOCAL, **settings}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "cluster.secret_file" in done.stderr
    assert not (tmp_path / "data" / "commitlog").exists()


@pytest.mark.more
def test_a_broker_keeps_the_segment_size_of_the_store_that_up_made(tmp_path: Path) -> None:
    data = tmp_path / "data"
    flags = ["up", "--data", str(data), "--port", "0", "--http-port", "0"]
    with Role("up", flags, folder=tmp_path, settings={}) as up:
        run_command(up.ready.endpoint, tmp_path, "topic", "create", "orders")
    sizes = {path.stat().st_size for path in (data / "commitlog").iterdir()}
    settings = {**LOCAL, "POPMQ_BROKER_LISTEN": "127.0.0.1:0", "POPMQ_BROKER_DATA": str(data)}
    with Role("broker", ["broker"], folder=tmp_path, settings=settings):
        pass
    assert {path.stat().st_size for path in (data / "commitlog").iterdir()} == sizes == {64 << 20}


@pytest.mark.more
def test_up_with_replicas_says_before_it_is_ready_that_the_disk_is_too_full_for_sends(
    tmp_path: Path,
) -> None:
    flags = ["up", "--replicas", "2", "--port", "0", "--http-port", "0"]
    flags += ["--data", str(tmp_path / "data")]
    settings = {"POPMQ_STORE_DISK_STOP_PERCENT": "1"}
    with Role("up", flags, folder=tmp_path, settings=settings) as up:
        log = up.log.read_text()
    assert "sends are refused" in log
    assert "store.disk_stop_percent" in log


def readable(descriptor: int, seconds: float) -> bool:
    """Unlike select(), poll() takes descriptors above 1,023, which a worker of pytest may have."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1_000))


def status_of(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "popmq", "status", "--endpoint", cluster.endpoints[0], *options],
        env=role_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.more
def test_status_shows_what_is_known_while_a_group_has_no_master(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.popmq("topic", "create", "orders")
        cluster.broker.kill9()
        deadline_s = time.monotonic() + 60
        while "master, dead" not in (done := status_of(cluster)).stdout:  # silent for 2 s
            assert time.monotonic() < deadline_s, done.stdout + done.stderr
            assert done.returncode == 1
        assert done.returncode == 1
        assert done.stdout.startswith("not healthy:")
        assert "broker-a: no master" in done.stdout
        assert done.stdout.split("TIMERS\n")[1].split("\n")[0].split() == ["?"] * 5
        cluster.controller.kill9()
        done = status_of(cluster, "-o", "json")
        (row,) = json.loads(done.stdout)
        assert (done.returncode, row["brokers"], row["topics"]) == (1, None, None)
        assert any("controller" in trouble for trouble in row["troubles"])
        cluster.controller.restart()
        cluster.broker.restart()


def test_q_ends_a_live_view_and_the_terminal_is_as_it_was(
    popmq_broker: RunningBroker, tmp_path: Path
) -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    process = subprocess.Popen(
        [sys.executable, "-m", "popmq", "top", "--every", "1h"],
        env=role_environment({"POPMQ_ENDPOINT": popmq_broker.endpoint}),
        stdin=its,
        stdout=its,
    )
    try:
        printed = b""
        while b"q ends" not in printed:
            assert readable(ours, 60), printed
            printed += os.read(ours, 4096)
        os.write(ours, b"q")
        assert process.wait(30) == 0
        assert termios.tcgetattr(its) == before
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(ours)
        os.close(its)


@pytest.mark.more
def test_a_receive_that_follows_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    flags = ["up", "--data", str(tmp_path / "data"), "--http-port", "0"]
    with Role("up", [*flags, "--port", "0"], folder=tmp_path, settings={}) as up:
        endpoint = up.ready.endpoint
        run_command(endpoint, tmp_path, "send", "orders", "before")
        follower = subprocess.Popen(
            [sys.executable, "-m", "popmq", "recv", "orders", "--group", "g", "--follow", "--ack"],
            env=role_environment({"POPMQ_ENDPOINT": endpoint}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert follower.stdout is not None
            assert follower.stderr is not None
            assert follower.stdout.readline().startswith("before")
            up.kill9()
            while "trying again until Ctrl-C" not in (note := follower.stderr.readline()):
                assert "may come again" in note  # it was killed before the ack
            up.arguments = [*flags, "--port", endpoint.rpartition(":")[2]]
            up.restart()
            assert "connected again" in follower.stderr.readline()
            run_command(endpoint, tmp_path, "send", "orders", "after")
            while not (line := follower.stdout.readline()).startswith("after"):
                assert line.startswith("before")
            follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == 0
        finally:
            follower.kill()
            follower.communicate()


@pytest.mark.more
def test_a_broken_file_of_epochs_is_found_repaired_and_the_broker_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    flags = ["up", "--data", str(data), "--port", "0", "--http-port", "0"]
    with Role("up", flags, folder=tmp_path, settings={}) as up:
        run_command(up.ready.endpoint, tmp_path, "send", "orders", "kept")
    epochs = data / "epochs"
    stored = epochs.read_bytes()
    assert b"\n1 0\n" in stored
    epochs.write_bytes(stored.replace(b"\n1 0\n", b"\n1 9\n"))
    assert main(["doctor", "--data", str(data)]) == 1
    printed = capsys.readouterr().out
    assert "DAMAGED EPOCHS" in printed
    assert "needs --repair" in printed
    assert main(["doctor", "--data", str(data), "--repair"]) == 0
    assert "repaired" in capsys.readouterr().out
    with Role("up", flags, folder=tmp_path, settings={}) as up:
        received = run_command(up.ready.endpoint, tmp_path, "recv", "orders", "--group", "g")
    assert "kept" in received


@pytest.mark.more
def test_up_with_workers_shows_a_table_of_processes_on_a_terminal(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    flags = ["--port", "0", "--http-port", "0", "--data", str(tmp_path / "data"), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "popmq", "up", *flags],
        env=role_environment({"COLUMNS": "80"}),
        stdout=its,
        stderr=its,
    )
    try:
        printed = b""
        while b"popmq send hello" not in printed:
            assert readable(ours, 60), printed
            printed += os.read(ours, 4096)
        lines = printed.decode().splitlines()
        begin = next(at for at, line in enumerate(lines) if line.startswith("PROCESS"))
        rows = lines[begin + 1 : begin + 4]
        names = [row.split("  ")[0] for row in rows]
        assert names == ["up", "proxy worker 1", "proxy worker 2"]
        assert rows[0].split()[1] == str(process.pid)
        assert max(map(len, rows)) <= 80
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        os.close(ours)
        os.close(its)
