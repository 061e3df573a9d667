"""`python -m tools.plain_english` (part of make check): long sentences and words to avoid.

A page may have sentences of at most LONGEST words, and none of the words in
docs/style-forbidden.txt.  Code, link targets and pictures do not count.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = ROOT / "docs" / "style-forbidden.txt"
LONGEST = 30

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->|^---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]+\)")
_CODE = re.compile(r"`[^`]+`")
# A heading, a list item, a row of a table and an empty line each begin a new block.
_NEW_BLOCK = re.compile(r"^\s*([#|>]|[-*+] |\d+\. |!!!|===|$)")
_END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[^a-z\s]|popmq\b)|(?<=:)\s+(?=-)")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|approx|No)\.\s")
# "name: explanation": what stands before the first colon of a list item is its label.
_LABEL = re.compile(r"^(\s*(?:[-*+]|\d+\.) [^.;:]{1,100}:) +(?=\S)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z0-9][\w'./%-]*")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change on a page."""

    line: int
    problem: str
    text: str


def forbidden(path: Path = FORBIDDEN) -> list[tuple[re.Pattern[str], str, str]]:
    """The listed words as patterns, as written, and what to write instead."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            word, _, instead = line.partition(" => ")
            pattern = re.escape(word).replace(r"\ ", r"\s+")
            rows.append((re.compile(rf"(?<![\w-]){pattern}(?![\w-])", re.I), word, instead))
    return rows


def pages() -> list[Path]:
    """Every page that people read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, list items, headings and table cells of a page, with their line numbers."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = _COMMENT.sub(blank, _FENCE.sub(blank, text))
    text = _LINK.sub(r"\1", _PICTURE.sub("", _CODE.sub("CODE", text)))
    text = _LABEL.sub(r"\1. CODE ", text)
    start, words = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if _NEW_BLOCK.match(line):
            if words:
                yield start, " ".join(words)
            words = []
            if line.lstrip().startswith("|"):
                yield from ((number, cell) for cell in line.split("|") if cell.strip())
                continue
        if not words:
            start = number
        if stripped := line.strip().lstrip("#>-*+ "):
            words.append(stripped)
        if line.startswith("#"):
            yield start, " ".join(words)
            words = []


def sentences(block: str) -> list[str]:
    """The sentences of one block."""
    return _END.split(_ABBREVIATION.sub(r"\1 ", block))


def findings(text: str) -> Iterator[Finding]:
    """What is to be changed in the text of one page."""
    rules = forbidden()
    for line, block in blocks(text):
        for sentence in sentences(block):
            count = len(_WORD.findall(sentence))
            if count > LONGEST:
                yield Finding(line, f"a sentence of {count} words, at most {LONGEST}", sentence)
        for pattern, word, instead in rules:
            if pattern.search(block):
                yield Finding(line, f'"{word}": write {instead}', block[:100])


def main() -> int:
    count = 0
    for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        name = page.relative_to(ROOT).as_posix()
        for finding in findings(page.read_text(encoding="utf-8")):
            count += 1
            print(f"{name}:{finding.line}: {finding.problem}\n    {finding.text}")
    if count:
        print(f"{count} places are not plain English (docs/style-forbidden.txt)", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
