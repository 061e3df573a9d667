"""popmq in the surroundings that people have: IPv6, a terminal that closes, few inodes."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.processes import LOCAL, Role, role_environment, run_command
from programs import run_program

pytestmark = pytest.mark.more


def up(folder: Path, host: str = LOCAL) -> Role:
    arguments = ["up", "--data", str(folder / "data"), "--host", host]
    arguments += ["--port", "0", "--http-port", "0"]
    return Role("up", arguments, folder=folder, settings={})


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_one_process_listens_at_an_ipv6_address(tmp_path: Path, host: str) -> None:
    with up(tmp_path, host) as role:
        assert role.ready.endpoint.startswith("[::1]:")
        run_command(role.ready.endpoint, tmp_path, "topic", "create", "orders")
        run_command(role.ready.endpoint, tmp_path, "send", "orders", "over six")
        received = run_command(
            role.ready.endpoint, tmp_path, "recv", "orders", "--group", "g", "--ack"
        )
        assert received.startswith("over six")


def test_a_closed_terminal_stops_a_process_as_sigterm_does(tmp_path: Path) -> None:
    with up(tmp_path) as role:
        run_command(role.ready.endpoint, tmp_path, "topic", "create", "orders")
        run_command(role.ready.endpoint, tmp_path, "send", "orders", "x")
        os.kill(role.pid, signal.SIGHUP)
        assert role.wait(10) == 0
        assert '"event": "stopped"' in role.log.read_text()
        role.restart()
        assert '"clean": true' in role.log.read_text()


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A file system with much room and hardly a file more."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=900m,nr_inodes=60", "tmpfs", str(folder)]
    if os.geteuid() or run_program(mount).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    run_program(["umount", str(folder)])


def test_a_disk_without_inodes_is_named_at_the_stop_the_start_and_by_the_doctor(
    tmp_path: Path, few_inodes: Path
) -> None:
    arguments = ["up", "--data", str(few_inodes), "--port", "0", "--http-port", "0"]
    role = Role("up", arguments, folder=tmp_path, settings={})
    named = f"the disk of {few_inodes} has no inode for another file (df -i), "
    with role:
        run_command(role.ready.endpoint, tmp_path, "topic", "create", "wide", "--queues", "64")
        run_command(role.ready.endpoint, tmp_path, "send", "wide", "x", "--count", "640")
        role.terminate()
    assert named in role.log.read_text()
    environ = role_environment({})
    for command, text in ((arguments, f"popmq: {named}"), (["doctor", *arguments[1:3]], "inode")):
        done = run_program([sys.executable, "-m", "popmq", *command], env=environ)
        assert done.returncode == 1
        assert text in done.stdout + done.stderr
