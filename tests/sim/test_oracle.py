"""The oracle: what it excuses, and that it excuses no more, with a broker in scripted runs."""

import random

from popmq.common.settings.settings import GroupSettings, MessageSettings, Settings, StoreSettings
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ReceiveCall,
    ResourceIncarnation,
    SentMessageHistory,
)
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.oracle.handle_oracle import UnansweredDeliveries
from popmq.testing.sim.operators import Operators
from popmq.testing.sim.producers import FIFO_QUEUES
from popmq.testing.sim.simulated_broker import SimulatedBroker

SECOND = 1_000


class Script:
    """A machine, its clients and the oracle; a FIFO topic and a group that reads it."""

    def __init__(self, *, fifo: bool = False) -> None:
        settings = Settings(
            store=StoreSettings(segment_bytes=64 << 10, reserved_segments=1),
            message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
            group=GroupSettings(auto_create=False),
        )
        rng, tally = random.Random(1), StateCounts()
        self.oracle = Oracle()
        self.machine = SimulatedBroker(settings, rng, tally)
        self.machine.start()
        self.clients = Operators(self.machine, self.oracle, rng, tally, lambda line: None)
        self.clients.make_topic("t", FIFO_QUEUES, fifo=fifo)
        self.clients.make_group("g", 40, fifo=fifo)
        self.machine.run_until_idle()
        topic, group = self.clients.topics["t"], self.clients.groups["g"]
        assert isinstance(topic, ResourceIncarnation)
        assert isinstance(group, ResourceIncarnation)
        self.topic, self.reader = topic, GroupReader(group, topic)
        self.oracle.readers.append(self.reader)

    @property
    def found(self) -> list[str]:
        return [violation.invariant for violation in self.oracle.violations]

    def pop_of_now(self) -> ReceiveCall:
        oracle, now_ms = self.oracle, self.machine.clock.boot_ms()
        return ReceiveCall(
            self.reader, (), -1, 60 * SECOND, 0, oracle.at + 1, now_ms, oracle.log_ms
        )

    def receive(self, *, invisible_ms: int = 60 * SECOND, client_id: str = "") -> None:
        self.clients.receive(self.reader, invisible_ms=invisible_ms, client_id=client_id)
        self.machine.run_until_idle()


def lost_receive(script: Script, *, invisible_ms: int = SECOND) -> None:
    """It is answered to nobody, and its time is over."""
    script.clients.receive(script.reader, invisible_ms=invisible_ms)
    asked = script.clients.asked[-1:]
    script.machine.advance(2 * invisible_ms)
    script.machine.step()
    script.clients.drop_replies(asked)


def test_a_receive_that_was_lost_behind_a_reset_counts_though_the_reset_is_answered_later() -> None:
    """Seed 8039: what was lost before the answer was taken for lost before the reset."""
    script = Script(fifo=True)
    script.clients.send(script.topic)
    script.machine.run_until_idle()
    script.clients.reset(script.reader, lambda: None, "oldest")
    lost_receive(script)
    script.receive()
    (life,) = script.reader.lives.values()
    assert (life.attempt, script.found) == (2, [])


def test_a_receive_that_was_lost_before_a_reset_counts_no_more() -> None:
    script = Script(fifo=True)
    script.clients.send(script.topic)
    script.machine.run_until_idle()
    lost_receive(script)
    script.clients.reset(script.reader, lambda: None, "oldest")
    script.machine.run_until_idle()
    script.receive()
    (life,) = script.reader.lives.values()
    assert (life.attempt, script.found) == (1, [])
    again, (sent, *_) = script.pop_of_now(), script.oracle.messages
    life.held = None
    script.oracle.delivered(again, sent.number, sent.head, sent.properties, 3, b"a handle")
    assert script.found == ["attempts"]


def test_a_reset_of_which_nobody_heard_may_have_come_after_one_that_is_answered_later() -> None:
    """Seed 600856: it passed over messages, and the answer of the earlier one took that back."""
    script = Script(fifo=True)
    script.clients.send(script.topic)
    script.machine.run_until_idle()
    script.clients.reset(script.reader, lambda: None, "oldest")
    script.clients.reset(script.reader, lambda: None, "newest")
    script.clients.drop_replies(script.clients.asked[-1:])
    script.machine.run_until_idle()
    lives = script.reader.lives.values()
    assert [(life.loose, life.passed) for life in lives] == [(True, True)] * len(lives)
    assert lives


def test_a_letter_that_was_sent_back_holds_its_key_up_though_the_first_copy_was_acked() -> None:
    """Seed 501104: the second copy was in flight, and a receive that found nothing was blamed."""
    script = Script(fifo=True)
    order, reader = script.oracle.order, script.reader
    first, second = (
        SentMessageHistory(number, script.topic, "", b"", b"", 1) for number in range(2)
    )
    order.put(first)
    order.put(second)
    reader.lives[0] = life = MessageHistory(acked=2, acked_at=2)
    assert order.is_first(reader, second, before=3)
    life.loose = True
    assert not order.is_first(reader, second, before=3)


def delivered(
    unanswered: UnansweredDeliveries, at_ms: int, process: int, *, buffered: bool = False
) -> Held:
    place = ResourceIncarnation("p", buffered=buffered)
    sent = SentMessageHistory(0, place, "", b"", b"", 0)
    held = Held(GroupReader(place, place), sent, 1, b"", at_ms, at_ms, 1, process=process)
    unanswered.delivered(held, at_ms)
    return held


def test_a_crash_excuses_deliveries_of_5_s_before_the_newest_record_and_none_older() -> None:
    unanswered = UnansweredDeliveries()
    old, young = (delivered(unanswered, at_ms, 0) for at_ms in (14_999, 15_000))
    written = delivered(unanswered, 5_000, 0, buffered=True)
    early = delivered(unanswered, 4_999, 0, buffered=True)
    unanswered.recorded(20_000)
    assert not unanswered.covers(young)
    unanswered.crashed(0)
    unanswered.started(30_000)
    assert [unanswered.covers(item) for item in (old, young, early, written)] == [False, True] * 2
    later = delivered(unanswered, 30_001, 1)
    assert not unanswered.covers(later)


def test_a_clean_stop_excuses_nothing_and_the_next_crash_what_it_may_take_for_young() -> None:
    unanswered = UnansweredDeliveries()
    held = [delivered(unanswered, at_ms, 0) for at_ms in (15_999, 16_000)]
    unanswered.recorded(20_000)
    unanswered.started(90_000)  # by a clock that was set back, log time stood still meanwhile
    assert not any(map(unanswered.covers, held))
    unanswered.recorded(91_000)
    unanswered.crashed(1)
    assert [unanswered.covers(item) for item in held] == [False, True]
