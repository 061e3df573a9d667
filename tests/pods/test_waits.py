"""What a wait of a hand-over is, of all the waits of a roll."""

import json
from datetime import UTC, datetime

import pytest
from pods.waits import waits_at_hand_overs

BEGUN = 1_900_000_000.0
EVERY_S = 0.05


def line(at_s: float, event: str, **fields: object) -> str:
    time = datetime.fromtimestamp(BEGUN + at_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "level": "info", "role": "broker", "event": event, **fields})


def new_master(at_s: float, epoch: int = 3) -> list[str]:
    return [
        line(at_s, "leading", epoch=epoch, start_position=714660),
        line(at_s + 0.04, "master", epoch=epoch, end_bytes=714724),
    ]


def oks(*silent: tuple[float, float]) -> list[float]:
    """For twenty seconds, but in the given parts of them."""
    all_of_them = [number * EVERY_S for number in range(401)]
    return [BEGUN + at for at in all_of_them if not any(a < at < b for a, b in silent)]


def test_the_wait_that_a_new_master_begins_in_is_the_hand_overs() -> None:
    results = waits_at_hand_overs(oks((10.0, 10.6)), new_master(10.5))
    assert results == {"epoch 3": pytest.approx(0.6)}


def test_a_longer_wait_at_another_time_is_none_of_it() -> None:
    results = waits_at_hand_overs(oks((4.0, 6.5), (10.0, 10.4), (12.0, 15.0)), new_master(10.3))
    assert results == {"epoch 3": pytest.approx(0.4)}


def test_each_hand_over_has_its_own() -> None:
    lines = [*new_master(5.5), *new_master(15.5, epoch=4)]
    results = waits_at_hand_overs(oks((5.0, 5.6), (15.0, 16.5)), lines)
    assert results == {"epoch 3": pytest.approx(0.6), "epoch 4": pytest.approx(1.5)}


def test_an_answer_that_was_on_its_way_does_not_split_the_wait() -> None:
    """It comes just after the new master began, and the long wait begins with it."""
    sent = sorted([*oks((10.0, 11.6)), BEGUN + 10.6])
    assert waits_at_hand_overs(sent, new_master(10.5)) == {"epoch 3": pytest.approx(1.0)}


def test_a_hand_over_that_came_to_nothing_counts_too() -> None:
    text = "the hand-over failed, serving again"
    results = waits_at_hand_overs(oks((10.0, 11.2)), [line(11.1, text)])
    assert results == {text: pytest.approx(1.2)}


@pytest.mark.parametrize("at_s", [-1.0, 21.0])
def test_without_an_ok_before_or_after_it_the_wait_has_no_end(at_s: float) -> None:
    assert waits_at_hand_overs(oks(), new_master(at_s)) == {"epoch 3": float("inf")}
    assert waits_at_hand_overs([], new_master(10.0)) == {"epoch 3": float("inf")}


def test_other_lines_tell_of_no_hand_over() -> None:
    others = ["starting", "[1, 2]", line(10.0, "slave connected", epoch=3), '{"event": "lea']
    assert waits_at_hand_overs(oks(), others) == {}
