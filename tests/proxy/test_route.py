"""What a proxy remembers of topics and groups: descriptions that are old, late, or go back."""

from collections.abc import Callable
from typing import Any

import pytest

from popmq.common.errors import Code, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.settings.settings import TopicSettings
from popmq.common.topics import TopicConfig
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.brokers.metadata_cache import (
    DESCRIBE_TIMEOUT_MS,
    NEWER_STATE_MS,
    TTL_MS,
    MetadataCache,
)
from popmq.testing.harness.clock import ManualClock


class Describing:
    """Two broker groups, one of which answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[OnReply] = []
        self.clock = ManualClock()
        self.routes = MetadataCache(StaticBrokers({"a": self}), self.clock, TopicSettings())
        self.heard: list[TopicConfig | PopmqError] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        assert kind is Kind.DESCRIBE_TOPIC
        self.asked.append(on_reply)
        return len(self.asked)

    def cancel(self, request_id: int) -> None: ...

    def ask(self) -> None:
        self.routes.topic("orders", self.heard.append)

    def answer(self, topic_id: int, state: tuple[int, int]) -> None:
        topic = admin_pb2.Topic(name="orders", id=topic_id, queues=4, permission="rw")
        reply = admin_pb2.TopicReply(
            status=admin_pb2.Status(code=Code.OK),
            topic=topic,
            meta_epoch=state[0],
            meta_version=state[1],
        )
        self.asked.pop(0)(reply.SerializeToString())

    def id_now(self) -> int:
        """As the next call hears it, without another question."""
        before = len(self.asked)
        self.ask()
        assert len(self.asked) == before
        result: Any = self.heard[-1]
        return int(result.id)


def passed(bench: Describing) -> None:
    bench.clock.advance(TTL_MS)


def forgotten(bench: Describing) -> None:
    bench.routes.forget_topic("orders")


@pytest.mark.parametrize("again", [passed, forgotten])
@pytest.mark.parametrize(
    ("before", "after", "taken"),
    [
        ((7, 10), (7, 9), False),
        ((7, 10), (6, 99), False),
        ((7, 10), (7, 10), True),
        ((7, 10), (7, 11), True),
        ((7, 10), (8, 3), True),
        ((7, 10), (0, 0), True),
        ((0, 0), (7, 3), True),
    ],
)
def test_a_description_that_is_older_than_the_one_before_replaces_nothing(
    again: Callable[[Describing], None],
    before: tuple[int, int],
    after: tuple[int, int],
    taken: bool,
) -> None:
    """(0, 0) is said by a broker of a version that does not know its state."""
    bench = Describing()
    bench.ask()
    bench.answer(70, before)
    assert bench.id_now() == 70
    again(bench)
    bench.ask()
    bench.answer(65, after)
    assert bench.id_now() == (65 if taken else 70)


def test_a_description_counts_as_old_from_its_question_on() -> None:
    bench = Describing()
    bench.ask()
    bench.clock.advance(TTL_MS - 1)
    bench.answer(70, (1, 1))
    assert bench.id_now() == 70
    bench.clock.advance(1)
    bench.ask()
    assert len(bench.asked) == 1


def test_what_was_newest_is_remembered_beside_a_refusal() -> None:
    bench = Describing()
    bench.ask()
    bench.answer(70, (7, 10))
    bench.clock.advance(TTL_MS)
    bench.ask()
    bench.asked.pop(0)(Unavailable("the owner is away"))
    assert isinstance(bench.heard[-1], Unavailable)
    bench.clock.advance(DESCRIBE_TIMEOUT_MS)
    bench.ask()
    bench.answer(65, (7, 9))
    assert bench.id_now() == 70


def test_an_older_description_is_believed_when_no_newer_one_has_come_for_a_while() -> None:
    """The owner's data was restored from a backup while the proxy went on."""
    bench = Describing()
    bench.ask()
    bench.answer(70, (7, 10))
    for _ in range(NEWER_STATE_MS // TTL_MS - 1):
        bench.clock.advance(TTL_MS)
        bench.ask()
        bench.answer(64, (1, 1))
        assert bench.id_now() == 70
    bench.clock.advance(TTL_MS)
    bench.ask()
    bench.answer(64, (1, 1))
    assert bench.id_now() == 64
