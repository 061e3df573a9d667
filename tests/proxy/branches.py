"""Which branches of some modules were taken, both ways, while something ran.

A branch is a conditional jump of the bytecode, so each operand of `and`, `or` and `not` counts by
itself, and so does the end of a loop.  Copies of a test that the compiler makes are one branch.
What no run can take both ways is left out: `assert`, and an exception that a clause does not name.
"""

import ast
import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

Place = tuple[int, int, int, int]  # lines and columns of a test: from line, to line, from, to
Branch = tuple[str, str, Place, bool]  # module, function, place, whether more is compared there


@dataclass(frozen=True)
class Jump:
    branch: Branch
    target: int  # offset
    there: str  # what the test was when it goes there
    else_: str


@dataclass
class Branches:
    """`outcomes` has those of each branch, and `taken` those that came."""

    watches: Sequence[ModuleType | Callable[..., object]]
    outcomes: dict[Branch, set[str]] = field(default_factory=dict)
    taken: dict[Branch, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._jumps: dict[CodeType, dict[int, Jump]] = {}
        for code, module in (pair for item in self.watches for pair in _codes(item)):
            self._jumps[code] = dict(_jumps(code, module))
        for jumps in self._jumps.values():
            for jump in jumps.values():
                self.outcomes.setdefault(jump.branch, set()).update((jump.there, jump.else_))
                self.taken[jump.branch] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        jumps = self._jumps.get(frame.f_code)
        if not jumps:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last: Jump | None = None

        def on_opcode(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "opcode":
                at = frame.f_lasti
                if last is not None:
                    self.taken[last.branch].add(last.there if at == last.target else last.else_)
                last = jumps.get(at)
            elif event == "exception":  # the test raised
                last = None
            return on_opcode

        return on_opcode

    def missed(self) -> list[str]:
        """Where which outcome never came."""
        return [
            f"{branch[0].rpartition('.')[2]}.{branch[1]}, line {branch[2][0]}, columns "
            f"{branch[2][2]} to {branch[2][3]}: never {outcome}"
            for branch, outcomes in sorted(self.outcomes.items())
            for outcome in sorted(outcomes - self.taken[branch])
        ]

    def summary(self) -> list[str]:
        """A line for each module."""
        lines = []
        for module in sorted({branch[0] for branch in self.outcomes}):
            own = [branch for branch in self.outcomes if branch[0] == module]
            both = sum(self.taken[branch] == self.outcomes[branch] for branch in own)
            lines.append(f"{module}: {both} of {len(own)} branches taken both ways")
        return lines


def _codes(item: ModuleType | Callable[..., object]) -> Iterator[tuple[CodeType, str]]:
    """Of a function, or of the functions and classes of a module, and of what is inside of them."""
    if isinstance(item, FunctionType):
        yield from ((code, item.__module__) for code in _with_inner(item.__code__))
        return
    assert isinstance(item, ModuleType)
    for value in vars(item).values():
        if getattr(value, "__module__", None) != item.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = member.fget if isinstance(member, property) else member
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename == item.__file__:  # not by a decorator
                yield from ((inner, item.__name__) for inner in _with_inner(code))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _with_inner(inner)


def _jumps(code: CodeType, module: str) -> Iterator[tuple[int, Jump]]:
    asserted = _asserted(code.co_filename)
    before: list[dis.Instruction] = []  # what the test ends with
    begins = -1
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        begins = instruction.offset if begins < 0 else begins
        if name == "EXTENDED_ARG":  # one with what follows, also for a tracer
            continue
        before, last = [*before[-1:], instruction], before
        offset, begins = begins, -1
        if name == "FOR_ITER":
            there, else_ = "at its end", "an item"
        elif "JUMP" in name and "_IF_" in name:
            there, else_ = _OUTCOMES[name.partition("_IF_")[2].removesuffix("_OR_POP")]
        else:
            continue
        at = last[-1].positions
        assert at is not None
        place = at.lineno or 0, at.end_lineno or 0, at.col_offset or 0, at.end_col_offset or 0
        if last[-1].opname == "CHECK_EXC_MATCH" or place[0] in asserted:
            continue
        branch = module, code.co_qualname, place, last[0].opname == "COPY"
        yield offset, Jump(branch, instruction.argval, there, else_)


@cache
def _asserted(path: str) -> frozenset[int]:
    """The lines of the tests of `assert`."""
    tree = ast.parse(Path(path).read_bytes())
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return frozenset(
        line for test in tests for line in range(test.lineno, (test.end_lineno or 0) + 1)
    )


_OUTCOMES = {
    "TRUE": ("true", "false"),
    "FALSE": ("false", "true"),
    "NONE": ("None", "not None"),
    "NOT_NONE": ("not None", "None"),
}
