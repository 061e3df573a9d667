"""`popmq operator` as processes on a real control plane: killed, stopped, and two at a time."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from e2e.processes import Role, run_command
from kube.asked import Asked
from kube.control_plane import ControlPlane, LivePods, free_ports
from kube.fake_api import Object
from kube.faulty_way import FaultyWay
from kube.running import given
from kube.slow_node import TEMPLATE, SlowBrokers, SlowNode
from kube.voices import Voice
from kube.watched import Watched
from kube.whole import check_whole
from kube.world import is_ready

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

CONVERGED_S = 10.0  # a Topic or ConsumerGroup, while an operator acts
BROKERS = 3  # of a cluster that says nothing else


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        plane.define()
        yield plane


@pytest.fixture
def operators(plane: ControlPlane, tmp_path: Path) -> Iterator["Operators"]:
    operators = Operators(plane, tmp_path)
    try:
        yield operators
    finally:
        operators.stop()


class Operators:
    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._http: dict[str, int] = {}

    def page(self, name: str) -> list[str]:
        with urlopen(f"http://127.0.0.1:{self._http[name]}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text.splitlines()

    def metrics(self, name: str) -> dict[str, float]:
        """Those without labels."""
        lines = [line.split() for line in self.page(name)]
        return {line[0]: float(line[1]) for line in lines if line[0] != "#" and "{" not in line[0]}

    def start(
        self, name: str, *, proxy: str = "", controller: str = "", kubeconfig: Path | None = None
    ) -> None:
        (http, nobody) = free_ports(2)
        self._http[name] = http
        variables = {
            "POPMQ_OPERATOR_KUBECONFIG": str(kubeconfig or self._plane.folder / "admin.kubeconfig"),
            "POPMQ_OPERATOR_IDENTITY": name,
            "POPMQ_OPERATOR_IMAGE": "popmq:1",
            "POPMQ_OPERATOR_LEASE_DURATION_MS": "3s",
            "POPMQ_OPERATOR_LEASE_RENEW_MS": "300ms",
            "POPMQ_OPERATOR_RESYNC_MS": "2s",
            "POPMQ_OPERATOR_CONTROLLER_ADDRESS": controller or f"127.0.0.1:{nobody}",
            "POPMQ_OPERATOR_PROXY_ADDRESS": proxy,
            "POPMQ_HTTP_LISTEN": f"127.0.0.1:{http}",
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [Path(sys.executable).parent / "popmq", "operator"],
                env=variables,
                stdout=log,
                stderr=log,
            )

    def restart_if_ended(self, name: str) -> None:
        """As Kubernetes would: an API server that is away for long costs an operator its Lease."""
        if self.running[name].poll() is not None:
            self.start(name)

    def holder(self) -> str:
        path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/popmq-operator"
        lease = self._plane.get(path) or {}
        holder_identity: str = (lease.get("spec") or {}).get("holderIdentity") or ""
        return holder_identity

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _deployment(plane: ControlPlane) -> Object:
    return plane.get("/apis/apps/v1/namespaces/default/deployments/demo-proxy") or {}


def _given(replicas: int) -> Object:
    return given("demo", "default", proxies={"replicas": replicas})


def _is_scaled(plane: ControlPlane, replicas: int) -> bool:
    found_replicas: int = (_deployment(plane).get("spec") or {}).get("replicas") or 0
    return found_replicas == replicas


def test_another_operator_goes_on_when_one_is_killed_stopped_or_told_to_end(
    plane: ControlPlane, operators: Operators
) -> None:
    operators.start("one")
    plane.wait("one to act", lambda: operators.holder() == "one", limit_s=60)
    operators.start("two")
    plane.apply(_given(1))
    plane.wait("the proxies", lambda: _is_scaled(plane, 1), limit_s=60)
    assert operators.holder() == "one"
    plane.wait("two to listen", lambda: "ready: " in operators.log("two"))
    read = {name: operators.metrics(name) for name in ("one", "two")}
    assert [read[name]["popmq_operator_leader"] for name in read] == [1, 0]
    assert [read[name]["popmq_operator_clusters"] for name in read] == [1, 0]
    assert read["one"]["popmq_operator_reconciles_total"] > 0
    assert read["one"]["popmq_operator_clusters_ready"] == 0  # no controller answers

    operators.running["one"].send_signal(signal.SIGSTOP)
    plane.apply(_given(2))
    plane.wait("two to act", lambda: _is_scaled(plane, 2), limit_s=60)
    assert operators.holder() == "two"
    operators.running["one"].send_signal(signal.SIGCONT)
    # It finds that it lost the Lease, and ends rather than to write once more.
    assert operators.running["one"].wait(timeout=60) == 1, operators.log("one")

    operators.start("three")
    operators.running["two"].send_signal(signal.SIGTERM)
    assert operators.running["two"].wait(timeout=60) == 0, operators.log("two")
    plane.apply(_given(3))
    plane.wait("three to act", lambda: _is_scaled(plane, 3), limit_s=60)

    operators.start("four")
    operators.running["three"].kill()
    plane.apply(_given(4))
    plane.wait("four to act", lambda: _is_scaled(plane, 4), limit_s=60)

    plane.restart_api_server()
    plane.apply(_given(5))

    def four_goes_on() -> bool:
        operators.restart_if_ended("four")
        return _is_scaled(plane, 5)

    plane.wait("four to go on", four_goes_on, limit_s=90)
    status = (plane.get("/apis/popmq.io/v1beta1/namespaces/default/brokerclusters/demo") or {}).get(
        "status"
    ) or {}
    assert status["conditions"][0]["reason"] == "NoController", json.dumps(status)


class Killer:
    """Kills the operator at each step of a roll, once before it is done and once after: at the
    pods that it deletes and at the hand-over; at the first write of other things after it."""

    def __init__(self, operators: Operators, name: str) -> None:
        self._operators = operators
        self._name = name
        self.struck: list[str] = []

    def fault(self, asked: Asked) -> str:
        if asked.verb == "delete" and asked.plural == "pods":
            return self._step(asked.name)
        first = asked.plural in ("statefulsets", "deployments") or asked.sub == "status"
        return "lost" if first and self._strikes(f"after {asked.plural} {asked.sub}") else ""

    def hand_over(self) -> str:
        return self._step("hand over")

    def _step(self, name: str) -> str:
        if self._strikes(f"before {name}"):
            return "drop"
        return "lost" if self._strikes(f"after {name}") else ""

    def _strikes(self, moment: str) -> bool:
        if moment in self.struck:
            return False
        self.struck.append(moment)
        self._operators.running[self._name].kill()
        self._operators.running[self._name].wait()
        return True


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    name = f"t{time.monotonic_ns()}"
    metadata = {"name": name}
    plane.post(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    )
    return name


@pytest.fixture
def rolled(
    plane: ControlPlane, operators: Operators, namespace: str, tmp_path: Path
) -> Iterator["Rolled"]:
    with Voice(plane, namespace, "demo") as voice, FaultyWay(plane) as way:
        yield Rolled(plane, operators, namespace, voice, way, way.kubeconfig(tmp_path))


@pytest.fixture
def slowly_rolled(
    plane: ControlPlane, operators: Operators, namespace: str, tmp_path: Path
) -> Iterator[tuple["Rolled", SlowBrokers]]:
    """Its brokers take several looks to go, to be ready and to be in sync."""
    brokers = SlowBrokers(LivePods(plane))
    with (
        Voice(plane, namespace, "demo", brokers) as voice,
        FaultyWay(plane) as way,
        SlowNode(plane, lambda: voice.looks, late=["demo-broker-0-2"]),
    ):
        yield Rolled(plane, operators, namespace, voice, way, way.kubeconfig(tmp_path)), brokers


@dataclass(frozen=True)
class Rolled:
    """A cluster whose operators are processes, and all that they do goes the faulty way."""

    plane: ControlPlane
    operators: Operators
    namespace: str
    voice: Voice
    way: FaultyWay
    kubeconfig: Path

    def keep_running(self, name: str) -> None:
        """As Kubernetes would: a container that ended begins again, under its pod's name."""
        process = self.operators.running.get(name)
        if process is None or process.poll() is not None:
            self.operators.start(name, controller=self.voice.address, kubeconfig=self.kubeconfig)

    def apply(self, **spec: object) -> None:
        few = {"proxies": {"replicas": 1}, "controller": {"replicas": 1}}
        self.plane.apply(given("demo", self.namespace, **few, **spec))

    @property
    def log(self) -> str:
        return self.operators.log("one")

    @property
    def ready_brokers(self) -> int:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        selector = "labelSelector=app.kubernetes.io/component=broker"
        return sum(is_ready(resource) for resource in self.plane.items(f"{path}?{selector}"))

    @property
    def has_settled(self) -> bool:
        path = f"/apis/popmq.io/v1beta1/namespaces/{self.namespace}/brokerclusters/demo"
        manifest = self.plane.get(path) or {"metadata": {}}
        conditions = (manifest.get("status") or {}).get("conditions") or []
        statuses = {condition["type"]: condition["status"] for condition in conditions}
        seen = {condition["observedGeneration"] for condition in conditions}
        settled = (statuses.get("Ready"), statuses.get("Progressing")) == ("True", "False")
        return settled and seen == {manifest["metadata"].get("generation")}


