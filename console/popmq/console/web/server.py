"""Routes of the console: which page function answers, and for which user."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import click
import htpy as h
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from popmq.cli.client import CallRefused
from popmq.common.errors import Code, PopmqError
from popmq.console.markup import notice, text
from popmq.console.page import Console, Document, Page, Redirect, Request
from popmq.console.pages import (
    clients,
    cluster,
    dead_letters,
    groups,
    messages,
    overview,
    reports,
    settings,
    timers,
    topics,
)
from popmq.console.sessions import Sessions
from popmq.console.web.checks import DOCUMENT_POLICY, RequestChecks
from popmq.console.web.document import form_of, rendered
from popmq.console.web.login import login_routes, to_login, token_of

LIVE_HEADER = "x-live"  # of what live.js asks for
STATIC = {
    "live.js": "text/javascript",
    "console.css": "text/css",
    "icon.svg": "image/svg+xml",
}
NOT_FOUND = (
    *(Code.NOT_FOUND, Code.TOPIC_NOT_FOUND, Code.CONSUMER_GROUP_NOT_FOUND),
    Code.MESSAGE_NOT_FOUND,
)
NO_ANSWER = (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)

Show = Callable[[Console, Request], Page | Document]
Act = Callable[[Console, Request], Page | Redirect]


@dataclass(frozen=True, slots=True)
class Place:
    """A page, and what changes things there."""

    path: str
    show: Show
    act: Act | None = None
    named: bool = False  # PATH/NAME is a page too


PLACES = (
    Place("/", overview.show),
    Place("/groups", groups.show, groups.act, named=True),
    Place("/topics", topics.show, topics.act, named=True),
    Place("/messages", messages.show, named=True),
    Place("/timers", timers.show, timers.act),
    Place("/dead-letters", dead_letters.show, dead_letters.act),
    Place("/cluster", cluster.show, cluster.act),
    Place("/clients", clients.show),
    Place("/settings", settings.show),
    Place("/reports", reports.show, named=True),
)


def application(sessions: Sessions, *, any_host: bool = False) -> Starlette:
    """`any_host`: other machines use it, under names that are not known here."""
    routes = [
        *(route for place in PLACES for route in _routes(sessions, place)),
        *login_routes(sessions),
        *(Route(f"/static/{name}", _static(name, kind)) for name, kind in STATIC.items()),
        Route("/livez", _livez),
    ]
    missing = {404: _missing(sessions)}
    checks = Middleware(RequestChecks, any_host=any_host)
    return Starlette(routes=routes, middleware=[checks], exception_handlers=missing)


def _routes(sessions: Sessions, place: Place) -> list[Route]:
    async def endpoint(request: HttpRequest) -> Response:
        return await _answer(sessions, place, request)

    methods = ["GET", "POST"] if place.act else ["GET"]
    paths = [place.path, f"{place.path}/{{name:path}}"] if place.named else [place.path]
    return [Route(path, endpoint, methods=methods) for path in paths]


async def _answer(sessions: Sessions, place: Place, http: HttpRequest) -> Response:
    token = token_of(http)
    session = sessions.find(token)
    if session is None and sessions.always:
        return to_login(http, LIVE_HEADER in http.headers)
    console = sessions.anonymous if session is None else session.console
    try:
        if http.method == "POST" and place.act is not None:
            return await _changed(console, place, place.act, http)
        response = await _looked(console, place, http)
    except NotKnown:
        # The session's secret is over, or there is no session and the cluster has users.
        sessions.log_out(token)
        sessions.refused = sessions.refused or session is None
        return to_login(http, LIVE_HEADER in http.headers)
    sessions.refused = sessions.refused and session is not None
    return response


async def _looked(console: Console, place: Place, http: HttpRequest) -> Response:
    name, query = http.path_params.get("name", ""), dict(http.query_params)
    if LIVE_HEADER not in http.headers:
        return await run_in_threadpool(_shown, console, place, Request(name, query))
    # Open pages ask again and again: those of one user and URL get one answer.
    request = Request(name, query, shared=True)
    return await run_in_threadpool(
        console.pages.get,
        (place.path, name, str(http.query_params)),
        partial(_shown, console, place, request),
    )


class NotKnown(Exception):
    """The proxy does not know who asks."""


def _shown(console: Console, place: Place, request: Request) -> Response:
    try:
        page = place.show(console, request)
    except (PopmqError, click.UsageError) as error:
        page = error_page(error)
    if isinstance(page, Document):
        headers = {"content-security-policy": DOCUMENT_POLICY}
        return HTMLResponse(page.content, headers=headers)
    return rendered(console, page, place.path)


async def _changed(console: Console, place: Place, act: Act, http: HttpRequest) -> Response:
    form: Mapping[str, Sequence[str]] = {}
    try:
        form = await form_of(http)
        request = Request(http.path_params.get("name", ""), dict(http.query_params), form)
        result = await run_in_threadpool(act, console, request)
    except (PopmqError, click.UsageError) as error:
        again = (http.url.path + (f"?{http.url.query}" if http.url.query else ""), form)
        result = error_page(error, again=again)
    if isinstance(result, Redirect):
        return RedirectResponse(result.to, status_code=303)
    return rendered(console, result, place.path)


def error_page(
    error: Exception, *, again: tuple[str, Mapping[str, Sequence[str]]] | None = None
) -> Page:
    """The error in words.  A page that only looks tries again by itself.  Of a change, `again` has
    path and form: the console never repeats it.  Raises NotKnown."""
    if isinstance(error, CallRefused) and error.number == Code.UNAUTHORIZED:
        raise NotKnown from error
    reason = error.format_message() if isinstance(error, click.UsageError) else str(error)
    number = int(getattr(error, "number", getattr(error, "code", 0)))
    status = 404 if number in NOT_FOUND else 503 if number in NO_ANSWER else 400
    title = {404: "Not found", 503: "No answer", 400: "Refused"}[status]
    if status != 503:
        after: h.Node = h.p["Nothing was changed."]
    elif again is None:
        after = h.p["This page tries again by itself."]
    else:
        action, fields = again
        after = [
            h.p["Whether it was done is not known."],
            # A message keeps its id, and is stored once.
            repeated(action, fields)
            if fields.get("message_id", [""]) != [""]
            else h.p[h.a(href=action)["Look before you do it again"]],
        ]
    return Page(
        title,
        [h.h1[title], notice("bad", text(reason)), after],
        live=again is None,
        status=status,
    )


def repeated(action: str, fields: Mapping[str, Sequence[str]]) -> h.Element:
    """The form that was sent, without the things that a person can change."""
    return h.form(method="post", action=action)[
        [
            h.input(type="hidden", name=name, value=value)
            for name, values in fields.items()
            for value in values
        ],
        h.button["Try again: it is sent once"],
    ]


def _missing(sessions: Sessions) -> Callable[[HttpRequest, Exception], Response]:
    def answer(request: HttpRequest, error: Exception) -> Response:
        content = [h.h1["Not found"], h.p["There is no such page. ", h.a(href="/")["Overview"]]]
        page = Page("Not found", content, live=False, status=404)
        return rendered(sessions.anonymous, page, "")

    return answer


def _livez(request: HttpRequest) -> Response:
    return PlainTextResponse("ok\n")


def _static(name: str, kind: str) -> Callable[[HttpRequest], Response]:
    content = (files("popmq.console.web") / name).read_bytes()

    def endpoint(request: HttpRequest) -> Response:
        return Response(content, media_type=kind)

    return endpoint
