"""A Remoting request as its handler sees it: the header's fields with their types, and answers."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.topics import is_broker_name
from popmq.proxy.auth.identity import AccessRefused
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import Command
from popmq.proxy.remoting.result_codes import ResultCode, result_code
from popmq.proxy.rpc.rpc import Rpc

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?[0-9]{1,20}")


class Request(NamedTuple):
    rpc: Rpc
    command: Command
    connection: RemotingConnection

    def text(self, name: str, default: str | None = None) -> str:
        """Raises BAD_REQUEST if it is missing and has no default."""
        value = self.command.fields.get(name, default)
        if value is None:
            raise Refused(Code.BAD_REQUEST, f"request {self.command.code} lacks the field {name!r}")
        return value

    def number(self, name: str, default: int | None = None, *, bits: int = 64) -> int:
        """Raises BAD_REQUEST for no number, and for one that does not fit so many bits."""
        text = self.text(name, None if default is None else str(default))
        is_number = _NUMBER.fullmatch(text) is not None
        if not is_number or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
            raise Refused(
                Code.BAD_REQUEST, f"field {name!r} is {text[:40]!r}, not a number of {bits} bits"
            )
        return int(text)

    def flag(self, name: str) -> bool:
        return self.text(name, "").lower() == "true"

    def json_body(self) -> Mapping[str, object]:
        try:
            content = json.loads(self.command.body)
        except (ValueError, RecursionError) as error:
            raise Refused(Code.BAD_REQUEST, f"the body is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise Refused(Code.BAD_REQUEST, "the body is no JSON object")
        return content

    def broker(self, known: Sequence[str], name: str) -> str:
        """The broker group that the client names, or that its port stands for, or the only one.

        Clients before 4.9.5, those in Go, C++ and Node name none. A guess between several would
        leave messages of the others unread.
        """
        name = name or self.command.fields.get("bname", "") or self.connection.broker_group
        if not name:
            if len(known) == 1:
                return known[0]
            raise Refused(
                Code.VERSION_UNSUPPORTED,
                f"the request names no broker group and there are {len(known)}: such a client "
                "needs a port for each of them (remoting.group_ports)",
            )
        if not is_broker_name(name):
            raise Refused(Code.BAD_REQUEST, f"{name[:100]!r} is no name of a broker group")
        return name

    def ok(self, fields: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.rpc.reply(self.command.answer(0, fields, body))

    def end(self, code: ResultCode, remark: str, fields: Mapping[str, str] | None = None) -> None:
        """An answer with a code that is no failure of ours, and is not counted as a refusal."""
        self.rpc.reply(self.command.answer(code, fields, remark=remark))


def refuse(command: Command, _data: bytes, error: PopmqError) -> Sequence[bytes]:
    """No client hears that its one-way request was refused, so that is logged.

    What was refused because of who asks is in the audit log already, once a second.
    """
    if command.is_one_way and not isinstance(error, AccessRefused):
        why = {"code": command.code, "why": str(error)}
        logger.info("a one-way request was refused", extra=why)
    code = result_code(error.code)
    if error.code is Code.VERSION_UNSUPPORTED:
        code = ResultCode.VERSION_NOT_SUPPORTED
    return (command.answer(code, remark=str(error)),)


def json_bytes(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
