"""`python -m tools.errors_page` (make errors): write docs/reference/errors.md.

The page is made from the enum `Code` and from what error_meanings.toml says about each member.
"""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from popmq.common import errors
from popmq.common.errors import Code

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
MEANINGS = Path(errors.__file__).with_name("error_meanings.toml")

_HEAD = """\
# Errors

Every reply has one of these codes. Official clients raise an error that contains number and text;
`popmq` prints both and exits with 1. The text of a refusal names the value, the limit and the
setting. Codes from 90000 on are between popmq's own processes. `make errors` writes this page from
`common/error_meanings.toml`. Clients of [Remoting](../concepts/remoting.md) get the nearest code of
RocketMQ 4 and the same text. Below each code is one text that popmq gives with it.
"""
# The first code of each section.
_SECTIONS = {
    Code.OK: "Answers",
    Code.BAD_REQUEST: "The request cannot be served as it is",
    Code.INTERNAL_ERROR: "popmq cannot serve the request",
    Code.NOT_MASTER: "Between popmq's own processes",
}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means to a client, what to do, and a text that popmq prints with it."""

    meaning: str
    remedy: str
    example: str


def meanings() -> dict[str, Meaning]:
    rows = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))
    return {name: Meaning(**row) for name, row in rows.items()}


def page() -> str:
    known = meanings()
    parts = [_HEAD]
    for code in Code:
        if code in _SECTIONS:
            parts.append(f"## {_SECTIONS[code]}\n")
        parts.append(_entry(code, known[code.name]))
    return "\n".join(parts)


def _entry(code: Code, row: Meaning) -> str:
    return f"### {code} {code.name}\n\n{row.meaning} {row.remedy}\n\n```text\n{row.example}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.relative_to(ROOT)}\n")
