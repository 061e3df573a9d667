"""What a terminal shows while a report is made."""

import io

import pytest

pytestmark = pytest.mark.heavy  # rich comes with the reports


def shown(*, terminal: bool) -> str:
    from rich.console import Console

    from popmq.reports.output.terminal import progress

    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with progress(console) as tell:
        tell("asking [::1]:8081 what there is")
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_a_terminal_says_what_is_being_done() -> None:
    assert "asking [::1]:8081 what there is" in shown(terminal=True)


def test_a_pipe_gets_nothing() -> None:
    assert shown(terminal=False) == ""
