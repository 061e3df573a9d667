"""Errors that no command expects, perhaps after it had its effect."""

import io
import sys

import pytest

from popmq.cli.__main__ import main
from popmq.testing.running_broker import RunningBroker


def close_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library does that closes the stream behind the command's back."""
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)


def test_one_line_says_what_failed_and_that_there_may_be_an_effect(
    popmq_broker: RunningBroker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close_output(monkeypatch)
    assert main(["send", "orders", "x", "--endpoint", popmq_broker.endpoint]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error: ValueError: I/O operation on closed file" in line
    assert "may have an effect" in line


def test_the_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    close_output(monkeypatch)
    monkeypatch.setenv("POPMQ_TRACEBACK", "1")
    with pytest.raises(ValueError, match="closed file"):
        main(["completion", "bash"])


def test_a_latin_1_terminal_shows_what_it_can(
    popmq_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    popmq_broker.send("orders", "na\u00efve \u4ef7".encode())
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    arguments = ["recv", "orders", "--group", "g", "--wait", "1s"]
    assert main([*arguments, "--endpoint", popmq_broker.endpoint]) == 0
    assert written.getvalue().startswith(b"na\xefve \\u4ef7")
