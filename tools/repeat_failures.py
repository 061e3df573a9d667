"""Runs each failed test of CI once more, alone, and says whether the run counts as green.

python -m tools.repeat_failures FILE: FILE is what tests/failures.py wrote. A test that passes now
was flaky: a line names it, and it is mended or moved out of the core before the next landing.
Exit status 1: a failure is exact, more than five tests failed, or a test failed again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 5


def main(path: Path) -> int:
    failures = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    errors = {failure["test"]: failure["error"] for failure in reversed(failures)}  # the first
    exact = sorted({failure["test"] for failure in failures if failure["exact"]})
    if not failures:
        print("ci: red: a step failed and named no test")
        return 1
    if exact:
        print("ci: red: a repeated run would prove nothing about these:")
        print("\n".join(f"  {test}: {errors[test]}" for test in exact))
        return 1
    if len(errors) > MOST:
        print(f"ci: red: {len(errors)} tests failed, and at most {MOST} are repeated")
        return 1
    again = [test for test in sorted(errors) if not passes(test)]
    for test in sorted(errors):
        verdict = "failed again" if test in again else "flaky"
        print(f"{verdict}: {test}: {errors[test]}")
    return 1 if again else 0


def passes(test: str) -> bool:
    env = {name: value for name, value in os.environ.items() if name != "CI_FAILURES"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    return subprocess.run(command, env=env).returncode == 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
