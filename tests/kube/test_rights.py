"""The rights of operator and controllers: what they use, from the API server's audit log.

A whole life of a cluster is led with the accounts that the chart and the operator make: nothing is
refused, and no rule grants what was not used.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube.control_plane import ROOT, ControlPlane, find_assets, free_ports
from kube.fake_api import Object
from kube.running import Running, given
from kube.world import NOW

from popmq.common.protocol.group_record import GroupRecord
from popmq.common.signing import Signer
from popmq.controller.lease_store import ApiServer, LeaseStore
from popmq.operator.declared.declared_reconcile import DeclaredReconciler
from popmq.operator.declared.metadata_client import NetworkMetadataClient, ProxyAccess
from popmq.operator.declared.user_reconcile import UserClient, UserReconciler
from popmq.operator.kube.api_client import ApiClient
from popmq.operator.kube.child_watch import WATCHED
from popmq.operator.model.manifest import (
    BROKER_CLUSTER,
    CONSUMER_GROUP,
    LAG_REPORT,
    SECRET,
    TOPIC,
    USER,
    ResourceKind,
)
from popmq.operator.model.spec import read_spec
from popmq.operator.model.users import ROTATE_ANNOTATION
from popmq.operator.reports.report_reconcile import ReportDefaults
from popmq.operator.resources.users import signer_in
from popmq.testing.running_broker import RunningBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ACCOUNT = "system:serviceaccount:system:mq-popmq-operator"
CONTROLLER = "system:serviceaccount:apps:demo-controller"
OWN = (BROKER_CLUSTER, TOPIC, CONSUMER_GROUP, USER, LAG_REPORT)
Right = tuple[str, str, str]  # group, resource, verb
# Asked for in the course of another request, which is all that the log has of it: by the admission
# plugin OwnerReferencesPermissionEnforcement, on here, and where a ClusterRole is bound.
UNLOGGED = {
    ("popmq.io", "brokerclusters/finalizers", "update"),
    ("popmq.io", "lagreports/finalizers", "update"),
    ("popmq.io", "users/finalizers", "update"),
    ("rbac.authorization.k8s.io", "clusterroles", "bind"),
    ("", "serviceaccounts", "delete"),
    ("rbac.authorization.k8s.io", "roles", "delete"),
    ("rbac.authorization.k8s.io", "rolebindings", "delete"),
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube")) as plane:
        yield plane


def installed(plane: ControlPlane) -> None:
    for name in ("system", "apps"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": name, "labels": labels}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        plane.post("/api/v1/namespaces", body)
    for kind in ("PodMonitor", "PrometheusRule"):
        plane.apply(prometheus_definition(kind))
    command = ["install", "mq", "charts/popmq", "--set", "operator.watchNamespaces={apps}"]
    where = [f"--kubeconfig={plane.folder}/admin.kubeconfig", "--namespace=system"]
    subprocess.run([find_assets() / "helm", *command, *where], check=True, cwd=ROOT, timeout=120)
    plane.wait_for_definitions()


def prometheus_definition(kind: str) -> Object:
    """As much as the Prometheus operator's has to have to be one."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def used(plane: ControlPlane, account: str) -> dict[str, set[Right]]:
    """By namespace. What was refused fails here: the Roles would not be enough."""
    results: dict[str, set[Right]] = {}
    for line in (plane.folder / "audit.log").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        about = entry.get("objectRef") or {}
        if entry["user"]["username"] != account or "resource" not in about:
            continue
        code = (entry.get("responseStatus") or {}).get("code")
        assert code not in (401, 403), line
        resource = about["resource"]
        if about.get("subresource"):
            resource += f"/{about['subresource']}"
        group = about.get("apiGroup", "")
        rights = results.setdefault(about.get("namespace", ""), set())
        rights.add((group, resource, entry["verb"]))
        if entry["verb"] == "patch" and code == 201:
            rights.add((group, resource, "create"))  # server-side apply of something new
    return results


