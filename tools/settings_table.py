"""`python -m tools.settings_table` (make settings): write the table of
docs/reference/settings.md.
"""

import re
import sys
from pathlib import Path

from popmq.common.settings.describe import descriptions, format_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
_TABLE = re.compile(r"^\| key \| default \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def table() -> str:
    """The rows for the settings as they are."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, described in descriptions().items():
        default = format_value(key, described.default)
        default = default if default == "empty" else f"`{default}`"
        # The texts link from docs/.
        meaning = described.meaning.replace("](", "](../")
        lines.append(f"| `{key}` | {default} | {described.allowed} | {meaning} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with that table."""
    return _TABLE.sub(lambda _: table(), text, count=1)


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.relative_to(Path.cwd())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
