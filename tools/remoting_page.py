"""`python -m tools.remoting_page` (part of make errors): write the tables of request codes of
docs/reference/remoting.md.

They are made from the handlers that a proxy dispatches on, and from RequestCode.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import click

from popmq.cli.commands import root
from popmq.common.clock import SystemClock
from popmq.common.settings.settings import Settings
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.request_codes import Direction, RequestCode
from popmq.proxy.remoting.service import Handler
from tools.command_examples import commands_below

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "remoting.md"
_TABLES = re.compile(r"(?<=^## Requests\n\n).*?(?=^## )", re.MULTILINE | re.DOTALL)
# The longest name first: `popmq broker list` begins with `popmq broker`.
COMMANDS = sorted(
    (
        name
        for name, command in commands_below("popmq", root())
        if not isinstance(command, click.Group) or command.invoke_without_command
    ),
    key=len,
    reverse=True,
)
_COMMAND = re.compile(rf"\b(?:{'|'.join(COMMANDS)})\b(?: --\w+| \w+\.\w+)?")


def handlers() -> Mapping[RequestCode, Handler]:
    return Proxy(Settings(), StaticBrokers({}), SystemClock()).remoting.handlers


def tables(served: Mapping[RequestCode, Handler]) -> str:
    others = [code for code in RequestCode if code not in served]
    sides = {side: [code for code in others if code.direction is side] for side in Direction}
    sent = [code for code in sides[Direction.TO_CLIENT] if code.text != code.direction.value]
    never = [
        code for code in others if code not in sent and code.direction is not Direction.TO_SERVER
    ]
    parts = (
        "All request codes of RocketMQ 5.5.0. `make errors` writes these tables from the handlers"
        " of the proxy.",
        "### Served",
        _table(
            "| request code | name | handler | |",
            (
                f"| {code} | {code.name} | {place_of(handler)} | {code.text} |"
                for code, handler in sorted(served.items())
            ),
        ),
        "### Sent to clients",
        _table("| request code | name | what it says |", map(_row, sent)),
        "### Refused",
        "These are answered 3 (REQUEST_CODE_NOT_SUPPORTED) with that text, so the client gets an"
        " exception. So are codes that are on none of these tables.",
        _table(
            "| request code | name | the text of the refusal |",
            map(_row, sides[Direction.TO_SERVER]),
        ),
        "### Never asked",
        "Clients and tools do not send these to a server. A proxy answers them 3, too.",
        _table("| request code | name | why |", map(_row, never)),
    )
    return "\n\n".join(parts) + "\n\n"


def place_of(handler: Handler) -> str:
    """`proxy/remoting/routes.py` `TopicRoutes.route`"""
    function = handler.func if isinstance(handler, partial) else handler
    path = function.__module__.removeprefix("popmq.").replace(".", "/")
    return f"`{path}.py` `{function.__qualname__}`"


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _row(code: RequestCode) -> str:
    text = _COMMAND.sub(r"`\g<0>`", code.text)
    return f"| {code} | {code.name} | {text} |"


def page(text: str) -> str:
    """The page with those tables."""
    written = tables(handlers())
    return _TABLES.sub(lambda _: written, text, count=1)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.relative_to(ROOT)}\n")
