"""The admin port: what it serves, that the public port does not, and how commands get there."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.processes import role_environment

from popmq.cli.__main__ import main
from popmq.cli.client import CallFailed, Client
from popmq.cli.terminal.contexts import connection_of
from popmq.common.admin_endpoint import (
    ID_HEADER,
    OTHER_PROXY,
    AdminEndpoint,
    named_endpoint,
    refusal,
)
from popmq.common.admin_socket import AdminSocket, bind_admin
from popmq.common.errors import ConfigError
from popmq.common.wire import admin_pb2 as admin
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.testing.running_broker import RunningBroker

SERVICES = {
    "popmq.admin.v1.Admin": "ListTopics",
    "popmq.report.v1.Reports": "Names",
    "apache.rocketmq.v2.Admin": "GetProxyRuntimeStats",
}
ON_PORT: dict[str, object] = {"proxy.admin_listen": "127.0.0.1:0"}
ON_PUBLIC: dict[str, object] = {"proxy.admin_on_public": True}


@contextmanager
def channel(endpoint: str) -> Iterator[Any]:
    with grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


def status(endpoint: str, path: str, *headers: tuple[str, str]) -> tuple[grpc.StatusCode, str]:
    with channel(endpoint) as opened:
        try:
            opened.unary_unary(path)(b"", timeout=10, metadata=headers)
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def named_by(endpoint: str) -> AdminEndpoint:
    code, details = status(endpoint, "/popmq.admin.v1.Admin/ListTopics")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    named = named_endpoint(details)
    assert named is not None, details
    return named


def path_of(service: str, method: str) -> str:
    return f"/{service}/{method}"


@pytest.mark.parametrize(("service", "method"), SERVICES.items())
def test_the_public_port_refuses_administration_and_names_where_it_is_served(
    popmq_broker: RunningBroker, service: str, method: str
) -> None:
    code, details = status(popmq_broker.endpoint, path_of(service, method))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert service in details
    assert "proxy.admin_listen" in details
    assert "--admin-endpoint" in details
    port = named_by(popmq_broker.endpoint)
    assert status(port.address, path_of(service, method)) == (grpc.StatusCode.OK, "")


def test_the_admin_port_serves_no_messages(popmq_broker: RunningBroker) -> None:
    port = named_by(popmq_broker.endpoint)
    path = "/apache.rocketmq.v2.MessagingService/QueryRoute"
    assert status(port.address, path)[0] is grpc.StatusCode.UNIMPLEMENTED
    assert status(popmq_broker.endpoint, path)[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(("service", "method"), SERVICES.items())
def test_a_setting_has_the_public_port_serve_administration(service: str, method: str) -> None:
    with RunningBroker(settings=ON_PUBLIC) as broker:
        assert status(broker.endpoint, path_of(service, method))[0] is grpc.StatusCode.OK


def test_only_its_user_may_connect_to_the_socket_and_a_stop_removes_it() -> None:
    with RunningBroker() as broker:
        path = Path(named_by(broker.endpoint).address.removeprefix("unix:"))
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_commands_on_the_same_machine_find_the_admin_port_by_themselves() -> None:
    with RunningBroker(settings=ON_PORT) as on_port, RunningBroker() as on_socket:
        for broker in (on_port, on_socket):
            endpoint = broker.endpoint.replace("127.0.0.1", "localhost")
            assert main(["topic", "list", "--endpoint", endpoint]) == 0
        assert named_by(on_port.endpoint).address.startswith("127.0.0.1:")


def test_a_client_goes_on_after_the_proxy_was_started_anew() -> None:
    with RunningBroker() as broker, Client(broker.endpoint) as client:
        assert client.topics(system=False) == []
        before = named_by(broker.endpoint)
        broker.restart()
        assert named_by(broker.endpoint).proxy_id != before.proxy_id
        assert client.topics(system=False) == []


def test_the_admin_port_refuses_calls_that_are_meant_for_another_proxy() -> None:
    """As when the public port is one that was forwarded from another machine."""
    with RunningBroker(settings=ON_PORT) as here, RunningBroker(settings=ON_PORT) as there:
        port, other = named_by(here.endpoint), named_by(there.endpoint)
        path = "/popmq.admin.v1.Admin/ListTopics"
        refused = status(port.address, path, (ID_HEADER, other.proxy_id))
        assert refused == (grpc.StatusCode.UNAVAILABLE, OTHER_PROXY)
        assert status(port.address, path, (ID_HEADER, port.proxy_id))[0] is grpc.StatusCode.OK


def test_a_command_that_is_led_to_another_popmq_changes_nothing_there(tmp_path: Path) -> None:
    """The path that was named on one machine is another popmq's on the next."""
    here = {"proxy.admin_listen": f"unix:{tmp_path}/here.sock"}
    there = {"proxy.admin_listen": f"unix:{tmp_path}/there.sock"}
    with RunningBroker(settings=here) as broker, RunningBroker(settings=there) as other:
        os.rename(f"{tmp_path}/there.sock", f"{tmp_path}/here.sock")
        with (
            Client(broker.endpoint) as client,
            pytest.raises(CallFailed, match=r"belongs to another popmq .*--admin-endpoint"),
        ):
            client.topic(admin.CreateTopicRequest(topic=admin.Topic(name="orders", queues=1)))
        with Client(other.endpoint, admin_endpoint=f"unix:{tmp_path}/here.sock") as client:
            assert client.topics(system=False) == []


