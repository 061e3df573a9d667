"""The wheel alone, in an environment of its own: commands, messages, and the pytest plug-in."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", pytest.param("3.12", marks=pytest.mark.long), "3.13", "3.14")
TEST = """
def test_an_order_comes_back(popmq_broker):
    popmq_broker.send("orders", b"one")
    popmq_broker.receive("orders", "workers", invisible="12h")
    popmq_broker.advance("12h")
    (again,) = popmq_broker.receive("orders", "workers")
    assert again.attempt == 2
"""

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


def interpreter(version: str) -> str:
    """A Python of that version: this one, one on PATH, or one of pyenv."""
    name = f"python{version}"
    candidates = [sys.executable, *filter(None, [shutil.which(name)])]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/{name}")))
    check = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for candidate in candidates:
        # A version manager may put a command on PATH that only prints an error.
        if run_program([candidate, "-c", check]).returncode == 0:
            return candidate
    pytest.skip(f"no Python {version}: the wheel is not tried with it")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    run_program(command, cwd=ROOT, check=True)
    (made,) = folder.glob("*.whl")
    return made


def environment(folder: Path) -> dict[str, str]:
    """Nothing of this tree, or of its tests, is in it."""
    ours = ("PYTHON", "POPMQ_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "HOME": str(folder), "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip")}


@contextmanager
def running(bin_folder: Path, folder: Path) -> Iterator[str]:
    """The endpoint of `popmq up`, ended by SIGTERM."""
    command: list[str | Path] = [bin_folder / "popmq", "up", "--port", "0", "--http-port", "0"]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: endpoint "), line + (folder / "up.log").read_text()
        yield line.split()[2].rstrip(",")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_alone_serves_sends_receives_and_brings_its_pytest_fixture(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    python = interpreter(version)
    run_program([python, "-m", "venv", tmp_path / "env"], check=True)
    bin_folder = tmp_path / "env" / "bin"

    def run(name: str, *arguments: str | Path) -> str:
        command = [bin_folder / name, *arguments]
        done = run_program(command, cwd=tmp_path, env=environment(tmp_path), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("python", "-m", "pip", "install", "--quiet", wheel, "pytest")
    with running(bin_folder, tmp_path) as endpoint:
        run("popmq", "send", "hello", "one", "--endpoint", endpoint)
        options = ("--group", "readers", "--ack", "--json", "--endpoint", endpoint)
        (line,) = run("popmq", "recv", "hello", *options).splitlines()
        assert json.loads(line)["body"] == "one"
    (tmp_path / "test_orders.py").write_text(TEST)
    strict = ("-W", "error", "--strict-markers", "-p", "no:cacheprovider")
    assert "1 passed" in run("python", "-m", "pytest", "-q", *strict, "test_orders.py")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_with_the_extra_of_reports_makes_a_report(wheel: Path, tmp_path: Path) -> None:
    run_program([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    bin_folder = tmp_path / "env" / "bin"

    def run(name: str, *arguments: str | Path) -> str:
        command = [bin_folder / name, *arguments]
        done = run_program(command, cwd=tmp_path, env=environment(tmp_path), timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("python", "-m", "pip", "install", "--quiet", f"{wheel}[reports,reports-java]")
    with running(bin_folder, tmp_path) as endpoint:
        run("popmq", "send", "hello", "one", "--endpoint", endpoint)
        run("popmq", "recv", "hello", "--group", "readers", "--endpoint", endpoint)
        assert "readers" in run("popmq", "report", "lag", "--endpoint", endpoint)


@pytest.mark.parametrize(
    "arguments",
    [("uvx", "--from"), pytest.param(("pipx", "run", "--spec"), marks=pytest.mark.long)],
    ids=["uvx", "pipx"],
)
def test_the_wheel_runs_without_an_installation(
    arguments: tuple[str, ...], wheel: Path, tmp_path: Path
) -> None:
    program, *options = arguments
    tools = tmp_path / "tools"
    run_program([sys.executable, "-m", "venv", tools], check=True)
    package = "uv" if program == "uvx" else program
    install: list[str | Path] = [
        tools / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        package,
    ]
    done = run_program(install, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    settings = {"UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    command: list[str | Path] = [tools / "bin" / program, *options, wheel, "popmq", "--version"]
    done = run_program(
        command, cwd=tmp_path, env={**environment(tmp_path), **settings}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "popmq" in done.stdout
