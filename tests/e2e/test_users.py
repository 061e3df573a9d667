"""`popmq up --auth` as a process, the commands as scripts use them, and the official client."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.processes import Role, role_environment

pytestmark = pytest.mark.more

CLIENT = Path(__file__).parent / "signed_client.py"


def up(folder: Path) -> Role:
    """It ignores the credentials of a command's environment."""
    arguments = ["up", "--auth", "--data", str(folder / "data"), "--port", "0", "--http-port", "0"]
    settings = {"POPMQ_ACCESS_KEY": "someone", "POPMQ_SECRET": "else"}
    return Role("up", arguments, folder=folder, settings=settings)


class Commands:
    def __init__(self, endpoint: str, access_key: str = "", secret: str = "") -> None:
        self._environ = {
            **role_environment({}),
            "POPMQ_ENDPOINT": endpoint,
            "POPMQ_ACCESS_KEY": access_key,
            "POPMQ_SECRET": secret,
        }

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "popmq.cli", *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def signed_client(zone: str, *arguments: str) -> str:
    """The official Python client in that time zone, which its header shows."""
    done = subprocess.run(
        [sys.executable, str(CLIENT), *arguments],
        env={**os.environ, "TZ": zone},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_script_makes_users_and_official_clients_of_all_zones_use_them(tmp_path: Path) -> None:
    with up(tmp_path) as role:
        endpoint, data = role.ready.endpoint, tmp_path / "data"
        assert (data / "admin.json").stat().st_mode & 0o777 == 0o600
        assert (data / "auth.key").stat().st_mode & 0o777 == 0o600
        assert Commands(endpoint).run("topic", "list").returncode == 1
        first = json.loads((data / "admin.json").read_text())
        assert set(first) == {"access_key", "secret"}
        admin = Commands(endpoint, first["access_key"], first["secret"])
        admin.ok("topic", "create", "orders")
        admin.ok("group", "create", "billing")
        for name, zone in (("ann", "Asia/Kathmandu"), ("bob", "UTC"), ("cat", "America/St_Johns")):
            printed = admin.ok("user", "create", name, "-o", "json")
            credentials = json.loads(printed)
            assert set(credentials) == {"access_key", "secret"}
            admin.ok("user", "grant", name, "--topic", "orders", "--allow", "pub,sub")
            admin.ok("user", "grant", name, "--group", "billing", "--allow", "sub")
            pair = (credentials["access_key"], credentials["secret"])
            assert signed_client(zone, endpoint, *pair, "orders", "billing") == f"got hi {zone}"
            own = Commands(endpoint, *pair)
            own.ok("send", "orders", "from the shell")
            assert "from the shell" in own.ok("recv", "orders", "--group", "billing", "--ack")
            refused = own.run("send", "other", "x")
            assert (refused.returncode, "40300" in refused.stderr) == (1, True)
        shown = json.loads(admin.ok("user", "show", "ann", "-o", "json"))
        assert shown[0]["clock_offsets"] == ["+05:45"]
        assert first["secret"] not in admin.ok("user", "list", "-o", "json")
        denied = admin.run("acl", "check", "ann", "delete", "topic:orders")
        assert (denied.returncode, denied.stdout) == (1, "no: no entry allows it\n")
    # A start without --auth finds the keys in the data directory; the mode is of the cluster.
    with up(tmp_path) as role:
        again = Commands(role.ready.endpoint, first["access_key"], first["secret"])
        assert "ann" in again.ok("user", "list")
        again.ok("auth", "mode", "off")
        assert Commands(role.ready.endpoint).run("topic", "list").returncode == 0
    assert first["secret"] not in role.log.read_text()


def test_no_file_but_the_first_users_own_holds_its_secret(tmp_path: Path) -> None:
    with up(tmp_path):
        secret = json.loads((tmp_path / "data" / "admin.json").read_text())["secret"]
    holders = {
        path.name
        for path in (tmp_path / "data").rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    }
    assert holders == {"admin.json"}
