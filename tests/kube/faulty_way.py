"""A way to a real API server for one client, on which a test decides what becomes of each request.

What the client asks, watches included, goes through it; all others have their own way and notice
nothing.  `fault` is called on a thread of its own, before a request is handed on.
"""

import asyncio
import json
from pathlib import Path

import aiohttp
from aiohttp import web
from kube.access import token_access
from kube.asked import Asked, Fault, answer_of, asked_of, cut
from kube.control_plane import ControlPlane

from popmq.operator.kube.access import ApiAccess
from popmq.testing.loop_thread import ThreadServer

_HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "host", "content-encoding")


class FaultyWay(ThreadServer):
    """Entered, it is there; `conflict`, `error` and `drop` keep a request from the API server,
    after `lost` it was done and the answer never comes."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__("faulty-way")
        self.fault: Fault = lambda asked: ""
        self.url = ""
        self._plane = plane
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def access(self) -> ApiAccess:
        return token_access(self.url, self._plane.tokens["admin"], "default")

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "faulty-way.kubeconfig"
        user = {"name": "u", "user": {"token": self._plane.tokens["admin"]}}
        there = {"cluster": "c", "user": "u", "namespace": "default"}
        config = {
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [user],
            "contexts": [{"name": "x", "context": there}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config))
        return path

    async def _open(self) -> None:
        # Its own way to the server has no limit: a watch lasts as long as the client wants.
        limits = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=self._plane.tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits)
        application = web.Application(client_max_size=16 << 20)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"

    async def _close(self) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()
        await asyncio.sleep(0.05)  # aiohttp ends TLS connections in the next turns of the loop

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        asked = await asked_of(request)
        fault = self.fault(asked) if asked else ""
        if (instead := answer_of(fault, request)) is not None:
            return instead
        assert self._session is not None
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = self._plane.url + request.path_qs
        body = await request.read()
        try:
            async with self._session.request(
                request.method,
                url,
                data=body or None,
                headers=headers,
                skip_auto_headers=("Content-Type",),
            ) as answer:
                if fault == "lost":
                    await answer.read()
                    cut(request)
                return await _handed_on(request, answer)
        except aiohttp.ClientError:  # the server is away, or ended in the middle
            cut(request)
            raise


async def _handed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def each_write_fails_twice(seen: dict[object, set[str]]) -> Fault:
    """Refused with 409, then done without an answer, and only then as it should be: every write
    that is not the same as one before.  `seen` has what became of each."""

    def fault(asked: Asked) -> str:
        if not asked.writes:
            return ""
        # Keys are new at each attempt, and a status or an event tells of the attempt.
        new = asked.plural in ("secrets", "events") or asked.sub
        answer = b"" if new else asked.body
        failed = seen.setdefault((asked.verb, asked.plural, asked.name, asked.sub, answer), set())
        for kind in ("conflict", "lost"):
            if kind not in failed:
                failed.add(kind)
                return kind
        return ""

    return fault
