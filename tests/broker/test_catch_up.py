"""Groups that read far behind, beside others that keep the loop busy."""

import random

import pytest

from popmq.broker.pop.catch_up_throttle import BURST_MS, HELD_LIMIT, QUIET_MS, CatchUpThrottle
from popmq.common.errors import Code, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import MessageSettings, PopSettings, Settings, StoreSettings
from popmq.common.wire.pull_pb2 import PullRequest
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import Answer, CoreBroker, pop

OLD = ("g", "old")


class Loop:
    """Time of a loop, and receives that take some of it."""

    def __init__(self, percent: int) -> None:
        self.now_ms = 1_000
        self.share = CatchUpThrottle(percent=percent, behind_bytes=100, now_ms=lambda: self.now_ms)
        self.share.delivered(OLD, 0, 1_000)
        self.served: list[int] = []

    def receive(self, number: int, takes_ms: int = 0) -> None:
        def serve() -> None:
            self.now_ms += takes_ms
            self.served.append(number)

        self.share.run(number, serve)


def test_a_group_far_behind_runs_at_once_on_a_loop_that_nobody_else_uses() -> None:
    loop = Loop(percent=10)
    for number in range(100):
        loop.receive(number, takes_ms=3)
    assert loop.served == list(range(100))
    assert loop.share.throttled == 0


@pytest.mark.parametrize("percent", [5, 20, 50])
def test_beside_others_a_group_far_behind_gets_its_percent_of_the_loop(percent: int) -> None:
    rng = random.Random(percent)
    loop = Loop(percent)
    number = spent_ms = 0

    def serve() -> None:
        nonlocal spent_ms
        takes_ms = rng.choice((0, 1, 2))
        loop.now_ms += takes_ms
        spent_ms += takes_ms

    while loop.now_ms < 101_000:
        loop.share.on_fresh_traffic()
        number += 1
        loop.share.run(number, serve)
        loop.now_ms += 1
        loop.share.step()
        if number > 40:
            loop.share.cancel(number - 40)
    share = spent_ms / (loop.now_ms - 1_000)
    assert percent / 100 * 0.9 < share < percent / 100 * 1.1 + 0.001


def test_receives_of_groups_far_behind_are_let_in_in_their_order() -> None:
    loop = Loop(percent=10)
    loop.share.on_fresh_traffic()
    for number in range(5):
        loop.receive(number, takes_ms=BURST_MS)
    assert loop.served == []  # nothing is saved up yet
    for _ in range(1_000):
        loop.now_ms += 1
        loop.share.on_fresh_traffic()
        loop.share.step()
    assert loop.served == [0, 1, 2, 3, 4]


def test_acks_of_a_group_far_behind_count_as_its_share() -> None:
    loop = Loop(percent=50)

    def work() -> str:
        loop.now_ms += 10
        return "acked"

    loop.share.on_fresh_traffic()
    assert loop.share.charge(work) == "acked"
    loop.share.on_fresh_traffic()
    loop.receive(1)
    for _ in range(10):  # 10 ms of acks are half of 20 ms, 10 of which they took themselves
        assert loop.served == []
        loop.now_ms += 1
        loop.share.on_fresh_traffic()
        loop.share.step()
    loop.now_ms += 1
    loop.share.on_fresh_traffic()
    loop.share.step()
    assert loop.served == [1]


def test_what_a_group_took_of_a_quiet_loop_is_not_held_against_it_later() -> None:
    loop = Loop(percent=10)
    for number in range(1_000):
        loop.receive(number, takes_ms=10)
    loop.share.on_fresh_traffic()
    loop.receive(1_000)
    waited_ms = 0
    while loop.served[-1] != 1_000:
        waited_ms += 1
        loop.now_ms += 1
        loop.share.on_fresh_traffic()
        loop.share.step()
    assert 0 < waited_ms <= 210


def test_a_held_receive_runs_once_the_others_were_quiet_for_a_moment() -> None:
    loop = Loop(percent=1)
    loop.share.charge(lambda: setattr(loop, "now_ms", loop.now_ms + 20))
    loop.share.on_fresh_traffic()
    loop.receive(1)
    loop.now_ms += QUIET_MS - 1
    assert loop.share.step() == 0
    loop.now_ms += 1
    assert loop.share.step() == 1


def test_a_group_that_came_near_the_end_is_not_behind_any_more() -> None:
    loop = Loop(percent=10)
    assert loop.share.is_behind(OLD)
    loop.share.delivered(OLD, 900, 1_000)
    assert not loop.share.is_behind(OLD)
    loop.share.delivered(OLD, 899, 1_000)
    assert loop.share.is_behind(OLD)
    loop.share.on_queue_end(OLD)
    assert not loop.share.is_behind(OLD)


