"""docs/reference/remoting.md has every request code of RocketMQ 5.5.0, as the proxy answers it."""

import re

from popmq.proxy.remoting.request_codes import RequestCode
from tools import remoting_page


def test_the_tables_of_request_codes_are_what_make_errors_writes() -> None:
    text = remoting_page.PAGE.read_text(encoding="utf-8")
    assert remoting_page.page(text) == text, (
        "run `make errors` and commit docs/reference/remoting.md"
    )


def test_every_request_code_is_on_the_page_once() -> None:
    written = remoting_page.tables(remoting_page.handlers())
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", written, re.MULTILINE)]
    assert sorted(listed) == sorted(RequestCode)


def test_a_code_without_a_handler_is_no_longer_among_those_that_are_served() -> None:
    fewer = dict(remoting_page.handlers())
    del fewer[RequestCode.PULL_MESSAGE]
    served, _, others = remoting_page.tables(fewer).partition("### Sent to clients")
    assert "| 11 | PULL_MESSAGE |" in others
    assert "| 11 | PULL_MESSAGE |" not in served


def test_every_command_that_a_refusal_names_exists() -> None:
    """The page shows the names of commands as code, and those alone."""
    written = remoting_page.tables(remoting_page.handlers())
    assert re.findall(r"\b(?:use|or|see) popmq .*", written) == []
    assert written.count("`popmq ") > 50
