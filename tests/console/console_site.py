"""The console over a real port, and an ordinary HTTP client that sees what a browser gets."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPConnection
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlencode

import uvicorn

from popmq.cli.client import Client
from popmq.common.signing import Signer
from popmq.console.client import ConsoleClient
from popmq.console.fetches import Fetches
from popmq.console.page import Console
from popmq.console.prometheus import Prometheus
from popmq.console.redrives import Redrives
from popmq.console.reports import Reports
from popmq.console.sessions import Sessions
from popmq.console.web.command import listen
from popmq.console.web.server import application

T = TypeVar("T")
Fields = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Form:
    action: str
    fields: Fields  # with their first values


class Parsed(HTMLParser):
    """The texts, tags, attributes and forms of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.texts: list[str] = []
        self.forms: list[Form] = []
        self._fields: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag == "form":
            self._fields = []
            self.forms.append(Form(given.get("action", ""), self._fields))
        if tag in ("input", "button") and "name" in given and given.get("type") != "checkbox":
            self._fields.append((given["name"], given.get("value", "")))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def links(self, prefix: str) -> list[str]:
        return [v for _, name, v in self.attributes if name == "href" and v.startswith(prefix)]

    def form(self, **fields: str) -> Form:
        """The one that has these fields with these values."""
        (match,) = [form for form in self.forms if set(fields.items()) <= set(form.fields)]
        return match


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    page: Parsed


def until(look: Callable[[], T], holds: Callable[[T], bool], within_s: float = 20) -> T:
    """Look again and again; returns what holds, and fails with the last that did not."""
    end_s = time.monotonic() + within_s
    while not holds(seen := look()):
        assert time.monotonic() < end_s, f"after {within_s} s: {seen!r}"
        time.sleep(0.05)
    return seen


class Site:
    """Enter it to serve the console of a proxy; leaving stops it."""

    def __init__(
        self,
        endpoint: str,
        *,
        any_host: bool = False,
        login: bool = False,
        prometheus: str = "",
        reports: str = "",
    ) -> None:
        fetches = Fetches()

        def open_console(signer: Signer) -> Console:
            client = ConsoleClient(Client(endpoint, quick_timeout_ms=2_500, signer=signer))
            return Console(
                client,
                Redrives(client),
                signer.access_key,
                Prometheus(prometheus, fetches) if prometheus else None,
                Reports(reports, fetches) if reports else None,
            )

        self.sessions = Sessions(open_console, always=login)
        self.client = self.sessions.anonymous.client
        self._listening = listen("127.0.0.1:0")
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        config = uvicorn.Config(
            application(self.sessions, any_host=any_host),
            ws="none",
            log_config=None,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="console")

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listening]))

    def __enter__(self) -> Self:
        self._thread.start()
        socket.create_connection(self._listening.getsockname(), timeout=10).close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._listening.close()
        self.sessions.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self._request("GET", path, "", headers)

    def post(self, path: str, fields: Fields = (), **headers: str) -> Answer:
        """As a browser does from a page of the console; where it leads to is followed."""
        answer = self.send(path, fields, **headers)
        cookie = {"cookie": headers["cookie"]} if "cookie" in headers else {}
        return self.get(answer.headers["location"], **cookie) if answer.status == 303 else answer

    def send(self, path: str, fields: Fields = (), **headers: str) -> Answer:
        """A POST, and its own answer."""
        given = {"origin": f"http://{self.host}", **headers}
        given["content-type"] = "application/x-www-form-urlencoded"
        return self._request("POST", path, urlencode(fields), given)

    def submit(self, form: Form, **changed: str) -> Answer:
        """Send a form with what a person would have typed."""
        kept = [(name, value) for name, value in form.fields if name not in changed]
        return self.post(form.action, [*kept, *changed.items()])

    def _request(self, method: str, path: str, body: str, headers: Mapping[str, str]) -> Answer:
        connection = HTTPConnection(self.host, timeout=30)
        try:
            connection.request(method, path, body.encode(), dict(headers))
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, named, Parsed(text))
