"""LIKE: `%` stands for any characters, `_` for one.

A pattern is cut at its `%` into pieces that are looked for from left to right, each as early as it
stands.  Unlike one regular expression for the whole this never goes back, so a match takes at
most the text's length times the pattern's.
"""

import re
from collections.abc import Callable


def like(pattern: str, escape: str) -> Callable[[str], bool]:
    """A test of a whole text. `escape` before `%`, `_` or itself takes its meaning away."""
    pieces = _pieces(pattern, escape)
    if len(pieces) == 1:
        whole = _compiled(pieces[0])
        return lambda text: whole.fullmatch(text) is not None
    first, *middle, last = pieces
    head = _compiled(first)
    searches = [_compiled(piece) for piece in middle if piece]
    tail, tail_size = _compiled(last), len(last)

    def test(text: str) -> bool:
        begun = head.match(text)
        if begun is None:
            return False
        at, end = begun.end(), len(text) - tail_size
        for search in searches:
            match = search.search(text, at)
            if match is None:
                return False
            at = match.end()
        return at <= end and tail.fullmatch(text, end) is not None

    return test


# A character of a piece: itself, or None for any.
_Piece = list[str | None]


def _pieces(pattern: str, escape: str) -> list[_Piece]:
    pieces: list[_Piece] = [[]]
    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if escape and sign == escape:
            at += 1
            pieces[-1].append(pattern[at])
        elif sign == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if sign == "_" else sign)
        at += 1
    return pieces


def _compiled(piece: _Piece) -> re.Pattern[str]:
    text = "".join("." if sign is None else re.escape(sign) for sign in piece)
    return re.compile(text, re.DOTALL)