def test_a_hundred_percent_holds_nobody_back() -> None:
    loop = Loop(percent=100)
    assert not loop.share.is_behind(OLD)


def test_too_many_held_receives_are_refused_with_a_reason() -> None:
    loop = Loop(percent=1)
    loop.share.on_fresh_traffic()
    for number in range(HELD_LIMIT):
        loop.receive(number)
    with pytest.raises(TooManyRequests, match="1024 receives of old messages"):
        loop.receive(HELD_LIMIT)


# -- through the broker's requests


class SlowClock(ManualClock):
    """A machine on which everything takes time: each look at the clock is 1 ms later."""

    slow = False

    def boot_ms(self) -> int:
        if self.slow:
            self.advance(1)
        return super().boot_ms()


@pytest.fixture
def core() -> CoreBroker:
    settings = Settings(
        store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 20),
        message=MessageSettings(max_body_bytes=256 << 10),
        pop=PopSettings(catch_up_percent=10, catch_up_behind_bytes=64 << 10),
    )
    clock = SlowClock()
    broker = CoreBroker(clock=clock, settings=settings)
    for name in ("old", "new"):
        broker.topic(name)
    for name in ("g", "h"):
        broker.group(name)
    for number in range(40):
        broker.send("old", b"%d" % number + bytes(4_096))
    assert len(broker.receive("old", "g", limit=1)) == 1  # far behind from here on
    clock.slow = True
    return broker


def receive(core: CoreBroker, topic: str, group: str) -> Answer:
    return core.ask(Kind.POP, pop(topic, group, limit=1))


def busy(core: CoreBroker) -> None:
    core.send("new", b"x")


def held(core: CoreBroker) -> Answer:
    """A receive of the old messages that found no room beside the others."""
    for _ in range(100):
        busy(core)
        answer = receive(core, "old", "g")
        if not answer.heard:
            return answer
    raise AssertionError("no receive was held back")


def test_a_receive_of_old_messages_waits_for_its_turn_and_is_answered_by_a_step(
    core: CoreBroker,
) -> None:
    answer = held(core)
    assert core.broker.pop.catch_up.throttled == 1
    core.advance(1_000)
    assert answer.body is not None
    assert len(hop.decode_pop_reply(answer.body).deliveries) == 1


def test_others_are_served_while_receives_of_old_messages_wait(core: CoreBroker) -> None:
    answer = held(core)
    new = receive(core, "new", "h")
    assert new.body is not None
    assert len(hop.decode_pop_reply(new.body).deliveries) == 1
    assert not answer.heard


def test_a_held_receive_whose_client_left_takes_no_message(core: CoreBroker) -> None:
    answer = held(core)
    delivered = core.broker.pop.service.metrics.delivered
    core.server.cancel(answer.id)
    core.advance(1_000)
    assert not answer.heard
    assert core.broker.pop.service.metrics.delivered == delivered


def test_a_stop_answers_the_receives_that_were_held(core: CoreBroker) -> None:
    answer = held(core)
    core.stop()
    assert answer.body is not None


def test_a_topic_made_again_is_not_far_behind(core: CoreBroker) -> None:
    assert core.broker.pop.catch_up.is_behind(("g", "old"))
    core.broker.registry.delete_topic("old")
    assert not core.broker.pop.catch_up.is_behind(("g", "old"))


def test_a_pull_that_waits_for_its_turn_is_told_that_its_topic_was_deleted(
    core: CoreBroker,
) -> None:
    held(core)
    busy(core)
    asked = PullRequest(topic="old", group="g", limit=1, reply_bytes=1 << 20, offset=0)
    pull = core.ask(Kind.PULL, asked.SerializeToString())
    assert not pull.heard
    core.broker.registry.delete_topic("old")
    core.advance(1_000)
    assert pull.error is not None
    assert pull.error.code is Code.TOPIC_NOT_FOUND


def test_a_receive_that_finds_nothing_leaves_its_group_up_to_date() -> None:
    core = CoreBroker(
        settings=Settings(
            store=StoreSettings(segment_bytes=1 << 20),
            message=MessageSettings(max_body_bytes=256 << 10),
            pop=PopSettings(catch_up_behind_bytes=4 << 10),
        )
    )
    core.topic("new")
    core.topic("orders")
    for _ in range(20):
        core.send("orders", bytes(1_000))
    assert core.receive("new", "g") == []
    assert not core.broker.pop.catch_up.is_behind(("g", "new"))
