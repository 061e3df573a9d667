"""Names in prose exist: what a docstring, a comment, a page or an error text names can be found.

A dotted name counts when its first part is a module, a class, an import alias or a section of
settings of ours. Fields of custom resources and chart values have such names too, and count.
"""

import ast
import io
import re
import runpy
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from popmq.common.settings.describe import descriptions

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "common",
    "broker",
    "proxy",
    "controller",
    "operator",
    "cli",
    "console",
    "testing",
    "reports",
)
_DOTTED = re.compile(
    r"(?<![\w./@:{-])([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*(?![\w/(-]*\.\w)(?![\w@/])"
)
_PATH = re.compile(r"(?<![\w./{-])[\w-]+(?:/[\w-]+)*/[\w-]+\.py\b")
# Records of the metadata store, a file, and an attribute of RocketMQ.
_OTHERS = {("cluster", "owner"), ("cluster", "groups"), ("cluster", "secret"), ("lite", "topic")}
_PREFIX_TEST = re.compile(
    r"""\[(?:0|:1)\] [!=]= ["']%|startswith\(\(?["']%|\b(?:if|in|and|or|not) \(?["']%[A-Z]+%"""
    r"""|(?:startswith\(\(?|in \()(?:topics\.)?(?:DLQ|RETRY|PARKED)_PREFIX"""
)
_JOINED_ADDRESS = re.compile(
    r"""\{[\w.]*host\w*\}:\{|\}:\{[\w.]*port|\[0\]\}:\{\w+\[1\]|127\.0\.0\.1:\{|%s:%[ds]""", re.I
)
_FILE_OR_HOST = re.compile(
    "com|conf|crt|css|dev|example|go|html|io|java|js|json|jsonl|key|local|lock|log|md|org|pem|png"
    "|proto|py|sh|sock|svc|toml|txt|whl|xml|yaml|yml"
)


@dataclass(slots=True)
class Names:
    """Of the whole tree. A stem may be that of several modules, a class name of several classes."""

    modules: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    aliases: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    pairs: set[tuple[str, str]] = field(default_factory=set)  # of settings, resources and values

    def has_member(self, name: str, member: str, seen: tuple[str, ...] = ()) -> bool:
        if member in self.classes[name]:
            return True
        known = [base for base in self.bases[name] if base in self.classes and base not in seen]
        if any(self.has_member(base, member, (*seen, name)) for base in known):
            return True
        return any(base.endswith("Enum") for base in self.bases[name]) and member in (
            "name",
            "value",
        )


@cache
def product_files() -> list[Path]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return [path for path in files if "_pb2" not in path.name]


@cache
def path_ends() -> set[str]:
    """`c.py`, `b/c.py` and `a/b/c.py` for each file, and `room/b/c.py` as the pages write it."""
    folders = [ROOT / room for room in (*ROOMS, "bench", "tests", "tools")]
    files = [path.relative_to(ROOT).parts for folder in folders for path in folder.rglob("*.py")]
    files += [(parts[0], *parts[3:]) for parts in files if parts[1] == "popmq"]
    return {"/".join(parts[at:]) for parts in files for at in range(len(parts))}


