"""Builds programs in Go, each once for what its module says."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
GO_PLACES = ("/usr/local/go/bin", "/usr/lib/go/bin", "/snap/bin")


def go() -> str:
    path = os.pathsep.join((os.environ.get("PATH", ""), *GO_PLACES))
    result = shutil.which("go", path=path)
    if result is None:
        pytest.skip(
            "this is built with Go, and there is none: sudo apt-get install golang-go, or "
            "unpack a release of https://go.dev/dl/ into /usr/local"
        )
    return result


def go_program(module: Path, package: str, name: str) -> Path:
    """The program of that package; a build that fails is a failure."""
    compiler = go()
    sources = (module / "go.sum", *sorted(module.glob("*.go")))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    binary = ROOT / "build" / f"{name}-{version}"
    if not binary.exists():
        binary.parent.mkdir(exist_ok=True)
        partial = binary.with_suffix(f".{os.getpid()}")
        command = [compiler, "build", "-o", str(partial), package]
        done = run_program(command, cwd=module, timeout=500)
        assert done.returncode == 0, done.stderr
        partial.replace(binary)
    return binary


def remoting_go_program() -> list[str]:
    """The command that runs go_remoting/main.go."""
    return [str(go_program(Path(__file__).parent / "go_remoting", ".", "remoting-go"))]
