"""docs/reference/remoting.md has a row for each request code, and no other."""

import re
from pathlib import Path

from popmq.proxy.remoting.request_codes import RequestCode

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "remoting.md"


def test_the_page_lists_the_request_codes_that_are_served_or_sent_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    listed = [int(code) for row in rows for code in row.split(",")]
    assert sorted(listed) == sorted(RequestCode)