@cache
def pages() -> list[Path]:
    return [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@cache
def all_names() -> Names:
    names = Names()
    names.modules["bench"].update(path.stem for path in (ROOT / "bench").glob("*.py"))
    for path in product_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        stem = path.parent.name if path.stem == "__init__" else path.stem
        top = names.modules[stem]
        if path.stem == "__init__":
            top.update(item.stem for item in path.parent.iterdir())
        for statement in tree.body:
            top.update(_bound(statement))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if alias.asname:
                        names.aliases[alias.asname].add(path)
            elif isinstance(node, ast.ClassDef):
                names.classes[node.name].update(_members(node))
                names.bases[node.name].update(ast.unparse(base) for base in node.bases)
    names.pairs.update(_pair(key) for key in descriptions())
    for path in [*(ROOT / "crds").glob("*.yaml"), ROOT / "charts/popmq/values.yaml"]:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            names.pairs.update(_key_pairs(document))
    return names


def _pair(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    return section, name


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _members(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        yield from _bound(inner)
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name


def _key_pairs(value: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """Each key below another one; a schema's `properties` and `items` are no keys of a spec."""
    if isinstance(value, list):
        for item in value:
            yield from _key_pairs(item, parent)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("properties", "items"):
                yield parent, key
            yield from _key_pairs(inner, parent if key in ("properties", "items") else key)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of comments and docstrings, or of a page without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blank = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S)
        yield from enumerate(blank.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node, docstring in docstrings(ast.parse(text)):
        yield node.lineno, docstring


@cache
def variables(path: Path) -> set[str]:
    """Names that a module, or the code of a page, binds to something else than a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        blocks = re.findall(r"```.*?```", text, flags=re.S)
        return {name for block in blocks for name in re.findall(r"\b[a-z_]+\b", block)}
    tree = ast.parse(text)
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return bound | {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                match node.body[:1]:
                    case [ast.Expr(value=ast.Constant(value=str(text)) as constant)]:
                        yield constant, text


def wrong_names(path: Path) -> Iterator[str]:
    names = all_names()
    for line, text in prose(path):
        for match in _DOTTED.finditer(text):
            first, second = match[1], match[2]
            if not _FILE_OR_HOST.fullmatch(second) and not _exists(names, path, first, second):
                yield f"{path}:{line}: {match[0]}"
        for match in _PATH.finditer(text):
            if path.suffix == ".py" and match[0] not in path_ends():
                yield f"{path}:{line}: {match[0]}"


def _exists(names: Names, path: Path, first: str, second: str) -> bool:
    if (first, second) in names.pairs or (first, second) in _OTHERS or first in variables(path):
        return True
    if any(key.startswith(second) and second.endswith("_") for _, key in names.pairs):
        return True  # `section.prefix_*`
    if first[0].isupper():
        return first not in names.classes or names.has_member(first, second)
    if first in names.modules:
        return second in names.modules[first]
    if first in names.aliases:
        return path in names.aliases[first]
    sections = {section for section, _ in names.pairs}
    # `module.Class` of a module that is gone.
    return first not in sections and second not in names.classes


def wrong_settings(path: Path) -> Iterator[str]:
    """Keys in the texts of a module that no setting has, such as those of errors."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(constant) for constant, _ in docstrings(tree)}
    keys = set(descriptions())
    sections = "|".join({key.partition(".")[0] for key in keys})
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            if id(node) in skipped:
                continue
            for key in re.findall(
                rf"(?<![\w./@{{-])(?:{sections})\.[a-z_]+\b(?![./*@])", node.value
            ):
                if key not in keys and tuple(key.split(".")) not in all_names().pairs:
                    yield f"{path}:{node.lineno}: {key}"


def stray_heading(path: Path) -> Iterator[str]:
    """A module docstring that begins with `Word:`, which names neither the module nor its class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    heading = re.match(r"([A-Z][a-z]+):", ast.get_docstring(tree) or "")
    words = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    words += path.stem.split("_")
    if heading and not any(word.lower().startswith(heading[1][:5].lower()) for word in words):
        yield f"{path}: begins with {heading[1]}:"


def test_each_dotted_name_in_docstrings_comments_and_pages_exists() -> None:
    assert [name for path in [*product_files(), *pages()] for name in wrong_names(path)] == []


def test_each_setting_that_a_text_names_exists() -> None:
    assert [key for path in product_files() for key in wrong_settings(path)] == []


def test_each_module_that_the_compiled_build_names_exists() -> None:
    modules = runpy.run_path(str(ROOT / "hatch_build.py"))["HOT"]
    rooms = {f"{path.parts[1]}/{path}": ROOT / path.parts[1] / path for path in map(Path, modules)}
    assert [name for name, path in rooms.items() if not path.exists()] == []


def test_no_module_begins_with_a_class_that_is_gone() -> None:
    assert [
        heading
        for path in product_files()
        if path.stem != "__init__"
        for heading in stray_heading(path)
    ] == []


def prefix_tests(path: Path) -> Iterator[str]:
    """Places that tell popmq's own topics by the beginning of a name, instead of asking
    `popmq.common.topics`."""
    if path.match("common/popmq/common/topics.py"):
        return
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if _PREFIX_TEST.search(text) and "F.col(" not in text:  # Spark calls no function of ours
            yield f"{path}:{line}: {text.strip()}"


def joined_addresses(path: Path) -> Iterator[str]:
    """Places that write a host and a port together, instead of `format_address`."""
    if path.match("common/popmq/common/address.py"):
        return
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if _JOINED_ADDRESS.search(text):
            yield f"{path}:{line}: {text.strip()}"


def test_one_function_joins_a_host_and_a_port() -> None:
    assert [place for path in product_files() for place in joined_addresses(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        'where = f"{host}:{port}"',
        'where = f"https://{self.host}:{self._port}/"',
        'where = f"{args.host}:{args.http_port}"',
        'where = f"{address[0]}:{address[1]}"',
        'where = f"127.0.0.1:{number}"',
        'where = "%s:%d" % (host, number)',
    ],
)
def test_a_planted_join_of_host_and_port_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text + "\n")
    assert len(list(joined_addresses(path))) == 1


def test_popmqs_own_topics_are_told_by_one_module() -> None:
    assert [place for path in product_files() for place in prefix_tests(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        'if topic.name[0] == "%":',
        'if name[:1] != "%":',
        "if name.startswith('%'):",
        "if name.startswith(topics.DLQ_PREFIX):",
        "for prefix in (DLQ_PREFIX, RETRY_PREFIX):",
        'if "%RETRY%" in name:',
    ],
)
def test_a_planted_test_of_a_prefix_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text + "\n")
    assert [place.rpartition(": ")[2] for place in prefix_tests(path)] == [text.split(": ")[-1]]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("module.py", '"""See `CommitLog.no_such`."""', "CommitLog.no_such"),
        ("module.py", "pass  # as pop_service.no_such does", "pop_service.no_such"),
        ("module.py", "pass  # (meta/no_such.py)", "meta/no_such.py"),
        ("module.py", '"""Implements `hop.Port`."""', "hop.Port"),
        ("module.py", '"""Implements `seam.CommitLog`."""', "seam.CommitLog"),
        ("page.md", "The setting `store.no_such` is wrong.", "store.no_such"),
    ],
)
def test_a_planted_name_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    path = tmp_path / name
    path.write_text(text + "\n")
    assert [line.rpartition(" ")[2] for line in wrong_names(path)] == [complaint]


def test_a_planted_setting_in_an_error_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('raise ValueError(f"{1} is over the limit (frames.no_such)")\n')
    assert [line.rpartition(" ")[2] for line in wrong_settings(path)] == ["frames.no_such"]


def test_a_planted_heading_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Arrivals: who is woken."""\nclass Wakeups: ...\n')
    assert [line.rpartition(" ")[2] for line in stray_heading(path)] == ["Arrivals:"]
