"""`python -m tools.docs_site` (make docs): build the documentation site into build/site.

The pages stay readable on their own, so they link to files outside of docs/ too.  The site has a
copy of the README and of the changelog as pages; links to other files become plain text.  The
navigation is the list of docs/index.md, so a page that is not listed there is an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "docs"
# Files outside of docs/ that are pages of the site.
EXTRA = {ROOT / "README.md": "start.md", ROOT / "CHANGELOG.md": "changes.md"}
# The diagrams' library, from its npm package, so that a page needs no network when it is read.
MERMAID = "mermaid@12.3.0"

_LINK = re.compile(r"(!?)\[((?:[^\]\\]|\\.)*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
_CONFIG = """\
[project]
site_name = "popmq"
site_description = "A message queue in Python that speaks RocketMQ's protocols"
docs_dir = "source"
site_dir = "site"
use_directory_urls = false
extra_javascript = {scripts}
nav = {nav}

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "navigation.sections", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"

[project.markdown_extensions.admonition]
[project.markdown_extensions.attr_list]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.tasklist]
[project.markdown_extensions.pymdownx.superfences]
custom_fences = [
  {{ name = "mermaid", class = "mermaid", format = "pymdownx.superfences.fence_code_format" }},
]
"""


def place(page: Path) -> str:
    """Where a page of the repository is in the site's source."""
    return EXTRA.get(page) or page.relative_to(DOCS).as_posix()


def site_text(page: Path) -> str:
    """The text of a page with links as the site needs them."""

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return match[0]
        file = (page.parent / path).resolve()
        if file not in EXTRA and (not file.is_relative_to(DOCS) or not file.is_file()):
            return text
        folder = Path(place(page)).parent
        new = os.path.relpath(place(file), folder)
        return f"{picture}[{text}]({new}{'#' + anchor if anchor else ''})"

    parts = _FENCE.split(page.read_text(encoding="utf-8"))
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def pages() -> list[Path]:
    return [*EXTRA, *sorted(DOCS.rglob("*.md"))]


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def sections() -> Iterator[tuple[str, list[Path]]]:
    """The headings of docs/index.md, each with the pages that its list links to."""
    index = DOCS / "index.md"
    for section in index.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        targets = [match[3].partition("#")[0] for match in _LINK.finditer(body)]
        files = [(DOCS / target).resolve() for target in dict.fromkeys(targets)]
        yield heading, [file for file in files if file.is_file()]
    yield "Decisions", sorted((DOCS / "decisions").glob("*.md"))
    yield "Changes", [ROOT / "CHANGELOG.md"]


def unlisted() -> set[Path]:
    """The pages that no list leads to."""
    listed = {page for _, pages_of_it in sections() for page in pages_of_it}
    return set(pages()) - listed - {DOCS / "index.md"}


def nav() -> str:
    """The navigation, as TOML."""

    def item(name: str, value: str) -> str:
        return f"{{ {json.dumps(name)} = {value} }}"

    def entries(of: list[Path]) -> str:
        return ", ".join(item(title(page), json.dumps(place(page))) for page in of)

    rows = [item("Home", '"index.md"')]
    rows += [item(heading, f"[{entries(of)}]") for heading, of in sections()]
    return "[\n  " + ",\n  ".join(rows) + ",\n]"


def write_source(folder: Path, *, scripts: list[str]) -> Path:
    """Write the site's source and configuration; return the configuration's path."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    shutil.copytree(DOCS / "pictures", source / "pictures")
    for page in pages():
        path = source / place(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site_text(page), encoding="utf-8")
    config = folder / "zensical.toml"
    config.write_text(_CONFIG.format(nav=nav(), scripts=json.dumps(scripts)), encoding="utf-8")
    return config


def fetch_mermaid(folder: Path) -> bool:
    """Put mermaid.min.js into a folder; False where npm is not there or cannot fetch it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["npm", "pack", "--silent", MERMAID], cwd=folder, capture_output=True, text=True
        )
    except FileNotFoundError:
        return False
    if done.returncode:
        return False
    archive = folder / done.stdout.strip()
    with tarfile.open(archive) as files:
        script = files.extractfile("package/dist/mermaid.min.js")
        assert script is not None, "the package has no mermaid.min.js"
        (folder / "mermaid.min.js").write_bytes(script.read())
    archive.unlink()
    return True


def build(folder: Path, *, scripts: list[str]) -> None:
    """Build the site strictly: a link that leads nowhere is an error."""
    config = write_source(folder, scripts=scripts)
    cache = ROOT / "build" / "mermaid"
    for script in scripts:
        shutil.copy(cache / script, folder / "source" / script)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--clean", "--strict", "-f", config], check=True)


def main() -> int:
    if missing := unlisted():
        print(f"not in docs/index.md: {sorted(map(str, missing))}", file=sys.stderr)
        return 1
    cache = ROOT / "build" / "mermaid"
    local = (cache / "mermaid.min.js").exists() or fetch_mermaid(cache)
    if not local:
        print("npm cannot fetch mermaid: diagrams load it from the network", file=sys.stderr)
    build(BUILD, scripts=["mermaid.min.js"] if local else [])
    print(f"next: {sys.executable} -m http.server --directory {BUILD / 'site'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
