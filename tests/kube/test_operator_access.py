"""An operator process on a real API server: each kind of credentials, and objects of others."""

import base64
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kube.chart_operator import (
    ACCOUNT,
    ChartOperator,
    chart_token,
    install_chart,
    refused_requests,
    requests,
)
from kube.control_plane import ControlPlane, free_ports
from kube.fake_api import Object
from kube.running import given

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

APPS = "/apis/popmq.io/v1beta1/namespaces/apps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/apps/deployments"
CREDENTIAL = "authentication.kubernetes.io/credential-id"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=False) as plane:
        install_chart(plane)
        yield plane


@pytest.fixture
def settings() -> dict[str, str]:
    """No controller or proxy is there."""
    (nobody,) = free_ports(1)
    address = f"127.0.0.1:{nobody}"
    return {
        "POPMQ_OPERATOR_CONTROLLER_ADDRESS": address,
        "POPMQ_OPERATOR_PROXY_ADDRESS": address,
        "POPMQ_OPERATOR_LEASE_DURATION_MS": "3s",
        "POPMQ_OPERATOR_LEASE_RENEW_MS": "300ms",
    }


def _kubeconfig(plane: ControlPlane, folder: Path, user: Object) -> Path:
    """That of the plane, with other credentials."""
    config = json.loads(plane.kubeconfig("admin", plane.tokens["admin"]).read_text())
    config["users"] = [{"name": "u", "user": user}]
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def _plugin(plane: ControlPlane, folder: Path) -> Object:
    version = "client.authentication.k8s.io/v1"
    status = {"token": chart_token(plane)}
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    script = folder / "plugin.py"
    script.write_text(f"print({json.dumps(credential)!r})\n")
    command = {"apiVersion": version, "command": sys.executable, "args": [str(script)]}
    return {"exec": {**command, "interactiveMode": "Never"}}


