"""Text of others for terminals and logs: no character of it moves a cursor or changes a colour.

Control characters, C1 included, are escaped, and so are line separators and those that turn the
direction of what follows.
"""

import json
import re

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_UNSAFE_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# JSON escapes the others itself.
_UNSAFE_IN_JSON = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """On one line."""
    return text if text.isprintable() else _UNSAFE.sub(_as_python, text)


def escaped_lines(text: str) -> str:
    """The same with its line feeds."""
    return text if text.isprintable() else _UNSAFE_IN_LINES.sub(_as_python, text)


def json_text(value: object, *, indent: int | None = None) -> str:
    """JSON that a terminal may show; what JSON does not know becomes text."""
    text = json.dumps(value, default=str, ensure_ascii=False, indent=indent)
    return _UNSAFE_IN_JSON.sub(_as_json, text)


def _as_python(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def _as_json(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
