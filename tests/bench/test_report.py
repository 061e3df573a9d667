"""What a comparison says of its figures: medians, ratios round by round, and what is missing."""

import json
import platform
from pathlib import Path

from bench.compare import Outcome, Plan
from bench.measure import Measure, Shape
from bench.report import machine, markdown, plot, ratios, spread, write
from popmq.cli.load.figures import LatencySummary, interpreter


def measure(peer: str, number: int, per_second: float, cpu_us: float) -> Measure:
    return Measure(
        peer=peer,
        case="send 64x1",
        round=number,
        messages=1_000,
        per_second=per_second,
        cpu_us=cpu_us,
        by_process_us={"server": cpu_us},
        loader_us=5.0,
        ms=LatencySummary(1_000, 1.0, 2.0, 3.0, 4.0),
        flushes=100,
        other_cores=0.1,
        load_average=1.0,
    )


def outcome() -> Outcome:
    new_outcome = Outcome(Plan(peers=["a", "b"], rounds=3))
    new_outcome.settings = {
        "popmq apart": "ours",
        "RocketMQ apart sync": "theirs",
        "gone": "another",
    }
    new_outcome.warmed = {"popmq apart": 10, "RocketMQ apart sync": 10}
    new_outcome.unavailable = {"gone": "cannot be set up: no such package"}
    new_outcome.failures = ["round 1, gone: it broke"]
    for number, (ours, theirs) in enumerate(((400.0, 100.0), (900.0, 150.0), (300.0, 100.0))):
        new_outcome.measures.append(measure("popmq apart", number, ours, 10.0))
        new_outcome.measures.append(measure("RocketMQ apart sync", number, theirs, 100.0))
    return new_outcome


def rate(item: Measure) -> float:
    return item.per_second


def test_ratios_are_taken_round_by_round() -> None:
    found_ratios = ratios(outcome(), "send 64x1", "popmq apart", "RocketMQ apart sync", rate)
    assert found_ratios == [4.0, 6.0, 3.0]
    assert spread(found_ratios, 1) == "4.0 (3.0-6.0)"


def test_a_goal_is_met_by_the_median_and_one_without_figures_is_not_guessed() -> None:
    page = markdown(outcome(), {"cores": "2"})
    line = next(name for name in page.splitlines() if "messages/s to RocketMQ" in name)
    assert line.endswith("| 4.00 (3.00-6.00) | at least 4 | met |")
    deep = [name for name in page.splitlines() if name.endswith("| not measured | 4 | |")]
    assert len(deep) == 1  # send 4x64 was not run
    assert "| CPU us a message, receive 32 + 32 acks | not measured | 25 | |" in page


def test_a_peer_that_could_not_be_set_up_is_named_with_the_reason() -> None:
    page = markdown(outcome(), {"cores": "2"})
    assert "**gone** cannot be set up: no such package" in page
    assert "round 1, gone: it broke" in page
    assert "| gone | another | - |" in page
    assert "| gone | 0" not in page


def test_the_three_files_hold_every_measure(tmp_path: Path) -> None:
    page = write(outcome(), tmp_path / "out")
    assert page.name == "results.md"
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(whole["measures"]) == 6
    assert whole["unavailable"] == {"gone": "cannot be set up: no such package"}
    assert (tmp_path / "out" / "plot.svg").read_text() == plot(outcome())
    assert plot(outcome()).count("<rect") == 1 + 4  # the ground, two peers, two titles


def test_a_shape_is_read_as_it_is_written() -> None:
    assert Shape.parse("64x1") == Shape(64, 1)
    assert str(Shape.parse("4x64")) == "4x64"


def test_the_figures_name_the_build_of_the_interpreter() -> None:
    python = machine()["python"]
    assert platform.python_version() in python
    assert platform.python_compiler() in python
    assert python == interpreter()
