"""Where commands have the user from that signs their calls."""

import json
from pathlib import Path

import pytest

from popmq.cli.commands import run as main
from popmq.cli.terminal.contexts import connection_of, contexts_path, read_contexts

ENVIRONMENT = ("POPMQ_ENDPOINT", "POPMQ_ACCESS_KEY", "POPMQ_SECRET", "POPMQ_ADMIN_ENDPOINT")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def add(tmp_path: Path, *arguments: str) -> int:
    secret = tmp_path / "admin.json"
    secret.write_text(json.dumps({"access_key": "admin", "secret": "of the file"}))
    return main(["context", "add", "a", "--endpoint", "h:1", "--access-key", "admin", *arguments])


def test_a_context_has_a_user_whose_secret_comes_from_a_file_and_is_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(tmp_path, "--secret-file", str(tmp_path / "admin.json")) == 0
    connection = connection_of(None, None)
    assert (connection.access_key, connection.secret) == ("admin", "of the file")
    assert Path(contexts_path()).stat().st_mode & 0o777 == 0o600
    assert main(["context", "list", "-o", "json"]) == 0
    assert "of the file" not in capsys.readouterr().out
    assert "of the file" not in repr(read_contexts())


def test_the_user_of_a_context_is_not_used_at_another_endpoint(tmp_path: Path) -> None:
    assert add(tmp_path, "--secret-file", str(tmp_path / "admin.json")) == 0
    assert connection_of("other:2", None).access_key == ""


def test_the_environment_wins_over_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert add(tmp_path, "--secret-file", str(tmp_path / "admin.json")) == 0
    monkeypatch.setenv("POPMQ_ACCESS_KEY", "ann")
    monkeypatch.setenv("POPMQ_SECRET", "of the environment")
    connection = connection_of(None, None)
    assert (connection.access_key, connection.secret) == ("ann", "of the environment")


def test_an_access_key_needs_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(tmp_path) == 1
    assert "--secret-file" in capsys.readouterr().err


def test_a_grant_needs_a_resource_and_one_effect(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--allow", "pub"], "name a resource"),
        (["--topic", "t"], "--allow and --deny"),
        (["--topic", "t", "--allow", "pub", "--deny", "sub"], "--allow and --deny"),
        (["--topic", "t", "--allow", "fly"], "is no action"),
        (["--role", "viewer"], "--prefix"),
        (["--role", "viewer", "--prefix", "x", "--topic", "t"], "--role"),
    ):
        assert main(["user", "grant", "ann", *arguments]) == 2
        assert text in capsys.readouterr().err
