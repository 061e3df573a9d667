"""A second opinion on what an SQL filter means, shared with none of the broker's code.

An expression is a tree of tuples; `value` walks it with the standard's truth tables over the
letters T, F and U, exact fractions, and a LIKE that tries every way.  `text` writes the tree
down as a user might.
"""

import random
from fractions import Fraction
from functools import cache
from typing import Any

Tree = tuple[Any, ...]

AND = {"TT": "T", "TF": "F", "TU": "U", "FT": "F", "FF": "F", "FU": "F", "UT": "U", "UF": "F"}
OR = {"TT": "T", "TF": "T", "TU": "T", "FT": "T", "FF": "F", "FU": "U", "UT": "T", "UF": "U"}
AND["UU"] = OR["UU"] = "U"
NOT = {"T": "F", "F": "T", "U": "U"}


def value(tree: Tree, properties: dict[str, str]) -> str:
    match tree:
        case ("and", left, right):
            return AND[value(left, properties) + value(right, properties)]
        case ("or", left, right):
            return OR[value(left, properties) + value(right, properties)]
        case ("not", inner):
            return NOT[value(inner, properties)]
        case ("null", operand):
            return "T" if resolved(operand, properties) is None else "F"
        case ("bare", operand):
            return compared("=", operand, ("bool", True), properties)
        case ("between", operand, low, high):
            above = compared(">=", operand, low, properties)
            return AND[above + compared("<=", operand, high, properties)]
        case ("in", name, items):
            result = "F"
            for item in items:
                result = OR[result + compared("=", ("name", name), item, properties)]
            return result if name in properties else "U"
        case ("like", name, pattern):
            text = properties.get(name)
            return "U" if text is None else "FT"[likes(text, pattern)]
        case ("has", word, name, part):
            text = properties.get(name)
            if text is None:
                return "U"
            places = [at for at in range(len(text) + 1) if text[at : at + len(part)] == part]
            if word == "STARTSWITH":
                return "FT"[0 in places]
            if word == "ENDSWITH":
                return "FT"[len(text) - len(part) in places]
            return "FT"[bool(places)]
        case (sign, left, right):
            return compared(sign, left, right, properties)
    raise AssertionError(tree)


def resolved(operand: Tree, properties: dict[str, str]) -> object:
    return properties.get(operand[1]) if operand[0] == "name" else operand[1]


def compared(sign: str, left: Tree, right: Tree, properties: dict[str, str]) -> str:
    resolutions, other = resolved(left, properties), resolved(right, properties)
    if resolutions is None or other is None:
        return "U"
    kinds = {operand[0] for operand in (left, right)} - {"name"}
    if kinds == {"number"} or (not kinds and sign not in ("=", "<>")):
        resolutions, other = fraction(str(resolutions)), fraction(str(other))
    elif kinds == {"bool"}:
        resolutions, other = boolean(resolutions), boolean(other)
    if resolutions is None or other is None:
        return "U"
    less, same = bool(resolutions < other), resolutions == other  # type: ignore[operator]  # of one kind by now
    true = {
        "=": same,
        "<>": not same,
        "<": less,
        "<=": less or same,
        ">": not (less or same),
        ">=": not less,
    }
    return "FT"[true[sign]]


def fraction(text: str) -> Fraction | None:
    if not text.isascii() or "/" in text or "_" in text or text != text.strip():
        return None
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def boolean(result: object) -> bool | None:
    if isinstance(result, bool):
        return result
    return {"TRUE": True, "FALSE": False}.get(str(result).upper())


def likes(text: str, pattern: str) -> bool:
    @cache
    def matches(at: int, place: int) -> bool:
        if place == len(pattern):
            return at == len(text)
        sign = pattern[place]
        if sign == "%":
            return matches(at, place + 1) or (at < len(text) and matches(at + 1, place))
        fits = at < len(text) and sign in ("_", text[at])
        return fits and matches(at + 1, place + 1)

    return matches(0, 0)


# -- writing it down


def text(tree: Tree, rng: random.Random) -> str:
    return " ".join(_words(tree, rng, 0))


_LEVELS = {"or": 1, "and": 2, "not": 3}


def _words(tree: Tree, rng: random.Random, above: int) -> list[str]:
    """The words of a tree; parentheses where the precedence needs them, and now and then more."""
    level = _LEVELS.get(tree[0], 4)
    match tree:
        case ("and" | "or" as joint, left, right):
            words = _words(left, rng, level)
            words += [_cased(joint, rng), *_words(right, rng, level)]
        case ("not", inner):
            words = [_cased("not", rng), *_words(inner, rng, level)]
        case _:
            words = _predicate(tree, rng)
    if level < above or rng.random() < 0.1:
        return ["(", *words, ")"]
    return words


def _predicate(tree: Tree, rng: random.Random) -> list[str]:
    match tree:
        case ("null", operand):
            return [_operand(operand, rng), _cased("is", rng), _cased("null", rng)]
        case ("bare", operand):
            return [_operand(operand, rng)]
        case ("between", operand, low, high):
            words = [_operand(operand, rng) for operand in (operand, low, high)]
            return [words[0], _cased("between", rng), words[1], _cased("and", rng), words[2]]
        case ("in", name, items):
            return [name, _cased("in", rng), "(", ", ".join(_operand(i, rng) for i in items), ")"]
        case ("like", name, pattern):
            return [name, _cased("like", rng), quoted(pattern)]
        case ("has", word, name, part):
            return [name, _cased(word, rng), quoted(part)]
        case (sign, left, right):
            return [_operand(left, rng), sign, _operand(right, rng)]
    raise AssertionError(tree)


def _operand(operand: Tree, rng: random.Random) -> str:
    kind, content = operand
    if kind == "text":
        return quoted(content)
    if kind == "bool":
        return _cased(str(content), rng)
    return str(content)


def quoted(content: str) -> str:
    return "'" + content.replace("'", "''") + "'"


def _cased(word: str, rng: random.Random) -> str:
    return rng.choice((word.upper(), word.lower(), word.title()))
