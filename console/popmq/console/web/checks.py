"""What every request must be, and what every answer says to the browser.

A page of another site can neither change anything here (its Origin is another one) nor read a page
through a name that it points to this machine (Host is checked).  The console has no WebSocket.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Scripts and styles are files of the console; none is in a page, whatever a page shows.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# A report contains its style and script.  The sandbox makes it a site without a name: it reaches
# no cookie and no page of the console, and it can load nothing.
DOCUMENT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
ANSWER_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: with it a browser would send forms without their Origin.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
SAFE_METHODS = ("GET", "HEAD")


class RequestChecks:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, any_host: bool = False) -> None:
        self._app = app
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = refusal_of(scope["method"], Headers(scope=scope), any_host=self._any_host)
        answer = PlainTextResponse(refusal, 403) if refusal else self._app
        await answer(scope, receive, send_with_headers)


def refusal_of(method: str, headers: Headers, *, any_host: bool) -> str:
    """Why a request is refused; empty when it is not."""
    host = headers.get("host", "")
    if not any_host and host_name(host) not in LOOPBACK_NAMES:
        return f"host {host[:80]!r} is none of this console: use 127.0.0.1 or localhost\n"
    if method in SAFE_METHODS:
        return ""
    origin = headers.get("origin", "")
    # TLS may end before the console, which then sees plain HTTP.
    if not host or origin not in (f"http://{host}", f"https://{host}"):
        return f"origin {origin[:80]!r} is not this console: nothing was changed\n"
    return ""


def host_name(host: str) -> str:
    """Without its port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()
