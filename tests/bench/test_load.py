"""The load generator against a real popmq: counts are right, and refusals are seen."""

import pytest

from bench.alone import IdlePolls
from popmq.cli.load.consuming import Consumer, ConsumerSession
from popmq.cli.load.end_to_end import lateness, send_and_receive
from popmq.cli.load.http2 import HEADER_VARIANTS
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import AckTemplate, SendTemplate
from popmq.cli.load.sending import ClosedLoad, OpenLoad, RocketMqSender
from popmq.cli.load.target import PopmqTopic, Target, check_stored
from popmq.testing.running_broker import RunningBroker

LIMIT_S = 60.0


def lanes(
    reactor: Reactor, target: Target, *, connections: int = 2, body: int = 64
) -> list[RocketMqSender]:
    template = SendTemplate(target.topic, body)
    return [RocketMqSender(channel, template) for channel in target.connect(reactor, connections)]


def consumer(reactor: Reactor, target: Target, *, acks: str) -> Consumer:
    channels = target.connect(reactor, 2)
    ConsumerSession(reactor, channels[0], target.group, [target.topic])
    receives = target.receives(wait_ms=1)
    return Consumer(reactor, channels, receives, AckTemplate(target.topic, target.group), acks=acks)


def test_what_a_closed_load_counts_is_what_is_stored(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    tally = ClosedLoad(reactor, lanes(reactor, topic.target()), 8).run(LIMIT_S, limit=100)
    assert (tally.asked, tally.done, dict(tally.refusals)) == (100, 100, {})
    assert len(tally.seconds) == 100
    assert topic.stored() == 100


def test_a_message_of_several_frames_arrives_whole(popmq: RunningBroker, reactor: Reactor) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    load = ClosedLoad(reactor, lanes(reactor, topic.target(), connections=1, body=50_000), 8)
    assert load.run(LIMIT_S, limit=40).done == 40  # 2 MB, more than the first window
    (first, *_) = popmq.receive("t", "g")
    assert len(first.body) == 50_000


@pytest.mark.parametrize("variant", HEADER_VARIANTS)
def test_headers_that_change_are_read_by_the_server(
    popmq: RunningBroker, reactor: Reactor, variant: str
) -> None:
    target = PopmqTopic(popmq.endpoint, "t", "g").target(variant=variant)
    tally = ClosedLoad(reactor, lanes(reactor, target), 4).run(LIMIT_S, limit=50)
    assert (tally.done, dict(tally.refusals)) == (50, {})


def test_a_refused_send_is_counted_with_its_code_and_not_as_done(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    missing = Target(popmq.endpoint, "no-such-topic", "g", topic.target().brokers)
    tally = ClosedLoad(reactor, lanes(reactor, missing), 4).run(LIMIT_S, limit=20)
    assert tally.done == 0
    ((why, count),) = tally.refusals.items()
    assert count == 20
    assert why.startswith("TOPIC_NOT_FOUND (40402)")


def test_a_call_that_is_not_served_is_a_refusal_with_its_grpc_status(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    target = PopmqTopic(popmq.endpoint, "t", "g").target()
    (channel,) = target.connect(reactor, 1)
    ended: list[str] = []
    channel.call(
        "/no.such/Method", b"\0\0\0\0\0", lambda token, status, data: ended.append(status), 0
    )
    channel.flush()
    reactor.run(lambda: bool(ended), limit_s=LIMIT_S, what="the answer")
    assert ended[0].split()[0] == "12"  # UNIMPLEMENTED


@pytest.mark.more
def test_an_open_load_asks_for_as_many_as_its_rate_says(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    tally = OpenLoad(reactor, lanes(reactor, topic.target()), 500).run(0.2)
    assert tally.asked == 100
    assert topic.stored() == tally.done == 100


def test_a_rate_that_the_server_cannot_follow_ends_the_run(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    target = PopmqTopic(popmq.endpoint, "t", "g").target()
    load = OpenLoad(reactor, lanes(reactor, target), 1e9, max_open=100)
    with pytest.raises(LoadError, match="100 sends are unanswered"):
        load.run(60)


@pytest.mark.parametrize("acks", ["each", "batch"])
def test_a_consumer_acks_all_that_is_there_once(
    popmq: RunningBroker, reactor: Reactor, acks: str
) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    ClosedLoad(reactor, lanes(reactor, topic.target()), 8).run(LIMIT_S, limit=100)
    consumed = consumer(reactor, topic.target(), acks=acks).run(LIMIT_S)
    assert (consumed.acks.done, consumed.acks.refused_count, consumed.twice) == (100, 0, 0)
    assert consumed.arrivals.done == len(consumed.seen) == 100
    assert topic.left() == 0


def test_what_is_not_acked_is_left_and_what_comes_again_is_counted_as_twice(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    ClosedLoad(reactor, lanes(reactor, topic.target()), 8).run(LIMIT_S, limit=10)
    unacking = consumer(reactor, topic.target(), acks="none")
    consumed = unacking.run(LIMIT_S)
    assert (consumed.arrivals.done, consumed.acks.done, topic.left()) == (10, 0, 10)
    popmq.advance("10m")
    again = unacking.run(LIMIT_S)
    assert again.twice == 10


def test_a_refused_ack_is_counted_with_its_code(popmq: RunningBroker, reactor: Reactor) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    PopmqTopic(popmq.endpoint, "t2", "other")
    ClosedLoad(reactor, lanes(reactor, topic.target()), 8).run(LIMIT_S, limit=5)
    target = topic.target()
    channels = target.connect(reactor, 1)
    foreign = AckTemplate("t", "other")
    wrong = Consumer(reactor, channels, target.receives(wait_ms=1), foreign)
    consumed = wrong.run(LIMIT_S)
    assert consumed.acks.done == 0
    assert consumed.acks.refused_count == 5
    assert all(why.startswith("INVALID_RECEIPT_HANDLE") for why in consumed.acks.refusals)


def test_end_to_end_waits_for_every_message(popmq: RunningBroker, reactor: Reactor) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    both = send_and_receive(
        reactor, topic.target(), rate=200, seconds=0.5, body=64, connections=1, wait_ms=100
    )
    assert both.sends.done == both.consumed.acks.done == len(both.consumed.seen) == 100
    assert topic.left() == 0
    assert min(both.consumed.arrivals.seconds) > 0


@pytest.mark.more
def test_delayed_messages_are_late_and_never_early(popmq: RunningBroker, reactor: Reactor) -> None:
    topic = PopmqTopic(popmq.endpoint, "t", "g")
    due = [number / 1000 for number in range(100)]
    both = lateness(reactor, topic.target(), due=due, ahead_s=2, body=64, wait_ms=500)
    assert len(both.consumed.seen) == 100
    assert min(both.consumed.arrivals.seconds) >= 0


def test_idle_polls_are_asked_again_when_they_come_back(
    popmq: RunningBroker, reactor: Reactor
) -> None:
    target = PopmqTopic(popmq.endpoint, "t", "g").target()
    idle = IdlePolls(reactor, target.connect(reactor, 2), target.receives(wait_ms=10)[0])
    idle.begin(3)
    reactor.run(lambda: idle.came_back >= 12, limit_s=LIMIT_S, what="polls")
    assert idle.refused == 0


def test_less_stored_than_answered_is_an_error() -> None:
    check_stored("sends", 5, 10, 15)
    with pytest.raises(LoadError, match="5 answered OK, 4 stored"):
        check_stored("sends", 5, 10, 14)
