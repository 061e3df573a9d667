"""What every kubelet does that a test plays itself: a node that lives, and looks at its pods."""

import threading
import time
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from kube.control_plane import ControlPlane
from kube.fake_api import Object

EVERY_S, BEAT_S = 0.1, 5.0


class Kubelet(ABC):
    """Entered, the node is there, which kwok leaves alone; `alone`: for pods that tolerate a taint
    `kubelet`."""

    def __init__(self, plane: ControlPlane, name: str, *, alone: bool = False) -> None:
        self.plane = plane
        self.name = name
        self._taints = [{"key": "kubelet", "effect": "NoSchedule"}] if alone else []
        self._beat_at = 0.0
        self._stopped = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def see(self, pods: list[Object]) -> None:
        """All of the node's, every tenth of a second while the API server answers."""

    def __enter__(self) -> Self:
        room = {"cpu": "32", "memory": "64Gi", "pods": "110"}
        labels = {"kubernetes.io/hostname": self.name, "kubelet": self.name}
        node: Object = {"apiVersion": "v1", "kind": "Node"}
        node["metadata"] = {"name": self.name, "labels": labels}
        node["spec"] = {"taints": self._taints}
        node["status"] = {"allocatable": room, "capacity": room}
        self.plane.post("/api/v1/nodes", node)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self.plane.delete(f"/api/v1/nodes/{self.name}", {})
        if self._failed and error is None:
            raise self._failed[0]

    def tell(self, pod: Object, status: Object) -> bool:
        """Merged into the pod's; whether the server took it."""
        return self.plane.patch(f"{_path(pod)}/status", {"status": status})

    def remove(self, pod: Object) -> None:
        """Nothing of it runs any more."""
        gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.plane.delete(_path(pod), gone)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(EVERY_S):
                self._beat()
                path = f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}"
                if (manifest := self.plane.get(path)) is not None:
                    self.see(manifest["items"])
        except BaseException as error:
            self._failed.append(error)

    def _beat(self) -> None:
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + BEAT_S
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now()}
        path = f"/api/v1/nodes/{self.name}/status"
        self.plane.patch(path, {"status": {"conditions": [ready]}})


def conditions(**given: bool) -> list[Object]:
    return [{"type": kind, "status": str(value)} for kind, value in given.items()]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _path(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
