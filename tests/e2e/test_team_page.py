"""Pages about users, run as they stand; only the address is that of the test's cluster."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.processes import Role, role_environment

pytestmark = pytest.mark.more

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADDRESS = "127.0.0.1:8081"


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```([a-z ]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_a_team_gets_its_namespace_and_two_users(tmp_path: Path) -> None:
    printed, refused = run_page("team.md", tmp_path)
    assert "first order" in printed
    assert "yes: allow pub on topic:shop%orders" in printed
    assert refused == 2
    assert (tmp_path / "up" / "lead.json").stat().st_mode & 0o077 == 0


def test_the_start_of_the_page_on_users_makes_a_user_that_may_send(tmp_path: Path) -> None:
    printed, refused = run_page("concepts/users.md", tmp_path)
    assert '"access_key": "ann"' in printed
    assert "yes: allow pub,sub on topic:orders" in printed
    assert refused == 0


def run_page(page: str, folder: Path) -> tuple[str, int]:
    """What its commands print, and how many of them are refused as the page says."""
    (start,) = [text for language, text in blocks(page) if language == "sh"]
    arguments = start.split()[1:]
    assert arguments == ["up", "--auth", "--data", "./data"]
    with Role(
        "up", [*arguments, "--port", "0", "--http-port", "0"], folder=folder, settings={}
    ) as role:
        environment = role_environment({"XDG_CONFIG_HOME": str(folder / "home")})
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        printed, refused = "", 0
        for language, text in blocks(page):
            if not language.startswith("bash"):
                continue
            done = subprocess.run(
                ["bash", "-euc", text.replace(ADDRESS, role.ready.endpoint)],
                cwd=role.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if language == "bash refused":
                assert (done.returncode, "FORBIDDEN (40300)" in done.stderr) == (1, True), text
                refused += 1
            else:
                assert done.returncode == 0, text + done.stderr
            printed += done.stdout
        return printed, refused
