"""The release script: its version is the tag's, its files are the same twice, and whole."""

import re
import shutil
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from programs import run_program

from popmq.common.version import VERSION
from tools import release
from tools.release import ReleaseRefused

ROOT = Path(__file__).resolve().parents[1]
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@popmq.example")


def committed(folder: Path, *tags: str) -> Path:
    """The folder as a repository of one commit with these tags."""
    commit = ("commit", "--quiet", "--message", "all", "--no-gpg-sign")
    for step in (("init", "--quiet"), ("add", "--all", "--force"), commit):
        run_program([*GIT, *step], cwd=folder, check=True)
    for tag in tags:
        run_program([*GIT, "tag", tag], cwd=folder, check=True)
    return folder


def versions_in(folder: Path, **other: str) -> Path:
    """The files with a version, as they are in this tree; `other` replaces it by file name."""
    for name in (release.VERSION_FILE, "charts/popmq/Chart.yaml", "docker-bake.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        replaced = text.replace(VERSION, other.get(Path(name).stem.replace("-", "_"), VERSION))
        (folder / name).write_text(replaced, encoding="utf-8")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{other.get('log', VERSION)}]\n")
    return folder


def copied_tree(folder: Path) -> Path:
    """What a commit of this tree would contain, with a section of the changelog for its version."""
    listed = run_program(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    changes = folder / "CHANGELOG.md"
    changes.write_text(changes.read_text(encoding="utf-8") + f"\n## [{VERSION}]\n")
    return folder


def test_the_version_of_a_release_is_that_of_its_tag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    committed(tmp_path, "v1.2.3", "some-other-tag")
    assert release.tagged_version(tmp_path) == "1.2.3"


@pytest.mark.parametrize("tags", [(), ("1.2.3",), ("v1.2.3", "v1.2.4")])
def test_a_commit_without_exactly_one_tag_of_a_version_is_no_release(
    tmp_path: Path, tags: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    committed(tmp_path, *tags)
    with pytest.raises(ReleaseRefused, match=r"needs one: its tags are \["):
        release.tagged_version(tmp_path)


def test_files_with_the_version_of_the_tag_are_accepted(tmp_path: Path) -> None:
    assert list(release.complaints(versions_in(tmp_path), VERSION)) == []


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"version": "9.9.9"}, rf"version\.py has version 9\.9\.9, and the tag v{VERSION}"),
        ({"Chart": "9.9.9"}, r"Chart\.yaml \(version\) has version 9\.9\.9"),
        ({"docker_bake": "9.9.9"}, r"docker-bake\.json \(TAG\) has version 9\.9\.9"),
        ({"log": "9.9.9"}, r"CHANGELOG\.md has no section"),
    ],
)
def test_a_file_with_another_version_is_named(
    tmp_path: Path, other: dict[str, str], complaint: str
) -> None:
    first = next(release.complaints(versions_in(tmp_path, **other), VERSION))
    assert re.search(complaint, first)


@pytest.mark.more
def test_a_dry_run_makes_the_files_of_a_release_and_publishes_nothing(tmp_path: Path) -> None:
    tree = committed(copied_tree(tmp_path / "tree"), f"v{VERSION}")
    command = [sys.executable, "-m", "tools.release", "--dry-run", "--output"]
    done = run_program([*command, str(tmp_path / "made")], cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two builds were equal" in done.stdout
    commands = re.findall(r"^would run: (.+)$", done.stdout, re.MULTILINE)
    assert [" twine upload " in commands[0], commands[1:]] == [
        True,
        ["docker buildx bake --push", f"git push origin v{VERSION}"],
    ]
    assert "running:" not in done.stdout
    check_wheel(tmp_path / "made" / f"popmq-{VERSION}-py3-none-any.whl")
    check_sdist(tmp_path / "made" / f"popmq-{VERSION}.tar.gz")
    # A folder with files of another run is left alone.
    again = run_program([*command, str(tmp_path / "made")], cwd=tree)
    assert (again.returncode, "is not empty" in again.stderr) == (1, True)
    (tree / "README.md").write_text("changed")
    changed = run_program([*command, str(tmp_path / "other")], cwd=tree)
    assert (changed.returncode, "changed and not committed" in changed.stderr) == (1, True)


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(f"popmq-{VERSION}.dist-info/METADATA").decode()
        entries = wheel.read(f"popmq-{VERSION}.dist-info/entry_points.txt").decode()
    check_metadata(Parser().parsestr(metadata))
    assert "popmq = popmq.cli.__main__:main" in entries
    assert "popmq = popmq_pytest" in entries
    assert f"popmq-{VERSION}.dist-info/licenses/LICENSE" in names
    # Each part of popmq tells type checkers that it has types.
    parts = {name.split("/")[1] for name in names if name.startswith("popmq/") and "/" in name[6:]}
    assert {f"popmq/{part}/py.typed" for part in parts} <= set(names)


def check_metadata(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    urls = {value.partition(",")[0] for value in metadata.get_all("Project-URL", [])}
    assert urls == {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
    classifiers = metadata.get_all("Classifier", [])
    assert "Framework :: Pytest" in classifiers
    assert "Programming Language :: Python :: 3.13" in classifiers
    extras = {"all", "cli", "client", "console", "grpcio", "kubernetes", "operator", "reports"}
    assert extras <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["Description-Content-Type"] == "text/markdown"


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "pyproject.toml",
        "hatch_build.py",
        "LICENSE",
        "README.md",
        "tests/conftest.py",
    } <= names
    unwanted = (".venv", ".git/", "build/", "dist/", "popmq-data")
    assert [name for name in names if name.startswith(unwanted)] == []
