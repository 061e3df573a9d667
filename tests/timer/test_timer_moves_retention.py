"""Retention goes on while timers leave: their messages stay until another group has them."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from timer.test_timer_retention import DAY_MS, on, pass_days, send_in

from popmq.broker.node.timer_migrator import TimerMigrator
from popmq.common.errors import Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire.controller_pb2 import BrokerAddress
from popmq.common.wire.replication_pb2 import TakeTimersRequest
from popmq.testing.harness.core_broker import CoreBroker


@dataclass
class Link:
    """Answers questions whether somebody is there, and batches only while it is `up`."""

    core: CoreBroker
    up: bool = False
    asked: list[TakeTimersRequest] = field(default_factory=list)
    mover: TimerMigrator = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.mover = TimerMigrator(
            self.core.settings,
            open_port=lambda address: self,
            clock=self.core.clock,
            rng=random.Random(1),
        )
        self.mover.hear([BrokerAddress(broker="other", address="other:1")])

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        assert kind is Kind.TAKE_TIMERS
        request = TakeTimersRequest.FromString(body)
        if request.timers:
            self.asked.append(request)
        on_reply(b"" if self.up or not request.timers else Unavailable("the answer was lost"))
        return 1

    def cancel(self, request_id: int) -> None: ...

    def step(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.core.clock.advance(50)
            self.mover.step(self.core.broker)
            self.core.run_until_idle()


@pytest.mark.more
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("moved_before", [False, True])
def test_what_leaves_is_read_where_retention_put_it(
    tmp_path: Path, restarts: bool, moved_before: bool
) -> None:
    core = on(tmp_path)
    for number in range(5):
        send_in(core, b"timer %d" % number, 60 * DAY_MS)
    core.run_steps()
    if moved_before:
        pass_days(core, 4)
        assert core.broker.timers.bodies.relocated >= 5
    link = Link(core)
    core.broker.registry.set_draining(True)
    link.step()
    departures = core.broker.timers.outgoing_timers
    assert len(departures.leaving) == 5
    core.broker.registry.set_draining(False)  # so that noise is taken; the batch stays on its way
    before = {item.position for item in departures.leaving}
    for _ in range(3):
        pass_days(core, 4)
        if restarts:
            core.broker.release_files()
            core.start()
            link.start()
    departures = core.broker.timers.outgoing_timers
    assert before.isdisjoint({item.position for item in departures.leaving})
    assert min(item.position for item in departures.leaving) >= core.broker.store.start
    link.asked.clear()
    link.up = True
    link.step()
    assert not departures.is_under_way
    assert departures.moved == 5
    (asked,) = link.asked
    assert sorted(timer.head for timer in asked.timers) == [b"timer %d" % n for n in range(5)]
    assert [timer.move for timer in asked.timers] == [1, 2, 3, 4, 5]
    pass_days(core, 8)  # and then they go
    assert core.broker.timers.state.pending_total == 0


def test_a_body_that_moved_a_moment_ago_leaves_from_its_new_place(tmp_path: Path) -> None:
    """Its old place is there yet, and goes before the other group may have answered."""
    core = on(tmp_path)
    for number in range(3):
        send_in(core, b"timer %d" % number, 60 * DAY_MS)
    core.run_steps()
    end, bodies = core.broker.store.end, core.broker.timers.bodies
    for body in [live_body for piece in bodies.bodies_below(end) for live_body in piece]:
        bodies.move(body)
    core.run_until_idle()
    core.run_steps()
    assert bodies.relocated == 3
    core.settings = replace(core.settings, timer=replace(core.settings.timer, moves_per_second=3))
    link = Link(core)
    core.broker.registry.set_draining(True)
    link.step(5)
    leaving = core.broker.timers.outgoing_timers.leaving
    assert len(leaving) == 3
    assert min(timer.position for timer in leaving) >= end
