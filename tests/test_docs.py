"""What the pages say can be checked against the tree: links, settings, files and names in them."""

import ast
import difflib
import doctest
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import accumulate
from math import ceil
from pathlib import Path

import click
import pytest

from popmq.cli.commands import parse
from popmq.cli.terminal.command_line import Invocation
from popmq.common import errors
from popmq.common.errors import Code, PopmqError
from popmq.common.settings import describe
from popmq.common.settings.settings import Settings, load_settings
from tools import errors_page, modules_page, resources_page, settings_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")],
)
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
DECISIONS = ROOT / "docs" / "decisions"

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```([a-z ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def dead_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        result = (page.parent / path).resolve() if path else page
        if not result.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(result):
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


def test_the_table_of_settings_is_what_make_settings_writes() -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    assert settings_table.page(text) == text, (
        "run `make settings` and commit docs/reference/settings.md"
    )


def test_the_file_on_the_page_of_settings_is_accepted(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^```toml\n(.*?)^```", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "popmq.toml"
    path.write_text(text)
    sources = load_settings(str(path), {}, {}).sources
    named = {key for key, source in sources.items() if source != "default"}
    assert named == {"proxy.workers", "replication.laggard_ms", "controller.addresses"}


def test_every_setting_has_a_meaning_and_no_other_name_has() -> None:
    path = Path(describe.__file__).parent / "meanings.toml"
    meanings = tomllib.loads(path.read_text(encoding="utf-8"))
    keys = {f"{section}.{name}" for section, names in meanings.items() for name in names}
    assert keys == set(describe.descriptions()) == set(Settings().flat())


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
    for path in (path for root in ROOT.glob("*/popmq/*") for path in root.rglob("*.py")):
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


def commands_in(page: Path) -> Iterator[str]:
    """The lines of a page's blocks that call popmq, without what the shell does around them."""
    for language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language.partition(" ")[0] in ("", "sh", "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?popmq (.*)", line):
                    yield re.sub(r" >.*| &$| --context \S+", "", match[1])


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands_in(page)]], ids=shown)
def test_popmq_accepts_every_command_line_in_a_block_of_a_page(page: Path) -> None:
    for line in commands_in(page):
        assert isinstance(parse(shlex.split(line, comments=True)), Invocation), line


def test_a_command_line_with_an_option_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nA=1 .venv/bin/popmq lag --no-such &\n```\n```text\npopmq x\n```\n")
    (line,) = commands_in(page)
    with pytest.raises(click.UsageError, match="--no-such"):
        parse(shlex.split(line))


def test_every_make_target_and_module_that_a_block_calls_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    blocks = "".join(
        block
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for _, block in _BLOCK.findall(page.read_text(encoding="utf-8"))
    )
    called = set(re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE))
    modules = set(re.findall(r"\bpython -m ([a-z_.]+)", blocks))
    assert len(called) > 4
    assert len(modules) > 2
    assert called - targets == set()
    roots = [ROOT, ROOT / "tests", *(ROOT / name for name in ("testing", "cli"))]
    missing = [
        name
        for name in modules
        for path in [name.replace(".", "/")]
        if not any((root / f"{path}.py").exists() or (root / path).is_dir() for root in roots)
    ]
    assert missing == []


def test_the_page_of_resources_is_what_make_resources_writes() -> None:
    written = resources_page.PAGE.read_text(encoding="utf-8")
    assert written == resources_page.page(), "run `make resources` and commit the page"


def test_the_page_of_errors_is_what_make_errors_writes() -> None:
    written = errors_page.PAGE.read_text(encoding="utf-8")
    assert written == errors_page.page(), "run `make errors` and commit docs/reference/errors.md"


def test_every_code_has_a_meaning_and_no_other_name_has() -> None:
    assert list(errors_page.meanings()) == [code.name for code in Code]


@pytest.mark.more
def test_every_example_of_an_error_is_a_text_that_the_code_gives_with_that_code() -> None:
    texts = texts_by_code()
    for name, row in errors_page.meanings().items():
        assert any(text.fullmatch(row.example) for text in texts[name]), (name, row.example)


