"""What one consumer does to others: nothing. All under virtual time, which is asserted.

Pop's promises: consumers come and go without a rebalance, there may be more of them than queues,
and one that is stuck holds up nobody; receives that wait cost nothing until there is something.
"""

from dataclasses import replace

import pytest

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.testing.disk.lying_disk import LyingFile
from popmq.testing.harness.core_broker import SMALL, Answer, CoreBroker, pop

TICK_MS = 10  # how often the broker's step runs here
POLL_MS = 30_000
WAITERS = 10_000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every read of every file, from now on."""
    sizes: list[int] = []
    read = LyingFile.read

    def counted(self: LyingFile, size: int, offset: int) -> bytes:
        sizes.append(size)
        return read(self, size, offset)

    monkeypatch.setattr(LyingFile, "read", counted)
    return sizes


def wait(core: CoreBroker, group: str = "g", *, expression: str = "", limit: int = 32) -> Answer:
    """A receive that waits, as its client asks for it."""
    body = pop("orders", group, limit=limit, poll_ms=POLL_MS, expression=expression)
    return core.ask(Kind.POP, body)


def got(answer: Answer) -> list[Delivery]:
    assert answer.body is not None, f"not answered: {answer.error}"
    return list(hop.decode_pop_reply(answer.body).deliveries)


def tick(core: CoreBroker) -> None:
    """The next step of the broker, `TICK_MS` later."""
    core.clock.advance(TICK_MS)
    core.run_steps()


def latency(core: CoreBroker, group: str, body: bytes) -> tuple[int, int]:
    """From a send to its delivery to a receive of the group that waits: virtual milliseconds, and
    calls of the loop."""
    waiting = wait(core, group)
    assert not waiting.heard, "there was something before the send"
    began_ms, calls = core.clock.boot_ms(), 0
    entry = hop.PutEntry(MessageType.NORMAL, body, b"", 0, 0)
    core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    while not waiting.heard:
        core.tick()
        calls += 1
        assert calls < 1_000, "never delivered"
    (delivery,) = got(waiting)
    assert delivery.head == body
    taken_ms = core.clock.boot_ms() - began_ms
    core.run_until_idle()
    core.ack("orders", group, delivery.handle)
    return taken_ms, calls


def latencies(core: CoreBroker, group: str = "g") -> list[tuple[int, int]]:
    found_latencies = []
    for number in range(20):
        found_latencies.append(latency(core, group, b"timed %d" % number))
        tick(core)
    return found_latencies


def quiet(kind: GroupType = GroupType.NORMAL) -> CoreBroker:
    limits = PopSettings(max_in_flight_per_queue=100_000, revive_step_ms=1)
    core = CoreBroker(settings=replace(SMALL, pop=limits))
    core.topic("orders", queues=1, type=MessageType.MIXED)
    core.group("g", type=kind)
    return core


# -- a consumer that is stuck


def test_a_consumer_that_never_acks_does_not_slow_other_groups() -> None:
    alone, beside = quiet(), quiet()
    beside.group("stuck")
    for number in range(2_000):
        beside.send("orders", b"%d" % number)
    while beside.receive("orders", "stuck", invisible_ms=3_600_000):
        pass
    while read := beside.receive("orders", "g"):
        beside.ack("orders", "g", *(delivery.handle for delivery in read))
    assert beside.broker.table.in_flight == 2_000
    assert latencies(beside) == latencies(alone)
    assert latencies(alone)[0][0] == 0  # milliseconds


def test_a_consumer_that_never_acks_does_not_slow_the_others_of_its_group() -> None:
    alone, beside = quiet(), quiet()
    for number in range(2_000):
        beside.send("orders", b"%d" % number)
    while beside.receive("orders", "g", invisible_ms=3_600_000):
        pass
    assert beside.broker.table.in_flight == 2_000
    assert latencies(beside) == latencies(alone)


def test_a_stuck_message_group_does_not_slow_the_others_of_a_fifo_group() -> None:
    alone, beside = quiet(GroupType.FIFO), quiet(GroupType.FIFO)
    for number in range(1_000):
        beside.send("orders", b"%d" % number, message_group="stuck")
    beside.receive("orders", "g", limit=1, invisible_ms=3_600_000)
    assert beside.receive("orders", "g") == []  # 999 are blocked
    assert latencies(beside) == latencies(alone)


@pytest.mark.parametrize("before", [0, 24, 49])
def test_a_queue_with_fifty_groups_serves_each_as_if_it_were_alone(before: int) -> None:
    """Groups are woken in the order in which they were made: so many before the timed one."""
    alone, beside = quiet(), quiet()
    waiting = []
    for number in range(50):
        name = "timed" if number == before else f"other-{number}"
        beside.group(name)
        if name != "timed":
            waiting.append(wait(beside, name))
    assert latencies(beside, "timed") == latencies(alone)
    tick(beside)
    assert all(len(got(answer)) == 1 for answer in waiting)


# -- consumers that come and go


def test_there_is_no_gap_when_consumers_come_and_go() -> None:
    core = quiet()
    staying = wait(core, limit=1)
    delivered = 0
    for number in range(50):
        newcomer = wait(core, limit=1)
        if number % 2:  # whoever waited for longest leaves, and another one is there
            core.server.cancel(staying.id)
            staying = newcomer
            newcomer = wait(core, limit=1)
        began_ms = core.clock.boot_ms()
        core.send("orders", b"%d" % number)
        (delivery,) = got(staying)
        assert delivery.head == b"%d" % number
        assert core.clock.boot_ms() == began_ms, "it waited"
        core.ack("orders", "g", delivery.handle)
        staying, delivered = newcomer, delivered + 1
    assert delivered == 50


def test_more_consumers_than_queues_all_get_messages() -> None:
    core = CoreBroker()
    core.topic("orders", queues=2)
    core.group("g")
    waiting = [wait(core, limit=1) for _ in range(20)]
    began_ms = core.clock.boot_ms()
    for number in range(20):
        core.send("orders", b"%d" % number)
    heads = [delivery.head for answer in waiting for delivery in got(answer)]
    assert sorted(heads) == sorted(b"%d" % number for number in range(20))
    assert core.clock.boot_ms() == began_ms


def test_no_stuck_client_holds_a_queue() -> None:
    core = quiet()
    for number in range(10):
        core.send("orders", b"%d" % number)
    stuck = core.receive("orders", "g", limit=4, invisible_ms=5_000, client_id="stuck")
    began_ms = core.clock.boot_ms()
    # The rest of the very same queue is the others', now and for as long as it is stuck.
    assert [entry.head for entry in core.receive("orders", "g", client_id="other")] == [
        b"%d" % number for number in range(4, 10)
    ]
    for number in range(10, 15):
        core.send("orders", b"%d" % number)
        (delivery,) = core.receive("orders", "g", client_id="other")
        assert delivery.head == b"%d" % number
    assert core.clock.boot_ms() == began_ms
    # What it held is theirs when its time is over, and not before.
    core.advance(4_900)
    assert core.receive("orders", "g", client_id="other") == []
    core.advance(150)
    back = core.receive("orders", "g", client_id="other")
    assert sorted((entry.head, entry.attempt) for entry in back) == [
        (entry.head, 2) for entry in stuck
    ]


# -- receives that wait


@pytest.fixture
def crowd() -> tuple[CoreBroker, list[Answer]]:
    """Ten thousand receives of twenty groups wait; half of them want tag A."""
    core = CoreBroker()
    core.topic("orders", queues=4)
    for number in range(20):
        core.group(f"g{number}")
    core.send("orders", b"old", tag="B")
    for number in range(20):
        (delivery,) = core.receive("orders", f"g{number}")
        core.ack("orders", f"g{number}", delivery.handle)
    waiting = [
        wait(core, f"g{number % 20}", expression="A" if number // 20 % 2 else "")
        for number in range(WAITERS)
    ]
    assert core.broker.polling.count == WAITERS
    return core, waiting


@pytest.mark.more
def test_ten_thousand_idle_receives_cost_no_reads(
    crowd: tuple[CoreBroker, list[Answer]], reads: list[int]
) -> None:
    core, waiting = crowd
    while core.broker.step():
        core.run_until_idle()
    reads.clear()
    pops = core.broker.pop.service.metrics.pops
    end, flushes = core.broker.store.end, core.broker.store.metrics.flushes
    for _ in range(2_000):
        tick(core)
    assert core.broker.pop.service.metrics.pops == pops
    assert reads == []
    assert (core.broker.store.end, core.broker.store.metrics.flushes) == (end, flushes)
    assert not any(answer.heard for answer in waiting)
    assert core.clock.boot_ms() < 1_000_000 + POLL_MS  # their time is not over


def test_an_arrival_wakes_one_receive_of_each_group_at_once(
    crowd: tuple[CoreBroker, list[Answer]],
) -> None:
    core, waiting = crowd
    pops, began_ms = core.broker.pop.service.metrics.pops, core.clock.boot_ms()
    core.send("orders", b"for all", tag="A")
    assert core.clock.boot_ms() == began_ms
    woken = [number for number, answer in enumerate(waiting) if answer.heard]
    assert sorted(number % 20 for number in woken) == list(range(20))
    # One pop for the message, and one miss of each of the two filters.
    assert core.broker.pop.service.metrics.pops - pops <= 20 * 3


@pytest.mark.more
def test_an_arrival_wakes_only_receives_whose_filter_it_matches(
    crowd: tuple[CoreBroker, list[Answer]],
) -> None:
    core, waiting = crowd
    core.send("orders", b"not for A", tag="B")
    woken = [number for number, answer in enumerate(waiting) if answer.heard]
    assert len(woken) == 20
    assert not any(number // 20 % 2 for number in woken), "its filter does not match"


def test_a_retry_wakes_a_receive_that_waits_within_one_tick() -> None:
    core = quiet()
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    waiting = wait(core)
    due_ms = min(ck.due_ms for ck in core.broker.table)
    while core.broker.store.log_ms() < due_ms - TICK_MS:
        tick(core)
        assert not waiting.heard
    tick(core)
    (delivery,) = got(waiting)
    assert (delivery.head, delivery.attempt) == (b"one", 2)


@pytest.mark.parametrize("how", ["ack", "expiry"])
def test_an_unlock_wakes_a_receive_that_waits_within_one_tick(how: str) -> None:
    core = quiet(GroupType.FIFO)
    core.send("orders", b"first", message_group="k")
    core.send("orders", b"next", message_group="k")
    (first,) = core.receive("orders", "g", limit=1, invisible_ms=1_000)
    waiting = wait(core)
    if how == "ack":
        core.ack("orders", "g", first.handle)
        expected = [(b"next", 1)]
    else:
        due_ms = min(ck.due_ms for ck in core.broker.table)
        while core.broker.store.log_ms() < due_ms - TICK_MS:
            tick(core)
            assert not waiting.heard
        expected = [(b"first", 2), (b"next", 1)]
    tick(core)
    assert [(delivery.head, delivery.attempt) for delivery in got(waiting)] == expected
