"""The API server, through the official client: read, server-side apply, delete.

A refusal is an `ApiError` with the server's own words; no whole answer is `ApiUnavailable`, and
then the request may have been done: whoever asks looks again.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import kubernetes.aio.client as kubernetes
from kubernetes.aio.client.rest import RESTResponse

from popmq.operator.kube.access import ApiAccess
from popmq.operator.model.conditions import Refusal
from popmq.operator.model.manifest import EVENT, Manifest, ResourceKind, at, is_left_by, is_owned_by
from popmq.operator.model.names import FIELD_MANAGER

TIMEOUT_S = 10.0
PAGE = 500  # objects of one answer to a list
WATCH_S = 240  # the server ends a watch after this; the client's own limit is 300
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
NOT_FOUND, CONFLICT = 404, 409
TRANSIENT = (401, 408, CONFLICT, 429)
NAME_TAKEN = (
    "an object of this name exists and has another owner: remove or rename one of them, or take "
    "over what another cluster of this name left (annotation popmq.io/adopt)"
)
EVENT_REPEAT_S = 60.0  # an event that recurs sooner is not counted again


class ApiError(Exception):
    """The API server refused a request.  `field` is the path of the first field that it names."""

    def __init__(self, status: int, reason: str, message: str, field: str = "") -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.field = field

    @property
    def is_transient(self) -> bool:
        """The same request may succeed later, so it is repeated soon."""
        return self.status >= 500 or self.status in TRANSIENT

    def refusal(self, subject: str) -> Refusal:
        """With the field, unless the server's message names it already."""
        names_field = not self.field or self.field in self.message
        return Refusal(subject, self.message if names_field else f"{self.field}: {self.message}")


class NameTaken(Exception):
    """An object of this name exists and has another owner, or none."""


class ApiUnavailable(Exception):
    """No whole answer: what was asked for may have been done."""