def test_a_cluster_is_made_rolled_scaled_in_and_deleted(rolled: Rolled) -> None:
    plane, namespace = rolled.plane, rolled.namespace
    rolled.keep_running("one")
    rolled.apply()
    plane.wait("the cluster", lambda: rolled.has_settled)
    check_whole(plane, namespace, "demo")
    deleted: list[str] = []

    def note(asked: Asked) -> str:
        if asked.verb == "delete" and asked.plural == "pods":
            deleted.append(asked.name)
        return ""

    # Pods were seen to go twice on a busy machine while the operator had restarted each once, by
    # its log. So what the operator deletes counts.
    rolled.way.fault = note
    with Watched(plane, namespace) as watched:
        rolled.apply(image="popmq:2")
        plane.wait("the roll", lambda: rolled.has_settled, limit_s=240)
        check_whole(plane, namespace, "demo")
        watched.settle()
    assert watched.most_down == {"demo-broker-0": 1}
    restarted = [name for name in deleted if "-broker-" in name]
    assert restarted == ["demo-broker-0-1", "demo-broker-0-2", "demo-broker-0-0"], rolled.log
    rolled.apply(image="popmq:2", brokers={"replicas": 2})
    plane.wait("two brokers", lambda: rolled.has_settled and rolled.ready_brokers == 2)
    plane.kubectl("delete", "bcl", "demo", "-n", namespace, "--wait=true", "--timeout=60s")
    left = f"/api/v1/namespaces/{namespace}/pods"
    plane.wait("the pods to go", lambda: plane.items(left) == [])
    assert plane.items(f"/apis/apps/v1/namespaces/{namespace}/statefulsets") == []


