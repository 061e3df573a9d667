"""What CI repeats and what it never repeats: a planted fault of each sort, in a run of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CORE = [
    line
    for line in (TESTS / "core.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# A test that fails in its first run only: it leaves a file behind.
ONCE = """
import pathlib
def test_planted():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        {failure}
"""


def run_ci(root: Path, file: str, failure: str, count: int = 1) -> tuple[int, str]:
    """The status and output of repeat_failures after a run of `count` planted tests of `file`."""
    failures = root / "failures.jsonl"
    failures.touch()
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "conftest.py").write_text('pytest_plugins = ["failures"]\n')
    for number in range(count):
        test = root / file.replace("N", str(number))
        test.parent.mkdir(parents=True, exist_ok=True)
        test.write_text(ONCE.format(failure=failure))
    env = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    env |= {"CI_FAILURES": str(failures), "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    options = {"cwd": root, "env": env, "capture_output": True, "text": True}
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:popmq", "--import-mode=importlib"]
    subprocess.run([sys.executable, "-m", "pytest", *quiet, "tests"], **options)  # type: ignore[call-overload]
    command = [sys.executable, "-m", "tools.repeat_failures", str(failures)]
    result = subprocess.run(command, **options)  # type: ignore[call-overload]
    return result.returncode, result.stdout


def test_a_test_that_passes_when_it_is_repeated_is_named_as_flaky(tmp_path: Path) -> None:
    status, output = run_ci(tmp_path, "tests/e2e/test_planted.py", "raise TimeoutError('too slow')")
    assert status == 0, output
    assert "flaky: tests/e2e/test_planted.py::test_planted: TimeoutError: too slow" in output


def test_a_test_that_fails_again_is_red(tmp_path: Path) -> None:
    failure = "seen.unlink(); assert 1 == 2"
    status, output = run_ci(tmp_path, "tests/e2e/test_planted.py", failure)
    assert status == 1
    assert "failed again: tests/e2e/test_planted.py::test_planted: assert 1 == 2" in output


@pytest.mark.parametrize(
    ("file", "failure"),
    [
        ("tests/e2e/test_kill_nine.py", "assert ['lost'] == []"),
        ("tests/sim/test_planted.py", "raise TimeoutError('no real clock')"),
        ("tests/e2e/test_planted.py", "import os; os._exit(3)"),
    ],
    ids=["ledger", "simulator", "crash"],
)
def test_a_fault_that_a_repeated_run_may_miss_is_red(
    tmp_path: Path, file: str, failure: str
) -> None:
    status, output = run_ci(tmp_path, file, failure)
    assert status == 1
    assert "ci: red" in output


def test_a_clock_that_ran_out_in_a_test_with_a_ledger_is_repeated(tmp_path: Path) -> None:
    status, output = run_ci(tmp_path, "tests/e2e/test_kill_nine.py", "raise TimeoutError('slow')")
    assert status == 0, output


def test_more_than_five_failures_are_red(tmp_path: Path) -> None:
    failure = "raise TimeoutError('too slow')"
    status, output = run_ci(tmp_path, "tests/e2e/test_N.py", failure, count=6)
    assert status == 1
    assert "6 tests failed, and at most 5 are repeated" in output


def test_each_module_with_a_ledger_exists() -> None:
    import failures

    assert [name for name in failures.LEDGERS if not (TESTS.parent / name).exists()] == []


def test_the_core_names_each_test_once() -> None:
    assert len(CORE) == len(set(CORE))