class ApiClient:
    """Opened and closed by whoever runs the operator."""

    def __init__(self, access: ApiAccess, *, timeout_s: float = TIMEOUT_S) -> None:
        self.access = access
        self._timeout_s = timeout_s
        self._client: kubernetes.ApiClient | None = None
        self._events_s: dict[tuple[str, str, str], float] = {}  # when each was recorded last

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            # TLS connections end in the next turns of the loop.
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
            listing = await self.ask("GET", kind.path(namespace), query=query)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return []
            raise
        items: list[Manifest] = listing.get("items") or []
        for manifest in items:  # a list names the kind once
            manifest.setdefault("apiVersion", kind.api_version)
            manifest.setdefault("kind", kind.kind)
        return items

    async def served(self, api_version: str) -> frozenset[str]:
        """The plural names of the kinds that the server knows in a group's version."""
        try:
            answer = await self.ask("GET", f"/apis/{api_version}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return frozenset()
            raise
        names = {str(resource["name"]) for resource in answer.get("resources") or []}
        return frozenset(name for name in names if "/" not in name)

    async def pages(
        self, kind: ResourceKind, namespace: str, selector: str
    ) -> AsyncIterator[Manifest]:
        """A list in parts, so that no answer is large."""
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = await self.ask("GET", kind.path(namespace), query=query)
            yield page
            rest = at(page, "metadata", "continue")
            if not rest:
                return
            query["continue"] = str(rest)

    async def watch(
        self, kind: ResourceKind, namespace: str, selector: str, version: str
    ) -> AsyncIterator[Manifest]:
        """The events after `version`, until the server ends the watch."""
        path = kind.path(namespace)
        query = {
            **{"watch": "true", "labelSelector": selector, "resourceVersion": version},
            **{"allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)},
        }
        answer: RESTResponse | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._request("GET", path, None, query, "application/json")
                text = "" if answer.status < 400 else (await answer.read()).decode()
            if answer.status >= 400:
                raise _refusal(answer.status, text)
            async with asyncio.timeout(WATCH_S + self._timeout_s):
                async for line in answer.response.content:
                    yield json.loads(line)
        except ApiError:
            raise
        except Exception as error:
            why = f"watch {path}: {error or type(error).__name__}"
            raise ApiUnavailable(why) from error
        finally:
            if answer is not None:
                answer.response.close()

    async def apply(
        self,
        kind: ResourceKind,
        manifest: Manifest,
        *,
        manager: str = FIELD_MANAGER,
        sub: str = "",
        force: bool = True,
    ) -> Manifest:
        """Server-side: our fields become as given; without `force` another writer's field is
        refused as a conflict."""
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"]) + (f"/{sub}" if sub else "")
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self.ask("PATCH", path, manifest, query=query, content=APPLY)

    async def apply_owned(
        self,
        kind: ResourceKind,
        manifest: Manifest,
        *,
        owner_uid: str,
        known: Manifest | None = None,
    ) -> Manifest:
        """Apply an object that `owner_uid` owns or that does not exist yet.  Raises NameTaken.
        `known` is the object as it is, if somebody has read it already."""
        metadata = manifest["metadata"]
        existing = known or await self.get(kind, metadata["namespace"], metadata["name"])
        if existing is not None and not is_owned_by(existing, owner_uid):
            raise NameTaken(NAME_TAKEN)
        # Without force, an object that another client creates at this moment is not taken over.
        return await self.apply(kind, manifest, force=existing is not None)

    async def adopted(
        self, kind: ResourceKind, manifest: Manifest, labels: Mapping[str, str], owner: Manifest
    ) -> Manifest:
        """The object with this owner, if another one of its kind and name left it; else as it
        is.  Only one owner may be its controller, so the old ones go."""
        if not is_left_by(manifest, labels, owner):
            return manifest
        metadata = manifest["metadata"]
        version = metadata["resourceVersion"]
        change = {"metadata": {"ownerReferences": [owner], "resourceVersion": version}}
        return await self.merge(kind, metadata["namespace"], metadata["name"], change)

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

    async def recurring_event(self, about: Manifest, reason: str, message: str) -> None:
        """A warning for what each reconcile finds again: recorded once in EVENT_REPEAT_S."""
        now_s = time.monotonic()
        identity = (about["metadata"]["uid"], reason, message)
        since_s = now_s - EVENT_REPEAT_S
        self._events_s = {key: at_s for key, at_s in self._events_s.items() if at_s > since_s}
        if identity not in self._events_s:
            self._events_s[identity] = now_s
            await self.event(about, reason, message, warning=True)

    async def event(self, about: Manifest, reason: str, message: str, *, warning: bool) -> None:
        """Record an event; one that recurs counts up.  A failure is no reason to stop."""
        message = message[:1024]
        identity = json.dumps([about["metadata"]["uid"], reason, message])
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        name = f"{about['metadata']['name'][:200]}.{digest}"
        event = _event(about, name, reason, message, warning=warning)
        try:
            await self._count_event(event)
        except (ApiError, ApiUnavailable):
            return

    async def _count_event(self, event: Manifest) -> None:
        try:
            await self.create(EVENT, event)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            namespace, name = event["metadata"]["namespace"], event["metadata"]["name"]
            before = await self.get(EVENT, namespace, name) or {}
            count = int(before.get("count") or 1) + 1
            change = {"count": count, "lastTimestamp": event["lastTimestamp"]}
            await self.merge(EVENT, namespace, name, change)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Manifest:
        text = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._request(method, path, body, query or {}, content)
                status, text = answer.status, (await answer.read()).decode()
        except Exception as error:
            # Whatever broke below, in the client or the network, there is no whole answer.
            raise ApiUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        if status >= 400:
            raise _refusal(status, text)
        try:
            document: Any = json.loads(text)
        except ValueError as error:
            raise ApiUnavailable(f"{method} {path}: an answer that is no JSON") from error
        return document if isinstance(document, dict) else {}

    async def _request(
        self, method: str, path: str, body: object, query: Mapping[str, str], content: str
    ) -> RESTResponse:
        configuration = self.access.configuration
        if self._client is None:
            self._client = kubernetes.ApiClient(configuration)
        headers = {"Accept": "application/json", "Content-Type": content}
        # Asked with each request: kubelets and exec plug-ins renew tokens.
        if token := await configuration.get_api_key_with_prefix("BearerToken"):
            headers["Authorization"] = token.strip()  # files end with a line feed
        url = configuration.host + path + (f"?{urlencode(query)}" if query else "")
        return await self._client.call_api(method, url, headers, body)


def _event(about: Manifest, name: str, reason: str, message: str, *, warning: bool) -> Manifest:
    metadata = about["metadata"]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message,
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


def _refusal(status: int, text: str) -> ApiError:
    try:
        document = json.loads(text)
        causes = (document.get("details") or {}).get("causes") or [{}]
        reason, message = str(document.get("reason", "")), str(document.get("message", ""))
        return ApiError(status, reason, message, str(causes[0].get("field") or ""))
    except (ValueError, AttributeError):
        return ApiError(status, "", text[:200])