def test_an_operator_killed_at_each_step_of_a_roll_is_followed_by_one_that_goes_on(
    slowly_rolled: tuple[Rolled, SlowBrokers],
) -> None:
    rolled, slow_brokers = slowly_rolled
    # With so low a bound it is readiness and being in sync that a pod is waited for.
    brokers = {"template": TEMPLATE, "durability": {"minInSync": 1}}

    def settled() -> bool:
        rolled.keep_running("one")
        return rolled.has_settled and rolled.ready_brokers == BROKERS

    rolled.apply(brokers=brokers)
    rolled.plane.wait("the cluster", settled)
    killer = Killer(rolled.operators, "one")
    with Watched(rolled.plane, rolled.namespace) as watched:
        rolled.apply(image="popmq:2", brokers=brokers)
        rolled.way.fault, rolled.voice.fault = killer.fault, killer.hand_over
        rolled.plane.wait("the roll", settled, limit_s=240)
        check_whole(rolled.plane, rolled.namespace, "demo")
        watched.settle()
    assert watched.most_down == {"demo-broker-0": 1}
    assert slow_brokers.fewest == 2
    gone = [name for name in watched.gone if "-broker-" in name]
    assert gone == ["demo-broker-0-1", "demo-broker-0-2", "demo-broker-0-0"], rolled.log
    assert len(killer.struck) == 3 * 2 + 2 + 3, killer.struck


def test_a_roll_outlives_an_operator_that_is_stopped_and_an_api_server_that_is_killed(
    rolled: Rolled,
) -> None:
    stages = ["stop", "restart"]  # at the first pod that is to go, and at the next

    def fault(asked: Asked) -> str:
        if asked.verb != "delete" or asked.plural != "pods" or not stages:
            return ""
        if stages[0] == "stop":
            rolled.operators.running["one"].send_signal(signal.SIGSTOP)
            stages.pop(0)
        return "drop"  # until there is another server to ask

    def settled() -> bool:
        if stages == ["restart"] and rolled.operators.holder() == "two":
            rolled.plane.restart_api_server()
            stages.clear()
        rolled.keep_running("two")
        return rolled.has_settled

    rolled.keep_running("one")
    rolled.apply()
    rolled.plane.wait("the cluster", lambda: rolled.has_settled)
    rolled.keep_running("two")
    with Watched(rolled.plane, rolled.namespace) as watched:
        rolled.way.fault = fault
        rolled.apply(image="popmq:2", config={"pop.max_batch": "8"})
        rolled.plane.wait("the roll", settled, limit_s=240)
        rolled.operators.running["one"].send_signal(signal.SIGCONT)
        assert rolled.operators.running["one"].wait(timeout=60) == 1
        check_whole(rolled.plane, rolled.namespace, "demo")
        watched.settle()
    assert watched.most_down == {"demo-broker-0": 1}
    assert len([name for name in watched.gone if "-broker-" in name]) == 3
    assert stages == []


