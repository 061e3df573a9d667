"""popmq as pods on two real nodes: the quickstart, lost pods and nodes, a roll under load.

`make test-pods` runs it; nothing here is simulated but the machines.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen

import pytest
from kube.control_plane import ROOT, ControlPlane
from kube.fake_api import Object
from kube.metrics_api import MetricsApi
from pods.nodes import GATEWAY, Nodes, have_all, network, volume
from pods.waits import waits_at_hand_overs
from programs import run_program

from popmq.operator.model.names import HTTP_PORT

IMAGES = os.environ.get("POPMQ_PODS_IMAGES", "")
NAMESPACE = "apps"
NODES = ("node1", "node2")
AIM_S = 1.0  # of a wait between two OKs: held at a hand-over, else shown with what happened
FOLLOWS_S = 15.0  # the status; an election takes two of them
POPMQ = str(Path(sys.executable).parent / "popmq")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IMAGES, reason="make test-pods runs it, as root"),
]


class Site:
    def __init__(self, plane: ControlPlane, nodes: Nodes) -> None:
        self.plane = plane
        self.nodes = nodes

    def kubectl(self, *arguments: str) -> str:
        return self.plane.kubectl("-n", NAMESPACE, *arguments)

    def status(self) -> Object:
        path = f"/apis/popmq.io/v1beta1/namespaces/{NAMESPACE}/brokerclusters/demo"
        status: Object = (self.plane.get(path) or {}).get("status") or {}
        return status

    def condition(self, kind: str) -> str:
        return str(self._condition(kind).get("status", ""))

    def message(self, kind: str) -> str:
        return str(self._condition(kind).get("message", ""))

    def _condition(self, kind: str) -> Object:
        for condition in self.status().get("conditions") or []:
            if condition["type"] == kind:
                found_condition: Object = condition
                return found_condition
        return {}

    @property
    def is_whole(self) -> bool:
        expected = {"masters": "1/1", "inSync": "3/3", "proxies": "2/2"}
        settled = self.condition("Ready") == "True" and self.condition("Progressing") == "False"
        complete = self.condition("Degraded") == "False"
        return settled and complete and self.status().get("summary") == expected

    @property
    def master(self) -> str:
        master: str = self.status()["groups"][0]["master"]
        return master

    def another_master_than(self, old: str, limit_s: float = FOLLOWS_S) -> None:
        """From now until the status names it, which Kubernetes need not have an event of."""
        begun = time.monotonic()
        self.plane.wait("another master", lambda: self.master not in ("", old), limit_s=limit_s)
        print(f"\n{self.master} leads by the status {time.monotonic() - begun:.1f} s later")

    @property
    def endpoint(self) -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/services/demo-proxy"
        service = self.plane.get(path)
        assert service is not None
        return f"{service['spec']['clusterIP']}:8081"

    def popmq(self, *arguments: str) -> str:
        command = [*self.from_a_pod, POPMQ, *arguments, "--endpoint", self.endpoint]
        done = run_program(command, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def from_a_pod(self) -> list[str]:
        """Before a command: it runs where the pod `client` is."""
        return ["nsenter", f"--net=/proc/{self.nodes.inside(self.pod('client'))}/ns/net"]

    def pod(self, name: str) -> Object:
        manifest = self.plane.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
        assert manifest is not None, name
        return manifest

    def pods_of(self, role: str) -> list[Object]:
        query = f"labelSelector=app.kubernetes.io/component={role}"
        return self.plane.items(f"/api/v1/namespaces/{NAMESPACE}/pods?{query}")

    def stores(self) -> dict[str, tuple[str, str]]:
        """By broker: its volume, and which store is on it (a new one has a new id)."""
        stores = {}
        for pod in self.pods_of("broker"):
            name = pod["metadata"]["name"]
            path = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/data-{name}"
            volume = str((self.plane.get(path) or {})["spec"]["volumeName"])
            (identity,) = (self.plane.folder / "volumes" / volume).rglob("identity")
            (store,) = (x for x in identity.read_text().splitlines() if "store_id" in x)
            stores[name] = volume, store
        assert len(stores) == 3
        return stores

    @property
    def images(self) -> set[str]:
        """Of the cluster's pods, those that go not counted."""
        query = "labelSelector=popmq.io/cluster=demo"
        pods = self.plane.items(f"/api/v1/namespaces/{NAMESPACE}/pods?{query}")
        stay = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return {manifest["spec"]["containers"][0]["image"] for manifest in stay}

    @property
    def proxies(self) -> str:
        return str((self.status().get("summary") or {}).get("proxies"))

    @property
    def limits(self) -> list[Object]:
        return [pod["spec"]["containers"][0]["resources"] for pod in self.pods_of("proxy")]

    def restarts(self, pod: Object) -> list[str]:
        """Why its container ended, if it did."""
        (status,) = pod["status"]["containerStatuses"]
        ended = (status.get("lastState") or {}).get("terminated")
        return [ended["reason"]] if ended else []

    def sends(self, proxy: Object) -> float:
        """That it answered, by its own count."""
        page = f"http://{proxy['status'].get('podIP')}:{HTTP_PORT}/metrics"
        try:
            with urlopen(page, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0  # not yet there
        start = 'popmq_proxy_request_seconds_count{method="SendMessage"'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def brokers_by_node(self) -> dict[str, list[str]]:
        brokers: dict[str, list[str]] = {}
        for pod in self.plane.items(f"/api/v1/namespaces/{NAMESPACE}/pods"):
            if "-broker-" in pod["metadata"]["name"]:
                brokers.setdefault(pod["spec"]["nodeName"], []).append(pod["metadata"]["name"])
        return brokers

    def pods(self) -> str:
        return self.kubectl("get", "pods", "-o", "wide")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if missing := have_all():
        pytest.skip(f"not on this machine: {missing}")
    folder = tmp_path_factory.mktemp("site")
    network()
    plane = ControlPlane(folder, nodes=0, address=GATEWAY, kubelets=NODES)
    nodes = Nodes(plane, folder, sorted(Path(IMAGES).glob("*.tar")))
    site = Site(plane, nodes)
    try:
        plane.start()
        nodes.start(*NODES)
        _make_room(plane, folder)
        _install(plane)
        yield site
    finally:
        print(site.pods() if plane.processes else "")
        nodes.stop()
        plane.stop()


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def _make_room(plane: ControlPlane, folder: Path) -> None:
    plane.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "local", "annotations": {_DEFAULT_CLASS: "true"}},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    )
    for node in NODES:
        for number in range(3):
            name = f"{node}-{number}"
            plane.apply(volume(name, node, folder / "volumes" / name))


