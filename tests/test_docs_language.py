"""The pages are in plain English: short sentences, and none of the words that have a better one."""

from pathlib import Path

import pytest

from tools import plain_english
from tools.plain_english import ROOT, findings, forbidden, pages, sentences


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def problems(text: str) -> list[str]:
    return [finding.problem for finding in findings(text)]


@pytest.mark.parametrize("page", pages(), ids=shown)
def test_a_page_has_no_long_sentence_and_no_forbidden_word(page: Path) -> None:
    assert list(findings(page.read_text(encoding="utf-8"))) == []


def test_a_sentence_of_31_words_is_too_long_and_one_of_30_is_not() -> None:
    assert problems("Short. " + "Word " * 30 + ". Short.") == []
    assert problems("Short. " + "Word " * 31 + ". Short.") == ["a sentence of 31 words, at most 30"]


def test_items_cells_and_headings_end_a_sentence() -> None:
    half = "word " * 20
    assert problems(f"# {half}\n{half}\n\n- {half}\n- {half}\n\n| {half} | {half} |\n") == []
    assert problems(f"- {half}\n  {half}\n") == ["a sentence of 40 words, at most 30"]


def test_the_label_of_a_list_item_is_not_part_of_its_sentence() -> None:
    half = "word " * 20
    assert problems(f"- {half}: {half}\n") == []
    assert problems(f"{half}: {half}\n") == ["a sentence of 40 words, at most 30"]


def test_abbreviations_and_versions_do_not_end_a_sentence() -> None:
    assert sentences("Use 5.1.3, e.g. The client. It works.") == [
        "Use 5.1.3, e.g The client.",
        "It works.",
    ]


@pytest.mark.parametrize(
    "text",
    ["Nobody is asked.", "the client is\ntold about it", "[Whoever](page.md) reads", "| Told |"],
)
def test_a_forbidden_word_is_reported_with_what_to_write(text: str) -> None:
    (problem,) = problems(text)
    assert ": write " in problem


@pytest.mark.parametrize(
    "text",
    [
        "`nobody`",
        "```\nnobody " + "word " * 40 + "\n```",
        "[a link](nobody/told.md)",
        "![told](told.png)",
        "untold, nobody-else",
        "<!-- nobody -->",
    ],
)
def test_code_links_pictures_and_parts_of_words_are_not_searched(text: str) -> None:
    assert problems(text) == []


def test_every_forbidden_word_has_a_replacement_and_stands_once() -> None:
    words = [word.lower() for _, word, instead in forbidden() if instead]
    assert len(words) == len(forbidden()) == len(set(words))


def test_the_command_names_page_line_and_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nNobody waits.\n")
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["plain_english", str(page)])
    assert plain_english.main() == 1
    assert 'page.md:3: "nobody": write ' in capsys.readouterr().out
