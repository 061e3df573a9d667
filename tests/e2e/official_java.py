"""Builds and starts the official Java client (java/Client.java), which speaks TLS by default."""

import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from e2e.official import Launch, RoleName
from programs import run_program

JAVA = Path(__file__).parent / "java"
BUILD = Path(__file__).resolve().parents[2] / "build"
SETUP_S = 500
# Four of them share two cores with the brokers: quick to start counts, not the highest speed.
_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx384m", "-Dfile.encoding=UTF-8")


def launch_java(speaks: Literal["tls", "plain"]) -> Launch:
    """Roles of the client, built once for what the sources and pom.xml say."""
    return partial(_command, java_program("Client"), speaks)


def java_program(name: str) -> list[str]:
    """The command that runs one of the programs in java/, which all speak in plain text or know
    better by their arguments."""
    return java_command(_built(JAVA, "official-java"), name)


def remoting_program(version: str, name: str = "Remoting") -> list[str]:
    """The command that runs a program in java_remoting/ with that version of the Java client."""
    folder = _built(JAVA.parent / "java_remoting", f"remoting-{version}", f"-Dclient={version}")
    return java_command(folder, name)


def java_command(folder: Path, name: str) -> list[str]:
    return [_find_tool("java"), *_JVM, "-cp", f"{folder / 'classes'}:{folder / 'lib'}/*", name]


def _command(program: list[str], speaks: str, role: RoleName) -> list[str]:
    return [*program, role, speaks]


def _built(java: Path, name: str, *options: str) -> Path:
    sources = sorted(java.glob("*.java"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (java / "pom.xml", *sources)))
    folder = BUILD / f"{name}-{digest.hexdigest()[:12]}"
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    copy = ("dependency:copy-dependencies", f"-DoutputDirectory={folder}/lib")
    _run(("mvn", "-B", "-q", *options, *copy), java, "maven")
    javac = ("javac", "-encoding", "UTF-8", "-d", f"{folder}/classes", "-cp", f"{folder}/lib/*")
    _run((*javac, *map(str, sources)), java, "default-jdk-headless")
    (folder / "done").touch()
    return folder


def _run(command: tuple[str, ...], java: Path, package: str) -> None:
    tool = _find_tool(command[0], package)
    done = run_program([tool, *command[1:]], cwd=java, timeout=SETUP_S)
    if done.returncode != 0:
        pytest.fail(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def _find_tool(name: str, package: str = "default-jdk-headless") -> str:
    result = shutil.which(name)
    if result is None:
        pytest.skip(f"no {name} on PATH; Debian, Ubuntu: sudo apt-get install {package}")
    return result
