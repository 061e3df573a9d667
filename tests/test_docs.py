"""What the pages say can be checked against the tree: links, settings, files and names in them."""

import ast
import difflib
import doctest
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from popmq.common.settings.settings import Settings
from tools import modules_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")],
)
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
OPERATING = ROOT / "docs" / "operating.md"
DECISIONS = ROOT / "docs" / "decisions"

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_STATUS = re.compile(r"^Status: (accepted|built|superseded by \[.+\]\(.+\))\.(?: Code: (.+)\.)?$")
# What a page about something that exists must not say. What popmq lacks is in README.md.
_DENIAL = re.compile(
    r"\b(?:not|nothing of it is|not yet)\s+built\b|\bnothing\s+exists\b|\bnot\s+there\s+yet\b"
    r"|^Later, in (?:a )?rooms?\b|\bpopmq will (?:have|contain)\b",
    re.MULTILINE | re.IGNORECASE,
)
# `file.py` followed by the names of what is in it.
_NAMED = re.compile(r"`([^`\s]+\.py)`\s+`([A-Za-z_][\w.]*)`")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def short(path: Path) -> str:
    """broker/popmq/broker/log/dispatch.py -> broker/log/dispatch.py"""
    return shown(path).partition("/popmq/")[2]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


def dead_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(found):
            yield f"{target}: no such heading"


def file_of(name: str) -> Path | None:
    """The file that a page means: from the root, or short, with room/ for room/popmq/room/."""
    room, _, rest = name.partition("/")
    for path in (ROOT / name, ROOT / room / "popmq" / room / rest):
        if path.is_file():
            return path
    return None


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert list(dead_links(page)) == []


def test_every_setting_is_in_the_table_of_settings() -> None:
    rows = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", prose(OPERATING), re.MULTILINE))
    assert rows == set(Settings().flat())


def exists(name: str) -> bool:
    """Whether there is such a file or folder: from the root, or short as in `file_of`."""
    room, _, rest = name.partition("/")
    return any(path.exists() for path in (ROOT / name, ROOT / room / "popmq" / room / rest))


