"""popmq in the surroundings that people have: IPv6, a terminal that closes, nohup."""

import os
import signal
from pathlib import Path

import pytest
from e2e.processes import LOCAL, Role, run_command

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
