"""Ways to brokers: routes that come and go, handles that find their broker, placement."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import Message
from proxy.houses import AwaitedCall

from popmq.common.clock import SystemClock
from popmq.common.errors import Code, InvalidReceiptHandle, PopmqError, Unavailable
from popmq.common.protocol.frames import Address
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.wire import admin_pb2, controller_pb2
from popmq.proxy.admin.admin_service import SERVICE
from popmq.proxy.brokers.broker_ports import (
    KEEP_ABSENT_MS,
    NEWER_MASTER_MS,
    RoutedBrokers,
    StaticBrokers,
    broker_of_handle,
)
from popmq.proxy.messaging.placement import choose_queue
from popmq.proxy.proxy import Proxy
from popmq.testing.harness.core_broker import SMALL


class Way:
    """A port that only knows whether it was closed."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address, self.closed = name, address, False
        self.asked: list[Kind] = []
        self.usable = True

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: Any) -> int:
        self.asked.append(kind)
        return 1

    def cancel(self, request_id: int) -> None: ...

    async def close(self) -> None:
        self.closed = True


class Answering(Way):
    """Answers each request at once, with an empty reply."""

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: Any) -> int:
        on_reply(b"")
        return super().request(kind, body, timeout_ms, on_reply)


class Controller:
    """Answers long polls when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[controller_pb2.RoutesRequest, Any]] = asyncio.Queue()
        self.cancelled: list[int] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: Any) -> int:
        request = controller_pb2.RoutesRequest.FromString(body)
        assert kind is Kind.ROUTES
        assert timeout_ms > request.wait_ms
        self.asked.put_nowait((request, on_reply))
        return 7

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    async def answer(
        self,
        version: int,
        epoch: int = 0,
        *,
        owner: str = "",
        absent: Sequence[str] = (),
        **brokers: str,
    ) -> int:
        """Answer the open long poll; return the version that it knew."""
        request, on_reply = await self.asked.get()
        addresses = [
            controller_pb2.BrokerAddress(broker=b, address=a, epoch=epoch)
            for b, a in brokers.items()
        ]
        reply = controller_pb2.RoutesReply(
            version=version, brokers=addresses, owner=owner, absent=absent
        )
        on_reply(reply.SerializeToString())
        return request.known_version


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def wall_ms(self) -> int:
        return self.ms

    def boot_ms(self) -> int:
        return self.ms


class Followed:
    """RoutedBrokers with controllers, a clock and the ways that were opened."""

    def __init__(self, controllers: int = 1, way: type[Way] = Way) -> None:
        self._way = way
        self.controllers = [Controller() for _ in range(controllers)]
        self.controller, self.clock, self.ways = self.controllers[0], Clock(), list[Way]()
        self.brokers = RoutedBrokers(self.controllers, self.open, self.clock)
        self.brokers.start()

    def way(self, name: str) -> Way:
        """The one that a request to that broker leaves on now."""
        before = [len(way.asked) for way in self.ways]
        self.brokers.port(name).request(Kind.LAG, b"", 1_000, lambda answer: None)
        (asked,) = [w for w, n in zip(self.ways, before, strict=True) if len(w.asked) > n]
        return asked

    def open(self, name: str, address: str) -> Way:
        Address.parse(address)  # as FramePort does
        self.ways.append(self._way(name, address))
        return self.ways[-1]


async def test_routes_open_a_way_to_each_broker() -> None:
    followed = Followed()
    with pytest.raises(Unavailable):
        followed.brokers.port("a")
    assert await followed.controller.answer(3, b="h:2", a="h:1") == 0
    assert followed.brokers.names() == ("a", "b")
    assert [(connection.name, connection.address) for connection in followed.ways] == [
        ("b", "h:2"),
        ("a", "h:1"),
    ]
    assert followed.way("a") is followed.ways[1]
    request, _ = await followed.controller.asked.get()
    assert request.known_version == 3
    await followed.brokers.stop()
    assert all(connection.closed for connection in followed.ways)
    assert followed.controller.cancelled == [7]


def begin(proxy: Proxy, request: Message, remaining_ms: int | None = None) -> AwaitedCall:
    """A command on its way."""
    call = AwaitedCall(remaining_ms)
    name = type(request).__name__.removesuffix("Request")
    (start,) = (m.start for m in proxy.methods() if m.path == f"{SERVICE}{name}")
    assert start is not None
    start(call, request.SerializeToString())
    return call


def change(proxy: Proxy, remaining_ms: int | None = None) -> AwaitedCall:
    request = admin_pb2.CreateGroupRequest(group=admin_pb2.Group(name="g"))
    return begin(proxy, request, remaining_ms)


def code(call: AwaitedCall) -> int:
    return admin_pb2.GroupReply.FromString(call.sent[0]).status.code


async def test_a_change_waits_for_the_owner_and_takes_no_lone_broker_group_for_it() -> None:
    followed = Followed(way=Answering)
    proxy = Proxy(SMALL, followed.brokers, SystemClock())
    await followed.controller.answer(1, b="h:2")  # `a` has not registered yet
    followed.brokers.changed.clear()
    calls = [change(proxy), change(proxy), change(proxy, remaining_ms=101)]
    calls[1].leave()
    await calls[2].ended.wait()
    assert code(calls[2]) == Code.HA_NOT_AVAILABLE
    assert (calls[0].sent, followed.ways[0].asked) == ([], [])
    await followed.controller.answer(2, a="h:1", b="h:2", owner="a")
    await calls[0].ended.wait()
    assert code(calls[0]) == Code.OK
    asked = {way.name: way.asked for way in followed.ways}
    assert asked == {"a": [Kind.CREATE_GROUP], "b": []}
    await followed.brokers.stop()


ABSENT = "broker group b is absent: no master of it has registered since the controllers"


async def test_what_is_asked_of_every_group_names_the_absent_ones() -> None:
    followed = Followed(way=Answering)
    proxy = Proxy(SMALL, followed.brokers, SystemClock())
    await followed.controller.answer(1, a="h:1")
    followed.brokers.changed.clear()
    reset = begin(proxy, admin_pb2.ResetOffsetRequest(group="g", topic="t", oldest=True))
    resumed = begin(proxy, admin_pb2.UnparkRequest(group="g", topic="t", key="k"))
    lag = begin(proxy, admin_pb2.LagRequest(group="g"))
    assert followed.ways[0].asked == []  # until the controller knows all groups
    await followed.controller.answer(2, a="h:1", owner="a", absent=["b"])
    for call in (reset, resumed, lag):
        await call.ended.wait()
    for call, kind in ((reset, admin_pb2.ResetOffsetReply), (lag, admin_pb2.LagReply)):
        reply = kind.FromString(call.sent[0])
        assert reply.status.code == Code.OK
        assert reply.incomplete.startswith(ABSENT)
    refusal = admin_pb2.UnparkReply.FromString(resumed.sent[0]).status
    assert refusal.code == Code.HA_NOT_AVAILABLE
    assert refusal.message.startswith(ABSENT)
    assert refusal.message.endswith("; done at a")

    await followed.controller.answer(3, a="h:1", b="h:2", owner="a")
    await followed.brokers.changed.wait()
    again = begin(proxy, admin_pb2.ResetOffsetRequest(group="g", topic="t", oldest=True))
    assert admin_pb2.ResetOffsetReply.FromString(again.sent[0]).incomplete == ""
    await followed.brokers.stop()


async def test_a_request_for_a_group_of_the_topic_waits_although_the_group_is_absent() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1", owner="a", absent=["b"])
    followed.brokers.awaited_port("b").request(Kind.PUT, b"", 5_000, lambda answer: None)
    await followed.controller.answer(2, a="h:1", b="h:2", owner="a")
    await followed.controller.asked.get()
    assert {way.name: way.asked for way in followed.ways} == {"a": [], "b": [Kind.PUT]}
    await followed.brokers.stop()


async def test_a_broker_that_moved_gets_a_new_way_and_the_others_keep_theirs() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1", b="h:2")
    await followed.controller.answer(2, a="h:9", b="h:2")
    assert [connection.address for connection in followed.ways] == ["h:1", "h:2", "h:9"]
    assert followed.way("a") is followed.ways[2]
    assert followed.way("b") is followed.ways[1]
    await followed.brokers.stop()
    assert followed.ways[0].closed


async def test_the_last_routes_stay_while_the_controller_is_away() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    _, on_reply = await followed.controller.asked.get()
    on_reply(Unavailable("the controller is away"))
    assert followed.brokers.names() == ("a",)
    # It asks again by itself.
    assert await followed.controller.answer(2, a="h:1", b="h:2") == 1
    assert followed.brokers.names() == ("a", "b")
    await followed.brokers.stop()


async def test_a_broker_that_is_not_listed_any_more_keeps_its_way_for_a_while() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1", b="h:2")
    await followed.controller.answer(2, b="h:2")
    assert followed.brokers.names() == ("a", "b")
    followed.clock.ms += KEEP_ABSENT_MS + 1
    await followed.controller.answer(3, b="h:2")
    assert followed.brokers.names() == ("b",)
    with pytest.raises(Unavailable):
        followed.brokers.port("a")
    await followed.brokers.stop()


async def test_routes_that_cannot_be_read_change_nothing() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    _, on_reply = await followed.controller.asked.get()
    on_reply(b"\xff")
    assert followed.brokers.names() == ("a",)
    await followed.controller.answer(1, a="h:1")
    await followed.brokers.stop()


async def test_a_broker_with_an_impossible_address_hides_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    await followed.controller.answer(2, 0, **{"0": "nonsense", "a": "nonsense", "b": "h:2"})
    assert followed.brokers.names() == ("a", "b")
    assert followed.way("a") is followed.ways[0]
    # It goes on with the routes that it got, and does not ask for them in a loop.
    assert await followed.controller.answer(3, a="h:9", b="h:2") == 2
    assert [connection.address for connection in followed.ways] == ["h:1", "h:2", "h:9"]
    await followed.brokers.stop()

    assert "address 'nonsense' is neither" in str([record.__dict__ for record in caplog.records])


async def test_of_two_controllers_the_one_that_knows_the_later_epoch_is_followed() -> None:
    followed = Followed(controllers=2)
    first, second = followed.controllers
    await first.answer(1, a="h:1", epoch=4)
    await second.answer(9, a="h:2", epoch=5)
    assert followed.way("a") is followed.ways[1]
    await first.answer(2, a="h:1", epoch=4)  # it has not read the new record yet
    assert followed.way("a") is followed.ways[1]
    await first.answer(3, a="h:3", epoch=6)
    assert followed.way("a") is followed.ways[2]
    await followed.brokers.stop()
    assert all(way.closed for way in followed.ways)


async def test_a_replaced_master_is_not_followed_while_the_controller_that_knows_is_new() -> None:
    """A controller that starts again lists a broker group when its master has registered."""

    followed = Followed(controllers=2)
    old, better = followed.controllers
    await better.answer(9, a="h:2", epoch=5)
    await better.answer(1)
    await old.answer(1, a="h:1", epoch=4)
    await old.answer(2, a="h:1", epoch=4)
    assert followed.way("a") is followed.ways[0]
    followed.clock.ms += NEWER_MASTER_MS
    await old.answer(3, a="h:1", epoch=4)
    await old.answer(4, a="h:1", epoch=4)
    assert followed.way("a") is followed.ways[1]
    await followed.brokers.stop()


async def test_while_one_controller_is_away_or_new_the_other_is_enough() -> None:
    followed = Followed(controllers=2)
    first, second = followed.controllers
    await first.answer(1, a="h:1", epoch=4)
    _, on_reply = await second.asked.get()
    on_reply(Unavailable("the controller is away"))
    assert followed.brokers.names() == ("a",)
    await second.answer(1)  # it has heard nobody yet
    followed.clock.ms += 2 * KEEP_ABSENT_MS
    await first.answer(2, a="h:1", b="h:2", epoch=4)
    await second.answer(1)
    assert followed.brokers.names() == ("a", "b")
    await followed.brokers.stop()


async def test_a_request_that_waits_at_a_replaced_master_goes_to_the_next_one() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    followed.brokers.port("a").request(Kind.PUT, b"", 5_000, lambda answer: None)
    await followed.controller.answer(2, a="h:2")
    assert followed.ways[1].asked == [Kind.PUT]
    await followed.brokers.stop()


def handle(broker: str) -> bytes:
    return ReceiptHandle(broker, 64, 9, 1, 5, 1, 1, 1, 0).encode(b"key")


def test_a_handle_finds_its_broker() -> None:
    way = Way("a", "h:1")
    assert broker_of_handle(StaticBrokers({"a": way}), handle("a")) == ("a", way)


@pytest.mark.parametrize("known", [{}, {"a": Way("a", "h:1")}])
def test_a_handle_of_a_broker_group_that_is_not_known_now_may_be_tried_again(
    known: dict[str, Way],
) -> None:
    with pytest.raises(PopmqError, match="'b' is not known now") as caught:
        broker_of_handle(StaticBrokers(known), handle("b"))
    assert caught.value.code is Code.HA_NOT_AVAILABLE


@pytest.mark.parametrize("name", ["", "b 1", "broker/b", "b" * 101])
def test_a_handle_of_a_broker_group_that_cannot_exist_is_given_up(name: str) -> None:
    with pytest.raises(InvalidReceiptHandle, match="no group can have that name"):
        broker_of_handle(StaticBrokers({"a": Way("a", "h:1")}), handle(name))


async def test_a_request_to_an_absent_group_of_a_topic_waits_for_its_route() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    answers: list[Any] = []
    port = followed.brokers.awaited_port("b")
    port.request(Kind.PUT, b"", 5_000, answers.append)
    assert followed.brokers.names() == ("a",)
    assert not followed.brokers.has_master("b")
    await followed.controller.answer(2, a="h:1", b="h:2")
    assert followed.brokers.names() == ("a", "b")
    assert followed.ways[1].asked == [Kind.PUT]
    assert followed.brokers.awaited_port("b") is port
    assert answers == []
    await followed.brokers.stop()


async def test_an_absent_group_of_a_topic_is_forgotten_after_a_minute_and_refused() -> None:
    followed = Followed()
    await followed.controller.answer(1, a="h:1")
    answers: list[Any] = []
    followed.brokers.awaited_port("b").request(Kind.PUT, b"", 90_000, answers.append)
    followed.clock.ms += KEEP_ABSENT_MS + 1
    await followed.controller.answer(2, a="h:1")
    assert [answer.code for answer in answers] == [Code.HA_NOT_AVAILABLE]
    with pytest.raises(Unavailable):
        followed.brokers.port("b")
    await followed.brokers.stop()


BROKERS = ["broker-a", "broker-b", "broker-c"]
PLACES = [("broker-a", 6), ("broker-a", 5), ("broker-a", 5), ("broker-a", 7), ("broker-c", 7)]
KEYS = [f"01{n:032x}" for n in range(6_000)]


def test_a_key_always_meets_the_same_queue() -> None:
    # Fixed for ever: a resend after an upgrade must find the first attempt.
    assert [choose_queue(key, BROKERS, 8) for key in KEYS[:5]] == PLACES
    assert choose_queue(KEYS[0], list(reversed(BROKERS)), 8) == choose_queue(KEYS[0], BROKERS, 8)


def test_keys_spread_evenly_over_brokers_and_queues() -> None:
    counts = Counter(choose_queue(key, BROKERS, 8) for key in KEYS)
    expected = len(KEYS) / 24
    assert len(counts) == 24
    assert all(0.7 * expected < count < 1.3 * expected for count in counts.values())


def test_a_new_broker_takes_only_its_own_share() -> None:
    more = [*BROKERS, "broker-d"]
    moved = [key for key in KEYS if choose_queue(key, BROKERS, 8) != choose_queue(key, more, 8)]
    assert all(choose_queue(key, more, 8)[0] == "broker-d" for key in moved)
    assert 0.2 < len(moved) / len(KEYS) < 0.3


async def test_a_broker_group_whose_epoch_rises_is_told_of_and_no_other() -> None:
    controller, clock = Controller(), Clock()
    texts: list[str] = []
    brokers = RoutedBrokers([controller], Way, clock, texts.append)
    brokers.start()
    for version, epoch in ((1, 1), (2, 1), (3, 2), (4, 1)):
        brokers.changed.clear()
        await controller.answer(version, epoch, a="a:1")
        await brokers.changed.wait()
    assert texts == ["a"]
    await brokers.stop()