def test_definitions_that_come_after_the_operator_are_watched_within_a_minute(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, controllers=False)
    operators = Operators(plane, tmp_path)
    try:
        plane.start()
        operators.start("one")
        plane.wait("one to act", lambda: operators.holder() == "one", limit_s=60)
        asked = lambda: '/apis/popmq.io/v1beta1"' in (tmp_path / "audit.log").read_text()  # noqa: E731
        plane.wait("its question for kinds", asked, limit_s=60)
        plane.define()
        plane.apply(_given(1))
        plane.wait("its proxies", lambda: _is_scaled(plane, 1), limit_s=60)
        ends = "popmq_operator_certificate_expiry_timestamp_seconds{"

        def shown() -> list[str]:
            return [line for line in operators.page("one") if line.startswith(ends)]

        plane.wait("the end of its certificate", shown, limit_s=60)
        assert 'cluster="demo"' in shown()[0]
        assert 'cluster_namespace="default"' in shown()[0]
        assert float(shown()[0].split()[1]) > time.time() + 80 * 86_400
        failing = 'popmq_operator_reports_failing{cluster="demo",cluster_namespace="default"} 0.0'
        plane.wait("its reports", lambda: failing in operators.page("one"), limit_s=60)
        assert operators.running["one"].poll() is None
        assert "other kinds are served" in operators.log("one")
    finally:
        operators.stop()
        plane.stop()


def _declared(kind: str, name: str, /, **spec: object) -> Object:
    metadata = {"name": name, "namespace": "default"}
    body = {"apiVersion": "popmq.io/v1beta1", "kind": kind, "metadata": metadata}
    return {**body, "spec": {"cluster": "demo", **spec}}


def _condition(plane: ControlPlane, kind: str, name: str, what: str = "Ready") -> str:
    query = f"{{.status.conditions[?(@.type=='{what}')].status}}"
    return plane.kubectl("get", kind, name, "-o", f"jsonpath={query}", ok=False)