def texts_by_code() -> dict[str, list[re.Pattern[str]]]:
    """The texts of every function of the product, by the codes of the errors that it makes."""
    # These two choose the code for callers that have the text.
    codes = {"unauthorized": Code.UNAUTHORIZED.name, "common_code": Code.MULTIPLE_RESULTS.name}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, PopmqError):
            codes[name] = value.code.name
    texts: dict[str, list[re.Pattern[str]]] = {code.name: [] for code in Code}
    for file in (file for root in ROOT.glob("*/popmq/*") for file in root.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                parts = list(ast.walk(function))
                templates = [text for part in parts if (text := template(part))]
                for name in {code for part in parts if (code := code_of(part, codes))}:
                    texts[name] += templates
    return texts


def code_of(part: ast.AST, codes: dict[str, str]) -> str | None:
    match part:
        case ast.Attribute(value=ast.Name(id="Code"), attr=name) if name in Code.__members__:
            return name
        case ast.Name(id=name):
            return codes.get(name)
    return None


def template(part: ast.AST) -> re.Pattern[str] | None:
    """What a string or an f-string becomes; None for one that is little more than its values."""
    match part:
        case ast.Constant(value=str(text)):
            return re.compile(re.escape(text))
        case ast.JoinedStr(values=values):
            fixed = [str(part.value) if isinstance(part, ast.Constant) else "" for part in values]
            if len("".join(fixed)) > 12:
                return re.compile("".join(re.escape(text) or ".+" for text in fixed))
    return None


def test_every_decision_is_on_the_architecture_page() -> None:
    text = prose(ARCHITECTURE)
    missing = [page.name for page in sorted(DECISIONS.glob("*.md")) if page.name not in text]
    assert missing == []


def wrong_status(page: Path) -> Iterator[str]:
    """What of a decision's status the tree contradicts."""
    lines = [line for line in prose(page).splitlines() if line.startswith("Status:")]
    match = _STATUS.match(lines[0]) if len(lines) == 1 else None
    if match is None:
        yield f"not one line 'Status: accepted|built|superseded by ....': {lines}"
        return
    status, code = match[1], match[2] or ""
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
    (result,) = wrong_status(page)
    assert complaint in result


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
    assert "Encryption of data on disk" in missing


def test_the_readme_fits_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_shows_its_first_command_on_the_first_screen() -> None:
    before = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n```")[0]
    assert sum(max(1, ceil(len(line) / 100)) for line in before.splitlines()) <= 30


def test_what_is_not_released_fits_half_a_page_of_the_changelog() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(changes.partition("## [Unreleased]")[2].partition("\n## [")[0].split()) <= 350


def test_the_bytes_on_the_page_of_formats_are_those_that_the_code_writes() -> None:
    def fields(data: bytes, *sizes: int) -> None:
        ends = [*accumulate(sizes), len(data)]
        parts = [data[start:end].hex() for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        print(*filter(None, parts))

    page = str(ROOT / "docs/reference/formats.md")
    failed, tried = doctest.testfile(page, module_relative=False, globs={"fields": fields})
    assert (failed, tried > 30) == (0, True)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "concepts").glob("*.md")), ids=shown)
def test_a_page_of_explanation_has_one_diagram(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count("```mermaid\n") == 1


@pytest.mark.parametrize(
    "page",
    sorted(
        page for folder in ("concepts", "how-to") for page in (ROOT / "docs" / folder).iterdir()
    ),
    ids=shown,
)
def test_a_guide_or_an_explanation_has_at_most_1200_words(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= 1200


def test_every_term_of_the_glossary_is_used_on_another_page() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"^\| ([A-Z][^|]+?) \|", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(terms) > 50
    others = " ".join(
        page.read_text(encoding="utf-8").lower() for page in PAGES if page != glossary
    )
    words = [word for term in terms for word in term.lower().split(", ")]
    assert [word for word in words if word not in " ".join(others.split())] == []
