"""Commands find the admin port of real processes: after kill -9, of a cluster, of before."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.earlier import ROOTS, earlier_tree, run_earlier
from e2e.processes import LOCAL, Role, free_port, role_environment, run_command

pytestmark = pytest.mark.more

BEFORE_ADMIN_PORTS = "0e466b47"  # the last commit whose public port alone administers


def up(folder: Path, *flags: str, port: int = 0) -> Role:
    arguments = ["up", "--data", "data", "--port", str(port), "--http-port", "0", *flags]
    return Role("up", arguments, folder=folder, settings={})


def topics(role: Role) -> str:
    return run_command(role.ready.endpoint, role.folder, "topic", "list")


def test_two_ups_are_administered_apart_also_after_kill_nine(tmp_path: Path) -> None:
    with (
        up(tmp_path / "one", port=free_port()) as first,
        up(tmp_path / "two", "--admin-port", "0") as two,
    ):
        run_command(first.ready.endpoint, first.folder, "topic", "create", "of-one")
        run_command(two.ready.endpoint, two.folder, "topic", "create", "of-two")
        first.kill9()
        first.restart()
        assert "of-one" in topics(first)
        assert "of-two" not in topics(first)
        assert "of-two" in topics(two)
        assert two.ready.admin.startswith(f"{LOCAL}:")
        port = int(two.ready.admin.rpartition(":")[2])
        assert port not in (0, int(two.ready.endpoint.rpartition(":")[2]))


def test_a_cluster_of_one_machine_is_administered_with_no_more_flags(tmp_path: Path) -> None:
    with up(tmp_path, "--groups", "2") as role:
        assert "no topic" in topics(role)
        assert "broker-b" in run_command(role.ready.endpoint, role.folder, "broker", "list")


def test_a_proxy_alone_takes_an_address_for_its_admin_port(tmp_path: Path) -> None:
    """And knows no broker: what counts is who answers."""
    settings = {"POPMQ_PROXY_LISTEN": f"{LOCAL}:0", "POPMQ_HTTP_LISTEN": f"{LOCAL}:0"}
    where = f"unix:{tmp_path}/admin.sock"
    arguments = ["proxy", "--admin-listen", where]
    with Role("proxy", arguments, folder=tmp_path, settings=settings) as proxy:
        output = run_command(
            f"{LOCAL}:{free_port()}",
            proxy.folder,
            "config",
            "--admin-endpoint",
            where,
            "-o",
            "json",
        )
        assert f'"{where}"' in output


def test_proxies_and_tools_of_before_and_of_now_go_together(tmp_path: Path) -> None:
    tree = earlier_tree(BEFORE_ADMIN_PORTS, tmp_path / "earlier")
    older = up(tmp_path / "old")
    run_earlier(tree, older)
    newer = up(tmp_path / "new")
    newer.settings["POPMQ_PROXY_ADMIN_ON_PUBLIC"] = "true"
    with older, newer:
        with grpc.insecure_channel(older.ready.endpoint) as channel:
            call: Any = channel.unary_unary("/popmq.admin.v1.Admin/ListTopics")
            assert call(b"", timeout=10), (
                "the earlier version runs, and its public port administers"
            )
        nowhere = f"unix:{tmp_path}/none.sock"
        for flags in ((), ("--admin-endpoint", nowhere)):
            listed = run_command(older.ready.endpoint, older.folder, "topic", "list", *flags)
            assert "no topic" in listed
        path = ":".join(str(tree / root) for root in ROOTS)
        done = subprocess.run(
            [sys.executable, "-m", "popmq", "topic", "create", "orders"],
            env=role_environment({"PYTHONPATH": path, "POPMQ_ENDPOINT": newer.ready.endpoint}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "orders" in topics(newer)
