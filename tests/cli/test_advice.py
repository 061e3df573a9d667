"""Every `popmq ...` that one of our messages advises is run, and popmq accepts it."""

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import click
import pytest
from test_names import docstrings, product_files

from popmq.cli.__main__ import main
from popmq.cli.commands import COMMANDS, RUNNING, Status, parse
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker
from popmq.testing.running_broker import RunningBroker

ROOT = Path(__file__).resolve().parents[2]
_ADVICE = re.compile(r"`popmq ([^`]+)`|\(popmq ([^()]+)\)")
# What stands in the place of a value, by the expression that the message shows.
VALUES = {
    "name": "fresh",
    "old.name": "billing",
    "group": "billing",
    "group.name": "billing",
    "topic": "orders",
    "name!r": "'customer-7'",
    "kind": "topic",
    "new.type.name.lower()": "fifo",
    "self._folder": "DATA",
    "self._folder.rpartition('/')[0]": "DATA",
}
LOCAL = ("completion", "config", "context", "doctor")
OF_USERS = ("user", "auth")  # refused where there are no users
# Those that go on until they are ended, or start others that do.
ENDLESS = ("report", "bench", "top", *(n for n, e in COMMANDS.items() if e.section == RUNNING))


def texts(path: Path) -> Iterator[str]:
    """Strings of a module that are no docstrings; of f-strings with `{expression}`s."""
    if path.suffix == ".toml":
        yield from toml_texts(tomllib.loads(path.read_text(encoding="utf-8")))
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(constant) for constant, _ in docstrings(tree)}
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(shown, node.values))
        elif isinstance(node, ast.Constant) and id(node) not in (skipped | parts):
            yield str(node.value)


def toml_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from toml_texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from toml_texts(inner)


def shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return "{" + ast.unparse(part.value) + ("!r" if part.conversion == ord("r") else "") + "}"


@cache
def advices() -> list[str]:
    files = [*product_files(), *ROOT.glob("*/popmq/**/*.toml")]
    commands = {
        (match[1] or match[2]).strip()
        for path in files
        if "popmq " in path.read_text(encoding="utf-8")
        for text in texts(path)
        for match in _ADVICE.finditer(text)
    }
    return sorted(commands)


def filled(advice: str) -> list[str]:
    """As somebody would type it who was told so."""
    text = re.sub(r"\{([^{}]*)\}", lambda place: VALUES[place[1]], advice)
    return shlex.split(text)


def test_there_is_advice() -> None:
    assert len(advices()) > 30
    assert "topic create {name}" in advices()


@pytest.mark.parametrize("advice", advices())
def test_each_advice_names_a_command_and_flags_that_exist(
    advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, flags = [], []
    for word in filled(advice):
        if word.startswith("--"):
            flags.append(word)
        elif not flags and word.islower():
            words.append(word)
    assert main([*words, "--help"]) == 0, capsys.readouterr().err
    help_text = capsys.readouterr().out
    assert [flag for flag in flags if flag not in help_text] == []


def is_complete(advice: str) -> bool:
    """Not just the name of a command: one that can be typed so, and that ends."""
    words = filled(advice)
    if words[0] in (*ENDLESS, *OF_USERS, "COMMAND") or "..." in advice:
        return False
    if "{" in advice:
        return True  # whatever it says then
    try:
        parse(words)
    except click.UsageError:
        return False
    return True


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The data directory of a stopped broker."""
    settings = replace(SMALL, broker=replace(SMALL.broker, data=str(tmp_path / "data")))
    CoreBroker(disk=ResidentDisk(), settings=settings).stop()
    return tmp_path / "data"


@pytest.mark.more
@pytest.mark.parametrize("advice", [advice for advice in advices() if is_complete(advice)])
def test_each_advice_that_can_be_typed_is_accepted(
    advice: str, popmq_broker: RunningBroker, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(store) if word == "DATA" else word for word in filled(advice)]
    creates = arguments[1:2] == ["create"]
    if not (creates and "orders" in arguments):
        popmq_broker.create_topic("orders")
    if not (creates and "billing" in arguments):
        popmq_broker.create_group("billing")
    where = [] if arguments[0] in LOCAL else ["--endpoint", popmq_broker.endpoint]
    if arguments[1:2] == ["delete"]:
        where.append("--yes")  # there is no terminal here
    status = main([*arguments, *where])
    # Here no message group is parked, which is for `group resume` to find out.
    good = (Status.DONE, Status.NOT_FOUND) if arguments[1:2] == ["resume"] else (Status.DONE,)
    assert status in good, capsys.readouterr().err
