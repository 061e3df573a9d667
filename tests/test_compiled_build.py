"""The optional build with the hot modules compiled: a wheel that passes the proxy's tests."""

import os
import sys
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[1]
BUILD_S, TESTS_S = 600, 900
IS_COMPILED = (
    "import popmq.proxy.messaging.send as one, popmq.proxy.transport.lean.connection as two;"
    "assert one.__file__.endswith('.so') and two.__file__.endswith('.so'), two.__file__"
)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(BUILD_S + TESTS_S)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the wheel goes before the sources."""
    folder = tmp_path_factory.mktemp("compiled")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    run([*pip, str(ROOT)], {**os.environ, "POPMQ_COMPILED": "1"}, BUILD_S)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run(command: list[str], environment: dict[str, str], within_s: int) -> str:
    done = run_program(command, cwd=ROOT, env=environment, timeout=within_s)
    assert done.returncode == 0, f"{done.stdout[-5_000:]}{done.stderr[-2_000:]}"
    return done.stdout


def test_the_compiled_modules_pass_the_tests_of_the_proxy(compiled: dict[str, str]) -> None:
    run([sys.executable, "-c", IS_COMPILED], compiled, 60)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not heavy and not long and not alone"]
    places = ["tests/proxy", "tests/common", "tests/e2e/test_transport_flag.py", "tests/testing"]
    print(run([sys.executable, "-m", "pytest", *options, *places], compiled, TESTS_S)[-300:])


def test_they_are_worth_it(compiled: dict[str, str]) -> None:
    """No figure is asserted: both are shown, for docs/benchmarks.md."""
    for environment in (compiled, {**os.environ}):
        print(environment.get("PYTHONPATH", "pure Python"))
        for bench in (["bench.lean_cost", "--calls", "60000"], ["bench.proxy_cost"]):
            print(run([sys.executable, "-m", *bench], environment, 300))
