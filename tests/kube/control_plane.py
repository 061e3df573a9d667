"""A real Kubernetes control plane on loopback for tests: etcd, API server, controllers, fake nodes.

The binaries come from KUBEBUILDER_ASSETS or the cache that `make kube-assets` fills; without them
the tests are skipped with a reason (not in .ci/run, which sets KUBE_REQUIRED).  Everything
is in one temporary folder, on free ports, with random tokens, and is killed at the end.
"""

import base64
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kube.access import token_access
from kube.fake_api import Object
from programs import run_program

from popmq.operator.kube.access import ApiAccess
from popmq.operator.kube.api_client import MERGE
from popmq.operator.model.certificates import authority, serving

_LIBC = ctypes.CDLL(None)
ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok", "kubectl"),
    *("helm", "kwok-stages.yaml"),
)
API_ONLY = ("etcd", "kube-apiserver", "kubectl")
START_S = 120.0
LOCAL = "127.0.0.1"
OWNER = "owner"  # a user that has hardly any rights
USERS = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "kwok": "system:masters",
}


def find_assets(needed: Sequence[str] = NEEDED) -> Path:
    """Skips the test that asks when there are none."""
    places = [Path(os.environ.get("KUBEBUILDER_ASSETS", "/nowhere"))]
    cache = os.environ.get("POPMQ_KUBE_CACHE") or Path.home() / ".cache" / "popmq-kube"
    places += sorted(Path(cache).glob("v*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if result := shutil.which("kube-apiserver"):
        places.append(Path(result).parent)
    for place in places:
        if all((place / name).exists() for name in needed):
            return place
    reason = "no Kubernetes control plane: make kube-assets builds one (needs Go)"
    if os.environ.get("KUBE_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in opened:
            connection.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in opened]


class ControlPlane:
    """`nodes` are kwok's: their pods run nothing and are ready at once.  `address` is where pods
    find the API server; `kubelets` are names of nodes that are somebody else's.  It listens at
    `host` and at a free port, unless one is given.  Without `controllers` there is an API server
    and nothing that acts on its objects."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        address: str = LOCAL,
        kubelets: Sequence[str] = (),
        host: str = LOCAL,
        port: int = 0,
        controllers: bool = True,
    ) -> None:
        self.folder = folder
        self._address = address
        self._with_controllers = controllers
        self.assets = find_assets(NEEDED if controllers else API_ONLY)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}
        free, self.etcd, self.peer, *self.more = free_ports(5)
        self.host, self.api_port = host, port or free
        self.url = f"https://{host}:{self.api_port}"
        self._users = {**USERS, **{f"system:node:{name}": "system:nodes" for name in kubelets}}
        self.tokens = {user: secrets.token_hex(16) for user in self._users}
        self._nodes = nodes
        self._make_keys()
        self.tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def start(self) -> None:
        self._etcd()
        self._api_server()
        self.wait("the API server", lambda: self._ask("GET", "/readyz", raw=True) is not None)
        if not self._with_controllers:
            return
        self._controllers()
        self.wait(
            "the controllers",
            lambda: self.get("/api/v1/namespaces/default/serviceaccounts/default") is not None,
        )
        for number in range(self._nodes):
            self.post("/api/v1/nodes", _node(number))
        self._class("growing", True)
        self._class("fixed", False)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def define(self) -> None:
        """The kinds of popmq, which are served then."""
        self.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        self.wait_for_definitions()

    def wait_for_definitions(self) -> None:
        """Until kinds are served, and known to admission, which looks for new ones every 10 s and
        asks of users that may not do everything."""
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        kinds = {"BrokerCluster": "brokerclusters", "LagReport": "lagreports", "User": "users"}
        finalizers = ",".join(f"{plural}.popmq.io/finalizers" for plural in kinds.values())
        for name, verb, resources in (
            ("owner-maker", "create", "configmaps"),
            ("owner-namer", "update", finalizers),
        ):
            rights = ("create", "clusterrole", name, f"--verb={verb}", f"--resource={resources}")
            self.kubectl(*rights, ok=False)  # it may be there from a time before
            bound = (f"--clusterrole={name}", f"--user={OWNER}")
            self.kubectl("create", "clusterrolebinding", name, *bound, ok=False)
        owner = {"apiVersion": "popmq.io/v1beta1", "name": "demo", "uid": "demo"}
        for kind in kinds:
            owners = [{**owner, "kind": kind, "blockOwnerDeletion": True}]
            metadata = {"name": "owned", "namespace": "default", "ownerReferences": owners}
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            path = "/api/v1/namespaces/default/configmaps?dryRun=All"
            self.wait(
                kind,
                lambda path=path, body=body: self._ask("POST", path, body, user=OWNER) is not None,
            )

    def stop(self) -> None:
        # The in-tree provisioner makes its volumes in /tmp, and forgets them when it is killed.
        volumes = self.items("/api/v1/persistentvolumes") if self.processes else []
        for process in reversed(self.processes.values()):
            process.kill()
        for process in self.processes.values():
            process.wait()
        for volume in volumes:
            if "hostPath" in volume["spec"]:
                shutil.rmtree(volume["spec"]["hostPath"]["path"], ignore_errors=True)

    def restart_api_server(self) -> None:
        process = self.processes["kube-apiserver"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self._run("kube-apiserver", self.commands["kube-apiserver"])
        self.wait("the API server", lambda: self._ask("GET", "/readyz", raw=True) is not None)

    # -- asking it, as its administrator

    @property
    def access(self) -> ApiAccess:
        return self.access_as("admin")

    def access_as(self, user: str) -> ApiAccess:
        token = self.tokens.get(user, user)
        return token_access(self.url, token, "default", self.folder / "ca.crt")

    def get(self, path: str) -> Object | None:
        result = self._ask("GET", path)
        return result if isinstance(result, dict) else None

    def items(self, path: str) -> list[Object]:
        return list((self.get(path) or {}).get("items") or [])

    def post(self, path: str, body: Object) -> Object:
        created = self._ask("POST", path, body)
        assert isinstance(created, dict), f"POST {path} was refused"
        return created

    def patch(self, path: str, body: Object) -> bool:
        """By merging; whether it was done."""
        return self._ask("PATCH", path, body) is not None

    def delete(self, path: str, options: Object) -> None:
        self._ask("DELETE", path, options)

    def kubectl(self, *arguments: str, given: str = "", ok: bool = True) -> str:
        done = run_program(
            [self.assets / "kubectl", "--kubeconfig", self.folder / "admin.kubeconfig", *arguments],
            input=given,
            timeout=120,
        )
        assert not ok or done.returncode == 0, done.stderr
        return done.stdout if ok else done.stdout + done.stderr

    def apply(self, given: Object) -> None:
        self.kubectl("apply", "-f", "-", given=json.dumps(given))

    def refusal(self, given: Object) -> str:
        """What is said to somebody who applies it."""
        return self.kubectl("apply", "-f", "-", given=json.dumps(given), ok=False)

    def wait(self, what: str, done: Any, *, limit_s: float = START_S) -> None:
        until = time.monotonic() + limit_s
        while not done():
            for name, process in self.processes.items():
                if process.poll() is not None and name not in ("operator",):
                    log = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise AssertionError(f"{name} ended:\n{log[-2000:]}")
            assert time.monotonic() < until, f"{what}: not within {limit_s:g} s"
            time.sleep(0.1)

    def _ask(
        self, method: str, path: str, body: object = None, *, raw: bool = False, user: str = ""
    ) -> Any:
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.tokens['admin']}",
                "Content-Type": MERGE if method == "PATCH" else "application/json",
                **({"Impersonate-User": user} if user else {}),
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.tls) as answer:
                text = answer.read()
        except (urllib.error.URLError, OSError):
            return None
        return text if raw else json.loads(text)

    # -- its parts

    def _make_keys(self) -> None:
        now = datetime.now(UTC)
        ca = authority(None, "tests", now)
        names = sorted({LOCAL, self._address, self.host})
        inside = ("10.96.0.1", "kubernetes", "kubernetes.default.svc")
        served = serving(None, ca, [*names, "localhost", *inside], now)
        self.folder.chmod(0o700)
        for name, data in (("ca", ca), ("server", served)):
            (self.folder / f"{name}.crt").write_bytes(base64.b64decode(data["tls.crt"]))
            (self.folder / f"{name}.key").write_bytes(base64.b64decode(data["tls.key"]))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        lines = [
            f"{token},{user},{user}{f',{group}' if (group := self._users[user]) else ''}"
            for user, token in self.tokens.items()
        ]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        for user in self._users:
            self.kubeconfig(user, self.tokens[user])

    def kubeconfig(self, user: str, token: str) -> Path:
        path = self.folder / f"{user.rpartition(':')[2]}.kubeconfig"
        authority_file = str(self.folder / "ca.crt")
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "c",
                            "cluster": {
                                "server": self.url,
                                "certificate-authority": authority_file,
                            },
                        }
                    ],
                    "users": [{"name": "u", "user": {"token": token}}],
                    "contexts": [
                        {
                            "name": "x",
                            "context": {"cluster": "c", "user": "u", "namespace": "default"},
                        }
                    ],
                    "current-context": "x",
                }
            )
        )
        return path

    def _run(self, name: str, arguments: Sequence[str]) -> None:
        self.commands[name] = list(arguments)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [self.assets / name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_die_with_parent,
            )

    def _etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self.etcd}", f"http://127.0.0.1:{self.peer}"
        self._run(
            "etcd",
            [
                f"--data-dir={self.folder}/etcd",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--unsafe-no-fsync",
                "--log-level=error",
            ],
        )

    def _api_server(self) -> None:
        self._run(
            "kube-apiserver",
            [
                f"--etcd-servers=http://127.0.0.1:{self.etcd}",
                f"--bind-address={'0.0.0.0' if self._address != LOCAL else self.host}",
                f"--advertise-address={self._address}",
                f"--secure-port={self.api_port}",
                "--tls-cert-file=server.crt",
                "--tls-private-key-file=server.key",
                "--client-ca-file=ca.crt",
                "--service-account-key-file=accounts.key",
                "--service-account-signing-key-file=accounts.key",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--token-auth-file=tokens.csv",
                "--authorization-mode=Node,RBAC",
                "--anonymous-auth=false",
                # Some clusters have it: owners that block their deletion need a right then.
                "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
                "--service-cluster-ip-range=10.96.0.0/20",
                "--profiling=false",
                "--shutdown-delay-duration=0s",
                f"--audit-policy-file={self._audit_policy()}",
                "--audit-log-path=audit.log",
            ],
        )

    def _audit_policy(self) -> Path:
        path = self.folder / "audit.json"
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        path.write_text(json.dumps(policy))
        return path

    def _controllers(self) -> None:
        kcm, scheduler = self.more
        for name, port, user, more in (
            (
                "kube-controller-manager",
                kcm,
                "kube-controller-manager",
                [
                    "--use-service-account-credentials=true",
                    "--service-account-private-key-file=accounts.key",
                    "--root-ca-file=ca.crt",
                    "--enable-hostpath-provisioner=true",
                    "--pvclaimbinder-sync-period=5s",
                    # An autoscaler acts within seconds, and on pods that have just begun.
                    "--horizontal-pod-autoscaler-sync-period=2s",
                    "--horizontal-pod-autoscaler-cpu-initialization-period=1s",
                    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
                ],
            ),
            ("kube-scheduler", scheduler, "kube-scheduler", []),
        ):
            config = f"{user}.kubeconfig"
            self._run(
                name,
                [
                    f"--kubeconfig={config}",
                    f"--authentication-kubeconfig={config}",
                    f"--authorization-kubeconfig={config}",
                    "--kube-api-qps=500",  # the default takes seconds at the start
                    "--kube-api-burst=1000",
                    "--leader-elect=false",
                    "--bind-address=127.0.0.1",
                    f"--secure-port={port}",
                    f"--cert-dir={self.folder}/{name}",
                    *more,
                ],
            )
        if not self._nodes:
            return
        self._run(
            "kwok",
            [
                "--kubeconfig=kwok.kubeconfig",
                "--manage-all-nodes=false",
                "--manage-nodes-with-label-selector=type=kwok",
                "--node-ip=127.0.0.1",
                "--cidr=10.244.0.0/16",
                "--node-lease-duration-seconds=40",
                f"--config={self.assets}/kwok-stages.yaml",
            ],
        )

    def _class(self, name: str, grows: bool) -> None:
        annotations = {"storageclass.kubernetes.io/is-default-class": str(grows).lower()}
        self.post(
            "/apis/storage.k8s.io/v1/storageclasses",
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": name, "annotations": annotations},
                "provisioner": "kubernetes.io/host-path",
                "allowVolumeExpansion": grows,
            },
        )


class LivePods:
    """What the simulated brokers look at: the real pods."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        answer = self._plane.get(f"/api/v1/namespaces/{namespace}/{plural}")
        if answer is None:  # brokers do not die with the API server
            raise ConnectionError("the API server does not say which pods there are")
        items = answer["items"]
        return [
            item for item in items if "popmq.io/cluster" in (item["metadata"].get("labels") or {})
        ]

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._plane.get(f"/api/v1/namespaces/{namespace}/{plural}/{name}")


def _die_with_parent() -> None:
    """Also when the tests are killed: PR_SET_PDEATHSIG is 1 (man 2 prctl)."""
    _LIBC.prctl(1, signal.SIGKILL)


def _node(number: int) -> Object:
    name = f"node-{number}"
    room = {"cpu": "32", "memory": "64Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "topology.kubernetes.io/zone": f"zone-{number}",
            },
        },
        "status": {"allocatable": room, "capacity": room},
    }
