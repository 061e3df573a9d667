"""The roles that an operator's pods run, on a real API server: they take peers with the secret, and
callers that are users where they have to be."""

import asyncio
import base64
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from kube.control_plane import ControlPlane
from kube.fake_api import Object
from kube.process_node import Image, ProcessNode
from kube.running import given
from kube.sandbox import skip_without_root

from popmq.cli.client import CallRefused, Client
from popmq.common.errors import PopmqError
from popmq.common.protocol.cluster_secret import ClusterSecret, parse_cluster_secret
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_tls import FrameTls
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.signing import Signer
from popmq.operator.cluster.data_plane import NetworkDataPlane
from popmq.operator.cluster.reconcile import Reconciler
from popmq.operator.kube.api_client import ApiClient, ApiError
from popmq.operator.model.certificates import authority, between_processes
from popmq.operator.model.conditions import verdict_in
from popmq.operator.resources.users import signer_in

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

# Addresses that no other test of this machine has, so that ports may be the real ones.
NETWORK = f"127.{16 + os.getpid() // 250 % 200}.{os.getpid() % 250}"
WHOLE_S = 150.0
NOW = datetime.now(UTC)
SMALL: dict[str, Any] = {
    "brokers": {"replicas": 1, "storage": {"size": "1Gi"}},
    "controller": {"replicas": 1},
    "proxies": {"replicas": 1},
    "config": {"store.segment_bytes": "16MiB"},
}
CLUSTER = given("demo", "apps", **SMALL)


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessNode]:
    skip_without_root()
    with ControlPlane(
        tmp_path_factory.mktemp("kube"), nodes=0, host=f"{NETWORK}.1", port=443
    ) as plane:
        plane.define()
        plane.kubectl("create", "namespace", "apps")
        with ProcessNode(
            plane,
            tmp_path_factory.mktemp("node"),
            image=Image(["/opt/popmq/bin/popmq"], {"PATH": "/opt/popmq/bin:/usr/bin:/bin"}),
            network=NETWORK,
            names={"kubernetes.default.svc": plane.host},
            accepts=lambda pod: True,
        ) as started:
            yield started


def pod_of(plane: ControlPlane, role: str) -> Object | None:
    selector = f"app.kubernetes.io/component%3D{role}"
    pods = plane.items(f"/api/v1/namespaces/apps/pods?labelSelector={selector}")
    return pods[0] if pods else None


def address_of(plane: ControlPlane, role: str, port: int) -> str:
    """Empty while it has none."""
    address = ((pod_of(plane, role) or {}).get("status") or {}).get("podIP", "")
    return f"{address}:{port}" if address else ""


async def reconcile_until_ready(plane: ControlPlane, users: str = "") -> Object:
    """As an operator with the network's names would; the status then. `users`: also until that is
    the reason of the condition Users."""
    path = "/apis/popmq.io/v1beta1/namespaces/apps/brokerclusters/demo"
    api = ApiClient(plane.access)
    until = time.monotonic() + WHOLE_S
    try:
        while True:
            controller = address_of(plane, "controller", 9878) or f"{NETWORK}.1:9"
            operator = Reconciler(
                api,
                NetworkDataPlane(controller, address_of(plane, "proxy", 8081)),
                default_image="popmq:1",
                now=lambda: datetime.now(UTC),
            )
            try:
                await operator.reconcile("apps", "demo")
            except ApiError as error:
                if not error.is_transient:
                    raise
            status: Object = (plane.get(path) or {}).get("status") or {}
            settled = verdict_in(status, "Progressing").status == "False"
            is_ready = settled and verdict_in(status, "Ready").status == "True"
            if is_ready and verdict_in(status, "Users").reason == users:
                return status
            assert time.monotonic() < until, status
            await asyncio.sleep(0.5)
    finally:
        await api.close()


async def connects(
    address: str, role: ProcessRole, secret: ClusterSecret | None, tls: FrameTls | None = None
) -> str:
    """Empty: the peer accepts this process; else why not."""
    hello = Hello(role=role, name="intruder", cluster="demo")
    settings = FrameSettings(secret=secret, secret_required=False, tls=tls)
    port = FramePort(address, hello, settings=settings)
    port.start()
    try:
        await call(port, Kind.LIST_REPLICAS, b"", 5_000)
    except PopmqError as error:
        return "" if port.peer is not None else str(error)
    finally:
        await port.close()
    return ""