def _certificate(plane: ControlPlane, folder: Path) -> Object:
    """Of a user that is called as the operator's account, so it has those rights."""
    authority = x509.load_pem_x509_certificate((plane.folder / "ca.crt").read_bytes())
    signer: Any = serialization.load_pem_private_key((plane.folder / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ACCOUNT)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.ExtendedKeyUsage([x509.OID_CLIENT_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "client.crt").write_bytes(certificate.public_bytes(pem))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "client.key").write_bytes(key.private_bytes(pem, pkcs8, plain))
    return {
        "client-certificate": str(folder / "client.crt"),
        "client-key": str(folder / "client.key"),
    }


def _serves(plane: ControlPlane, cluster: str, replicas: int) -> None:
    """The operator does what a cluster's spec says, which it noticed by a watch."""
    body = given(cluster, "apps", proxies={"replicas": replicas})
    plane.apply(body)

    def is_applied() -> bool:
        deployment = plane.get(f"{DEPLOYMENTS}/{cluster}-proxy") or {"spec": {}}
        return bool(deployment["spec"].get("replicas") == replicas)

    plane.wait(f"{replicas} proxies", is_applied, limit_s=60)


@pytest.mark.parametrize("credentials", [_plugin, _certificate], ids=["plug-in", "certificate"])
def test_an_operator_runs_with_the_credentials_of_its_kubeconfig(
    plane: ControlPlane,
    settings: dict[str, str],
    tmp_path: Path,
    credentials: Callable[[ControlPlane, Path], Object],
) -> None:
    config = _kubeconfig(plane, tmp_path, credentials(plane, tmp_path))
    name = credentials.__name__.strip("_")
    with ChartOperator(plane, tmp_path, settings, kubeconfig=config):
        _serves(plane, name, 3)
        _serves(plane, name, 4)
    assert refused_requests(plane) == []


def _bound_token(plane: ControlPlane, secret: str) -> str:
    """Good for as long as that Secret is there."""
    metadata = {"name": secret, "namespace": "popmq-system"}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    plane.post("/api/v1/namespaces/popmq-system/secrets", body)
    bound = ("--bound-object-kind=Secret", f"--bound-object-name={secret}")
    return plane.kubectl("create", "token", "popmq-operator", "-n", "popmq-system", *bound).strip()


def _id_of(token: str) -> str:
    claims = token.split(".")[1]
    decoded = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return f"JTI={decoded['jti']}"


def _used(plane: ControlPlane, token: str) -> bool:
    ids = [item["user"].get("extra") or {} for item in requests(plane)]
    return any(_id_of(token) in known.get(CREDENTIAL, ()) for known in ids)


def test_an_operator_goes_on_with_the_next_token_of_its_file(
    plane: ControlPlane, settings: dict[str, str], tmp_path: Path
) -> None:
    first, second = (_bound_token(plane, secret) for secret in ("first", "second"))
    file = tmp_path / "token"
    file.write_text(first)
    config = _kubeconfig(plane, tmp_path, {"tokenFile": str(file)})
    with ChartOperator(plane, tmp_path, settings, kubeconfig=config) as operator:
        _serves(plane, "file", 3)
        file.write_text(second)
        plane.wait("the second token", lambda: _used(plane, second), limit_s=90)
        plane.delete("/api/v1/namespaces/popmq-system/secrets/first", {})
        _serves(plane, "file", 4)
        assert operator.process.poll() is None


FOREIGN: tuple[tuple[str, Object], ...] = (
    ("secrets/demo-ca", {"kind": "Secret", "data": {"tls.crt": "eA==", "ca.crt": "eA=="}}),
    ("secrets/demo-cluster-secret", {"kind": "Secret", "data": {"secret": "eA=="}}),
    ("services/demo-proxy", {"kind": "Service", "spec": {"ports": [{"port": 80}]}}),
    ("configmaps/demo-config", {"kind": "ConfigMap", "data": {"a": "b"}}),
    ("configmaps/demo-ca", {"kind": "ConfigMap", "data": {"ca.crt": "x"}}),
)


def test_objects_of_others_outlive_creation_change_and_deletion_of_a_cluster(
    plane: ControlPlane, settings: dict[str, str], tmp_path: Path
) -> None:
    core = "/api/v1/namespaces/apps"
    labels = {"popmq.io/cluster": "demo", "app.kubernetes.io/managed-by": "popmq-operator"}
    for number, (path, body) in enumerate(FOREIGN):
        plural, _, name = path.partition("/")
        metadata = {"name": name, "labels": labels if number % 2 else {}}
        plane.post(f"{core}/{plural}", {"apiVersion": "v1", **body, "metadata": metadata})
    before = [plane.get(f"{core}/{path}") for path, _ in FOREIGN]
    assert None not in before

    def reconciled() -> Object:
        status = (plane.get(f"{APPS}/brokerclusters/demo") or {}).get("status") or {}
        conditions = {item["type"]: item for item in status.get("conditions") or []}
        return dict(conditions.get("Reconciled") or {})

    def is_told(generation: int) -> bool:
        condition_status = reconciled()
        return (condition_status.get("reason"), condition_status.get("observedGeneration")) == (
            "NameTaken",
            generation,
        )

    with ChartOperator(plane, tmp_path, settings):
        _serves(plane, "demo", 3)
        plane.wait("the condition", lambda: is_told(1), limit_s=60)
        condition_status = reconciled()
        assert condition_status["status"] == "False"
        for subject in ("Secret demo-ca", "Service demo-proxy", "ConfigMap demo-config"):
            assert subject in condition_status["message"]
        plane.apply(given("demo", "apps", tls={"mode": "Disabled"}, proxies={"replicas": 2}))
        plane.wait("the condition after a change", lambda: is_told(2), limit_s=60)
        assert [plane.get(f"{core}/{path}") for path, _ in FOREIGN] == before
        begun_s = time.monotonic()
        plane.kubectl("delete", "bcl", "demo", "-n", "apps", "--wait=true", "--timeout=60s")
        print(f"deleted in {time.monotonic() - begun_s:.1f} s")
    assert [plane.get(f"{core}/{path}") for path, _ in FOREIGN] == before
    assert refused_requests(plane) == []


def test_a_cluster_that_is_there_again_takes_its_objects_over(
    plane: ControlPlane, settings: dict[str, str], tmp_path: Path
) -> None:
    """The API server lets an object have one controller, and asks for rights on its owner."""
    secret, path = "/api/v1/namespaces/apps/secrets/again-ca", f"{APPS}/brokerclusters/again"

    def owner_of(what: str) -> str:
        (owner,) = (plane.get(what) or {})["metadata"]["ownerReferences"]
        return str(owner["uid"])

    with ChartOperator(plane, tmp_path, settings):
        _serves(plane, "again", 3)
        plane.wait("its CA", lambda: plane.get(secret) is not None, limit_s=60)
    authority = plane.get(secret)
    assert authority is not None
    plane.delete(path, {"propagationPolicy": "Background"})  # and no garbage collector runs
    plane.wait("the old one to go", lambda: plane.get(path) is None, limit_s=60)
    with ChartOperator(plane, tmp_path, settings):
        body = given("again", "apps", proxies={"replicas": 4})
        body["metadata"]["annotations"] = {"popmq.io/adopt": "true"}
        plane.apply(body)

        def is_taken_over() -> bool:
            status = (plane.get(path) or {}).get("status") or {}
            condition_status = {
                item["type"]: item["status"] for item in status.get("conditions") or []
            }
            return condition_status.get("Reconciled") == "True"

        plane.wait("the objects", is_taken_over, limit_s=60)
        uid = str((plane.get(path) or {})["metadata"]["uid"])
        assert owner_of(f"{DEPLOYMENTS}/again-proxy") == owner_of(secret) == uid
        assert (plane.get(secret) or {})["data"] == authority["data"]
    assert refused_requests(plane) == []
