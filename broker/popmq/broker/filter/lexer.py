"""The words of an SQL-92 filter, each with its column, so that an error can point at it.

The alphabet is that of RocketMQ's selector grammar: names of letters, digits, `_` and `$`; texts
in single quotes, where two quotes stand for one; decimal numbers; comments.
"""

import re
from decimal import Decimal
from enum import Enum
from typing import NamedTuple

from popmq.common.errors import Code, Refused

# Characters of a number, in an expression and in a property; its exponent has up to three digits.
NUMBER_LIMIT = 64
# A word takes up to 5 us to compile, and a filter may take 10 ms.
WORDS_LIMIT = 2_048


class TokenType(Enum):
    NAME = "a name"
    TEXT = "a text"
    NUMBER = "a number"
    KEYWORD = "a keyword"
    SIGN = "a sign"
    END = "the end"


KEYWORDS = frozenset(("AND", "OR", "NOT", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "LIKE"))
KEYWORDS |= {"ESCAPE", "CONTAINS", "STARTSWITH", "ENDSWITH"}

_WORD = re.compile(
    r"""
      (?P<blank>   [ \t\r\n\f]+ | --[^\r\n]* | /\*.*?\*/ )
    | (?P<number>  (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) (?: [eE][+-]?[0-9]+ )? [lL]? )
    | (?P<name>    [A-Za-z_$][A-Za-z0-9_$]* )
    | (?P<text>    '(?: [^'] | '' )*' )
    | (?P<sign>    <> | <= | >= | [=<>(),+-] )
    """,
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_HINTS = {
    "!": "write <> for `not equal`",
    '"': "texts are in single quotes",
    "`": "names are not quoted",
    "'": "the text has no closing quote",
    "*": "there is no arithmetic",
    "/": "there is no arithmetic, and a comment ends with */",
    ".": "a name has letters, digits, _ and $",
}


class Token(NamedTuple):
    """`text` is the word as written, keywords in upper case, the content of a text in quotes."""

    word: TokenType
    text: str
    column: int  # of its first character, from 1

    @property
    def shown(self) -> str:
        if self.word is TokenType.END:
            return "the end"
        return repr(self.text if len(self.text) <= 24 else self.text[:21] + "...")


def bad_expression(column: int, sentence: str) -> Refused:
    return Refused(Code.ILLEGAL_FILTER_EXPRESSION, f"SQL filter, column {column}: {sentence}")


def tokens(expression: str) -> list[Token]:
    """All words and the end. Raises ILLEGAL_FILTER_EXPRESSION."""
    found_tokens: list[Token] = []
    at = 0
    while at < len(expression):
        match = _WORD.match(expression, at)
        if match is None:
            sign = expression[at]
            hint = _HINTS.get(sign, "it belongs into no filter")
            raise bad_expression(at + 1, f"{sign!r} is not understood: {hint}")
        if match.lastgroup != "blank":
            if len(found_tokens) == WORDS_LIMIT:
                raise bad_expression(at + 1, f"there are more than {WORDS_LIMIT} words and signs")
            found_tokens.append(_token(match, at + 1))
        at = match.end()
    found_tokens.append(Token(TokenType.END, "", len(expression) + 1))
    return found_tokens


def number(text: str) -> Decimal | None:
    """The number that a text says, exactly; None when it says none or one out of bounds."""
    if len(text) > NUMBER_LIMIT or _NUMBER.fullmatch(text) is None:
        return None
    return Decimal(text)


def _token(match: re.Match[str], column: int) -> Token:
    text = match.group()
    match match.lastgroup:
        case "number":
            text = text.rstrip("lL")
            if number(text) is None:
                raise bad_expression(column, f"the number {text[:24]} is too long or too large")
            return Token(TokenType.NUMBER, text, column)
        case "text":
            return Token(TokenType.TEXT, text[1:-1].replace("''", "'"), column)
        case "name" if text.upper() in KEYWORDS:
            return Token(TokenType.KEYWORD, text.upper(), column)
        case "name":
            return Token(TokenType.NAME, text, column)
        case _:
            return Token(TokenType.SIGN, text, column)
