"""`python -m tools.modules_page` (make modules): write docs/reference/modules.md.

The page is made from docstrings alone: the first paragraph of each module, grouped by package,
below the docstring of the package.
"""

import ast
import inspect
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "modules.md"

_PAGE_OF_DOCS = re.compile(r"\bdocs/([\w/.-]+\.md(?:#[\w-]+)?)")
_HEAD = """\
# Modules

`make modules` writes this page from the docstrings: change those, not the page. A package says what
it owns, which invariant it keeps and what it may import; a module says in one paragraph what lives
in it. Start with [the architecture](../ARCHITECTURE.md). Paths are short:
`broker/log/commit_log.py` is the file `broker/popmq/broker/log/commit_log.py`, the
module `popmq.broker.log.commit_log`.
"""


def page() -> str:
    """The text of docs/reference/modules.md for the tree as it is."""
    return "\n".join([_HEAD, *(line for folder in packages() for line in section(folder))])


def packages() -> Iterator[Path]:
    """Every package, in the order of pyproject.toml; of one import root by their names."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for root in config["tool"]["hatch"]["build"]["dev-mode-dirs"]:
        inits = (ROOT / root / "popmq" / root).rglob("__init__.py")
        yield from sorted(init.parent for init in inits)


def section(folder: Path) -> Iterator[str]:
    """The lines about one package."""
    name = short_name(folder)
    yield f"{'###' if '/' in name else '##'} {name}"
    yield ""
    yield linked(docstring(folder / "__init__.py"))
    yield ""
    modules = [file for file in sorted(folder.glob("*.py")) if is_written(file)]
    yield from (line_of(file, short_name(file)) for file in modules)
    if modules:
        yield ""


def line_of(file: Path, name: str) -> str:
    first_paragraph = " ".join(docstring(file).split("\n\n")[0].split())
    return f"- `{name}`: {linked(first_paragraph)}"


def short_name(path: Path) -> str:
    """broker/popmq/broker/log -> broker/log"""
    return path.relative_to(ROOT).as_posix().partition("/popmq/")[2]


def is_written(file: Path) -> bool:
    return file.stem != "__init__" and not file.stem.endswith(("_pb2", "_pb2_grpc"))


def docstring(file: Path) -> str:
    """Reads no further than the docstring: a whole tree is parsed in seconds, not at once."""
    with file.open(encoding="utf-8") as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.STRING:
                return inspect.cleandoc(ast.literal_eval(token.string))
    raise ValueError(f"{file} has no docstring")


def linked(text: str) -> str:
    """The pages that a docstring names become links; paths are from docs/reference/."""
    return _PAGE_OF_DOCS.sub(lambda path: f"[{path[0]}](../{path[1]})", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.relative_to(ROOT)}\n")
