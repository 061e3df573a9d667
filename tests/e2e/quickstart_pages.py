"""Programs on pages that a reader is asked to save as files."""

import re

_FILE = re.compile(
    r"[Ss]ave this as\s+`([\w.]+)`[^:]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def named_blocks(text: str) -> list[tuple[str, str]]:
    """Name and content of each."""
    return _FILE.findall(text)
