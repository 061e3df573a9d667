"""The end of a turn: once for all that came in it, in order, with what is left meanwhile."""

import asyncio

import pytest

from popmq.common.loop_iteration import LoopIteration, at_once


async def test_what_is_left_for_the_end_of_a_turn_comes_in_order_behind_the_turn() -> None:
    results: list[str] = []

    turn = LoopIteration()
    turn.call_at_end(lambda: results.append("first"))
    turn.call_at_end(lambda: results.append("second"))
    results.append("the turn")
    await asyncio.sleep(0)

    assert results == ["the turn", "first", "second"]


async def test_what_the_end_of_a_turn_leaves_is_done_in_the_same_pass() -> None:
    results: list[str] = []

    turn = LoopIteration()
    turn.call_at_end(lambda: turn.call_at_end(lambda: results.append("its own")))
    turn.call_at_end(lambda: results.append("another's"))
    await asyncio.sleep(0)
    assert results == ["another's", "its own"]
    turn.call_at_end(lambda: results.append("next turn"))
    await asyncio.sleep(0)

    assert results == ["another's", "its own", "next turn"]


async def test_one_that_fails_spoils_no_other(caplog: pytest.LogCaptureFixture) -> None:
    results: list[str] = []

    turn = LoopIteration()
    turn.call_at_end(lambda: results.remove("absent"))
    turn.call_at_end(lambda: results.append("after it"))
    await asyncio.sleep(0)
    turn.call_at_end(lambda: results.append("a turn later"))
    await asyncio.sleep(0)

    assert results == ["after it", "a turn later"]
    assert "the end of a turn failed" in caplog.text


def test_without_a_loop_nothing_is_gathered() -> None:
    results: list[str] = []
    at_once(lambda: results.append("now"))
    assert results == ["now"]
