"""The documentation site: every page is in its navigation, and its links lead somewhere."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tools import docs_site
from tools.docs_site import DOCS, ROOT, build, nav, place, site_text, unlisted, write_source


def test_every_page_is_in_the_navigation() -> None:
    assert unlisted() == set()


def test_the_navigation_has_each_page_once() -> None:
    names = [f'"{place(page)}"' for page in docs_site.pages()]
    assert [name for name in names if nav().count(f"= {name} ") != 1] == []


def test_a_link_to_the_readme_leads_to_its_page_and_one_out_of_the_docs_becomes_text() -> None:
    index = site_text(DOCS / "index.md")
    assert "](start.md#first-messages)" in index
    assert "](../README.md" not in index
    reliability = site_text(DOCS / "reliability.md")
    assert "[tests/e2e/nemesis/checker.py]" not in reliability
    assert "tests/e2e/nemesis/checker.py" in reliability


def test_links_and_pictures_of_the_readme_are_those_of_the_site(tmp_path: Path) -> None:
    text = site_text(ROOT / "README.md")
    assert "](docs/" not in text
    write_source(tmp_path / "site", scripts=[])
    assert "](pictures/console-group.png)" in text
    assert (tmp_path / "site" / "source" / "pictures" / "console-group.png").is_file()


@pytest.mark.heavy
def test_the_site_builds_strictly_and_has_a_search_index(tmp_path: Path) -> None:
    assert importlib.util.find_spec("zensical"), "run make docs, or make test-heavy"
    build(tmp_path / "site", scripts=[])
    assert (tmp_path / "site" / "site" / "index.html").is_file()
    assert "invisible time" in (tmp_path / "site" / "site" / "search.json").read_text()


@pytest.mark.heavy
def test_a_link_that_leads_nowhere_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_dead_link(page: Path) -> str:
        dead = "\n[dead](no-such-page.md)\n" if page.name == "index.md" else ""
        return site_text(page) + dead

    monkeypatch.setattr(docs_site, "site_text", with_dead_link)
    with pytest.raises(subprocess.CalledProcessError):
        build(tmp_path / "site", scripts=[])
