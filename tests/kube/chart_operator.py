"""`popmq operator` as a process that has the rights of its chart and no others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kube.control_plane import ROOT, ControlPlane, free_ports
from kube.fake_api import Object

ACCOUNT = "system:serviceaccount:popmq-system:popmq-operator"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOP_S = 60.0


def install_chart(plane: ControlPlane) -> None:
    """Account and rights of the operator; its pod runs nowhere."""
    plane.define()
    plane.kubectl("apply", "--server-side", "-f", str(ROOT / "deploy" / "operator.yaml"))
    plane.kubectl("create", "namespace", "apps")


class ChartOperator:
    """Runs while entered.  `settings` are variables, `kubeconfig` another way to the same
    rights."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        *,
        kubeconfig: Path | None = None,
    ) -> None:
        self._plane = plane
        self.log = folder / "operator.log"
        self._kubeconfig = kubeconfig or plane.kubeconfig("operator", chart_token(plane))
        (self._http,) = free_ports(1)
        self._variables = {
            "POPMQ_OPERATOR_KUBECONFIG": str(self._kubeconfig),
            "POPMQ_OPERATOR_LEASE_NAMESPACE": "popmq-system",
            "POPMQ_OPERATOR_IMAGE": "popmq:1",
            "POPMQ_HTTP_LISTEN": f"127.0.0.1:{self._http}",
            "PATH": os.environ["PATH"],
            **(settings or {}),
        }

    def __enter__(self) -> Self:
        command = [str(Path(sys.executable).parent / "popmq"), "operator"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._variables, stdout=log, stderr=log)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=STOP_S)

    @property
    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3_000:]
        return "ready: " in self.log.read_text()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def most_rss_bytes(self) -> int:
        """Since its start."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def chart_token(plane: ControlPlane) -> str:
    return plane.kubectl("create", "token", "popmq-operator", "-n", "popmq-system").strip()


def requests(plane: ControlPlane) -> list[Object]:
    """All of the operator so far; what is still open, such as a watch, is none."""
    lines = (plane.folder / "audit.log").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines if ACCOUNT in line]
    return [entry for entry in entries if entry["user"]["username"] == ACCOUNT]


def refused_requests(plane: ControlPlane) -> list[Object]:
    """For want of a right."""
    return [
        request
        for request in requests(plane)
        if (request.get("responseStatus") or {}).get("code") in (401, 403)
    ]


def make_pods(plane: ControlPlane, cluster: str) -> None:
    """As the controllers and kubelets would, where none run: each object is ready at once."""
    group, sets = f"{cluster}-broker-0", "/apis/apps/v1/namespaces/apps/statefulsets"
    plane.wait("the set", lambda: plane.get(f"{sets}/{group}") is not None)
    group_set = plane.get(f"{sets}/{group}")
    assert group_set is not None
    template, metadata = group_set["spec"]["template"], group_set["metadata"]
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": metadata["name"]}
    for ordinal in range(3):
        name = f"{group}-{ordinal}"
        volumes = [*template["spec"]["volumes"], {"name": "data", "emptyDir": {}}]
        spec = {**template["spec"], "volumes": volumes, "automountServiceAccountToken": False}
        about = {**template["metadata"], "name": name, "namespace": "apps"}
        about["ownerReferences"] = [{**owner, "uid": metadata["uid"], "controller": True}]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
        plane.post("/api/v1/namespaces/apps/pods", body)
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        plane.patch(f"/api/v1/namespaces/apps/pods/{name}/status", {"status": ready})
    seen = {"observedGeneration": metadata["generation"], "replicas": 3}
    plane.patch(f"{sets}/{group}/status", {"status": seen})
    selector = f"labelSelector=popmq.io/cluster={cluster}"
    for deployment in plane.items(f"/apis/apps/v1/namespaces/apps/deployments?{selector}"):
        counts = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
        status = dict.fromkeys(counts, deployment["spec"]["replicas"])
        status["observedGeneration"] = deployment["metadata"]["generation"]
        path = f"/apis/apps/v1/namespaces/apps/deployments/{deployment['metadata']['name']}/status"
        plane.patch(path, {"status": status})
