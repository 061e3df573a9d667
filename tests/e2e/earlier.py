"""The product as it was at an earlier commit, to run beside today's (mixed versions).

The tree comes out of this repository's own history, so the tests need a clone that has it.
PYTHONPATH puts it in front of the editable installation.
"""

import subprocess
from pathlib import Path

from e2e.processes import Role

REPOSITORY = Path(__file__).parents[2]
# The last commit before replicas computed equal state hashes and requests named incarnations.
BEFORE_INCARNATIONS = "f6860e9"
ROOTS = ("common", "broker", "proxy", "controller", "operator", "cli", "testing")


def earlier_tree(commit: str, folder: Path) -> Path:
    """Extract the product's folders at `commit` into `folder`; return `folder`."""
    archive = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", "--format=tar", commit, *ROOTS],
        capture_output=True,
        check=False,
    )
    assert archive.returncode == 0, (
        f"commit {commit} is needed from the history of this clone: {archive.stderr.decode()}"
    )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def run_earlier(tree: Path, *roles: Role) -> None:
    """From their next start on, these roles run the product of `tree`."""
    for role in roles:
        role.settings["PYTHONPATH"] = python_path(tree)


def python_path(tree: Path) -> str:
    return ":".join(str(tree / root) for root in ROOTS)


def run_current(*roles: Role) -> None:
    """From their next start on, these roles run today's product."""
    for role in roles:
        role.settings.pop("PYTHONPATH", None)
