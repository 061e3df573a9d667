"""One request to an API server, as faults and those that count see it; and how a fault answers."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

_PATH = re.compile(
    r"/(?:api|apis)/(?P<version>v1|[^/]+/[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>status|scale))?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Asked:
    verb: str
    plural: str
    namespace: str
    name: str
    sub: str
    user: str = ""
    body: bytes = b""

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list", "watch")


# "", "conflict", "error", "invalid", "lost" (done, no answer), "drop"
Fault = Callable[[Asked], str]


async def asked_of(request: web.Request) -> Asked | None:
    """None: no path of an object or a list of them."""
    match = _PATH.fullmatch(request.path)
    if match is None:
        return None
    name = match["name"] or ""
    verb = _VERBS.get(request.method, "get" if name else "list")
    if verb == "list" and request.query.get("watch") in ("1", "true"):
        verb = "watch"
    user = request.headers.get("Authorization", "").removeprefix("Bearer ")
    place = match["namespace"] or ""
    return Asked(verb, match["plural"], place, name, match["sub"] or "", user, await request.read())


def answer_of(fault: str, request: web.Request) -> web.Response | None:
    """In place of the API server's, which then hears nothing of it."""
    if fault == "conflict":
        return refused(409, "Conflict", "the object has been modified")
    if fault == "error":
        return refused(500, "InternalError", "as the test wants it")
    if fault == "invalid":
        return refused(422, "Invalid", "the test refuses it", field="spec.refused")
    if fault == "drop":
        cut(request)
    return None


def refused(code: int, reason: str, message: str, field: str = "") -> web.Response:
    body: dict[str, object] = {
        "kind": "Status",
        "status": "Failure",
        "reason": reason,
        "message": message,
    }
    if field:
        body["details"] = {"causes": [{"field": field, "message": message}]}
    return web.json_response({**body, "code": code}, status=code)


def cut(request: web.Request) -> None:
    """The connection breaks and nobody knows what was done."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
