"""Many timers in one step come to what one after the other comes to."""

import random
from dataclasses import replace

import pytest
from timer.timer_client import HOUR, SECOND, core_with_topic, received, send, send_all

from popmq.broker.log.log_tail import LogTail
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.persistence.bulk_copy import MessageCopy
from popmq.broker.timer import timer_service
from popmq.broker.timer.due_timers import DueTimer
from popmq.broker.timer.timer_state import TimerState
from popmq.common.record.message import MESSAGE_HEADER_SIZE, Stamp, encode_message, intact_message
from popmq.common.record.timer_body import intact_bodies
from popmq.common.record.timer_token import FiringToken, TimerToken
from popmq.common.settings.settings import MessageSettings, StoreSettings
from popmq.testing.harness.core_broker import SMALL


def state_with(timers: int) -> TimerState:
    """Pending ones of three topics; some were recalled long ago, some lately."""
    state = TimerState()
    for number in range(timers):
        state.stored(64 + number % 3)
    for number in range(20):
        state.stored(64)
        state.cancel(number * HOUR // 4, 500 + number, 64)
    state.classified = timers
    state.skip(timers + 1, log_start=10_000)
    return state


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_of_firings_leaves_the_state_that_each_of_them_leaves(late: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    states, many = state_with(40), state_with(40)
    due_ms = sorted(rng.randrange(4 * HOUR) for _ in range(30))
    batch = [
        DueTimer(at, 1_000 + number, QueueUnit(0, 1, 0), 64 + number % 3, late)
        for number, at in enumerate(due_ms)
    ]
    for due in batch:
        states.ended(FiringToken(due.topic_id, due.due_ms, due.identity, 40, 0, late))
    many.on_fired(batch)
    assert (states.cursor, states.pending) == (many.cursor, many.pending)
    assert states.cancelled == many.cancelled
    assert list(states.begin_snapshot()) == list(many.begin_snapshot())


def test_the_daily_count_hears_of_each_timer_of_a_batch() -> None:
    class Heard:
        def __init__(self) -> None:
            self.ends: list[tuple[int, int]] = []

        def stored(self, topic_id: int) -> None: ...
        def lost(self) -> None: ...
        def ended(self, identity: int, topic_id: int) -> None:
            self.ends.append((identity, topic_id))

    state, states = state_with(3), Heard()
    state.watch = states
    state.on_fired(
        [
            DueTimer(5, 7, QueueUnit(0, 1, 0), 64, False),
            DueTimer(5, 9, QueueUnit(0, 1, 0), 65, False),
        ]
    )
    assert states.ends == [(7, 64), (9, 65)]


def test_copies_are_the_records_that_messages_are_put_as() -> None:
    parts = [(b"t" * at, b"head" * at, b"\x1a\x02m%d" % at) for at in range(5)]
    logs = []
    for many in (False, True):
        core = core_with_topic()
        store, topic_id = core.broker.store, core.broker.registry.topic("orders").id
        stamp, start = store.stamp(), store.end
        if many:
            store.put_copies(
                [
                    MessageCopy(topic_id, 0, 9, token, len(head), head + slices)
                    for token, head, slices in parts
                ],
                stamp,
            )
        else:
            for token, head, slices in parts:
                store.put_message(
                    topic_id=topic_id, queue_id=0, head=head, properties=slices, tag_hash=9,
                    token=token, stamp=stamp,
                )  # fmt: skip
        core.run_until_idle()
        assert store.confirmed == store.end
        index = [*store.index.find(topic_id, 2, b"m3"), *store.index.find(topic_id, 1, b"m3")]
        sizes = MESSAGE_HEADER_SIZE * 5 + sum(len(b"".join(part)) for part in parts)
        assert store.end - start == sizes
        units = store.queue(topic_id, 0).units(0, 10)
        log = b"".join(store.reader.record(unit) for unit in units)
        logs.append((index, units, store.metrics.records, log))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("follows", [False, True], ids=["", "a slave follows"])
def test_copies_fill_segments_as_messages_do(follows: bool) -> None:
    """The last bytes of a segment are padded, or left, wherever the records end."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    parts = [(rng.randbytes(40), rng.randbytes(rng.randrange(1_500))) for _ in range(300)]
    logs = []
    small = replace(
        SMALL,
        store=StoreSettings(segment_bytes=16 << 10),
        message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
    )
    for many in (False, True):
        core = core_with_topic(settings=small)
        store, topic_id = core.broker.store, core.broker.registry.topic("orders").id
        tail = store._log.tail = LogTail(1 << 30) if follows else None
        stamp, start, last = store.stamp(), store.end, 0
        while last < len(parts):
            some = parts[last : last + 64]
            last += len(some)
            if many:
                copies = [
                    MessageCopy(topic_id, at % 2, 9, t, len(h), h) for at, (t, h) in enumerate(some)
                ]
                put = store.put_copies(copies, stamp)
                assert put[-1].position == store.last_position
            else:
                for at, (token, head) in enumerate(some):
                    store.put_message(
                        topic_id=topic_id, queue_id=at % 2, head=head, properties=b"",
                        tag_hash=9, token=token, stamp=stamp,
                    )  # fmt: skip
            core.run_until_idle()
        units = [store.queue(topic_id, queue).units(0, 300) for queue in (0, 1)]
        assert len(units[0]) + len(units[1]) == len(parts)
        assert store.end - start > 3 * core.settings.store.segment_bytes
        pieces = (tail._positions, tail._pieces) if tail is not None else ()
        log = [store.reader.raw(some) for some in units], store.end, store.last_position
        logs.append((units, log, pieces))
    assert logs[0] == logs[1]


def test_a_body_on_its_short_way_is_the_message_of_its_record() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    data, units, tokens = b"", [], []
    for number in range(50):
        moved, replaces = rng.choice(((None, None), (7, None), (None, (5, 6))))
        tokens.append(TimerToken(number, number % 4, rng.getrandbits(64), moved, replaces))
        record = encode_message(
            stamp=Stamp(3, 5, 8), position=1_000 + len(data), topic_id=9, queue_id=0,
            queue_offset=number, tag_hash=77, head=rng.randbytes(rng.randrange(40)),
            properties=rng.randbytes(rng.randrange(40)), token=tokens[-1].encode(),
        )  # fmt: skip
        units.append(QueueUnit(1_000 + len(data), len(record), 0))
        data += record
    bodies = intact_bodies(data, 1_000, units)
    for body, token, unit in zip(bodies, tokens, units, strict=True):
        whole = intact_message(data, unit.position - 1_000, unit.position, unit.size)
        assert whole is not None
        assert body is not None
        assert body.content == whole.head + whole.properties
        assert (body.queue_offset, body.head_size) == (whole.header.queue_offset, len(whole.head))
        assert (body[1:4], whole.any_token) == (token[:3], token)
    first = units[0]
    for at in range(first.size):
        broken = bytearray(data)
        broken[at] ^= 1 << rng.randrange(8)
        assert intact_bodies(bytes(broken), 1_000, [first]) == [None]
    assert intact_bodies(data, 1_000, [first._replace(size=first.size + 1)]) == [None]
    assert intact_bodies(data, 999, [first._replace(position=999)]) == [None]
    assert intact_bodies(data[: first.size - 1], 1_000, [first]) == [None]


def test_a_timer_without_its_topic_among_many_is_a_dead_letter_and_holds_none_up() -> None:
    core = core_with_topic()
    gone = core.topic("gone", queues=1, type=core.broker.registry.topic("orders").type)
    due_ms = core.clock.wall_ms() + SECOND
    for number in range(30):
        send(core, f"m{number:02}", due_ms, topic="gone" if number in (3, 17) else "orders")
    core.run_steps()
    core.broker.registry.delete_topic(gone.name)
    core.run_until_idle()
    core.advance(2 * SECOND)
    results: list[bytes] = []
    while batch := received(core):
        results += batch
    assert results == [b"m%02d" % at for at in range(30) if at not in (3, 17)]
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
        core.run_until_idle()
        core.run_steps()
    assert service.fired == 40
