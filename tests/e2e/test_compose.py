"""compose.yaml: by its schema, and its services as processes, started by the same commands.

There is no container engine here.  Each service has a loopback address in place of a network
namespace: its name and 0.0.0.0 become that address, and its volume becomes a folder.
"""

import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.official_go import go_program
from e2e.processes import Role, role_environment
from e2e.prometheus import Prometheus
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WITHIN_S = 60.0
VOLUME = "/var/lib/popmq"
ROLES = ("controller", "broker-1", "broker-2", "broker-3", "proxy", "proxy-2", "console")


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return document


def published(service: dict[str, Any]) -> list[str]:
    return list(service.get("ports", []))


def test_every_port_that_is_published_is_one_of_loopback() -> None:
    ports = [port for service in compose()["services"].values() for port in published(service)]
    assert len(ports) == 6
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [
        mount.split(":")[0]
        for service in compose()["services"].values()
        for mount in service.get("volumes", [])
    ]
    files = [mount for mount in mounts if mount.startswith("./")]
    assert len(files) == 5
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert {mount for mount in mounts if not mount.startswith("./")} == set(compose()["volumes"])


def test_prometheus_asks_every_service_that_serves_metrics() -> None:
    page = (ROOT / "deploy/compose/prometheus.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(page)["scrape_configs"]
    (targets,) = job["static_configs"]
    assert "popmq" in job["job_name"]
    assert targets["targets"] == [f"{name}:5557" for name in ROLES if name != "console"]


def test_grafana_finds_the_dashboards_where_they_are_mounted() -> None:
    page = (ROOT / "deploy/compose/dashboards.yml").read_text(encoding="utf-8")
    (provider,) = yaml.safe_load(page)["providers"]
    folder = provider["options"]["path"]
    grafana = compose()["services"]["grafana"]
    assert f"./monitoring/dashboards:{folder}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "monitoring/dashboards" / home.removeprefix(f"{folder}/")).exists()


@dataclass
class Services:
    """The services of popmq, each at a loopback address of its own."""

    folder: Path
    addresses: dict[str, str]
    roles: dict[str, Role] = field(default_factory=dict)

    def here(self, service: str, text: str) -> str:
        for name, address in self.addresses.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?=:\d)", address, text)
        text = text.replace("0.0.0.0:", f"{self.addresses[service]}:")
        return text.replace(VOLUME, str(self.folder / "volumes" / service))

    def role(self, name: str) -> Role:
        service = compose()["services"][name]
        (self.folder / "volumes" / name).mkdir(parents=True)
        environment = service.get("environment", {})
        self.roles[name] = Role(
            name,
            [self.here(name, word) for word in service["command"]],
            folder=self.folder,
            settings={key: self.here(name, value) for key, value in environment.items()},
        )
        return self.roles[name]

    def popmq(self, *arguments: str, proxy: str = "proxy") -> str:
        """A command on the host, through the ports that are published."""
        address = self.addresses[proxy]
        where = ("--endpoint", f"{address}:8081", "--admin-endpoint", f"{address}:8083")
        done = run_program([sys.executable, "-m", "popmq.cli", *arguments, *where], timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("compose")
    net = f"127.{random.randrange(64, 250)}.{random.randrange(250)}"
    addresses = {name: f"{net}.{number}" for number, name in enumerate(ROLES, 1)}
    made = Services(folder, addresses)
    with ExitStack() as stack:
        for name in ROLES:
            stack.enter_context(made.role(name))
        yield made


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_services_are_a_cluster_of_three_replicas_with_a_console(services: Services) -> None:
    services.popmq("send", "hello", "one")
    received = services.popmq("recv", "hello", "--group", "readers", "--ack", "--json")
    assert json.loads(received)["body"] == "one"
    services.popmq("send", "hello", "two", proxy="proxy-2")
    received = services.popmq("recv", "hello", "--group", "readers", "--ack", "--json")
    assert json.loads(received)["body"] == "two"
    listed = services.popmq("broker", "list", "-o", "json")
    assert set(re.findall(r'"(broker-\d)"', listed)) == {"broker-1", "broker-2", "broker-3"}
    with urllib.request.urlopen(f"http://{services.addresses['console']}:8082/groups") as page:
        assert "readers" in page.read().decode()


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_image_s_check_finds_every_service_healthy_that_uses_it(services: Services) -> None:
    for name, role in services.roles.items():
        if compose()["services"][name].get("healthcheck", {}).get("disable"):
            continue
        done = run_program(
            [sys.executable, "-m", "popmq.cli.roles.healthcheck"],
            env=role_environment(role.settings),
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_prometheus_finds_every_process_by_the_file_of_compose(
    services: Services, tmp_path: Path
) -> None:
    page = (ROOT / "deploy/compose/prometheus.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(page)["scrape_configs"]
    names = job["static_configs"][0]["targets"]
    targets = [services.here("proxy", name) for name in names]
    with Prometheus(tmp_path, targets, ROOT / "monitoring" / "alerts.yml") as prometheus:
        deadline_s = time.monotonic() + WITHIN_S
        while [sample["value"][1] for sample in prometheus.query("sum(up)")] != [str(len(targets))]:
            assert time.monotonic() < deadline_s, prometheus.query("up")
            time.sleep(0.2)  # between two looks


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_file_keeps_to_the_schema_of_compose() -> None:
    program = go_program(HERE / "compose", ".", "compose-check")
    done = run_program([program, ROOT / "compose.yaml"])
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert set(services) == {*ROLES, "prometheus", "grafana"}
    assert all(services[name]["image"] == "popmq:0.1.0" for name in ROLES)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_the_check_of_the_schema_refuses_a_wrong_file(tmp_path: Path) -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    (tmp_path / "compose.yaml").write_text(
        text.replace("    command: [controller]", "    comand: x")
    )
    program = go_program(HERE / "compose", ".", "compose-check")
    done = run_program([program, tmp_path / "compose.yaml"])
    assert done.returncode == 1
    assert "comand" in done.stderr
