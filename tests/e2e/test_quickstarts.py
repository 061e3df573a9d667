"""The pages of docs/quickstarts: each program and command runs as it stands there.

The tests change nothing in them but the port, as several popmq run on one machine.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.official_go import GO_PLACES
from e2e.processes import Role
from e2e.quickstart_pages import ENDPOINT, named_blocks, run_commands

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "quickstarts"
# A command that asks a cluster which only the page has.
ELSEWHERE = re.compile(r"--context prod|^popmq lag|--context NAME")
CONTEXT = "popmq context add prod --endpoint tls://mq.example.org:8081 --admin-endpoint"
_COMMANDS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = {
    "python": "python",
    "java": "mvn",
    "go": "go",
    "node": "npm",
    "remoting-java": "mvn",
}


def written(page: str, folder: Path, endpoint: str) -> str:
    """The commands of the page, after its files were written to the folder."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert ENDPOINT in text
    files = named_blocks(text)
    assert files, page
    for name, content in files:
        (folder / name).write_text(content.replace(ENDPOINT, endpoint), encoding="utf-8")
    (commands,) = _COMMANDS.findall(text)
    return str(commands)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a popmq as the pages start it."""
    role = Role(
        "up",
        ["up", "--port", "0", "--http-port", "0"],
        folder=tmp_path_factory.mktemp("quickstarts"),
        settings={},
    )
    with role:
        yield role.ready.endpoint


def check_page(page: str, folder: Path, endpoint: str) -> None:
    path = os.pathsep.join((os.environ["PATH"], *GO_PLACES, str(Path(sys.executable).parent)))
    if shutil.which(NEEDS[page], path=path) is None:
        pytest.skip(f"no {NEEDS[page]} on PATH: the page on {page} is not run")
    check_that_it_returned(run_commands(written(page, folder, endpoint), folder))


def check_that_it_returned(output: str) -> None:
    """The message that was sent, and no other, was received."""
    sent = re.findall(r"^sent (\S+)$", output, re.MULTILINE)
    received = re.findall(r"^received (\S+) .*first message'?$", output, re.MULTILINE)
    assert len(sent) == 1, output
    assert received == sent, output


def test_every_quickstart_is_on_the_page_of_quickstarts() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == set(NEEDS) == set(re.findall(r"\(([\w-]+)\.md\)", text))


def test_the_quickstart_in_python_runs_as_it_stands(tmp_path: Path, endpoint: str) -> None:
    check_page("python", tmp_path, endpoint)


def test_the_first_program_of_the_readme_runs_as_it_stands_and_ends(
    tmp_path: Path, endpoint: str
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = next(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))[1]
    assert ENDPOINT in program
    assert "os._exit" not in program
    (tmp_path / "first.py").write_text(program.replace(ENDPOINT, endpoint), encoding="utf-8")
    check_that_it_returned(run_commands("python first.py", tmp_path))


@pytest.mark.more
@pytest.mark.parametrize(
    ("page", "begins", "prints"),
    [
        ("README.md", ".venv/bin/popmq send hello", "in a while"),
        ("docs/concepts/lite-topics.md", "popmq topic create chats", "hello"),
        ("docs/how-to/compose.md", "popmq send hello", "first message"),
        ("docs/how-to/migrate-from-rocketmq.md", "popmq topic create orders", "billing"),
        ("docs/how-to/several-clusters.md", "popmq context add prod", "using context test"),
        ("docs/reference/cli.md", CONTEXT, "using context prod"),
    ],
)
def test_the_commands_of_a_page_run_as_they_stand(
    page: str, begins: str, prints: str, tmp_path: Path, endpoint: str
) -> None:
    """From the line that begins so to the end of its block, without what needs another cluster."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```([a-z ]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (commands,) = [
        begins + block.partition(begins)[2]
        for language, block in blocks
        if language in ("", "sh") and begins in block
    ]
    lines = [line for line in commands.splitlines() if not ELSEWHERE.search(line)]
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "ca.pem").touch()
    output = run_commands(
        "\n".join(lines).replace(ENDPOINT, endpoint), tmp_path, POPMQ_ENDPOINT=endpoint
    )
    assert prints in output


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", ["java", "go", "node", "remoting-java"])
def test_a_quickstart_runs_as_it_stands(page: str, tmp_path: Path, endpoint: str) -> None:
    check_page(page, tmp_path, endpoint)
