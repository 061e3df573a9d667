"""Names and construction, as a reader meets them: nouns, arguments by name, wiring by hand."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layout import LAYERS, ROOT, parsed

# Names of locals and fields that say nothing about what they hold.
EMPTY_NAMES = {"one", "found", "told", "said", "heard", "who", "whose", "want", "judged"}


def all_sources() -> Iterator[Path]:
    for top in (*LAYERS, "bench", "tests", "tools"):
        yield from sorted((ROOT / top).rglob("*.py"))


def _bindings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_locals_and_parameters_are_nouns() -> None:
    """`for one in found` becomes `for message in messages`."""
    empty = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in all_sources()
        for name in _bindings(parsed(path))
        if name in EMPTY_NAMES
    ]
    assert empty == []


def test_calls_name_their_arguments_and_unpack_no_tuple() -> None:
    """`f(*(a, b), c)` saves lines, and hides which argument is which."""
    unpacked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in all_sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        for item in node.args
        if isinstance(item, ast.Starred) and isinstance(item.value, ast.Tuple)
    ]
    assert unpacked == []


# Assignments to an attribute of another object's attribute, counters apart. It may only fall.
MOST_REACHES = {"broker": 42, "proxy": 25, "operator": 6, "controller": 4, "common": 3, "cli": 3}


def _targets(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]


@pytest.mark.parametrize("room", [room for room in LAYERS if room != "testing"])
def test_no_more_objects_set_attributes_of_the_parts_of_others(room: str) -> None:
    """`self.store.retention.live = bodies` is construction that a reader cannot follow."""
    reaches = [
        f"{path.relative_to(ROOT)}:{target.lineno}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for target in _targets(parsed(path))
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute)
    ]
    assert len(reaches) <= MOST_REACHES.get(room, 0), "\n".join(reaches)
