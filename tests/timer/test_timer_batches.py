"""Many timers in one step come to what one after the other comes to."""

import random

import pytest
from timer.timer_client import HOUR, SECOND, core_with_topic, received, send, send_all

from popmq.broker.store.copies import Copy
from popmq.broker.store.unit_check import Unit
from popmq.broker.timer import timer_service
from popmq.broker.timer.due_timers import Due
from popmq.broker.timer.timer_state import TimerState
from popmq.common.message import MESSAGE_HEADER_SIZE
from popmq.common.timer_token import FiringToken


def state_with(timers: int) -> TimerState:
    """Pending ones of three topics; some were recalled long ago, some lately."""
    state = TimerState()
    for number in range(timers):
        state.stored(64 + number % 3)
    for number in range(20):
        state.stored(64)
        state.cancel(number * HOUR // 4, 500 + number, 64)
    state.judged = timers
    state.skip(timers + 1, log_start=10_000)
    return state


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_of_firings_leaves_the_state_that_each_of_them_leaves(late: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    one, many = state_with(40), state_with(40)
    due_ms = sorted(rng.randrange(4 * HOUR) for _ in range(30))
    batch = [
        Due(at, 1_000 + number, Unit(0, 1, 0), 64 + number % 3, late)
        for number, at in enumerate(due_ms)
    ]
    for due in batch:
        one.ended(FiringToken(due.topic_id, due.due_ms, due.identity, 40, 0, late))
    many.fired(batch)
    assert (one.cursor, one.pending) == (many.cursor, many.pending)
    assert dict(one.cancelled_items()) == dict(many.cancelled_items())
    assert list(one.begin_snapshot()) == list(many.begin_snapshot())


def test_the_daily_count_hears_of_each_timer_of_a_batch() -> None:
    class Heard:
        def __init__(self) -> None:
            self.ends: list[tuple[int, int]] = []

        def stored(self, topic_id: int) -> None: ...
        def lost(self) -> None: ...
        def ended(self, identity: int, topic_id: int) -> None:
            self.ends.append((identity, topic_id))

    state, heard = state_with(3), Heard()
    state.watch = heard
    state.fired([Due(5, 7, Unit(0, 1, 0), 64, False), Due(5, 9, Unit(0, 1, 0), 65, False)])
    assert heard.ends == [(7, 64), (9, 65)]


def test_copies_are_the_records_that_messages_are_put_as() -> None:
    parts = [(b"t" * at, b"head" * at, b"\x1a\x02m%d" % at) for at in range(5)]
    logs = []
    for many in (False, True):
        core = core_with_topic()
        store, topic_id = core.broker.store, core.broker.registry.topic("orders").id
        stamp, start = store.stamp(), store.end
        if many:
            store.put_copies(
                [Copy(topic_id, 0, 9, token, head, slices) for token, head, slices in parts], stamp
            )
        else:
            for token, head, slices in parts:
                store.put_message(
                    topic_id=topic_id, queue_id=0, head=head, properties=slices, tag_hash=9,
                    token=token, stamp=stamp,
                )  # fmt: skip
        core.settle()
        assert store.confirmed == store.end
        index = [*store.index.find(topic_id, 2, b"m3"), *store.index.find(topic_id, 1, b"m3")]
        sizes = MESSAGE_HEADER_SIZE * 5 + sum(len(b"".join(part)) for part in parts)
        assert store.end - start == sizes
        units = store.queue(topic_id, 0).units(0, 10)
        log = b"".join(store.reader.record(unit) for unit in units)
        logs.append((index, units, store.metrics.records, log))
    assert logs[0] == logs[1]


def test_a_timer_without_its_topic_among_many_is_a_dead_letter_and_holds_none_up() -> None:
    core = core_with_topic()
    gone = core.topic("gone", queues=1, type=core.broker.registry.topic("orders").type)
    due_ms = core.clock.wall_ms() + SECOND
    for number in range(30):
        send(core, f"m{number:02}", due_ms, topic="gone" if number in (3, 17) else "orders")
    core.run_steps()
    core.broker.registry.delete_topic(gone.name)
    core.settle()
    core.advance(2 * SECOND)
    found: list[bytes] = []
    while batch := received(core):
        found += batch
    assert found == [b"m%02d" % at for at in range(30) if at not in (3, 17)]
    service = core.broker.timers.service
    assert (service.fired, service.dead_lettered) == (30, 2)


@pytest.mark.parametrize(("name", "limit"), [("_STEP_BYTES", 2_000), ("_FIRINGS_LIMIT", 10)])
def test_no_more_fire_than_may_wait_for_the_disk(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_service, name, limit)
    core = core_with_topic()
    due = {f"m{at:02}": SECOND for at in range(40)}
    send_all(core, due)
    core.clock.advance(2 * SECOND)
    service = core.broker.timers.service
    for _ in range(3):
        core.broker.step()
    assert 0 < service.fired < 40
    assert name != "_FIRINGS_LIMIT" or service.fired == limit
    for _ in range(10):
        core.settle()
        core.run_steps()
    assert service.fired == 40
