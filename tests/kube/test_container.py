"""The image in containers: a first message through another port, and from another container.

    tools/build-image.sh popmq localhost/popmq:1

The official Python client is the judge: it connects to the address that the proxy's routes name.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.processes import free_port
from e2e.quickstart_pages import named_blocks
from kube.control_plane import ROOT
from programs import run_program

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

TAG = "localhost/popmq-test-container:1"
WITHIN_S = 60.0
LAYER_LIMIT_BYTES = 35_000_000

# What podman starts containers with, without limits that a sandbox may not set.
RUNTIME = """#!/usr/bin/env python3
import json, os, sys
for option, name in (("--bundle", "config.json"), ("--process", "")):
    if option in sys.argv:
        path = os.path.join(sys.argv[sys.argv.index(option) + 1], name).rstrip("/")
        with open(path) as file:
            config = json.load(file)
        config.get("process", config).pop("rlimits", None)
        with open(path, "w") as file:
            json.dump(config, file)
os.execv({runc!r}, ["runc", *sys.argv[1:]])
"""

FIRST = """
import sys
from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer
from rocketmq import SimpleConsumer

endpoint, tls, user, secret = sys.argv[1], sys.argv[2] == "tls", *sys.argv[3:5]
config = ClientConfiguration(endpoint, Credentials(user, secret) if user else Credentials())
producer = Producer(config, ("hello",), tls_enable=tls)
producer.startup()
message = Message()
message.topic, message.body = "hello", b"first"
producer.send(message)
consumer = SimpleConsumer(config, "readers", {"hello": FilterExpression()}, 10, tls_enable=tls)
consumer.startup()
(received,) = consumer.receive(16, 30)
consumer.ack(received)
print("received", received.body.decode(), flush=True)
consumer.shutdown()
producer.shutdown()
"""


class Podman:
    def __init__(self, folder: Path) -> None:
        runc = shutil.which("runc")
        missing = [name for name in ("podman", "buildah", "debootstrap") if not shutil.which(name)]
        if missing or runc is None:
            pytest.skip(f"no {', '.join(missing) or 'runc'}: the image is not run in a container")
        self.runtime = folder / "runc"
        self.runtime.write_text(RUNTIME.format(runc=runc))
        self.runtime.chmod(0o755)
        self._names: list[str] = []
        self.folder = folder

    def __call__(self, *arguments: str, ok: bool = True) -> str:
        command = ["podman", "--runtime", str(self.runtime), *arguments]
        done = run_program(command, timeout=300)
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def start(self, *arguments: str) -> str:
        """The name of a container that is healthy by the image's own check."""
        name = f"popmq-test-{len(self._names)}-{free_port()}"
        self._names.append(name)
        self("run", "--detach", "--name", name, *arguments)
        deadline_s = time.monotonic() + WITHIN_S
        # Without systemd nothing runs the check by itself: each look runs it once.
        while run_program(
            ["podman", "--runtime", str(self.runtime), "healthcheck", "run", name]
        ).returncode:
            assert time.monotonic() < deadline_s, self("logs", name)
        return name

    def address(self, name: str) -> str:
        (network,) = json.loads(self("inspect", name))[0]["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def close(self) -> None:
        for name in self._names:
            self("rm", "--force", "--volumes", name, ok=False)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    podman = Podman(tmp_path_factory.mktemp("podman"))
    build = run_program(["bash", str(ROOT / "tools" / "build-image.sh"), "popmq", TAG])
    assert build.returncode == 0, build.stdout + build.stderr
    try:
        yield podman
    finally:
        podman.close()


def first_message(
    endpoint: str, *, certificate: Path | None = None, user: str = "", secret: str = ""
) -> str:
    """The output of the program, after a message went there and back; over TLS with a certificate
    to trust."""
    command = [sys.executable, "-c", FIRST, endpoint, "tls" if certificate else "plain"]
    trusted = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)} if certificate else {}
    done = run_program(
        [*command, user, secret], timeout=120, env={**os.environ, **trusted, "HOME": "/tmp"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_message_goes_through_another_port_of_the_host(podman: Podman) -> None:
    port = free_port()
    podman.start("--publish", f"127.0.0.1:{port}:8081", TAG)
    assert "received first" in first_message(f"127.0.0.1:{port}")
    assert "received first" in first_message(f"localhost:{port}")


def test_the_first_message_goes_from_another_container_by_its_name_and_address(
    podman: Podman,
) -> None:
    server = podman.start(TAG)
    address = podman.address(server)
    # The client's packages are those of this environment.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    mounts = ["--volume", f"{packages}:/packages:ro", "--env", "PYTHONPATH=/packages"]
    where = ["--add-host", f"popmq:{address}", "--entrypoint", "/usr/bin/python3"]
    for endpoint in (f"{address}:8081", "popmq:8081"):
        output = podman("run", "--rm", *mounts, *where, TAG, "-c", FIRST, endpoint, "plain", "", "")
        assert "received first" in output


def test_the_first_message_of_a_user_goes_over_tls_through_another_port(
    podman: Podman, tmp_path: Path
) -> None:
    port = free_port()
    command = ["up", "--host", "0.0.0.0", "--auth"]
    server = podman.start(
        "--publish", f"127.0.0.1:{port}:8081", "--env", "POPMQ_PROXY_TLS=only", TAG, *command
    )
    secret = json.loads(podman("exec", server, "cat", "/var/lib/popmq/admin.json"))
    environment = {
        "POPMQ_ENDPOINT": "tls://127.0.0.1:8081",
        "POPMQ_TLS_CA": "/var/lib/popmq/tls/certificate.pem",
        "POPMQ_ACCESS_KEY": secret["access_key"],
        "POPMQ_SECRET": secret["secret"],
    }
    options = [word for pair in environment.items() for word in ("--env", "=".join(pair))]

    def popmq(*arguments: str) -> str:
        return podman("exec", *options, server, "/opt/popmq/bin/popmq", *arguments)

    user = json.loads(popmq("user", "create", "app", "-o", "json"))
    popmq("topic", "create", "hello")
    popmq("group", "create", "readers")
    popmq("user", "grant", "app", "--topic", "hello", "--allow", "pub,sub")
    popmq("user", "grant", "app", "--group", "readers", "--allow", "sub")
    certificate = tmp_path / "certificate.pem"
    certificate.write_text(podman("exec", server, "cat", environment["POPMQ_TLS_CA"]))
    keys = {"user": user["access_key"], "secret": user["secret"]}
    output = first_message(f"127.0.0.1:{port}", certificate=certificate, **keys)
    assert "received first" in output
    with pytest.raises(AssertionError):
        first_message(f"127.0.0.1:{port}", certificate=certificate, user="app", secret="wrong")


@pytest.fixture
def containers(podman: Podman, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program that finds podman where it expects Docker."""
    where = f"unix://{tmp_path}/podman.sock"
    command = ["podman", "--runtime", str(podman.runtime), "system", "service", "--time=0", where]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as service:
        deadline_s = time.monotonic() + WITHIN_S
        while not (tmp_path / "podman.sock").exists():
            assert time.monotonic() < deadline_s, "podman's service does not listen"
        try:
            yield {
                "DOCKER_HOST": where,
                # Its container for cleaning up comes from a registry; and the host is this one.
                "TESTCONTAINERS_RYUK_DISABLED": "true",
                "TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1",
                "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
            }
        finally:
            service.terminate()


TESTCONTAINERS_POM = """
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>example</groupId>
  <artifactId>first-test</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.testcontainers</groupId>
      <artifactId>testcontainers</artifactId>
      <version>2.0.5</version>
    </dependency>
    <dependency>
      <groupId>org.apache.rocketmq</groupId>
      <artifactId>rocketmq-client-java</artifactId>
      <version>5.2.0</version>
    </dependency>
  </dependencies>
</project>
"""
PROGRAMS = {
    "python": """
        python -m venv --system-site-packages env
        env/bin/python -m pip install -q testcontainers==4.15.0 rocketmq-python-client==5.1.2 pytest
        env/bin/python -m pytest -q -p no:cacheprovider first_test.py
        """,
    "java": """
        mvn -B -q dependency:copy-dependencies -DoutputDirectory=lib
        java -cp 'lib/*' FirstTest.java
        """,
    "node": """
        npm install --no-audit --no-fund testcontainers@10.16.0 rocketmq-client-nodejs@1.0.8
        node --test --test-force-exit first.test.mjs
        """,
}
PASSED = {"python": "1 passed", "java": "sent ", "node": "# pass 1"}


@pytest.mark.parametrize("language", PROGRAMS)
def test_the_programs_for_testcontainers_run_as_they_stand_on_their_page(
    containers: dict[str, str], tmp_path: Path, language: str
) -> None:
    page = (ROOT / "docs/how-to/test-with-containers.md").read_text(encoding="utf-8")
    for name, content in named_blocks(page):
        (tmp_path / name).write_text(content.replace("popmq:0.1.0", TAG), encoding="utf-8")
    (tmp_path / "pom.xml").write_text(TESTCONTAINERS_POM)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, **containers, "PATH": path}
    command = ["bash", "-euc", PROGRAMS[language]]
    done = run_program(command, cwd=tmp_path, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert PASSED[language] in done.stdout


def test_the_layers_of_popmq_are_small_and_list_their_packages(podman: Podman) -> None:
    archive = podman.folder / "image"
    done = run_program(["buildah", "push", "--quiet", TAG, f"dir:{archive}"])
    assert done.returncode == 0, done.stderr
    layers = json.loads((archive / "manifest.json").read_text())["layers"]
    added = [layer["size"] for layer in layers[1:]]
    print(f"\nlayers above the base image: {added}")
    assert sum(added) <= LAYER_LIMIT_BYTES
    bill = json.loads(podman("run", "--rm", "--entrypoint", "cat", TAG, "/opt/popmq/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    assert {"popmq", "protobuf", "click"} <= {part["name"] for part in bill["components"]}
