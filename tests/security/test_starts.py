"""What each start opens: nothing that other machines reach without a setting that says so.

The table is that of docs/security.md.  A start is judged by the sockets of its processes.
"""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from e2e.processes import LOCAL, Role, role_environment
from kube.clusters import cluster

from popmq.common.address import is_loopback
from popmq.common.errors import ConfigError
from popmq.common.settings.settings import load_settings
from popmq.operator.model.manifest import Manifest
from popmq.operator.model.spec import SpecError, read_spec
from popmq.operator.resources.config import settings as settings_of

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
ALL = "0.0.0.0"
OPEN = {"POPMQ_LISTEN_OPEN_TO_ANYBODY": "true"}
TLS_ONLY = {"POPMQ_PROXY_TLS": "only"}
UP = ["up", "--data", "data", "--port", "0", "--http-port", "0"]
QUIET = {"POPMQ_HTTP_LISTEN": f"{LOCAL}:0"}
CONTROLLER = {**QUIET, "POPMQ_CONTROLLER_LISTEN": f"{LOCAL}:0"}
BROKER = {**QUIET, "POPMQ_BROKER_LISTEN": f"{LOCAL}:0"}
PROXY = {**QUIET, "POPMQ_PROXY_LISTEN": f"{LOCAL}:0"}
NO_SECRET = {"POPMQ_CLUSTER_SECRET_REQUIRED": "false"}
TO_ANYBODY, SECRET = "listen.open_to_anybody", "cluster.secret_file"
LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Start:
    """`refused`: the setting that the error names; `ports`: how many other machines reach."""

    arguments: Sequence[str]
    settings: Mapping[str, str]
    ports: int = 0
    refused: str = ""


def on(setting: str, base: Mapping[str, str] = PROXY) -> dict[str, str]:
    return {**base, setting: f"{ALL}:0"}


STARTS = {
    "up": Start(UP, {}),
    "up with workers": Start([*UP, "--workers", "2"], {}),
    "up with replicas": Start([*UP, "--replicas", "2"], {}),
    "up with an admin port": Start([*UP, "--admin-port", "0"], {}),
    "up --host": Start([*UP, "--host", ALL], {}, refused=TO_ANYBODY),
    "up --host with workers": Start([*UP, "--host", ALL, "--workers", "2"], {}, refused=TO_ANYBODY),
    "up --host with replicas": Start(
        [*UP, "--host", ALL, "--replicas", "2"], {}, refused=TO_ANYBODY
    ),
    "up --host without TLS": Start(
        [*UP, "--host", ALL], {"POPMQ_PROXY_TLS": "off"}, refused=TO_ANYBODY
    ),
    # The public port and that of the metrics.
    "up --host as a decision": Start([*UP, "--host", ALL, "--open-to-anybody"], {}, ports=2),
    "up --host with TLS alone": Start([*UP, "--host", ALL], TLS_ONLY, ports=2),
    "controller": Start(["controller"], CONTROLLER),
    "controller on the network": Start(
        ["controller"], on("POPMQ_CONTROLLER_LISTEN", CONTROLLER), refused=SECRET
    ),
    "controller on the network, open to clients": Start(
        ["controller"], {**on("POPMQ_CONTROLLER_LISTEN", CONTROLLER), **OPEN}, refused=SECRET
    ),
    "controller without a secret as a decision": Start(
        ["controller"], {**on("POPMQ_CONTROLLER_LISTEN", CONTROLLER), **NO_SECRET}, ports=1
    ),
    "broker": Start(["broker"], BROKER),
    "broker on the network": Start(["broker"], on("POPMQ_BROKER_LISTEN", BROKER), refused=SECRET),
    "broker without a secret as a decision": Start(
        ["broker"], {**on("POPMQ_BROKER_LISTEN", BROKER), **NO_SECRET}, ports=1
    ),
    "proxy": Start(["proxy"], PROXY),
    **{
        f"proxy with {setting} {how}": Start(["proxy"], {**on(setting), **more}, ports, refused)
        for setting in ("POPMQ_PROXY_LISTEN", "POPMQ_PROXY_ADMIN_LISTEN", "POPMQ_REMOTING_LISTEN")
        for how, more, ports, refused in (
            ("on the network", {}, 0, TO_ANYBODY),
            ("as a decision", OPEN, 1, ""),
            ("with TLS alone", TLS_ONLY, 1, ""),
        )
    },
    "console": Start(["console", "--listen", "127.0.0.1:0"], {}),
    "up with a console": Start([*UP, "--console-port", "0"], {}),
    "console on the network": Start(
        ["console", "--listen", f"{ALL}:0"], {}, refused="--open-to-anybody"
    ),
    "console with a login": Start(["console", "--listen", f"{ALL}:0", "--login"], {}, ports=1),
    "console as a decision": Start(
        ["console", "--listen", f"{ALL}:0", "--open-to-anybody"], {}, ports=1
    ),
    "metrics on the network": Start(["proxy"], on("POPMQ_HTTP_LISTEN"), ports=1),
}


def reachable(pid: int) -> set[str]:
    """Listening TCP sockets of the process and its children that are not on loopback."""
    return {address for address in listening(pid) if not on_loopback(address)}


def listening(pid: int) -> set[str]:
    """TCP sockets of the process and its children, also those on loopback."""
    sockets = set()
    for member in [pid, *children(pid)]:
        inodes = inodes_of(member)
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{member}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and fields[9] in inodes:
                    sockets.add(fields[1])
    return sockets


