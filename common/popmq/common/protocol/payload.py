"""Putting frames' payloads together and taking them apart: texts with their length in front.

A value that no field can hold, or a payload that ends early, is the sender's mistake.
"""

import struct
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from popmq.common.errors import Code, PopmqError, Refused

U16 = struct.Struct(">H")
_ERROR = struct.Struct(">I")
ERROR_TEXT_LIMIT = 1_000  # bytes; a refusal may quote what was sent, however long
_CUT = " ..."
_T = TypeVar("_T")


def checked_encode(encode: Callable[[_T], bytes]) -> Callable[[_T], bytes]:
    """A text or number too large for its field is the caller's mistake: BAD_REQUEST."""

    @wraps(encode)
    def checked(request: _T) -> bytes:
        try:
            return encode(request)
        except struct.error as error:
            raise Refused(
                Code.BAD_REQUEST, f"the request has a value that no frame can hold: {error}"
            ) from error

    return checked


def truncated_text(text: str) -> bytes:
    """An error's text, cut to its limit between two characters."""
    data = text.encode()
    if len(data) <= ERROR_TEXT_LIMIT:
        return data
    kept = data[: ERROR_TEXT_LIMIT - len(_CUT)].decode(errors="ignore")
    return (kept + _CUT).encode()


def encode_error(error: PopmqError) -> bytes:
    return _ERROR.pack(error.code) + truncated_text(str(error))


def decode_error(body: bytes) -> PopmqError:
    (code,) = _ERROR.unpack_from(body)
    try:
        known = Code(code)
    except ValueError:
        known = Code.INTERNAL_ERROR
    return Refused(known, body[_ERROR.size :].decode(errors="replace"))


def text(value: str) -> bytes:
    data = value.encode()
    return U16.pack(len(data)) + data


class PayloadReader:
    """Takes a payload apart; a payload that ends early is the sender's mistake."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            values = layout.unpack_from(self.data, self.at)
        except struct.error as error:
            raise Refused(Code.BAD_REQUEST, "the frame's payload ends early") from error
        self.at += layout.size
        return values

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
        value = self.data[self.at : end]
        self.at = end
        return value

    def text(self) -> str:
        start = self.at + U16.size
        end = start + int.from_bytes(self.data[self.at : start], "big")
        if end > len(self.data):
            raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
        self.at = end
        try:
            return self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise Refused(Code.BAD_REQUEST, "the frame's payload has bytes, not text") from error
