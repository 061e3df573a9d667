"""`popmq drain`: what it shows of a broker group that is emptied."""

import pytest
from cli.parsing import invoked

from popmq.cli.__main__ import main
from popmq.cli.client import Client
from popmq.cli.drain import read_remainder, remainder_fields, run_drain
from popmq.common.errors import Refused
from popmq.common.protocol.drain_remainder import DrainRemainder, drain_remainder, remainder_text
from popmq.common.wire import admin_pb2 as admin
from popmq.testing.running_broker import RunningBroker


@pytest.mark.parametrize(
    ("rest", "line"),
    [
        (DrainRemainder(3, 2, (), 0), "b still has 3 messages, 2 timers"),
        (
            DrainRemainder(3, 1_000, ("f", "m"), 4),
            "b still has 3 messages, 1000 timers; FIFO topics that wait for it: f, m",
        ),
        (
            DrainRemainder(0, 44, (), 0, leaving=256, moved=700),
            "b still has 0 messages, 44 timers and 256 on their way to others; 700 timers were "
            "moved",
        ),
        (
            DrainRemainder(0, 44, (), 0, waits="no other broker group takes them"),
            "b still has 0 messages, 44 timers; timers are not moved: no other broker group takes "
            "them",
        ),
        (
            DrainRemainder(0, 0, (), 0, transactions=2),
            "b still has 0 messages, 0 timers, 2 transactions without an end",
        ),
        (DrainRemainder(0, 0, (), 0, unknown="b: no"), "what b still has is not known: b: no"),
        (DrainRemainder(0, 0, (), 0), "b is drained: its brokers can be stopped and removed"),
        (
            DrainRemainder(0, 0, (), 4),
            "b is drained: its brokers can be stopped and removed; it has 4 dead letters",
        ),
    ],
)
def test_a_line_says_what_is_left(rest: DrainRemainder, line: str) -> None:
    assert remainder_text("b", rest) == line


@pytest.mark.parametrize(
    "rest",
    [
        DrainRemainder(1, 0, (), 0),
        DrainRemainder(0, 1, (), 0),
        DrainRemainder(0, 0, ("f",), 0),
        DrainRemainder(0, 0, (), 0, leaving=1),
        DrainRemainder(0, 0, (), 0, transactions=1),
        DrainRemainder(0, 0, (), 0, unknown="b: no"),
    ],
)
def test_nothing_may_be_left_of_a_drained_group(rest: DrainRemainder) -> None:
    assert remainder_fields("b", rest)["drained"] is False


def test_a_broker_that_does_not_count_its_timers_is_not_taken_for_drained() -> None:
    lag = admin.LagReply()
    with pytest.raises(Refused, match="is of an older popmq"):
        drain_remainder("b", lag, [], admin.DrainReply(draining=True))
    counted = admin.DrainReply(draining=True, counted=True, leaving=2)
    assert not drain_remainder("b", lag, [], counted)[0].is_drained


def test_a_timer_is_counted_as_one_and_not_as_a_message_too() -> None:
    lag = admin.LagReply(lags=[admin.Lag(broker="b", group="g", topic="t", delayed=5)])
    rest, _ = drain_remainder("b", lag, [], admin.DrainReply(draining=True, counted=True, timers=5))
    assert (rest.messages, rest.timers) == (0, 5)


def test_topics_stay_while_the_drained_group_has_not_said_what_it_has() -> None:
    """The proxy that was asked may not know the group just now."""
    reply = admin.DrainReply(draining=True, counted=True)
    fifo = admin.Topic(name="fifo", brokers=["a", "b"])
    rest, free = drain_remainder("b", admin.LagReply(brokers=["a"]), [fifo], reply)
    assert (rest.is_drained, free) == (False, [])
    assert "broker group b did not say what it has" in remainder_text("b", rest)
    rest, free = drain_remainder("b", admin.LagReply(brokers=["a", "b"]), [fifo], reply)
    assert (rest.is_drained, free) == (True, [fifo])


def test_the_flags_are_understood() -> None:
    invocation = invoked("drain", "b", "--wait", "5m")
    args = invocation.args
    assert (invocation.run, args.group, args.undo, args.wait) == (run_drain, "b", False, 300_000)


def test_a_single_broker_cannot_be_drained(
    popmq_broker: RunningBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", "broker-a", "--yes", "--endpoint", popmq_broker.endpoint]) == 1
    assert "owns the topics and consumer groups" in capsys.readouterr().err
    assert main(["drain", "broker-b", "--endpoint", popmq_broker.endpoint]) == 4
    assert "no broker group broker-b: did you mean broker-a?" in capsys.readouterr().err


def test_a_timer_that_fires_during_the_look_is_counted(popmq_broker: RunningBroker) -> None:
    class Slow(Client):
        """Meanwhile the time of the delayed message comes."""

        def topics(self, *, system: bool) -> list[admin.Topic]:
            popmq_broker.advance("1h")
            return super().topics(system=system)

    popmq_broker.send("orders", b"now")
    popmq_broker.send("orders", b"later", delay="30m")
    (message,) = popmq_broker.receive("orders", "workers")
    popmq_broker.ack(message)
    with Slow(popmq_broker.endpoint) as client:
        assert not read_remainder(client, "broker-a").is_drained
        assert read_remainder(client, "broker-a").messages == 1


def test_what_cannot_be_counted_is_not_gone_and_its_topics_stay() -> None:
    reply = admin.DrainReply(draining=True, counted=True)
    lag = admin.LagReply(incomplete="broker b: away")
    rest, free = drain_remainder("b", lag, [admin.Topic(name="fifo", brokers=["b"])], reply)
    assert not rest.is_drained
    assert free == []
