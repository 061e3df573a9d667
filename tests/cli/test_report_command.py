"""`popmq report` where the packages that it needs are not installed."""

import sys

import pytest

from popmq.cli.__main__ import main


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark"])
@pytest.mark.parametrize("arguments", [("lag",), ("history", "--history", "x")])
def test_what_to_install_is_said(
    missing: str,
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith("popmq.reports")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["report", *arguments]) == 1
    assert "pip install 'popmq[reports]'" in capsys.readouterr().err


def test_a_report_names_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nothing"]) == 2
    assert "There are delay, history, lag, revive." in capsys.readouterr().err