def test_a_process_without_the_secret_is_refused_by_the_brokers_and_controllers_of_an_operator(
    node: ProcessNode,
) -> None:
    plane = node.plane
    plane.apply(CLUSTER)
    status = asyncio.run(reconcile_until_ready(plane))
    assert status["summary"]["masters"] == "1/1", "the operator proved the secret to the controller"
    assert verdict_in(status, "Authenticated").reason == "Required"
    secret = plane.get("/api/v1/namespaces/apps/secrets/demo-cluster-secret")
    assert secret is not None
    ours = parse_cluster_secret(base64.b64decode(secret["data"]["secret"]), "the Secret")
    for role, port in (("controller", 9878), ("broker", 10911)):
        address = address_of(plane, role, port)
        for asker in (ProcessRole.BROKER, ProcessRole.PROXY, ProcessRole.TOOL):
            refusal = asyncio.run(connects(address, asker, None))
            assert "offers no proof of the cluster's secret" in refusal, (role, asker)
            other = asyncio.run(connects(address, asker, ClusterSecret((b"x" * 64,))))
            assert "another cluster secret" in other, (role, asker)
        assert asyncio.run(connects(address, ProcessRole.PROXY, ours)) == ""


def tls_of(secret: Object, ca: Object) -> FrameTls:
    """A peer that shows the certificate of one Secret and trusts the CA of another."""
    certificate, key = (base64.b64decode(secret["data"][name]) for name in ("tls.crt", "tls.key"))
    trusted = base64.b64decode(ca["data"]["ca.crt"])
    return FrameTls.of_pem(certificate, key, trusted, name="popmq", required=True)


def test_pods_with_tls_between_them_serve_and_refuse_plain_text_and_other_certificates(
    node: ProcessNode,
) -> None:
    plane = node.plane
    plane.apply(given("demo", "apps", **SMALL, tls={"betweenProcesses": True}))
    status = asyncio.run(reconcile_until_ready(plane))
    assert status["glance"]["masters"] == "1/1", "the operator used TLS to the controller"
    assert verdict_in(status, "ProcessTls").reason == "Required"
    secrets = "/api/v1/namespaces/apps/secrets"
    stored = plane.get(f"{secrets}/demo-cluster-secret")
    process = plane.get(f"{secrets}/demo-process-tls")
    of_proxies = plane.get(f"{secrets}/demo-tls")
    assert stored is not None
    assert process is not None
    assert of_proxies is not None
    ours = parse_cluster_secret(base64.b64decode(stored["data"]["secret"]), "the Secret")
    other = {"data": between_processes(None, authority(None, "x", NOW), "popmq", NOW)}
    for role, port in (("controller", 9878), ("broker", 10911)):
        address, asker = address_of(plane, role, port), ProcessRole.PROXY
        good = asyncio.run(connects(address, asker, ours, tls_of(process, process)))
        plain = asyncio.run(connects(address, asker, ours))
        foreign = asyncio.run(connects(address, asker, ours, tls_of(other, process)))
        of_proxy = asyncio.run(connects(address, asker, ours, tls_of(of_proxies, process)))
        assert good == ""
        assert "the peer does not use TLS" in plain
        assert "TLS failed" in foreign
        assert "TLS failed" in of_proxy


def test_callers_of_a_new_cluster_must_be_users_until_its_mode_is_another(
    node: ProcessNode,
) -> None:
    plane = node.plane
    plane.apply(given("demo", "apps", **SMALL, auth={"mode": "On"}))
    asyncio.run(reconcile_until_ready(plane, "On"))
    secret = "/api/v1/namespaces/apps/secrets/demo-admin-user"
    admin = signer_in(plane.get(secret))
    assert admin is not None
    assert knows(plane, admin)
    assert not knows(plane, Signer())
    assert not knows(plane, Signer("admin", "another secret"))
    plane.apply(given("demo", "apps", **SMALL, auth={"mode": "Off"}))
    asyncio.run(reconcile_until_ready(plane, "Off"))
    assert knows(plane, Signer())
    plane.apply(given("demo", "apps", **SMALL, auth={"mode": "Observe"}))
    asyncio.run(reconcile_until_ready(plane, "Observe"))
    assert knows(plane, Signer())


def test_a_cluster_that_serves_everybody_gets_users_without_an_end(node: ProcessNode) -> None:
    plane = node.plane
    plane.apply(CLUSTER)
    asyncio.run(reconcile_until_ready(plane))
    assert knows(plane, Signer())
    plane.apply(given("demo", "apps", **SMALL, auth={"mode": "On"}))
    asyncio.run(reconcile_until_ready(plane, "On"))
    admin = signer_in(plane.get("/api/v1/namespaces/apps/secrets/demo-admin-user"))
    assert admin is not None
    assert (knows(plane, admin), knows(plane, Signer())) == (True, False)


def knows(plane: ControlPlane, signer: Signer) -> bool:
    """Whether the proxy serves that caller."""
    with Client(address_of(plane, "proxy", 8081), signer=signer) as client:
        try:
            client.check_signature()
        except CallRefused:
            return False
    return True