def test_a_client_asks_the_public_port_of_a_proxy_without_an_admin_port(tmp_path: Path) -> None:
    nowhere = f"unix:{tmp_path}/none.sock"
    with RunningBroker(settings=ON_PUBLIC) as broker:
        with Client(broker.endpoint, admin_endpoint=nowhere) as client:
            assert client.topics(system=False) == []
        with ReportEndpoint(f"{nowhere},{broker.endpoint}", patience_s=0) as reports:
            assert reports.names().keys() == {"broker-a"}


def test_reports_find_the_admin_port_on_the_same_machine(popmq_broker: RunningBroker) -> None:
    with ReportEndpoint(popmq_broker.endpoint, patience_s=0) as reports:
        assert reports.names().keys() == {"broker-a"}


def test_a_command_of_another_user_is_told_why_and_what_to_do(
    popmq_broker: RunningBroker,
) -> None:
    """Root enters every folder, so it becomes another user; any user may close its own folder."""
    folder = Path(named_by(popmq_broker.endpoint).address.removeprefix("unix:")).parent
    is_root = os.geteuid() == 0
    if not is_root:
        folder.chmod(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "popmq", "topic", "list"],
            cwd="/",
            env=role_environment({"POPMQ_ENDPOINT": popmq_broker.endpoint, "HOME": "/"}),
            user=65_534 if is_root else None,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        folder.chmod(0o700)
    assert done.returncode == 3
    assert f"{folder}/proxy-{popmq_broker.endpoint}.sock is for the user that runs" in done.stderr
    assert "--admin-port" in done.stderr


def test_callers_elsewhere_are_not_told_a_path() -> None:
    assert named_endpoint(refusal("popmq.admin.v1.Admin", None)) is None
    endpoint = AdminEndpoint("0123456789abcdef", "unix:/a folder/x [1].sock")
    assert named_endpoint(refusal("popmq.admin.v1.Admin", endpoint)) == endpoint
    assert named_endpoint(f"another sentence [{endpoint.proxy_id} {endpoint.address}]") is None


def test_an_admin_endpoint_belongs_to_the_endpoint_of_the_same_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    added = ["--endpoint", "a:1", "--admin-endpoint", "unix:/a.sock"]
    assert main(["context", "add", "a", *added]) == 0
    assert connection_of(None, None).admin_endpoint == "unix:/a.sock"
    main(["context", "add", "plain", "--endpoint", "p:1"])
    known = json.loads((tmp_path / "popmq" / "contexts.json").read_text())["contexts"]
    assert known["plain"] == {"endpoint": "p:1"}  # which an earlier popmq reads, too
    assert connection_of("b:1", None).admin_endpoint == ""
    assert connection_of("b:1", None, "b:2").admin_endpoint == "b:2"
    monkeypatch.setenv("POPMQ_ENDPOINT", "c:1")
    assert connection_of(None, None).admin_endpoint == ""
    monkeypatch.setenv("POPMQ_ADMIN_ENDPOINT", "c:2")
    assert connection_of(None, None).admin_endpoint == "c:2"
    assert connection_of("b:1", None).admin_endpoint == ""
    assert connection_of(None, "a").admin_endpoint == "unix:/a.sock"
    with pytest.raises(ConfigError, match="'unix:' is not an address"):
        connection_of("b:1", None, "unix:")


def test_a_client_names_the_setting_when_it_is_told_no_admin_port(tmp_path: Path) -> None:
    with RunningBroker(settings={"proxy.admin_listen": f"unix:{tmp_path}/a.sock"}) as broker:
        os.rename(f"{tmp_path}/a.sock", f"{tmp_path}/b.sock")
        with (
            Client(broker.endpoint) as client,
            pytest.raises(CallFailed, match=r"no popmq at unix:.*/a\.sock .*--admin-endpoint"),
        ):
            client.topics(system=False)
        with Client(broker.endpoint, admin_endpoint=f"unix:{tmp_path}/b.sock") as client:
            assert client.topics(system=False) == []


# -- sockets


def test_a_socket_that_nobody_listens_on_is_replaced_and_one_that_lives_is_not(
    tmp_path: Path,
) -> None:
    def bind() -> AdminSocket:
        return AdminSocket.bind("", public="h:1", runtime_folder=str(tmp_path))

    left_by_kill_nine = bind()
    left_by_kill_nine.sock.close()
    first = bind()
    assert first.address == left_by_kill_nine.address
    first.sock.listen()
    second = bind()
    assert second.address.endswith(f"-{os.getpid()}.sock")
    first.close()
    second.close()
    assert list((tmp_path / "popmq").iterdir()) == []


def test_an_address_that_is_taken_is_refused_with_its_setting(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/a.sock", "127.0.0.1:0"):
        first = AdminSocket.bind(address, public="", runtime_folder="")
        first.sock.listen()
        with pytest.raises(ConfigError, match=r"another process .*proxy\.admin_listen"):
            AdminSocket.bind(first.address, public="", runtime_folder="")
        first.close()
    with pytest.raises(ConfigError, match="the limit is 107"):
        AdminSocket.bind(f"unix:{tmp_path}/{'x' * 100}.sock", public="", runtime_folder="")


def test_a_proxy_without_a_folder_for_its_socket_has_no_admin_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert bind_admin("", public="h:1", runtime_folder="/proc") is None
    assert "no admin port" in caplog.text


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below /tmp anybody may make a folder of that name, or a link."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"popmq-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="a folder of another user"):
        AdminSocket.bind("", public="h:1", runtime_folder="")