def _install(plane: ControlPlane) -> None:
    for name in ("popmq-system", NAMESPACE):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": name, "labels": labels}
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    image = ("--set", "image.repository=localhost/popmq", "--set-string", "image.tag=1")
    where = (f"--kubeconfig={plane.folder}/admin.kubeconfig", "--namespace=popmq-system")
    command = [str(plane.assets / "helm"), "install", "popmq", "charts/popmq", *where, *image]
    subprocess.run([*command, "--wait", "--timeout=180s"], check=True, cwd=ROOT)
    plane.kubectl("apply", "-n", NAMESPACE, "-f", f"{ROOT}/deploy/quickstart.yaml")
    plane.apply(_bystander())
    ready = ("--for=condition=Ready", "pod/client", "--timeout=60s")
    plane.kubectl("wait", "-n", NAMESPACE, *ready)


def _bystander() -> Object:
    """A pod whose place in the network the clients have."""
    context = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "client", "image": "localhost/pause:1", "securityContext": context}
    metadata = {"name": "client", "namespace": NAMESPACE}
    spec = {"containers": [container], "nodeName": NODES[0], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_the_quickstart_serves_from_another_place_of_the_network(site: Site) -> None:
    begun = time.monotonic()
    site.plane.wait("the cluster", lambda: site.is_whole, limit_s=240)
    print(f"\nwhole after {time.monotonic() - begun:.1f} s\n{site.pods()}")
    site.kubectl("wait", "--for=condition=Ready", "topic/orders", "--timeout=60s")
    site.popmq("send", "orders", "one")
    assert "one" in site.popmq("recv", "orders", "--group", "readers", "--ack")


class Flow:
    """Entered, an official client sends; left, everything that was answered OK was received."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stores = site.stores()

    def __enter__(self) -> Self:
        script = Path(__file__).parent / "flow.py"
        where = [self._site.endpoint, "orders", "readers", str(self._folder)]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._site.from_a_pod, sys.executable, str(script), *where],
                stdout=log,
                stderr=log,
            )
        self._site.plane.wait("the flow", lambda: len(self.lines("sent")) > 50, limit_s=60)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        try:
            if error is None:
                before = len(self.lines("sent"))
                more = lambda: len(self.lines("sent")) > before + 50  # noqa: E731
                self._site.plane.wait("more", more, limit_s=60)
                (self._folder / "stop").touch()
                assert self._process.wait(timeout=400) == 0, (self._folder / "log").read_text()
        finally:
            self._process.kill()
            self._process.wait()

    def lines(self, name: str) -> list[list[str]]:
        path = self._folder / name
        return (
            [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
        )

    def check(self, what: str) -> None:
        sent = [(float(line[0]), line[1]) for line in self.lines("sent") if len(line) == 2]
        received = {line[0] for line in self.lines("received")}
        times = [entry[0] for entry in sent]
        gaps = sorted(((b - a, a, b) for a, b in pairwise(times)), reverse=True)
        shown = ", ".join(f"{gap:.2f}" for gap, _, _ in gaps[:4])
        refused = len(self.lines("refused"))
        lost = {entry[1] for entry in sent} - received
        print(
            f"\n{what}: {len(sent)} sends OK, {refused} refused, {len(lost)} lost; "
            f"longest waits between two OKs {shown} s"
        )
        for text, count in Counter(lines[-1][:200] for lines in self.lines("refused")).most_common(
            2
        ):
            print(f"refused {count} times: {text}")
        for _, begun, ended in (gap for gap in gaps[:2] if gap[0] > AIM_S):
            print("\n".join(["meanwhile:", *self._said(begun, ended)]))
        assert not lost, sorted(lost)[:10]

    def check_hand_overs(self) -> None:
        """That there was one, and how long sends waited for each."""
        wall = time.time() - time.monotonic()
        oks = [wall + float(line[0]) for line in self.lines("sent") if len(line) == 2]
        logged = self._site.nodes.logged(_utc(oks[0]), _utc(oks[-1]))
        waits = waits_at_hand_overs(oks, [text for _, _, text in logged])
        print("\n".join(f"sends waited {wait:.2f} s at {what}" for what, wait in waits.items()))
        assert waits, "no broker said that it leads now"
        assert max(waits.values()) <= AIM_S, waits

    def _said(self, begun: float, ended: float) -> list[str]:
        """In a wait between two OKs, by the clock of this machine."""
        wall = time.time() - time.monotonic()
        some = timedelta(seconds=0.3)
        return self._site.nodes.said(_utc(wall + begun) - some, _utc(wall + ended) + some)[:30]

    def same_stores(self) -> None:
        """Every broker is on the volume that it had, and its store is the one that was there."""
        assert self._site.stores() == self._stores


def _utc(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


def test_a_new_image_is_rolled_out_under_load(site: Site, tmp_path: Path) -> None:
    for node in NODES:
        site.nodes.tag(node, "localhost/popmq:1", "localhost/popmq:2")
    with Flow(site, tmp_path) as flow:
        image = '{"spec": {"image": "localhost/popmq:2"}}'
        site.kubectl("patch", "bcl", "demo", "--type=merge", "-p", image)
        site.plane.wait("the new image", lambda: site.images == {"localhost/popmq:2"}, limit_s=300)
        site.plane.wait("the cluster", lambda: site.is_whole, limit_s=120)
    flow.check("a roll of brokers, proxies and controllers")
    flow.check_hand_overs()
    flow.same_stores()


def test_a_masters_pod_is_killed(site: Site, tmp_path: Path) -> None:
    with Flow(site, tmp_path) as flow:
        old = site.master
        site.kubectl("delete", "pod", old, "--grace-period=0", "--force")
        site.another_master_than(old)
        site.plane.wait("the cluster", lambda: site.is_whole, limit_s=180)
    flow.check("the master's pod killed")
    flow.same_stores()


def test_a_masters_network_is_cut_and_comes_back(site: Site, tmp_path: Path) -> None:
    with Flow(site, tmp_path) as flow:
        old = site.master
        cable = site.nodes.cut(site.pod(old)["status"]["podIP"])
        site.another_master_than(old)
        site.nodes.mend(cable)
        site.plane.wait("the cluster", lambda: site.is_whole, limit_s=180)
    flow.check("the master's network cut, and mended")
    flow.same_stores()


def test_more_proxies_come_and_go(site: Site, tmp_path: Path) -> None:
    with Flow(site, tmp_path) as flow:
        for number in ("4", "2"):
            site.kubectl("scale", "bcl/demo", f"--replicas={number}")
            expected = f"{number}/{number}"
            site.plane.wait(
                "the proxies",
                lambda wanted=expected: site.proxies == wanted,
                limit_s=120,
            )
    flow.check("four proxies, and two again")


def test_a_proxy_over_its_memory_limit_harms_nobody_else(site: Site, tmp_path: Path) -> None:
    memory = {"memory": "300Mi"}
    limited = {"requests": {"cpu": "100m", **memory}, "limits": memory}
    spec = {"proxies": {"resources": limited, "maxConnectionAge": "5s"}}
    site.kubectl("patch", "bcl", "demo", "--type=merge", "-p", json.dumps({"spec": spec}))
    site.plane.wait("the limit", lambda: site.limits == [limited, limited], limit_s=120)
    site.plane.wait("the cluster", lambda: site.is_whole, limit_s=120)
    pods, *others = site.pods_of("proxy")
    with Flow(site, tmp_path) as flow:
        site.nodes.eat_memory(pods, 400 << 20)
        name = pods["metadata"]["name"]
        site.plane.wait("the kill", lambda: site.restarts(site.pod(name)) == ["OOMKilled"])
        site.plane.wait("the cluster", lambda: site.is_whole, limit_s=120)
    flow.check("a proxy killed at its memory limit")
    flow.same_stores()
    lives = {manifest["metadata"]["uid"]: site.restarts(manifest) for manifest in others}
    assert {pod["metadata"]["uid"] for pod in site.pods_of("proxy")} >= set(lives)
    for other in (*site.pods_of("broker"), *site.pods_of("controller")):
        assert site.restarts(other) == [], other["metadata"]["name"]
    assert set(map(str, lives.values())) == {"[]"}


def test_an_autoscaler_adds_proxies_and_clients_move_to_them(site: Site, tmp_path: Path) -> None:
    before = {pod["metadata"]["name"] for pod in site.pods_of("proxy")}
    with Flow(site, tmp_path) as flow, MetricsApi(site.plane, cpu="50m") as metrics:
        scaling = {"spec": {"proxies": {"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}}}
        site.kubectl("patch", "bcl", "demo", "--type=merge", "-p", json.dumps(scaling))
        site.plane.wait("the autoscaler", lambda: site.kubectl("get", "hpa", "-o", "name") != "")
        metrics.cpu = "130m"  # twice 65 % of what they request
        site.plane.wait("four proxies", lambda: site.proxies == "4/4", limit_s=120)

        def served() -> bool:
            new = [pod for pod in site.pods_of("proxy") if pod["metadata"]["name"] not in before]
            return any(site.sends(manifest) > 0 for manifest in new)

        site.plane.wait("a client at a new one", served, limit_s=120)
        metrics.cpu = "50m"
    flow.check("four proxies by the autoscaler")
    as_before = {"proxies": {"autoscaling": None, "maxConnectionAge": "10m"}}
    site.kubectl("patch", "bcl", "demo", "--type=merge", "-p", json.dumps({"spec": as_before}))
    site.plane.wait("two proxies", lambda: site.is_whole, limit_s=120)


def test_a_masters_node_is_lost(site: Site, tmp_path: Path) -> None:
    """The node with one of the three brokers, made the master first; two have to be in sync."""
    where = site.brokers_by_node()
    (alone,) = next(pods for pods in where.values() if len(pods) == 1)
    node = next(name for name, pods in where.items() if pods == [alone])
    if site.master != alone:
        site.popmq("failover", "broker-0", "--to", alone, "--yes")
        site.plane.wait("the hand-over", lambda: site.master == alone, limit_s=60)
    with Flow(site, tmp_path) as flow:
        site.nodes.kill(node)
        # The operator that acts may have been there, too, and its Lease lasts for 15 s.
        site.another_master_than(alone, limit_s=60)
        text = f"broker-0: 2 of 3 in sync ({alone} is not"
        site.plane.wait("the status", lambda: text in site.message("Degraded"), limit_s=60)
        assert site.condition("Ready") == "True"
    flow.check("the master's node lost")