def granted(role: Object) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_and_the_controllers_use_all_of_their_rights_and_no_others(
    plane: ControlPlane, tmp_path: Path
) -> None:
    installed(plane)
    token = plane.kubectl("create", "token", "mq-popmq-operator", "-n", "system").strip()
    _watch_as_a_process(plane, token, tmp_path)
    _lead_a_life(plane, token)
    roles = "/apis/rbac.authorization.k8s.io/v1"
    name = "mq-popmq-operator"
    lease = plane.get(f"{roles}/namespaces/system/roles/{name}-lease")
    classes = plane.get(f"{roles}/clusterroles/{name}-system-classes")
    main = plane.get(f"{roles}/clusterroles/{name}-system")
    assert lease is not None
    assert classes is not None
    assert main is not None
    asked = used(plane, ACCOUNT)
    given_away = used(plane, CONTROLLER)["apps"]  # nobody can give away what he has not
    assert asked["system"] == granted(lease)
    assert asked[""] == granted(classes)
    assert asked["apps"] | given_away | UNLOGGED == granted(main)


def _watch_as_a_process(plane: ControlPlane, token: str, folder: Path) -> None:
    (nobody,) = free_ports(1)
    variables = {
        "POPMQ_OPERATOR_KUBECONFIG": str(plane.kubeconfig("operator", token)),
        "POPMQ_OPERATOR_NAMESPACES": "apps",
        "POPMQ_OPERATOR_LEASE": "mq-popmq-operator",
        "POPMQ_OPERATOR_LEASE_NAMESPACE": "system",
        "POPMQ_OPERATOR_LEASE_RENEW_MS": "300ms",
        "POPMQ_OPERATOR_CONTROLLER_ADDRESS": f"127.0.0.1:{nobody}",
        "POPMQ_OPERATOR_PROXY_ADDRESS": f"127.0.0.1:{nobody}",
        "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
    }
    popmq = Path(sys.executable).parent / "popmq"
    with (folder / "operator.log").open("wb") as log:
        process = subprocess.Popen([popmq, "operator"], env=variables, stdout=log, stderr=log)
    try:
        for kind in ("Topic", "ConsumerGroup", "User"):
            metadata = {"name": "orders", "namespace": "apps"}
            spec = {"cluster": "demo", "onDelete": "Delete"}
            body = {"apiVersion": "popmq.io/v1beta1", "kind": kind, "metadata": metadata}
            plane.apply({**body, "spec": spec})
            answer = ("get", f"{kind}.popmq.io", "orders", "-n", "apps", "-o", "jsonpath={.status}")
            plane.wait(
                kind, lambda arguments=answer: "NoCluster" in plane.kubectl(*arguments), limit_s=60
            )
        plane.wait("all watches", lambda: _watches(plane) >= {*WATCHED, *OWN}, limit_s=60)
        process.terminate()
        assert process.wait(timeout=60) == 0, (folder / "operator.log").read_text()
    finally:
        process.kill()
        process.wait()


def _watches(plane: ControlPlane) -> set[ResourceKind]:
    """A log has a watch when its answer begins."""
    watched = {right[1] for right in used(plane, ACCOUNT)["apps"] if right[2] == "watch"}
    return {kind for kind in (*WATCHED, *OWN) if kind.plural in watched}


def _lead_a_life(plane: ControlPlane, token: str) -> None:
    """Everything that makes the operator ask for something else."""
    reports = ReportDefaults(role="mq-popmq-operator-system-reports")
    running = Running(plane, plane.access_as(token), reports=reports)
    storage = {"size": "20Gi", "onDelete": "Delete"}
    brokers = {"groups": 2, "replicas": 2, "durability": {"minInSync": 1}, "storage": storage}
    metadata = {"name": "hourly", "namespace": "apps"}
    body = {"apiVersion": "popmq.io/v1beta1", "kind": "LagReport", "metadata": metadata}
    plane.apply({**body, "spec": {"cluster": "demo", "executors": {}}})
    watched = {"podMonitor": True, "rules": True}
    scaled = {"autoscaling": {"minReplicas": 1}}
    console = {"ingress": {"host": "queue.example"}}
    parts = {"monitoring": watched, "proxies": scaled, "console": console}
    plane.apply(given("demo", "apps", brokers=brokers, **parts))
    running.until("demo", "apps")
    _keep_records(plane)
    _keep_topics(plane, token)
    _keep_users(plane, token)
    for _ in range(2):  # the second time its events count up
        plane.kubectl("annotate", "bcl", "demo", "-n", "apps", "popmq.io/fence=demo-broker-0-0")
        running.until("demo", "apps")
        plane.kubectl("annotate", "bcl", "demo", "-n", "apps", "popmq.io/fence-")
        running.until("demo", "apps")
    for protection in ("popmq.io/delete-protection=true", "popmq.io/delete-protection-"):
        plane.kubectl("annotate", "bcl", "demo", "-n", "apps", protection)
        running.until("demo", "apps")
    brokers = {**brokers, "groups": 1, "storage": {**storage, "size": "30Gi"}}
    other = given(
        "demo",
        "apps",
        image="popmq:2",
        brokers=brokers,
        proxies={"replicas": 1},
        controller={"replicas": 1},
        tls={"mode": "Disabled"},
        networkPolicy={"enabled": False},
    )
    plane.apply(other)
    running.grow_volumes("demo", "apps", "30Gi")
    plane.kubectl("delete", "bcl", "demo", "-n", "apps", "--wait=false")
    running.until("demo", "apps")
    plane.kubectl("wait", "--for=delete", "bcl/demo", "-n", "apps", "--timeout=60s")
    running.until("demo", "apps")  # the reports' runs


