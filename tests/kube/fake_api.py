"""A small API server for tests: what the operator uses of one, with real versions and conflicts.

One increasing resourceVersion, uids, generations that move with the spec only, server-side apply
with field owners (lists are one value), merge patches, /status, selectors, finalizers, owner
references, watches with bookmarks and 410.  `faults` may answer any request instead of it.  The
same tests run against a real one (test_control_plane.py), which keeps this one honest.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from kube.asked import Asked, Fault, answer_of, asked_of, cut, refused

Object = dict[str, Any]
Key = tuple[str, str, str]  # plural, namespace, name
SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
# What the controllers of Kubernetes look at.
WATCHED = ("brokerclusters", "deployments", "statefulsets", "pods", "persistentvolumeclaims")


@dataclass
class Stored:
    body: Object
    applied: dict[str, Object] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class FakeApi:
    """`after` is called when something was written: there the test's controllers act."""

    def __init__(self) -> None:
        self.objects: dict[Key, Stored] = {}
        self.asked: list[Asked] = []
        self.fault: Fault = lambda asked: ""
        self.after: Callable[[], None] = lambda: None
        self.url = ""
        self._version = 100
        self._history: list[tuple[int, str, str, Object]] = []
        self._oldest = 0
        self._grown = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        self._grown.set()
        await self._runner.cleanup()

    def compact(self) -> None:
        """Watches from older versions are told to list again."""
        self._oldest = self._version
        self._history.clear()

    # -- for tests: the same without a network

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        message = self.objects.get((plural, namespace, name))
        return copied(message.body) if message else None

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        return [
            copied(message.body)
            for (kind, where, _), message in sorted(self.objects.items())
            if kind == plural and namespace in ("", where)
        ]

    def put(self, plural: str, body: Object) -> None:
        """Create or replace, as some other client would."""
        metadata = body["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        message = self.objects.get(key)
        if message is None:
            self._create(key, copied(body))
        else:
            self._store(key, message, copied(body), whole=True)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        self._delete((plural, namespace, name), "Background")

    # -- requests

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        asked = await asked_of(request)
        if asked is None:
            return refused(404, "NotFound", f"no such path: {request.path}")
        self.asked.append(asked)
        fault = self.fault(asked)
        if (instead := answer_of(fault, request)) is not None:
            return instead
        if asked.verb == "watch":
            return await self._watch(request, asked)
        try:
            body = json.loads(asked.body) if asked.body else {}
            code, answer = self._answer(asked, request, body)
        except Refused as refusal:
            return refused(refusal.status, refusal.reason, refusal.message)
        if asked.writes and asked.plural in WATCHED:
            self.after()
        if fault == "lost":
            cut(request)
        return web.json_response(answer, status=code)

    def _answer(self, asked: Asked, request: web.Request, body: Object) -> tuple[int, Object]:
        key = (asked.plural, asked.namespace, asked.name)
        match asked.verb:
            case "list":
                return 200, self._list(asked.plural, asked.namespace, request.query)
            case "get":
                return 200, self._found(key).body
            case "create":
                metadata = body["metadata"]
                if "generateName" in metadata and "name" not in metadata:
                    metadata["name"] = f"{metadata['generateName']}{self._version}"
                key = (asked.plural, asked.namespace, metadata["name"])
                if key in self.objects:
                    raise Refused(409, "AlreadyExists", f"{key[0]} {key[2]} already exists")
                return 201, self._create(key, body).body
            case "update":
                message = self._found(key)
                _check_version(message, body)
                return 200, self._store(key, message, body, status=asked.sub == "status").body
            case "delete":
                expected = (body.get("preconditions") or {}).get("uid")
                message = self._found(key)
                if expected and expected != message.body["metadata"]["uid"]:
                    raise Refused(409, "Conflict", f"the uid is not {expected}")
                self._delete(key, body.get("propagationPolicy", "Background"))
                return 200, {"kind": "Status", "status": "Success"}
        return self._patch(key, asked, request, body)

    def _patch(
        self, key: Key, asked: Asked, request: web.Request, body: Object
    ) -> tuple[int, Object]:
        status = asked.sub == "status"
        if "apply-patch" in request.headers["Content-Type"]:
            return self._apply(key, body, request.query["fieldManager"], status=status)
        message = self._found(key)
        _check_version(message, body)
        merged = _merge(message.body, body)
        return 200, self._store(key, message, merged, status=status).body

    def _apply(self, key: Key, body: Object, manager: str, *, status: bool) -> tuple[int, Object]:
        message = self.objects.get(key)
        if message is None:
            if status:
                raise Refused(404, "NotFound", f"{key[0]} {key[2]} not found")
            new_message = self._create(key, copied(body))
            new_message.applied[manager] = copied(body)
            new_message.body["metadata"]["managedFields"] = _managed(new_message)
            return 201, new_message.body
        # What this manager had and leaves out goes, unless another one has it too.
        slot = f"{manager}/status" if status else manager
        merged = copied(message.body)
        others = [manifest for name, manifest in message.applied.items() if name != slot]
        for path in _leaves(message.applied.get(slot, {})):
            if not _has(body, path) and not any(_has(manifest, path) for manifest in others):
                _remove(merged, path)
        merged = _merge(merged, body)
        message.applied[slot] = copied(body)
        return 200, self._store(key, message, merged, status=status).body

    def _list(self, plural: str, namespace: str, query: Any) -> Object:
        expected = _selector(query.get("labelSelector", ""))
        items = [
            message.body
            for (kind, where, _), message in sorted(self.objects.items())
            if kind == plural and namespace in ("", where) and _matches(message.body, expected)
        ]
        return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query.get("resourceVersion") or self._version)
        expected = _selector(request.query.get("labelSelector", ""))
        while True:
            if seen < self._oldest:
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
                await response.write(json.dumps(gone).encode() + b"\n")
                return response
            for version, kind, event, body in list(self._history):
                where = body["metadata"].get("namespace", "")
                if version > seen and kind == asked.plural and asked.namespace in ("", where):
                    seen = version
                    if _matches(body, expected):
                        line = json.dumps({"type": event, "object": body})
                        await response.write(line.encode() + b"\n")
            self._grown.clear()
            await self._grown.wait()

    # -- storage

    def _found(self, key: Key) -> Stored:
        message = self.objects.get(key)
        if message is None:
            raise Refused(404, "NotFound", f"{key[0]} {key[2]} not found")
        return message

    def _create(self, key: Key, body: Object) -> Stored:
        metadata = body["metadata"]
        metadata.update(uid=f"uid-{self._version}", generation=1)
        metadata.setdefault("namespace", key[1])
        metadata["creationTimestamp"] = "2030-01-01T00:00:00Z"
        if key[0] == "deployments":
            body["spec"].setdefault("replicas", 1)
        if key[0] not in ("pods", "persistentvolumeclaims"):
            body.pop("status", None)
        message = self.objects[key] = Stored(body)
        self._moved(key, "ADDED", body)
        return message

    def _store(
        self, key: Key, message: Stored, body: Object, *, status: bool = False, whole: bool = False
    ) -> Stored:
        """Nothing moves when nothing changes; a status write changes the status alone."""
        old = message.body
        if status:
            body = {**old, "status": body.get("status", {})}
        elif not whole:
            body = {**body, **({"status": old["status"]} if "status" in old else {})}
        for name in SERVER_FIELDS:
            if name in old["metadata"]:
                body["metadata"][name] = old["metadata"][name]
        if key[0] == "deployments":
            body["spec"].setdefault("replicas", 1)
        body["metadata"]["managedFields"] = _managed(message)
        if _plain(body) == _plain(old):
            old["metadata"]["managedFields"] = _managed(message)
            return message
        if body.get("spec") != old.get("spec"):
            body["metadata"]["generation"] = old["metadata"]["generation"] + 1
        message.body = body
        self._moved(key, "MODIFIED", body)
        if "deletionTimestamp" in body["metadata"] and not body["metadata"].get("finalizers"):
            self._gone(key, "Background")
        return message

    def _moved(self, key: Key, event: str, body: Object) -> None:
        self._version += 1
        body["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, key[0], event, copied(body)))
        self._grown.set()

    def _delete(self, key: Key, policy: str) -> None:
        message = self._found(key)
        metadata = message.body["metadata"]
        if metadata.get("finalizers"):
            if "deletionTimestamp" not in metadata:
                metadata["deletionTimestamp"] = "2030-01-01T00:00:01Z"
                self._moved(key, "MODIFIED", message.body)
            return
        self._gone(key, policy)

    def _gone(self, key: Key, policy: str) -> None:
        message = self.objects.pop(key)
        self._moved(key, "DELETED", message.body)
        uid = message.body["metadata"]["uid"]
        for other, resource in list(self.objects.items()):
            owners = resource.body["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners) and other in self.objects:
                if policy == "Orphan":
                    left = [owner for owner in owners if owner["uid"] != uid]
                    resource.body["metadata"]["ownerReferences"] = left
                else:
                    self._delete(other, policy)


def copied(body: Any) -> Any:
    """All is JSON here, and this is several times as fast as copy.deepcopy."""
    return json.loads(json.dumps(body))


def _check_version(message: Stored, body: Object) -> None:
    expected = (body.get("metadata") or {}).get("resourceVersion")
    if expected and expected != message.body["metadata"]["resourceVersion"]:
        raise Refused(409, "Conflict", "the object has been modified")


def _selector(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


def _matches(body: Object, expected: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels") or {}
    return expected.items() <= labels.items()


def _merge(old: Any, change: Any) -> Any:
    """Null removes; what is no object replaces what was there."""
    if not isinstance(change, dict):
        return copied(change)
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _leaves(body: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in body.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        elif (*path, key) not in (("apiVersion",), ("kind",), ("metadata", "name")):
            yield (*path, key)


def _has(body: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(body, dict) or key not in body:
            return False
        body = body[key]
    return True


def _remove(body: Object, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        body = body.get(key, {})
    body.pop(path[-1], None)


def _managed(stored: Stored) -> list[Object]:
    def fields(body: Any) -> Any:
        if not isinstance(body, dict):
            return {}
        return {f"f:{key}": fields(value) for key, value in body.items()}

    return [
        {"manager": name.removesuffix("/status"), "fieldsV1": fields(body)}
        for name, body in stored.applied.items()
    ]


def _plain(body: Object) -> Object:
    metadata = {k: v for k, v in body["metadata"].items() if k not in SERVER_FIELDS}
    return {**body, "metadata": metadata}
