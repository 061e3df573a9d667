"""What a page function gets and what it returns; the server does the rest (web/server.py)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

import htpy

from popmq.common.errors import Code, PopmqError, Refused
from popmq.console.client import ConsoleClient
from popmq.console.prometheus import Prometheus
from popmq.console.recent import RecentAnswers
from popmq.console.redrives import Redrives
from popmq.console.reports import Reports


@dataclass(frozen=True, slots=True)
class Console:
    """What all pages of a user share."""

    client: ConsoleClient
    redrives: Redrives
    user: str = ""  # that is logged in
    prometheus: Prometheus | None = None
    reports: Reports | None = None
    # As its browsers got them.  What they are made of is kept longer where it takes long.
    pages: RecentAnswers = field(default_factory=lambda: RecentAnswers(max_good_for_s=1.0))


@dataclass(frozen=True, slots=True)
class Request:
    """`name` is the rest of the path, empty on lists; `form` has what a POST sent.

    `shared`: the answer goes to every browser that asks at that moment, so it holds nothing that
    is for one of them.
    """

    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shared: bool = False

    def sent(self, field_name: str) -> str:
        """The field of the form; empty when it was not sent."""
        values = self.form.get(field_name, ())
        return values[0].strip() if values else ""

    def number(self, name: str) -> int:
        """A number of the URL; 0 for what is none."""
        text = self.query.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


@dataclass(frozen=True, slots=True)
class Page:
    """`live`: the browser asks for it again and again, and shows what changed."""

    title: str
    content: htpy.Node
    live: bool = True
    status: int = 200


@dataclass(frozen=True, slots=True)
class Document:
    """HTML that another program made.  Browsers show it as a site of its own, which reaches nothing
    of the console."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Redirect:
    """After a change: to the page that shows it."""

    to: str


def to(*parts: str, **query: object) -> str:
    """A path of the console; whatever the names are, it stays one."""
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    given = {name: value for name, value in query.items() if value not in ("", 0)}
    return f"{path}?{urlencode(given)}" if given else path


def to_message(message_id: str) -> str:
    """A browser takes . and .. for folders."""
    if message_id in ("", ".", ".."):
        return to("messages", id=message_id)
    return to("messages", message_id)


def bad_input(text: str) -> PopmqError:
    return Refused(Code.BAD_REQUEST, text)


def parse_number(request: Request, name: str, *, least: int, most: int, label: str) -> int:
    """A number of the form.  Raises BAD_REQUEST."""
    text = request.sent(name)
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else -1
    if not least <= number <= most:
        raise bad_input(f"{label} is {text[:40]!r}: write a number from {least} to {most}")
    return number


def now_ms() -> int:
    return time.time_ns() // 1_000_000
