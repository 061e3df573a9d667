"""Receives from a topic that does not exist yet: they wait as on an empty one, and make nothing."""

from dataclasses import replace

import pytest
from broker.meta_pair import Two, named

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, decode_pop_reply
from popmq.common.settings.settings import PollSettings
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies, pop

LETTERS = "%DLQ%shop"


class Waiting:
    """A receive in progress."""

    def __init__(
        self, core: CoreBroker, topic: str = "orders", *, poll_ms: int = 20_000, limit: int = 16
    ) -> None:
        self._core = core
        self.replies: list[bytes | PopmqError] = []
        body = pop(topic, "readers", limit=limit, poll_ms=poll_ms)
        self.number = core.server.request(Kind.POP, body, 30_000, self.replies.append)
        core.run_until_idle()

    @property
    def received(self) -> list[bytes] | None:
        """None: it waits."""
        if not self.replies:
            return None
        (reply,) = self.replies
        assert isinstance(reply, bytes), reply
        return bodies(decode_pop_reply(reply).deliveries)


@pytest.fixture
def core() -> CoreBroker:
    return named("broker-a", auto_create=True)


def test_a_receive_waits_for_the_topic_and_wakes_at_its_first_send(core: CoreBroker) -> None:
    receive = Waiting(core)
    core.advance(5_000)
    assert receive.received is None
    assert core.broker.registry.find_topic("orders") is None
    assert core.broker.registry.find_group("readers") is None
    core.topic("orders")
    core.run_until_idle()
    assert receive.received is None
    core.send("orders", b"one")
    assert receive.received == [b"one"]


@pytest.mark.parametrize("created", [False, True])
def test_its_time_is_over_when_it_said_so(core: CoreBroker, created: bool) -> None:
    receive = Waiting(core)
    core.advance(15_000)
    if created:
        core.topic("orders")
    core.advance(4_999)
    assert receive.received is None
    core.advance(1)
    assert receive.received == []


def test_a_receive_that_does_not_wait_gets_nothing(core: CoreBroker) -> None:
    assert Waiting(core, poll_ms=0).received == []


def test_a_notification_comes_at_the_first_send(core: CoreBroker) -> None:
    asked = Waiting(core, limit=0)
    core.topic("orders")
    core.send("orders", b"one")
    (reply,) = asked.replies
    assert isinstance(reply, bytes)
    assert decode_pop_reply(reply).remaining == 1


def test_all_that_wait_go_on_and_one_that_left_does_not(core: CoreBroker) -> None:
    first, left, second = Waiting(core), Waiting(core), Waiting(core)
    core.server.cancel(left.number)
    core.topic("orders", queues=1)
    core.send("orders", b"one")
    core.send("orders", b"two")
    assert (first.received, second.received, left.received) == ([b"one"], [b"two"], None)


def test_they_count_among_those_that_wait() -> None:
    topic = replace(SMALL.topic, auto_create=True)
    core = CoreBroker(settings=replace(SMALL, topic=topic, poll=PollSettings(waiters=1)))
    Waiting(core)
    refused = Waiting(core)
    (refusal,) = refused.replies
    assert isinstance(refusal, PopmqError)
    assert refusal.code is Code.TOO_MANY_REQUESTS


@pytest.mark.parametrize("name", ["orders", "%odd", "%DLQ%nobody"])
def test_what_cannot_come_by_itself_is_not_found(name: str) -> None:
    core = named("broker-a", auto_create=name != "orders")
    (refusal,) = Waiting(core, name).replies
    assert isinstance(refusal, PopmqError)
    assert refusal.code is Code.TOPIC_NOT_FOUND


def test_a_receive_of_dead_letters_waits_for_the_first_one() -> None:
    core = CoreBroker()  # where no topic is made by a send
    core.topic("orders")
    core.group("shop", max_attempts=1)
    receive = Waiting(core, LETTERS)
    assert receive.received is None
    core.send("orders", b"poison")
    (delivery,) = core.receive("orders", "shop")
    core.reject("orders", "shop", delivery.handle)
    core.run_until_idle()
    assert receive.received == [b"poison"]


def test_each_reason_for_an_absent_topic_has_its_own_text() -> None:
    core = CoreBroker()
    core.group("shop")
    texts = {}
    for name in ("orders", LETTERS, "%DLQ%nobody", "%odd", "%RETRY%shop+orders"):
        with pytest.raises(PopmqError) as caught:
            core.broker.registry.topic(name)
        texts[name] = str(caught.value).partition(": ")[2]
    assert texts == {
        "orders": "create it with `popmq topic create orders`, or set topic.auto_create",
        LETTERS: "consumer group shop has no dead letters yet",
        "%DLQ%nobody": "there is no consumer group nobody, and it left no dead letters; "
        "`popmq group list` shows the groups",
        "%odd": "no new topic begins with %",
        "%RETRY%shop+orders": "popmq makes topics of such names, and clients cannot create them",
    }


def test_a_receive_at_a_broker_group_that_follows_makes_no_topic_at_the_owner() -> None:
    two = Two(auto_create=True)
    two.follow()
    receive = Waiting(two.other)
    two.follow()
    assert two.owner.broker.registry.find_topic("orders") is None
    assert receive.received is None
    two.owner.topic("orders")
    two.owner.group("readers")
    two.follow()
    two.other.send("orders", b"one")
    assert receive.received == [b"one"]
