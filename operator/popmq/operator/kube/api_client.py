"""The API server over HTTP: read, server-side apply, delete. One request, one answer, no memory.

A refusal is an `ApiError` with the server's own words; no whole answer is `ApiUnavailable`, and
then the request may have been done: whoever asks looks again.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from popmq.common.errors import ConfigError
from popmq.operator.model.manifest import EVENT, Manifest, ResourceKind
from popmq.operator.model.names import FIELD_MANAGER

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
NOT_FOUND, CONFLICT = 404, 409


class ApiError(Exception):
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ApiUnavailable(Exception):
    """No whole answer: what was asked for may have been done."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """How to reach the API server. `token` is asked with each request: kubelets rotate it."""

    url: str
    token: Callable[[], str]
    tls: ssl.SSLContext | None
    namespace: str  # of the pod, or of the kubeconfig's context


def pod_access(environ: Mapping[str, str]) -> ApiAccess:
    """As every pod is told it. Raises ConfigError elsewhere."""
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise ConfigError(
            "this is no pod of a Kubernetes cluster (KUBERNETES_SERVICE_HOST is not set): "
            "name a kubeconfig file (operator.kubeconfig)"
        )
    host = f"[{host}]" if ":" in host else host
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ApiAccess(
        f"https://{host}:{port}",
        lambda: (SERVICE_ACCOUNT / "token").read_text(encoding="utf-8").strip(),
        ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt")),
        (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip(),
    )


def kubeconfig_access(path: str) -> ApiAccess:
    """The current context of a kubeconfig with a token or a client certificate."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        contexts = {one["name"]: one["context"] for one in config["contexts"]}
        context = contexts[config["current-context"]]
        cluster = {one["name"]: one["cluster"] for one in config["clusters"]}[context["cluster"]]
        user = {one["name"]: one["user"] for one in config["users"]}[context["user"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"operator.kubeconfig = {path} cannot be used: {error!r}") from error
    token = str(user.get("token", ""))
    tls = None
    if cluster["server"].startswith("https:"):
        tls = _tls_of(Path(path).parent, cluster, user)
    return ApiAccess(cluster["server"], lambda: token, tls, context.get("namespace", "default"))


def _tls_of(folder: Path, cluster: Mapping[str, str], user: Mapping[str, str]) -> ssl.SSLContext:
    authority = cluster.get("certificate-authority")
    data = cluster.get("certificate-authority-data")
    tls = ssl.create_default_context(
        cafile=str(folder / authority) if authority else None,
        cadata=base64.b64decode(data).decode() if data else None,
    )
    if "client-certificate" in user:
        tls.load_cert_chain(folder / user["client-certificate"], folder / user["client-key"])
    elif "client-certificate-data" in user:
        # The ssl module reads pairs from files only.
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            tls.load_cert_chain(pair.name)
    return tls


class ApiClient:
    """Opened and closed by whoever runs the operator."""

    def __init__(self, access: ApiAccess, *, timeout_s: float = TIMEOUT_S) -> None:
        self.access = access
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # aiohttp ends TLS connections in the next turns of the loop.
            await asyncio.sleep(0.05)

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> Manifest | None:
        try:
            return await self.ask("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def list(self, kind: ResourceKind, namespace: str, selector: str = "") -> list[Manifest]:
        """All that match; none where the kind itself does not exist."""
        query = {"labelSelector": selector} if selector else {}
        try:
            found = await self.ask("GET", kind.path(namespace), query=query)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return []
            raise
        items: list[Manifest] = found.get("items") or []
        for one in items:  # a list names the kind once
            one.setdefault("apiVersion", kind.api_version)
            one.setdefault("kind", kind.kind)
        return items

    async def apply(
        self, kind: ResourceKind, manifest: Manifest, *, manager: str = FIELD_MANAGER, sub: str = ""
    ) -> Manifest:
        """Server-side: our fields become as given, whatever else wrote to them."""
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"]) + (f"/{sub}" if sub else "")
        query = {"fieldManager": manager, "force": "true"}
        return await self.ask("PATCH", path, manifest, query=query, content=APPLY)

    async def merge(
        self, kind: ResourceKind, namespace: str, name: str, change: Manifest
    ) -> Manifest:
        path = kind.path(namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        return await self.ask("PATCH", path, change, query=query, content=MERGE)

    async def set_finalizers(
        self, kind: ResourceKind, manifest: Manifest, finalizers: Sequence[str]
    ) -> None:
        """By resourceVersion: somebody else's finalizer must not get lost."""
        metadata = manifest["metadata"]
        version = metadata["resourceVersion"]
        change = {"metadata": {"finalizers": list(finalizers), "resourceVersion": version}}
        await self.merge(kind, metadata["namespace"], metadata["name"], change)

    async def create(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        return await self.ask("POST", kind.path(manifest["metadata"]["namespace"]), manifest)

    async def replace(self, kind: ResourceKind, manifest: Manifest) -> Manifest:
        """Refused with 409 unless `metadata.resourceVersion` is the newest."""
        metadata = manifest["metadata"]
        return await self.ask("PUT", kind.path(metadata["namespace"], metadata["name"]), manifest)

    async def delete(
        self, kind: ResourceKind, namespace: str, name: str, *, uid: str = "", orphan: bool = False
    ) -> None:
        """Only the object with this uid, if one is given; what is gone already is no error."""
        options: Manifest = {"propagationPolicy": "Orphan" if orphan else "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self.ask("DELETE", kind.path(namespace, name), options)
        except ApiError as error:
            if error.status != NOT_FOUND and not (uid and error.status == CONFLICT):
                raise

    async def event(self, about: Manifest, reason: str, message: str, *, warning: bool) -> None:
        """Told to people; one that cannot be told is no reason to stop."""
        metadata = about["metadata"]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "generateName": f"{metadata['name']}.",
                "namespace": metadata["namespace"],
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": FIELD_MANAGER},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
        }
        try:
            await self.create(EVENT, event)
        except (ApiError, ApiUnavailable):
            return

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Manifest:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self.access.tls or False, limit=20)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        headers = {"Accept": "application/json"}
        if token := self.access.token():
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            headers["Content-Type"] = content
            data = json.dumps(body)
        url = self.access.url + path
        try:
            async with self._session.request(
                method, url, params=query, data=data, headers=headers
            ) as answer:
                status, text = answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        if status >= 400:
            raise _refusal(status, text)
        try:
            found: Any = json.loads(text)
        except ValueError as error:
            raise ApiUnavailable(f"{method} {path}: an answer that is no JSON") from error
        return found if isinstance(found, dict) else {}


def _refusal(status: int, text: str) -> ApiError:
    try:
        told = json.loads(text)
        return ApiError(status, str(told.get("reason", "")), str(told.get("message", "")))
    except (ValueError, AttributeError):
        return ApiError(status, "", text[:200])


def find_access(kubeconfig: str) -> ApiAccess:
    """Of the kubeconfig that is named, else of the pod we are in."""
    return kubeconfig_access(kubeconfig) if kubeconfig else pod_access(os.environ)
