"""`--transport lean` as an operator gives it: the commands work, and the metrics say who served."""

import re
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from e2e.processes import READY_S, Role, role_environment
from programs import run_program

from popmq.proxy.api import service_pb2 as service

more = pytest.mark.more


@pytest.mark.parametrize(
    "asked",
    [
        [],
        pytest.param(["--transport", "lean"], marks=more),
        pytest.param(["--transport", "grpcio"], marks=more),
    ],
)
def test_up_serves_the_commands_with_the_transport_that_was_asked_for(
    tmp_path: Path, asked: list[str]
) -> None:
    flags = ["--data", "data", "--port", "0", "--http-port", "0", *asked]
    with Role("up", ["up", *flags], folder=tmp_path, settings={}) as role:

        def popmq(*arguments: str) -> str:
            done = run_program(
                [sys.executable, "-m", "popmq.cli", *arguments],
                env=role_environment({"POPMQ_ENDPOINT": role.ready.endpoint}),
                timeout=READY_S,
                check=True,
            )
            return done.stdout

        popmq("send", "hello", "first message")
        assert "first message" in popmq("recv", "hello", "--group", "g", "--ack")
        with urlopen(role.ready.metrics, timeout=10) as page:
            text = page.read().decode()
        assert ("popmq_proxy_lean_" in text) == ("grpcio" not in asked)
        used = re.search(r"^popmq_loop_cpu_seconds_total (\S+)$", text, re.MULTILINE)
        assert used is not None
        assert float(used[1]) > 0  # what an autoscaler may go by
        if "grpcio" not in asked:
            assert role.metric("popmq_proxy_lean_calls_total") >= 3
            assert role.metric("popmq_proxy_lean_faults_total") == 0


@pytest.mark.more
def test_commands_speak_tls_where_nothing_else_is_taken(tmp_path: Path) -> None:
    flags = ["--data", "data", "--port", "0", "--http-port", "0"]
    settings = {"POPMQ_PROXY_TLS": "only"}
    with Role("up", ["up", *flags], folder=tmp_path, settings=settings) as role:
        certificate = str(role.folder / "data" / "tls" / "certificate.pem")

        def popmq(endpoint: str, *arguments: str, **variables: str) -> tuple[int, str]:
            done = run_program(
                [sys.executable, "-m", "popmq.cli", *arguments, "--endpoint", endpoint],
                env=role_environment(variables),
                timeout=READY_S,
            )
            return done.returncode, done.stdout + done.stderr

        plain, over_tls = role.ready.endpoint, f"tls://{role.ready.endpoint}"
        assert popmq(over_tls, "send", "hello", "x", POPMQ_TLS_CA=certificate)[0] == 0
        code, output = popmq(plain, "send", "hello", "x")
        assert code == 3
        assert f"{plain} takes TLS only: write tls://{plain}" in output
        code, output = popmq(over_tls, "send", "hello", "x")
        assert code == 3
        assert "is not trusted (self-signed certificate): POPMQ_TLS_CA, or `popmq context" in output
        code, output = popmq(over_tls, "send", "hello", "x", POPMQ_TLS_CA="absent.pem")
        assert code == 1
        assert "POPMQ_TLS_CA = absent.pem: No such file or directory" in output


@pytest.mark.more
def test_up_takes_tls_with_a_certificate_that_it_keeps(tmp_path: Path) -> None:
    flags = ["--data", "data", "--port", "0", "--http-port", "0", "--transport", "lean"]
    certificates = []
    for _ in range(2):
        with Role("up", ["up", *flags], folder=tmp_path, settings={}) as role:
            certificate = (role.folder / "data" / "tls" / "certificate.pem").read_bytes()
            certificates.append(certificate)
            roots = grpc.ssl_channel_credentials(certificate)
            with grpc.secure_channel(role.ready.endpoint, roots) as channel:
                beat: Any = channel.unary_unary("/apache.rocketmq.v2.MessagingService/Heartbeat")
                answer = service.HeartbeatResponse.FromString(
                    beat(b"", metadata=(("x-mq-client-id", "me@1"),), timeout=10)
                )
            assert answer.status.code
            assert role.metric("popmq_proxy_lean_calls_total") == 1
    assert certificates[0] == certificates[1]
