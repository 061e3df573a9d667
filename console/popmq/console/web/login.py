"""Login and logout: a form for access key and secret, and the cookie of the session.

The cookie is `HttpOnly; SameSite=Strict`, and `Secure` where the browser came over TLS.  Its name
has the port: browsers give cookies of one port of a host to the others, too.
"""

from urllib.parse import urlencode

import click
import htpy as h
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from popmq.cli.client import CallFailed
from popmq.common.errors import Code, PopmqError
from popmq.common.signing import Signer
from popmq.console.markup import notice, text
from popmq.console.page import Page
from popmq.console.sessions import LONGEST_S, Sessions
from popmq.console.web.document import form_of, rendered

LOGIN = "/login"
STATUSES = {Code.TOO_MANY_REQUESTS: 429, Code.PRECONDITION_FAILED: 400}


def login_routes(sessions: Sessions) -> list[Route]:
    async def login(http: HttpRequest) -> Response:
        if http.method == "POST":
            return await _logged_in(sessions, http)
        return _form_page(sessions, local_path(http.query_params.get("next", "")))

    async def logout(http: HttpRequest) -> Response:
        sessions.log_out(token_of(http))
        response = RedirectResponse(LOGIN, status_code=303)
        response.delete_cookie(cookie_name(http), httponly=True, samesite="strict")
        return response

    return [
        Route(LOGIN, login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
    ]


def cookie_name(http: HttpRequest) -> str:
    port = http.headers.get("host", "").rpartition(":")[2]
    return f"popmq_session_{port if port.isascii() and port.isdecimal() else 0}"


def token_of(http: HttpRequest) -> str:
    """Of the session that the browser claims; empty without one."""
    return http.cookies.get(cookie_name(http), "")


def to_login(http: HttpRequest, is_live: bool) -> Response:
    """A page that was open says by its status that it is over, and the browser loads it anew."""
    if is_live:
        return Response(status_code=401)
    came_from = f"{http.url.path}?{http.url.query}" if http.url.query else http.url.path
    target = came_from if http.method == "GET" else "/"
    return RedirectResponse(f"{LOGIN}?{urlencode({'next': target})}", status_code=303)


def local_path(text: str) -> str:
    """A path of the console: `//host` and `/\\host` are other sites for a browser."""
    is_local = text.startswith("/") and text[1:2] not in ("/", "\\")
    return text if is_local and text.isprintable() else "/"


async def _logged_in(sessions: Sessions, http: HttpRequest) -> Response:
    after = "/"
    try:
        form = await form_of(http)
        after = local_path(_sent(form.get("next", ())))
        signer = Signer(_sent(form.get("access_key", ())), _sent(form.get("secret", ())))
        if not signer.access_key or not signer.secret.isascii():
            raise click.UsageError("write an access key and its secret")
        address = http.client.host if http.client else ""
        token = await run_in_threadpool(sessions.log_in, signer, address)
    except (PopmqError, click.UsageError) as error:
        return _form_page(sessions, after, error)
    sessions.log_out(token_of(http))
    response = RedirectResponse(after, status_code=303)
    response.set_cookie(
        cookie_name(http),
        token,
        max_age=int(LONGEST_S),
        httponly=True,
        samesite="strict",
        secure=http.headers.get("origin", "").startswith("https://"),
    )
    return response


def _sent(values: object) -> str:
    return str(values[0]).strip() if isinstance(values, list) and values else ""


def _form_page(sessions: Sessions, after: str, error: Exception | None = None) -> Response:
    reason = error.format_message() if isinstance(error, click.UsageError) else str(error or "")
    status = 200
    if error is not None:
        code = getattr(error, "code", None)
        status = 503 if isinstance(error, CallFailed) else STATUSES.get(code, 401)  # type: ignore[arg-type]
    content = [
        h.h1["Log in"],
        error is not None and notice("bad", text(reason)),
        h.form(class_="login", method="post", action=LOGIN)[
            h.input(type="hidden", name="next", value=after),
            h.label[
                "Access key ",
                h.input(name="access_key", required=True, autocomplete="username"),
            ],
            h.label[
                "Secret ",
                h.input(
                    name="secret",
                    type="password",
                    required=True,
                    autocomplete="current-password",
                ),
            ],
            h.button["Log in"],
        ],
        h.p[
            "A user of the cluster: `popmq user create NAME` prints its access key and secret. "
            "Pages show what that user may see."
        ],
    ]
    page = Page("Log in", content, live=False, status=status)
    return rendered(sessions.anonymous, page, "")
