"""`popmq drain`: what it shows of a broker group that is emptied."""

import json

import pytest

from popmq.cli.__main__ import build_parser, main
from popmq.cli.drain import rest_json, run_drain
from popmq.common.drained import Rest, rest_line
from popmq.testing.running_broker import RunningBroker


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        (Rest(3, 2, (), 0), "b still has 3 messages and 2 timers"),
        (
            Rest(3, 1_000, ("f", "m"), 4),
            "b still has 3 messages and 1000 or more timers; FIFO topics that wait for it: f, m",
        ),
        (Rest(0, 0, (), 0), "b is drained: its brokers can be stopped and removed"),
        (
            Rest(0, 0, (), 4),
            "b is drained: its brokers can be stopped and removed; it has 4 dead letters",
        ),
    ],
)
def test_a_line_says_what_is_left(rest: Rest, line: str) -> None:
    assert rest_line("b", rest) == line


@pytest.mark.parametrize("rest", [Rest(1, 0, (), 0), Rest(0, 1, (), 0), Rest(0, 0, ("f",), 0)])
def test_nothing_may_be_left_of_a_drained_group(rest: Rest) -> None:
    assert json.loads(rest_json("b", rest))["drained"] is False


def test_the_flags_are_understood() -> None:
    args = build_parser({}).parse_args(["drain", "b", "--wait", "5m"])
    assert (args.run, args.group, args.undo, args.wait) == (run_drain, "b", False, 300_000)


def test_a_single_broker_cannot_be_drained(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "broker-a", "--endpoint", popmq_broker.endpoint]) == 1
    assert "owns the topics and consumer groups" in capsys.readouterr().err
    assert main(["drain", "nowhere", "--endpoint", popmq_broker.endpoint]) == 1
    assert "broker group 'nowhere' is not known" in capsys.readouterr().err
