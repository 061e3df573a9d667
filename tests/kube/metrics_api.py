"""The metrics APIs of a cluster, as far as an autoscaler asks: what every pod is said to use.

CPU as metrics-server tells it (metrics.k8s.io), and one figure of each pod as an adapter for
Prometheus does (custom.metrics.k8s.io).
"""

import json
import ssl
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, urlencode, urlsplit

from kube.control_plane import ControlPlane
from kube.fake_api import Object

SERVICE = "metrics"
GROUPS = {"metrics.k8s.io": "v1beta1", "custom.metrics.k8s.io": "v1beta2"}


class MetricsApi:
    """Entered, it is registered: `cpu` is what a container uses, `figure` the other metric."""

    def __init__(self, plane: ControlPlane, *, cpu: str = "0", figure: str = "0") -> None:
        self.cpu, self.figure = cpu, figure
        self._plane = plane
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Of", (_Asked,), {"api": self}))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(plane.folder / "server.crt", plane.folder / "server.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        port = self._server.server_address[1]
        # By name: the API server would not go to an endpoint on loopback.
        spec: Object = {"type": "ExternalName", "externalName": "localhost"}
        spec["ports"] = [{"port": port}]
        metadata = {"name": SERVICE, "namespace": "kube-system"}
        self._plane.apply(
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
        )
        for group, version in GROUPS.items():
            self._plane.apply(_api_service(group, version, int(port)))
        for group, version in GROUPS.items():
            ready = ("--for=condition=Available", f"apiservice/{version}.{group}", "--timeout=60s")
            self._plane.kubectl("wait", *ready)
        return self

    def __exit__(self, *_: object) -> None:
        for group, version in GROUPS.items():
            self._plane.kubectl("delete", "apiservice", f"{version}.{group}", ok=False)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, query: dict[str, list[str]]) -> Object:
        """/apis/GROUP/VERSION, or below it /namespaces/NAMESPACE/pods[/*/METRIC]"""
        parts = path.strip("/").split("/")
        group_version = "/".join(parts[1:3])
        if len(parts) < 6:
            return _resources(group_version)
        selector = urlencode({"labelSelector": query.get("labelSelector", [""])[0]})
        pods = self._plane.items(f"/api/v1/namespaces/{parts[4]}/pods?{selector}")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if len(parts) == 6:
            items = [{**self._usage(pod), "timestamp": now, "window": "30s"} for pod in pods]
            return {"kind": "PodMetricsList", "apiVersion": group_version, "items": items}
        items = [{**self._value(pod, parts[7]), "timestamp": now} for pod in pods]
        return {"kind": "MetricValueList", "apiVersion": group_version, "items": items}

    def _usage(self, pod: Object) -> Object:
        usage = {"cpu": self.cpu, "memory": "10Mi"}
        containers = [
            {"name": container["name"], "usage": usage} for container in pod["spec"]["containers"]
        ]
        metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "labels")}
        return {"metadata": metadata, "containers": containers}

    def _value(self, pod: Object, metric: str) -> Object:
        about = {key: pod["metadata"][key] for key in ("name", "namespace")}
        described = {"kind": "Pod", "apiVersion": "/v1", **about}
        return {"describedObject": described, "metric": {"name": metric}, "value": self.figure}


class _Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ClassVar[MetricsApi]

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        body = json.dumps(self.api.answer(where.path, parse_qs(where.query))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def _resources(group_version: str) -> Object:
    name, kind = ("pods", "PodMetrics")
    if group_version.startswith("custom."):
        name, kind = ("pods/any", "MetricValueList")
    manifest = {
        "name": name,
        "singularName": "",
        "namespaced": True,
        "kind": kind,
        "verbs": ["get"],
    }
    results = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
    return {**results, "resources": [manifest]}


def _api_service(group: str, version: str, port: int) -> Object:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.{group}"},
        "spec": {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"name": SERVICE, "namespace": "kube-system", "port": port},
        },
    }