def test_topics_and_groups_follow_their_objects_and_drift_is_put_right(
    plane: ControlPlane, operators: Operators, tmp_path: Path
) -> None:
    settings = {"POPMQ_PROXY_LISTEN": "127.0.0.1:0", "POPMQ_HTTP_LISTEN": "127.0.0.1:0"}
    flags = ["up", "--data", str(tmp_path / "data"), "--port", "0", "--http-port", "0"]
    with Role("up", flags, folder=tmp_path, settings=settings) as role:
        endpoint = role.ready.endpoint

        def popmq(*arguments: str) -> str:
            return run_command(endpoint, tmp_path, *arguments)

        def queues() -> int:
            found_queues: int = json.loads(popmq("topic", "show", "orders", "--json"))["queues"]
            return found_queues

        plane.apply(_given(1))
        plane.apply(_declared("Topic", "orders", queues=4, onDelete="Delete"))
        operators.start("one", proxy=endpoint)
        plane.wait("the topic", lambda: _condition(plane, "topic", "orders") == "True")
        assert queues() == 4

        def durability(name: str) -> str:
            found_durability: str = json.loads(popmq("topic", "show", name, "--json"))["durability"]
            return found_durability

        plane.apply(_declared("Topic", "later", durability="Memory"))
        within = {"limit_s": CONVERGED_S}
        plane.wait("another", lambda: _condition(plane, "topic", "later") == "True", **within)
        assert (durability("orders"), durability("later")) == ("disk", "memory")
        shown = [line.split() for line in plane.kubectl("get", "pmt", "-o", "wide").splitlines()]
        column = shown[0].index("DURABILITY")
        assert {row[0]: row[column] for row in shown[1:]} == {"orders": "Disk", "later": "Memory"}
        popmq("topic", "alter", "later", "--durability", "disk")
        plane.wait("the memory", lambda: durability("later") == "memory", **within)
        plane.apply(_declared("Topic", "later"))
        plane.wait("the disk", lambda: durability("later") == "disk", **within)
        popmq("topic", "alter", "orders", "--permission", "r")
        drifted = lambda: _condition(plane, "topic", "orders", "Drifted") == "True"  # noqa: E731
        plane.wait("the drift", drifted, **within)
        assert json.loads(popmq("topic", "show", "orders", "--json"))["permission"] == "rw"

        operators.running["one"].kill()
        plane.apply(_declared("ConsumerGroup", "readers", maxAttempts=3))
        plane.apply(_declared("Topic", "orders", queues=6, onDelete="Delete"))
        operators.start("two", proxy=endpoint)
        plane.wait("the group", lambda: _condition(plane, "pmg", "readers") == "True")
        assert json.loads(popmq("group", "show", "readers", "--json"))["max_attempts"] == 3
        plane.wait("more queues", lambda: queues() == 6)

        plane.apply(_declared("Topic", "orders", queues=8, onDelete="Delete"))
        plane.wait("more queues again", lambda: queues() == 8, **within)

        plane.kubectl("delete", "topic", "orders", "--timeout=60s")
        plane.kubectl("delete", "consumergroup", "readers", "--timeout=60s")
        assert "orders" not in popmq("topic", "list")
        assert "readers" in popmq("group", "list")


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("Topic", {"retention": "soon"}, "such as 90s, 12h or 3d"),
        ("Topic", {"type": "Lite", "liteTtl": "soon"}, "such as 90s, 12h or 3d"),
        ("Topic", {"liteTtl": "1h"}, "is of topics of type Lite"),
        ("Topic", {"name": "a b"}, "1 to 127 letters"),
        ("Topic", {"queues": 0}, "greater than or equal to 1"),
        ("Topic", {"durability": "Ram"}, 'supported values: "Disk", "Memory"'),
        ("Topic", {"type": "Transaction", "durability": "Memory"}, "leave out spec.durability"),
        ("Topic", {"queuez": 3}, 'unknown field "spec.queuez"'),
        ("ConsumerGroup", {"type": "FIFO", "checkPoints": "Buffered"}, "needs spec.checkPoints"),
        ("ConsumerGroup", {"backOff": ["1"]}, "holds durations such as"),
        ("Topic", {"retention": "999999999999999d"}, "at most 99999d"),
        ("LagReport", {"schedule": "daily"}, "five fields"),
        ("LagReport", {"schedule": "99 * * * *"}, "the minutes, has numbers from 0 to 59"),
        ("LagReport", {"schedule": "0 24 * * *"}, "the hours, has numbers from 0 to 23"),
        ("LagReport", {"schedule": "0 0 32 * *"}, "the days of the month"),
        ("LagReport", {"timeZone": "Europe Berlin"}, "a name of the tz database"),
        (
            "LagReport",
            {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}},
            "resources.requests may not exceed resources.limits",
        ),
        ("LagReport", {"master": "yarn"}, "spec.master is local[N]"),
        ("LagReport", {"master": "local[2]", "executors": {}}, "needs a spec.master of k8s://"),
        ("LagReport", {"executors": {"memory": "64Mi"}}, "a quantity from 768Mi on"),
        ("LagReport", {"executors": {"instances": 0}}, "greater than or equal to 1"),
    ],
)
def test_the_api_server_refuses_what_cannot_be_declared(
    plane: ControlPlane, kind: str, spec: dict[str, object], message: str
) -> None:
    assert message in plane.refusal(_declared(kind, "bad", **spec))


def test_the_api_server_refuses_a_report_whose_name_is_no_label(plane: ControlPlane) -> None:
    assert "63 characters" in plane.refusal(_declared("LagReport", "x" * 64))


@pytest.mark.parametrize("schedule", ["*/5 0-6,22 1,15 JAN-MAR MON-FRI", "@daily", "0 * * * *"])
def test_the_api_server_takes_a_schedule_that_cron_takes(
    plane: ControlPlane, schedule: str
) -> None:
    plane.apply(_declared("LagReport", "timed", schedule=schedule))
    plane.kubectl("delete", "lagreport", "timed")


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"queues": 4}, {"queues": 2}, "cannot shrink"),
        ({"type": "FIFO", "queues": 4}, {"type": "FIFO", "queues": 8}, "would lose their order"),
        ({"type": "Normal"}, {"type": "Delay"}, "make another Topic"),
        ({"name": "a"}, {"name": "b"}, "make another Topic"),
        ({}, {"cluster": "other"}, "spec.cluster cannot change"),
    ],
)
def test_the_api_server_refuses_changes_that_no_topic_can_have(
    plane: ControlPlane, first: dict[str, object], then: dict[str, object], message: str
) -> None:
    plane.apply(_declared("Topic", "fixed", **first))
    try:
        assert message in plane.refusal(_declared("Topic", "fixed", **then))
    finally:
        plane.kubectl("delete", "topic", "fixed")
