"""What many clusters cost an operator: requests to the API server, CPU, memory and patience.

A real API server and a real operator process with its chart's rights.  Controllers are simulated,
and all proxies lead to one broker, or hang.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from kube.chart_operator import (
    ChartOperator,
    install_chart,
    make_pods,
    refused_requests,
    requests,
)
from kube.control_plane import ControlPlane, LivePods
from kube.fake_api import Object
from kube.running import given
from kube.voices import Voice
from kube.world import Brokers

from popmq.operator.cluster.observed import GroupHealth
from popmq.operator.model.spec import ClusterSpec
from popmq.testing.loop_thread import ThreadServer
from popmq.testing.running_broker import RunningBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

APPS = "/apis/popmq.io/v1beta1/namespaces/apps"
FOREIGN, FOREIGN_BYTES = 400, 500_000
READY_S = 10.0
TOPICS = 10  # of each cluster
HANGING = 3
IDLE_REQUESTS = 10.0  # a minute, of each cluster
SETTLED_S = 10.0  # what a last write wakes is over then
CONVERGED_S = 5.0
CHANGES = 100


@pytest.fixture
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=False) as plane:
        install_chart(plane)
        yield plane


class SteadyVoice(Voice):
    """Its three brokers are there, whatever becomes of pods; so it asks the API server little."""

    def _spec(self) -> ClusterSpec:
        self._known: ClusterSpec | None = getattr(self, "_known", None) or super()._spec()
        return self._known


class SteadyBrokers(Brokers):
    def look_at(self, spec: ClusterSpec, name: str) -> GroupHealth:
        nodes = [f"{spec.name}-{name}-{number}" for number in range(3)]
        return GroupHealth(master=nodes[0], in_sync=frozenset(nodes), alive=frozenset(nodes))


class Proxies(ThreadServer):
    """One socket for each cluster; behind it is `endpoint`, or nobody who ever answers."""

    def __init__(self, folder: Path, endpoint: str, healthy: list[str], hanging: list[str]) -> None:
        super().__init__("proxies")
        self._folder = folder
        self._endpoint = endpoint
        self._names = {**dict.fromkeys(healthy, True), **dict.fromkeys(hanging, False)}

    async def _open(self) -> None:
        self._servers = [
            await asyncio.start_unix_server(
                self._relay if answers else self._hang, self._folder / f"{name}-proxy"
            )
            for name, answers in self._names.items()
        ]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()

    async def _hang(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            pass
        writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._endpoint.rpartition(":")
        from_broker, to_broker = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pipe(reader, to_broker), _pipe(from_broker, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def _is(status: str, plane: ControlPlane, plural: str, name: str) -> bool:
    """Whether the newest spec has that verdict."""
    manifest = plane.get(f"{APPS}/{plural}/{name}") or {"metadata": {}}
    conditions = (manifest.get("status") or {}).get("conditions") or []
    generation = manifest["metadata"].get("generation")
    return any(
        (condition["type"], condition["status"], condition["observedGeneration"])
        == ("Ready", status, generation)
        for condition in conditions
    )


def _topic(plane: ControlPlane, cluster: str, number: int, queues: int) -> str:
    name = f"{cluster}-t{number}"
    spec = {"cluster": cluster, "queues": queues}
    metadata = {"name": name, "namespace": "apps"}
    body = {"apiVersion": "popmq.io/v1beta1", "kind": "Topic", "metadata": metadata, "spec": spec}
    plane.post(f"{APPS}/topics", body)
    return name


def _foreign(plane: ControlPlane, number: int) -> None:
    """ConfigMaps of somebody else, whom no operator of ours has to read."""
    metadata = {"name": f"foreign-{number}", "namespace": "default"}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    plane.post(
        "/api/v1/namespaces/default/configmaps", {**body, "data": {"x": "x" * FOREIGN_BYTES}}
    )


@pytest.mark.parametrize(
    ("clusters", "idle_s", "most_bytes", "most_cores"),
    [
        (30, 60, 200 << 20, 0.1),
        pytest.param(
            100, 330, 300 << 20, 0.2, marks=[pytest.mark.long, pytest.mark.timeout(3_000)]
        ),
    ],
)
def test_many_clusters_cost_little_and_those_that_hang_slow_no_other(
    plane: ControlPlane,
    tmp_path: Path,
    clusters: int,
    idle_s: int,
    most_bytes: int,
    most_cores: float,
) -> None:
    names = [f"c{number}" for number in range(clusters)]
    hanging, healthy = names[:HANGING], names[HANGING:]
    sockets = tmp_path / "s"
    sockets.mkdir()
    settings = {
        "POPMQ_OPERATOR_CONTROLLER_ADDRESS": f"unix:{sockets}/{{name}}",
        "POPMQ_OPERATOR_PROXY_ADDRESS": f"unix:{sockets}/{{name}}-proxy",
    }
    with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: _foreign(plane, number), range(FOREIGN)))
        broker = stack.enter_context(RunningBroker(settings={"topic.auto_create": False}))
        stack.enter_context(Proxies(sockets, broker.endpoint, healthy, hanging))
        for name in names:
            listen = f"unix:{sockets}/{name}"
            brokers = SteadyBrokers(LivePods(plane))
            stack.enter_context(SteadyVoice(plane, "apps", name, brokers, listen=listen))
        begun_s = time.monotonic()
        operator = stack.enter_context(ChartOperator(plane, tmp_path, settings))
        plane.wait("the operator", lambda: operator.is_ready)
        ready_s = time.monotonic() - begun_s
        for name in names:
            plane.post(f"{APPS}/brokerclusters", given(name, "apps", tls={"mode": "Disabled"}))
        list(threads.map(lambda name: make_pods(plane, name), names))
        topics = [_topic(plane, name, n, 4) for name in names for n in range(TOPICS)]
        for name in healthy:
            plane.wait(name, lambda name=name: _is("True", plane, "brokerclusters", name))
        served = [name for name in topics if name.partition("-")[0] in healthy]
        for name in served:
            plane.wait(name, lambda name=name: _is("True", plane, "topics", name))

        time.sleep(SETTLED_S)
        quiet = len(requests(plane)), operator.cpu_s()
        time.sleep(idle_s)  # nothing is to happen
        asked = requests(plane)[quiet[0] :]
        cores = (operator.cpu_s() - quiet[1]) / idle_s

        took_s = sorted(_converges(plane, served[n * 37 % len(served)], n) for n in range(CHANGES))
        assert refused_requests(plane) == []
        a_minute = len(asked) / clusters / (idle_s / 60)
        p99_s = took_s[CHANGES * 99 // 100 - 1]
        rss_bytes = operator.most_rss_bytes()
    print(
        f"{clusters} clusters, {len(topics)} topics, {HANGING} clusters hang, "
        f"{FOREIGN} foreign ConfigMaps: ready in {ready_s:.1f} s, at most {rss_bytes >> 20} MiB; "
        f"idle for {idle_s} s: {a_minute:.1f} requests a minute and cluster, {cores:.3f} cores; "
        f"{CHANGES} changed topics: median {took_s[CHANGES // 2]:.2f} s, p99 {p99_s:.2f} s"
    )
    print(Counter(map(_what, asked)).most_common(12))
    assert ready_s < READY_S
    assert rss_bytes < most_bytes
    assert a_minute <= IDLE_REQUESTS
    assert cores <= most_cores
    assert p99_s <= CONVERGED_S


def _what(request: Object) -> str:
    about = request.get("objectRef") or {}
    return f"{request['verb']} {about.get('resource')} {about.get('subresource', '')}".strip()


def _converges(plane: ControlPlane, topic: str, number: int) -> float:
    begun_s = time.monotonic()
    assert plane.patch(f"{APPS}/topics/{topic}", {"spec": {"queues": 5 + number}})
    plane.wait(topic, lambda: _is("True", plane, "topics", topic))
    return time.monotonic() - begun_s
