"""Receives that ask only whether there is something: one is told at a time, and none for long."""

from dataclasses import replace

import pytest

from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PopReply, decode_pop_reply
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies, pop


class Asked:
    """A notification in progress; `said` is whether there was something, once it was said."""

    def __init__(self, core: CoreBroker, *, poll_ms: int = 20_000, **more: object) -> None:
        self.replies: list[bytes | Exception] = []
        body = pop("orders", "g", limit=0, poll_ms=poll_ms, **more)  # type: ignore[arg-type]
        self.number = core.server.request(Kind.POP, body, 30_000, self.replies.append)
        core.run_until_idle()

    @property
    def said(self) -> bool | None:
        if not self.replies:
            return None
        (reply,) = self.replies
        assert isinstance(reply, bytes)
        decoded_reply: PopReply = decode_pop_reply(reply)
        assert not decoded_reply.deliveries
        return bool(decoded_reply.remaining)


@pytest.mark.parametrize("type_", [GroupType.NORMAL, GroupType.FIFO])
def test_it_says_at_once_what_is_there_and_takes_nothing(type_: GroupType) -> None:
    core = CoreBroker()
    core.topic("orders")
    core.group("g", type=type_)
    assert Asked(core, poll_ms=0).said is False
    core.send("orders", b"one")
    assert Asked(core, poll_ms=0).said is True
    assert bodies(core.receive("orders", "g")) == [b"one"]


def test_one_that_waits_is_told_when_something_comes_and_with_nothing_at_its_end(
    core: CoreBroker,
) -> None:
    asked, short = Asked(core), Asked(core, poll_ms=5_000)
    core.advance(4_999)
    assert (asked.said, short.said) == (None, None)
    core.advance(1)
    assert (asked.said, short.said) == (None, False)
    core.send("orders", b"one")
    assert asked.said is True


def test_of_those_that_wait_one_is_told_and_the_next_when_somebody_got_it(
    core: CoreBroker,
) -> None:
    first, second, third = Asked(core), Asked(core), Asked(core)
    core.send("orders", b"one")
    core.send("orders", b"two")
    assert [request.said for request in (first, second, third)] == [True, None, None]
    core.receive("orders", "g", limit=1)
    core.run_until_idle()
    assert [request.said for request in (second, third)] == [True, None]
    core.receive("orders", "g", limit=1)
    core.advance(1_000)
    assert third.said is None  # nothing is left


def test_a_hit_that_nobody_follows_goes_to_the_next_after_100_ms(core: CoreBroker) -> None:
    first, second = Asked(core), Asked(core)
    core.send("orders", b"one")
    assert (first.said, second.said) == (True, None)
    core.advance(99)
    assert second.said is None
    core.advance(1)
    assert second.said is True
    third = Asked(core)
    assert third.said is None
    core.advance(100)
    assert third.said is True


def test_a_receive_that_passes_over_what_was_told_lets_the_next_message_be_told_at_once(
    core: CoreBroker,
) -> None:
    first, second = Asked(core), Asked(core)
    core.send("orders", b"other", tag="b")
    assert first.said is True
    assert core.receive("orders", "g", expression="a") == []
    core.send("orders", b"mine", tag="a")
    assert second.said is True


def test_what_is_there_and_cannot_be_had_is_told_ten_times_a_second_at_most() -> None:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(max_in_flight_per_queue=1)))
    core.topic("orders", queues=1)
    for body in (b"one", b"two"):
        core.send("orders", body)
    core.receive("orders", "g")
    answer, asked = 0, Asked(core)
    for _ in range(1_000):
        if asked.said:
            answer += 1
            with pytest.raises(PopmqError, match="in flight"):
                core.receive("orders", "g")
            asked = Asked(core)
        core.advance(1)
    assert 9 <= answer <= 11


def test_one_whose_asker_left_is_not_told(core: CoreBroker) -> None:
    first, second = Asked(core), Asked(core)
    core.server.cancel(first.number)
    assert core.broker.polling.count == 1
    core.send("orders", b"one")
    assert (first.said, second.said) == (None, True)
    assert core.broker.polling.count == 0


def test_a_retry_that_is_due_is_told(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    asked = Asked(core)
    core.advance(900)
    assert asked.said is None
    core.advance(200)
    assert asked.said is True


def test_plain_receives_and_notifications_wait_side_by_side(core: CoreBroker) -> None:
    replies: list[bytes | Exception] = []
    body = pop("orders", "g", poll_ms=20_000)
    core.server.request(Kind.POP, body, 30_000, replies.append)
    asked = Asked(core)
    core.send("orders", b"one")
    (reply,) = replies
    assert isinstance(reply, bytes)
    assert bodies(list(hop.decode_pop_reply(reply).deliveries)) == [b"one"]
    assert asked.said is None
