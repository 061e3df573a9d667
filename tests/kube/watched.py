"""What a watch of the API server tells of the brokers' pods: how many of a group were down at once.

A pod counts once it was ready; from then on it is down while it is away, told to go or not ready.
"""

import http.client
import json
import threading
import urllib.parse
from typing import Self

from kube.control_plane import ControlPlane
from kube.fake_api import Object
from kube.world import is_ready

AGAIN_S = 0.1
GONE = 410


class Watched:
    """Of one namespace while it is entered.  A server that was started again does not know what was
    before; then all pods that it has not got any more count as down at the same moment."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.most_down: dict[str, int] = {}  # by StatefulSet
        self.gone: list[str] = []  # pods, in the order in which they went
        self._plane = plane
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._up: dict[str, dict[str, bool]] = {}  # by StatefulSet, by pod
        self._retired: set[str] = set()
        self._there: dict[str, Object] = {}  # by uid
        self._version = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watched", daemon=True)

    def __enter__(self) -> Self:
        self._list()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def settle(self) -> None:
        """Until all that has happened by now was told."""

        def told() -> bool:
            pods = self._asked()["items"]
            return _versions(pods) == _versions(list(self._there.values()))

        self._plane.wait("the watch", told, limit_s=30)

    def retire(self, *names: str) -> None:
        """Pods that are to go for good are not missed from now on."""
        self._retired.update(names)
        for pods in self._up.values():
            for name in names:
                pods.pop(name, None)

    def _asked(self) -> Object:
        plane = self._plane.get(self._path)
        if plane is None:
            raise OSError("the API server is away")
        return plane

    def _list(self) -> None:
        results = self._asked()
        stay = {item["metadata"]["uid"] for item in results["items"]}
        for uid, pod in list(self._there.items()):
            if uid not in stay:
                self._look_at("DELETED", pod)
        for pod in results["items"]:
            self._look_at("ADDED", pod)
        self._version = results["metadata"]["resourceVersion"]

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._watch()
            except (OSError, http.client.HTTPException, ValueError):
                self._stopped.wait(AGAIN_S)  # the server is away, or went in the middle of a line

    def _watch(self) -> None:
        where = urllib.parse.urlsplit(self._plane.url)
        connection = http.client.HTTPSConnection(
            where.hostname or "", where.port, timeout=5, context=self._plane.tls
        )
        query = {"watch": "1", "resourceVersion": self._version, "timeoutSeconds": "2"}
        headers = {"Authorization": f"Bearer {self._plane.tokens['admin']}"}
        try:
            connection.request(
                "GET", f"{self._path}?{urllib.parse.urlencode(query)}", headers=headers
            )
            for line in connection.getresponse():
                event = json.loads(line)
                if event.get("type") == "ERROR" and event["object"].get("code") == GONE:
                    return self._list()
                if event.get("type") not in ("ADDED", "MODIFIED", "DELETED"):
                    raise ValueError(line)
                self._look_at(event["type"], event["object"])
        finally:
            connection.close()

    def _look_at(self, kind: str, pod: Object) -> None:
        metadata = pod["metadata"]
        self._version = metadata["resourceVersion"]
        self._there[metadata["uid"]] = pod
        if kind == "DELETED":
            del self._there[metadata["uid"]]
            self.gone.append(metadata["name"])
        labels = metadata.get("labels") or {}
        if "popmq.io/broker-group" not in labels or metadata["name"] in self._retired:
            return
        group = metadata["name"].rpartition("-")[0]
        pods = self._up.setdefault(group, {})
        up = kind != "DELETED" and "deletionTimestamp" not in metadata and is_ready(pod)
        if up or metadata["name"] in pods:
            pods[metadata["name"]] = up
        down = sum(not pod for pod in pods.values())
        self.most_down[group] = max(self.most_down.get(group, 0), down)


def _versions(pods: list[Object]) -> set[tuple[str, str]]:
    return {(pod["metadata"]["uid"], pod["metadata"]["resourceVersion"]) for pod in pods}