def definitions(file: Path) -> dict[str, set[str]]:
    """The functions and classes of a module, each with the members that its body defines."""
    return {
        node.name: {name for part in node.body for name in defined_names(part)}
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def defined_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def wrong_names(page: Path) -> Iterator[str]:
    """Paths in code spans that lead nowhere, and classes, methods and functions that are not where
    the page puts them.

    A name stands behind its file, as in `broker/log/dispatch.py` `Dispatch.advance`. A class may be
    named alone once its file is known.
    """
    text = prose(page)
    for name in _CODE.findall(text):
        if re.fullmatch(r"[\w.-]+(/[\w.-]*)+|\S+\.py", name) and not exists(name):
            yield f"{name}: no such file or folder"
    known: dict[str, set[str]] = {}
    for name, inside in _NAMED.findall(text):
        members = definitions(file) if (file := file_of(name)) else {}
        first = inside.partition(".")[0]
        if first in members:
            known[first] = members[first]
        else:
            yield f"{name}: no {first}"
    for name in _CODE.findall(text):
        first, _, member = name.partition(".")
        if first not in known and re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", name):
            yield f"{name}: the page names no file that has it"
        elif first in known and member and member not in known[first]:
            yield f"{name}: no such member"


def test_every_path_and_name_on_the_architecture_page_exists() -> None:
    assert _NAMED.findall(prose(ARCHITECTURE))
    assert list(wrong_names(ARCHITECTURE)) == []


@pytest.mark.parametrize(
    ("sentence", "complaint"),
    [
        ("`broker/log/no_such.py`", "no such file or folder"),
        ("`broker/no_such`", "no such file or folder"),
        ("`crds/no_such.yaml`", "no such file or folder"),
        ("`broker/log/dispatch.py` `NoSuch`", "no NoSuch"),
        ("`broker/log/dispatch.py` `Dispatch.no_such`", "no such member"),
        ("`broker/log/dispatch.py` `Dispatch`, then `Dispatch.no_such`", "no such member"),
        ("`broker/log/dispatch.py` `CommitLog.append`", "no CommitLog"),
        ("`Dispatch.advance`", "names no file"),
    ],
)
def test_a_path_or_name_that_does_not_exist_is_found(
    tmp_path: Path, sentence: str, complaint: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{sentence}\n\n`common/clock.py` `SystemClock` is right, so is `broker/log`\n")
    assert complaint in " ".join(wrong_names(page))


def test_the_architecture_page_names_every_package() -> None:
    named = set(_CODE.findall(prose(ARCHITECTURE)))
    packages = {modules_page.short_name(folder) for folder in modules_page.packages()}
    assert packages - named == set()


def test_the_architecture_page_fits_one_sitting() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_page_of_modules_is_what_make_modules_writes() -> None:
    written = modules_page.PAGE.read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(written, modules_page.page().splitlines(), lineterm="", n=0)
    assert list(changes) == [], "run `make modules` and commit docs/reference/modules.md"


def test_every_module_and_every_package_is_on_the_page_of_modules() -> None:
    text = modules_page.PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^- `(.+?\.py)`: .", text, re.MULTILINE))
    packages = set(re.findall(r"^##+ (.+)$", text, re.MULTILINE))
    for path in (path for root in ROOT.glob("*/popmq") for path in root.rglob("*.py")):
        name = short(path)
        if path.stem == "__init__":
            assert name.removesuffix("/__init__.py") in packages
        elif not path.stem.endswith("_pb2"):
            assert name in named


def test_a_page_of_modules_has_the_first_paragraph_of_a_docstring_and_its_links(
    tmp_path: Path,
) -> None:
    module = tmp_path / "popmq" / "module.py"
    module.parent.mkdir()
    module.write_text('"""What it is for\n(docs/concepts/pop.md).\n\nAnd more.\n"""\nNAME = "x"\n')
    assert modules_page.line_of(module, "module.py") == (
        "- `module.py`: What it is for ([docs/concepts/pop.md](../concepts/pop.md))."
    )


def test_every_decision_is_on_the_architecture_page() -> None:
    text = prose(ARCHITECTURE)
    missing = [page.name for page in sorted(DECISIONS.glob("*.md")) if page.name not in text]
    assert missing == []


def wrong_status(page: Path) -> Iterator[str]:
    """What of a decision's status the tree contradicts."""
    lines = [line for line in prose(page).splitlines() if line.startswith("Status:")]
    found = _STATUS.match(lines[0]) if len(lines) == 1 else None
    if found is None:
        yield f"not one line 'Status: accepted|built|superseded by ....': {lines}"
        return
    status, code = found[1], found[2] or ""
    files = re.findall(r"`([^`\s]+\.(?:py|toml))`", code)
    if bool(files) != (status == "built"):
        yield f"{status}, and its code is {files}: what is built names its code, nothing else does"
    for name in files:
        if file_of(name) is None:
            yield f"{name}: no such file"
    for name, inside in _NAMED.findall(code):
        file = file_of(name)
        source = file.read_text(encoding="utf-8") if file else ""
        if not re.search(rf"^(def|class) {re.escape(inside)}\b", source, re.MULTILINE):
            yield f"{name}: no {inside}"


@pytest.mark.parametrize("page", sorted(DECISIONS.glob("*.md")), ids=shown)
def test_the_status_of_a_decision_is_that_of_the_code_it_names(page: Path) -> None:
    assert list(wrong_status(page)) == []


@pytest.mark.parametrize(
    ("status", "complaint"),
    [
        ("", "not one line"),
        ("Status: finished.", "not one line"),
        ("Status: built.", "its code is []"),
        ("Status: accepted. Code: `common/step_loop.py`.", "nothing else does"),
        ("Status: built. Code: `common/no_such.py`.", "no such file"),
        ("Status: built. Code: `common/step_loop.py` `NoSuch`.", "no NoSuch"),
    ],
)
def test_a_status_that_the_tree_contradicts_is_found(
    tmp_path: Path, status: str, complaint: str
) -> None:
    page = tmp_path / "0001-x.md"
    page.write_text(f"# 1. X\n\n{status}\n")
    (found,) = wrong_status(page)
    assert complaint in found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ("README.md", "CHANGELOG.md")], ids=shown
)
def test_no_page_denies_what_exists(page: Path) -> None:
    assert _DENIAL.findall(prose(page)) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "They are not built.",
        "Not\nbuilt: the copying of topics.",
        "Status: nothing of it is built.",
        "of Kubernetes nothing exists yet",
        "Later, in a room of its own: the operator.",
        "Later, in rooms or parts of their own: reports.",
        "popmq will contain no scheduler",
        "prepared by this and not built",
    ],
)
def test_a_sentence_that_denies_is_found(sentence: str) -> None:
    assert _DENIAL.search(sentence)


def test_the_readme_lists_what_is_missing() -> None:
    missing = prose(ROOT / "README.md").split("## Not yet")[1]
    assert "remoting protocol" in missing
    assert "authentication" in missing


def test_the_readme_fits_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_bytes_on_the_page_of_formats_are_those_that_the_code_writes() -> None:
    def fields(data: bytes, *sizes: int) -> None:
        ends = [*accumulate(sizes), len(data)]
        parts = [data[start:end].hex() for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        print(*filter(None, parts))

    page = str(ROOT / "docs/reference/formats.md")
    failed, tried = doctest.testfile(page, module_relative=False, globs={"fields": fields})
    assert (failed, tried > 30) == (0, True)
