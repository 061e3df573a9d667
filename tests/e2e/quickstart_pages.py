"""Programs and commands on pages, as a reader saves and runs them."""

import os
import re
import sys
from pathlib import Path

from e2e.official_go import GO_PLACES
from programs import run_program

RUN_S = 500
ENDPOINT = "127.0.0.1:8081"
_FILE = re.compile(
    r"[Ss]ave this as\s+`([\w.]+)`[^:]*:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def named_blocks(text: str) -> list[tuple[str, str]]:
    """Name and content of each."""
    return _FILE.findall(text)


def run_commands(commands: str, folder: Path, **environment: str) -> str:
    """What they print; the home is the folder, and the caches of package managers stay."""
    home = Path.home()
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], *GO_PLACES))
    caches = {
        "GOPATH": os.environ.get("GOPATH", str(home / "go")),
        "GOCACHE": os.environ.get("GOCACHE", str(home / ".cache" / "go-build")),
        "GOFLAGS": "-modcacherw",
        "MAVEN_OPTS": f"-Duser.home={home}",
        "JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "NPM_CONFIG_CACHE": os.environ.get("NPM_CONFIG_CACHE", str(home / ".npm")),
    }
    done = run_program(
        ["bash", "-euc", commands],
        cwd=folder,
        timeout=RUN_S,
        env={**os.environ, **caches, "HOME": str(folder), "PATH": places, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # maven ends with a reset of colours