def unix_sockets(pid: int) -> set[Path]:
    """Paths that the process and its children listen on."""
    paths = set()
    for member in [pid, *children(pid)]:
        inodes = inodes_of(member)
        for line in Path(f"/proc/{member}/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in inodes and len(fields) > 7:
                paths.add(Path(fields[7]))
    return paths


def inodes_of(pid: int) -> set[str]:
    """Of its sockets."""
    return {
        link.readlink().name[len("socket:[") : -1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and link.readlink().name.startswith("socket:[")
    }


def children(pid: int) -> list[int]:
    direct = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [member for child in map(int, direct) for member in (child, *children(child))]


def on_loopback(address: str) -> bool:
    """Of the hexadecimal form that the kernel shows, in words of the machine's byte order."""
    words = re.findall("........", address.partition(":")[0])
    octets = [byte for word in words for byte in bytes.fromhex(word)[::-1]]
    if len(octets) == 4:
        return octets[0] == 127
    return octets == [0] * 15 + [1]


@pytest.mark.parametrize("name", STARTS)
def test_a_start_opens_what_the_table_says(name: str, tmp_path: Path) -> None:
    start = STARTS[name]
    if start.refused:
        text = failed(start, tmp_path)
        assert start.refused in text
        assert not (tmp_path / "data").exists()
        return
    with Role("start", list(start.arguments), folder=tmp_path, settings=start.settings) as role:
        assert len(reachable(role.pid)) == start.ports


def failed(start: Start, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "popmq", *start.arguments],
        cwd=folder,
        env=role_environment(start.settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "ready:" not in done.stdout
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "processes"), [(["--workers", "2"], 1), (["--replicas", "2"], 4)]
)
def test_processes_of_one_machine_open_no_tcp_port_for_frames(
    flags: Sequence[str], processes: int, tmp_path: Path
) -> None:
    """Of TCP there is the public port, and the metrics of each process but workers."""
    with Role("up", [*UP, *flags], folder=tmp_path, settings={}) as role:
        assert len(listening(role.pid)) == 1 + processes
        sockets = {role.folder / path for path in unix_sockets(role.pid)}
        assert {"controller.sock"} <= {path.name for path in sockets}
        for path in sockets:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            if path.name != "frames.sock":  # that is in the data directory
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("role", ["controller", "broker"])
def test_frames_are_on_the_network_with_a_secret(role: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    base = on(f"POPMQ_{role.upper()}_LISTEN", QUIET)
    settings = {**base, "POPMQ_CLUSTER_SECRET_FILE": str(secret)}
    with Role(role, [role], folder=tmp_path, settings=settings) as running:
        assert len(reachable(running.pid)) == 1


def test_the_images_command_says_that_it_is_open(tmp_path: Path) -> None:
    *_, command = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    arguments = [*json.loads(command), *UP[1:]]
    with Role("image", arguments, folder=tmp_path, settings={}) as role:
        assert len(reachable(role.pid)) == 2
    arguments.remove("--open-to-anybody")
    assert TO_ANYBODY in failed(Start(arguments, {}), tmp_path)
    assert "LISTEN_OPEN_TO_ANYBODY" not in (ROOT / "Dockerfile").read_text()


def of_cluster(manifest: Manifest) -> dict[str, str]:
    metadata = {"namespace": "apps", "uid": "u", **manifest["metadata"]}
    return settings_of(read_spec({**manifest, "metadata": metadata}, default_image="popmq:1"))


@pytest.mark.parametrize(
    ("tls", "is_open"),
    [
        ({}, True),
        ({"mode": "Disabled"}, True),
        ({"mode": "Own", "plainText": True}, True),
        ({"mode": "Own", "plainText": False}, False),
        ({"mode": "Secret", "secretName": "mine", "plainText": False}, False),
    ],
)
def test_a_brokercluster_is_open_where_its_spec_takes_plain_text(
    tls: Manifest, is_open: bool
) -> None:
    values = of_cluster(cluster(tls=tls))
    assert values["listen.open_to_anybody"] == str(is_open).lower()
    assert "cluster.secret_required" not in values
    loaded = load_settings(None, {}, values).settings
    loaded.check_client_ports()
    closed = {**values, "listen.open_to_anybody": "false"}
    if is_open:
        with pytest.raises(ConfigError, match=TO_ANYBODY):
            load_settings(None, {}, closed).settings.check_client_ports()
        with pytest.raises(SpecError, match="reached from other machines"):
            of_cluster(cluster(tls=tls, config={"listen.open_to_anybody": "false"}))


@pytest.mark.parametrize("name", ["quickstart", "showcase"])
def test_the_quickstart_says_that_it_takes_plain_text_and_requires_the_secret_of_frames(
    name: str,
) -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / f"{name}.yaml").read_text())
    (quickstart,) = (item for item in documents if item["kind"] == "BrokerCluster")
    assert quickstart["spec"]["config"] == {TO_ANYBODY: "true"}
    values = of_cluster(quickstart)
    assert values["proxy.tls"] == "auto"
    assert values["listen.open_to_anybody"] == "true"
    assert values["cluster.secret_file"]


def test_defaults_of_every_address_are_on_loopback() -> None:
    defaults = load_settings(None, {}, {}).settings.flat()
    for key, value in defaults.items():
        if key.endswith("listen") and value:
            assert is_loopback(str(value).rpartition(":")[0]), key
    assert defaults["listen.open_to_anybody"] is False
    assert defaults["cluster.secret_required"] is True
    assert defaults["proxy.admin_on_public"] is False
