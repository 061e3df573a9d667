"""The nemesis: a minute of it on real processes, and a checker that finds what it should."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from e2e.nemesis.checker import Op, check, main, read
from e2e.nemesis.run import run

GROUP: Op = {"op": "group", "group": "g", "topic": "t", "fifo": False, "buffered": False}
FIFO: Op = {**GROUP, "fifo": True}
BUFFERED: Op = {**GROUP, "buffered": True}
SEED = 24
SECONDS = 60.0


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_minute_under_the_nemesis_breaks_no_promise(tmp_path: Path) -> None:
    path = asyncio.run(run(tmp_path, seconds=SECONDS, seed=SEED, groups=2, replicas=3))
    verdict = check(read(path))
    print(f"\nseed {SEED}, history {path}\n{verdict.table()}")
    assert verdict.violations == []
    assert len(verdict.faults) >= 4
    assert all(verdict.operations[f"{what} ok"] > 20 for what in ("send", "ack", "change"))


def send(number: int, at: int, outcome: str = "ok", **more: Any) -> Op:
    fields = {"topic": "t", "id": f"m{number}", "key": "k", "number": number, "due_ms": 0}
    return {"op": "send", **fields, "begun": at, "ended": at + 1, "outcome": outcome, **more}


def receive(at: int, *numbers: int, whole: bool = True) -> Op:
    messages = [[f"m{number}", 1] for number in numbers]
    more = {"invisible_ms": 1_000, "whole": whole, "messages": messages}
    return {"op": "receive", "group": "g", "topic": "t", "begun": at, "ended": at + 1, **more}


def act(op: str, number: int, at: int, outcome: str = "ok", **more: Any) -> Op:
    fields = {"group": "g", "id": f"m{number}", "outcome": outcome}
    return {"op": op, **fields, "begun": at, "ended": at + 1, **more}


TWO = [FIFO, send(1, 0), send(2, 1)]
WHOLE = [GROUP, send(1, 0), receive(10, 1), act("ack", 1, 20)]
FAULT: Op = {"op": "fault", "what": "kill", "begun": 30, "ended": 40, "crash": True}


@pytest.mark.parametrize(
    ("history", "violations"),
    [
        (WHOLE, []),
        ([GROUP, send(1, 0), receive(10, 1)], ["lost: g m1, sent OK at 1"]),
        ([GROUP, send(1, 0, "unknown")], []),
        ([GROUP, send(1, 0), act("recall", 1, 5, "unknown")], []),
        ([GROUP, send(1, 0), receive(10, 1), act("ack", 1, 20, "refused")], ["lost"]),
        ([FAULT, GROUP, send(1, 0), receive(10, 1), act("ack", 1, 35, "refused")], ["lost"]),
        ([FAULT, BUFFERED, send(1, 0), receive(10, 1), act("ack", 1, 35, "refused")], ["lost"]),
        ([*WHOLE, receive(2_000, 1)], ["repeated after ack"]),
        ([GROUP, send(1, 0), receive(10, 1), act("ack", 1, 20, "unknown"), receive(2_000, 1)], []),
        ([GROUP, send(1, 0), receive(10, 1), receive(500, 1), act("ack", 1, 520)], ["early"]),
        (
            [GROUP, FAULT, send(1, 0), receive(10, 1), receive(500, 1), act("ack", 1, 520)],
            ["early"],
        ),
        ([BUFFERED, FAULT, send(1, 0), receive(10, 1), receive(50, 1), act("ack", 1, 60)], []),
        (
            [BUFFERED, FAULT, send(1, 0), receive(50, 1), receive(90, 1), act("ack", 1, 95)],
            ["early"],
        ),
        (
            [GROUP, send(1, 0), receive(10, 1, whole=False), receive(500, 1), act("ack", 1, 520)],
            [],
        ),
        (
            [
                *(GROUP, send(1, 0), receive(10, 1), act("change", 1, 20, invisible_ms=5_000)),
                *(receive(2_000, 1), act("ack", 1, 2_020)),
            ],
            ["early"],
        ),
        (
            [
                *(GROUP, send(1, 0), receive(10, 1)),
                act("change", 1, 20, "refused", invisible_ms=300),
                *(receive(500, 1), act("ack", 1, 520)),
            ],
            [],
        ),
        *(  # The answer to the change comes when it was done, and the message came again.
            (
                [
                    *(GROUP, send(1, 0), receive(10, 1)),
                    act("change", 1, 20, outcome, invisible_ms=300) | {"ended": 600},
                    *(receive(500, 1), act("ack", 1, 520)),
                ],
                [],
            )
            for outcome in ("ok", "unknown")
        ),
        (  # It was of the delivery before: the one of now is invisible for its own time.
            [
                *(GROUP, send(1, 0), receive(10, 1)),
                act("change", 1, 20, invisible_ms=300) | {"ended": 600},
                *(receive(500, 1), receive(700, 1), act("ack", 1, 710)),
            ],
            ["early"],
        ),
        ([GROUP, send(1, 0, due_ms=100), receive(10, 1), act("ack", 1, 20)], ["early"]),
        ([*WHOLE, act("stale", 1, 30)], ["stale handle accepted"]),
        ([GROUP, act("rollback", 1, 0, "unknown"), receive(10, 1)], ["without a commit: g m1"]),
        ([*WHOLE, act("reset", 0, 30)], ["lost"]),
        ([*WHOLE, act("reset", 0, 30), receive(50, 1), act("ack", 1, 60)], []),
        ([*WHOLE, act("reset", 0, 30, "unknown"), receive(50, 1)], []),
        ([*WHOLE, receive(50, 1), act("reset", 0, 60), act("ack", 1, 70)], ["repeated", "early"]),
        (
            [
                *(*WHOLE, act("reset", 0, 30), receive(50, 1), act("ack", 1, 60)),
                receive(2_000, 1),
            ],
            ["repeated after ack: g m1, attempt 1, received at 2001, acked OK at 61"],
        ),
        (
            [
                *(GROUP, send(1, 0), receive(10, 1), act("reset", 0, 20), receive(30, 1)),
                act("ack", 1, 40),
            ],
            [],
        ),
        ([*WHOLE, act("stale", 1, 30, "refused")], []),
        ([*WHOLE, {"op": "lag", "ended": 90, "left": 2}], ["lag left: 2"]),
        (
            [*TWO, receive(10, 2), receive(30, 1), act("ack", 2, 40), act("ack", 1, 41)],
            ["out of order: g m2 at 11 before m1"],
        ),
        (
            [*TWO, receive(10, 1, 2), act("ack", 1, 20), act("ack", 2, 21)],
            [],
        ),
        (
            [*TWO, receive(10, 1), act("ack", 1, 20), receive(30, 2), act("ack", 2, 40)],
            [],
        ),
    ],
)
def test_the_checker_finds_what_is_wrong_and_nothing_else(
    history: list[Op], violations: list[str]
) -> None:
    ended = {"op": "lag", "ended": 80, "left": 0}
    found_violations = check([ended, *history]).violations
    assert len(found_violations) == len(violations), found_violations
    assert all(
        item.startswith(start) for item, start in zip(found_violations, violations, strict=True)
    ), found_violations


def test_a_kept_history_can_be_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    lines = [json.dumps(delivery) for delivery in [*WHOLE, receive(2_000, 1)]]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main([str(path)]) == 1
    output = capsys.readouterr().out
    assert "repeated after ack: g m1, attempt 1, received at 2001, acked OK at 21" in output