def _keep_records(plane: ControlPlane) -> None:
    """As a controller does, with the account that the operator made for it."""
    token = plane.kubectl("create", "token", "demo-controller", "-n", "apps").strip()
    authority = str(plane.folder / "ca.crt")
    server = ApiServer(plane.url, "apps", lambda: token, ca_file=authority)
    store = LeaseStore(server, "demo")
    roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/apps/roles"
    role = plane.get(f"{roles}/demo-controller")
    assert role is not None
    for version in (1, 2):
        record = GroupRecord("a", epoch=version, sync_state_set=("a",), version=version)
        store.swap("broker-0", version - 1, record)
    assert store.read("broker-0") == record
    assert used(plane, CONTROLLER) == {"apps": granted(role)}


def _keep_topics(plane: ControlPlane, token: str) -> None:
    async def looks(endpoint: str) -> None:
        api = ApiClient(plane.access_as(token))
        plane_of_popmq = NetworkMetadataClient(endpoint)
        operator = DeclaredReconciler(api, plane_of_popmq, default_image="popmq:1", now=lambda: NOW)
        try:
            await operator.reconcile("apps", "demo")
            for kind in ("topic", "consumergroup"):
                plane.kubectl("delete", kind, "orders", "-n", "apps", "--wait=false")
            while any([await api.list(kind, "apps") for kind in (TOPIC, CONSUMER_GROUP)]):
                await operator.reconcile("apps", "demo")
        finally:
            await api.close()

    with RunningBroker() as popmq:
        asyncio.run(looks(popmq.endpoint))


def _keep_users(plane: ControlPlane, token: str) -> None:
    """Made, rotated and deleted; with the User goes its Secret."""

    async def looks(popmq: RunningBroker) -> None:
        api = ApiClient(plane.access_as(token))
        users = UserReconciler(api, UserClient(popmq.endpoint), now=lambda: NOW, check=lambda: None)
        access = ProxyAccess(signer=Signer(popmq.access_key, popmq.secret))
        demo = await api.get(BROKER_CLUSTER, "apps", "demo")
        assert demo is not None
        spec = read_spec(demo, default_image="popmq:1")
        secrets = []
        try:
            for turn in ("first", "second"):
                mark = f"{ROTATE_ANNOTATION}={turn}"
                orders = ("users.popmq.io", "orders", "-n", "apps")
                plane.kubectl("annotate", *orders, mark, "--overwrite")
                assert await users.keep(spec, access, await api.list(USER, "apps"))
                secrets.append(signer_in(await api.get(SECRET, "apps", "demo-user-orders")))
            plane.kubectl("delete", "users.popmq.io", "orders", "-n", "apps", "--wait=false")
            while known := await api.list(USER, "apps"):
                await users.keep(spec, access, known)
        finally:
            await api.close()
        assert None not in secrets
        assert len(set(secrets)) == 2

    with RunningBroker(users=True) as popmq:
        asyncio.run(looks(popmq))
    secret = "/api/v1/namespaces/apps/secrets/demo-user-orders"
    plane.wait("its Secret to go", lambda: plane.get(secret) is None, limit_s=60)
