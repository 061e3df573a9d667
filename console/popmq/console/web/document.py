"""The page around what a page function returns, and the forms that browsers send."""

from collections.abc import Mapping
from urllib.parse import parse_qs

import click
import htpy as h
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse

from popmq.common.version import VERSION
from popmq.console.markup import text
from popmq.console.page import Console, Page, to

MAX_FORM_BYTES = 8 << 20
MAX_FIELDS = 2_000
NAVIGATION = (
    ("/", "Overview"),
    ("/groups", "Groups"),
    ("/topics", "Topics"),
    ("/timers", "Timers"),
    ("/dead-letters", "Dead letters"),
    ("/cluster", "Cluster"),
    ("/clients", "Clients"),
    ("/settings", "Settings"),
    ("/reports", "Reports"),
)


async def form_of(http: HttpRequest) -> Mapping[str, list[str]]:
    """The fields that were sent.  Raises click.UsageError for more than the console takes."""
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            raise click.UsageError(f"the form has more than {MAX_FORM_BYTES} bytes")
    try:
        return parse_qs(
            body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"
        )
    except ValueError as error:
        raise click.UsageError(f"the form cannot be read: {error}") from error


def rendered(console: Console, page: Page, path: str) -> HTMLResponse:
    document = h.html(lang="en")[
        h.head[
            h.meta(charset="utf-8"),
            h.meta(name="viewport", content="width=device-width, initial-scale=1"),
            h.title[f"{page.title} - popmq"],
            h.link(rel="icon", href="/static/icon.svg"),
            h.link(rel="stylesheet", href="/static/console.css"),
            h.script(src="/static/live.js", defer=True),
        ],
        h.body[
            h.a(class_="skip", href="#main")["Skip to the content"],
            _header(console, path),
            h.p(id="state", role="status", hidden=True),
            h.main(id="main", data_live="yes" if page.live else "no")[page.content],
            h.footer[
                f"popmq {VERSION}, proxy {text(console.client.endpoint)}. ",
                h.span(id="pulse")["Live with JavaScript only."] if page.live else None,
            ],
        ],
    ]
    return HTMLResponse(str(document), status_code=page.status)


def _header(console: Console, path: str) -> h.Node:
    links = [
        h.li[h.a(href=target, aria_current="page" if target == path else None)[label]]
        for target, label in NAVIGATION
        if target != "/reports" or console.reports is not None
    ]
    return h.header[
        h.a(class_="brand", href="/")["popmq"],
        h.nav(aria_label="pages of the console")[h.ul[links]],
        h.form(class_="find", method="get", action=to("messages"), role="search")[
            h.input(name="id", type="search", placeholder="Message id", aria_label="Message id"),
            h.button["Explain"],
        ],
        h.button(id="theme", type="button", hidden=True)["Theme"],
        console.user
        and h.form(class_="user", method="post", action="/logout")[
            h.span[text(console.user)], h.button["Log out"]
        ],
    ]
