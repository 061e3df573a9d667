"""Reset of a group's offset, while it is being served and across restarts."""

import random

import pytest

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.topics import CheckPoints, StartAt
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=1)
    broker.group("g")
    return broker


def reset(
    core: CoreBroker, topic: str = "orders", group: str = "g", **to: object
) -> list[pb.ResetQueue]:
    request = pb.ResetOffsetRequest(group=group, topic=topic, **to)  # type: ignore[arg-type]
    reply = core.reply(Kind.RESET_OFFSET, request.SerializeToString())
    return list(pb.ResetOffsetReply.FromString(reply).queues)


def send(core: CoreBroker, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        core.send("orders", b"%d" % number, queue_id=0)


def heads(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.head for delivery in deliveries]


def in_flight(core: CoreBroker) -> int:
    assert core.broker.table.in_flight == sum(
        progress.in_flight for _, progress in core.broker.table.progress_items()
    )
    return core.broker.table.in_flight


def test_after_a_reset_the_next_pop_reads_at_the_new_offset_at_once(core: CoreBroker) -> None:
    send(core, 10)
    assert len(core.receive("orders", "g")) == 10  # all in flight
    (done,) = reset(core, offset=4)
    assert (done.before, done.after, done.in_flight) == (10, 4, 10)
    assert heads(core.receive("orders", "g")) == [b"4", b"5", b"6", b"7", b"8", b"9"]


def test_a_reset_forward_skips_what_was_not_read(core: CoreBroker) -> None:
    send(core, 10)
    assert heads(core.receive("orders", "g", limit=2)) == [b"0", b"1"]
    reset(core, offset=7)
    assert heads(core.receive("orders", "g")) == [b"7", b"8", b"9"]


def test_what_was_in_flight_at_a_reset_never_comes_back(core: CoreBroker) -> None:
    send(core, 3)
    core.receive("orders", "g", invisible_ms=1_000)
    reset(core, newest=True)
    assert in_flight(core) == 0
    core.advance(20_000)
    assert core.receive("orders", "g") == []
    assert core.broker.registry.find_topic("%RETRY%g+orders") is None
    assert len(core.broker.table) == 0
    assert len(core.broker.table.due_times) == 0


def test_a_handle_from_before_a_reset_is_refused_and_moves_nothing(core: CoreBroker) -> None:
    send(core, 4)
    old = core.receive("orders", "g")
    changed = core.change("orders", "g", old[3].handle, 60_000)
    reset(core, offset=2)
    for handle in (old[0].handle, old[2].handle, changed):
        (result,) = core.ack("orders", "g", handle)
        assert result.code == Code.INVALID_RECEIPT_HANDLE
        assert "offset was reset" in result.message
        with pytest.raises(PopmqError, match="offset was reset"):
            core.change("orders", "g", handle, 1_000)
    assert "offset was reset" in core.reject("orders", "g", old[1].handle).message
    group, topic = core.broker.registry.group("g"), core.broker.registry.topic("orders")
    progress = core.broker.table.progress(group.id, topic.id, 0)
    assert progress is not None
    assert (progress.committed, progress.cursor) == (2, 2)
    new = core.receive("orders", "g")
    assert heads(new) == [b"2", b"3"]
    assert [r.code for r in core.ack("orders", "g", *(delivery.handle for delivery in new))] == [
        Code.OK
    ] * 2
    assert (progress.committed, progress.in_flight) == (4, 0)


def test_an_ack_from_before_a_reset_can_still_be_repeated(core: CoreBroker) -> None:
    send(core, 2)
    delivery, _ = core.receive("orders", "g")
    core.ack("orders", "g", delivery.handle)
    reset(core, oldest=True)
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    assert heads(core.receive("orders", "g")) == [b"0", b"1"]


def test_a_reset_touches_no_other_group_queue_or_topic() -> None:
    core = CoreBroker()
    core.topic("orders", queues=2)
    core.topic("bills", queues=1)
    for group in ("g", "h"):
        core.group(group)
    for queue in (0, 1):
        core.send("orders", b"q%d" % queue, queue_id=queue)
    core.send("bills", b"bill")
    for group in ("g", "h"):
        core.receive("orders", group)
    core.receive("bills", "g")
    reset(core, oldest=True, queue_id=1)
    assert heads(core.receive("orders", "g")) == [b"q1"]
    assert core.receive("orders", "h") == []
    assert core.receive("bills", "g") == []
    assert in_flight(core) == 5


def test_a_reset_to_newest_skips_pending_retries_too(core: CoreBroker) -> None:
    send(core, 2)
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    delivery, _ = core.receive("orders", "g", limit=2, invisible_ms=1_000)  # retries, in flight
    core.change("orders", "g", delivery.handle, 0)
    core.advance(20)  # one retry pending, one in flight
    done = reset(core, newest=True)
    assert [(q.topic, q.after) for q in done] == [("orders", 2), ("%RETRY%g+orders", 3)]
    core.advance(20_000)
    assert core.receive("orders", "g") == []
    assert in_flight(core) == 0


def test_a_retry_that_is_just_being_written_is_skipped_with_the_others(core: CoreBroker) -> None:
    send(core, 2)
    core.receive("orders", "g", limit=1, invisible_ms=1_000)
    core.clock.advance(1_100)
    core.broker.step()  # the retry's record is appended, and not on the disk yet
    reset(core, newest=True)
    core.advance(20_000)
    assert core.receive("orders", "g") == []
    core.start()
    assert core.receive("orders", "g") == []


@pytest.mark.parametrize("keep", [True, False])
def test_pending_retries_come_after_a_reset_to_an_older_place_unless_skipped(
    core: CoreBroker, keep: bool
) -> None:
    send(core, 2)
    core.receive("orders", "g", limit=1, invisible_ms=1_000)
    core.advance(2_000)
    more: dict[str, object] = {} if keep else {"skip_retries": True}
    reset(core, "orders", "g", offset=1, **more)
    assert sorted(heads(core.receive("orders", "g"))) == ([b"0", b"1"] if keep else [b"1"])


def test_a_reset_to_newest_can_keep_the_retries(core: CoreBroker) -> None:
    send(core, 2)
    core.receive("orders", "g", limit=1, invisible_ms=1_000)
    core.advance(2_000)
    reset(core, newest=True, skip_retries=False)
    assert heads(core.receive("orders", "g")) == [b"0"]


def test_a_reset_to_a_time_reads_from_the_first_message_stored_then(core: CoreBroker) -> None:
    send(core, 3)
    core.clock.advance(60_000)
    then = core.clock.wall_ms()
    send(core, 2, first=3)
    core.receive("orders", "g")
    (done,) = reset(core, stored_ms=then)
    assert done.after == 3
    assert heads(core.receive("orders", "g")) == [b"3", b"4"]
    (done,) = reset(core, stored_ms=then + 1)
    assert done.after == 5


def test_a_dry_run_tells_and_changes_nothing(core: CoreBroker) -> None:
    send(core, 3)
    taken = core.receive("orders", "g", limit=2)
    end = core.broker.store.end
    (reset_queue,) = reset(core, newest=True, dry_run=True)
    assert (reset_queue.before, reset_queue.after, reset_queue.in_flight) == (2, 3, 2)
    assert core.broker.store.end == end
    assert core.ack("orders", "g", taken[0].handle)[0].code == Code.OK


def test_a_waiting_receive_is_woken_by_a_reset(core: CoreBroker) -> None:
    send(core, 1)
    core.ack("orders", "g", core.receive("orders", "g")[0].handle)
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    assert not waiting.heard
    reset(core, oldest=True)
    assert waiting.body is not None
    assert heads(list(hop.decode_pop_reply(waiting.body).deliveries)) == [b"0"]


def test_a_group_that_never_read_can_be_reset(core: CoreBroker) -> None:
    send(core, 3)
    (done,) = reset(core, offset=2)
    assert (done.before, done.after) == (0, 2)
    assert heads(core.receive("orders", "g")) == [b"2"]


def test_a_reset_of_one_queue_leaves_the_others_of_a_new_group_at_the_newest() -> None:
    core = CoreBroker()
    core.topic("orders", queues=2)
    core.group("late", start_at=StartAt.NEWEST)
    for queue in (0, 1):
        core.send("orders", b"q%d" % queue, queue_id=queue)
    (reset_queue,) = reset(core, group="late", oldest=True, queue_id=0, dry_run=True)
    assert reset_queue.before == 1
    reset(core, group="late", oldest=True, queue_id=0)
    assert heads(core.receive("orders", "late")) == [b"q0"]


@pytest.mark.parametrize(
    ("to", "code", "named"),
    [
        ({"offset": 4}, Code.ILLEGAL_OFFSET, "0 to 3"),
        ({"offset": -1}, Code.ILLEGAL_OFFSET, "-1"),
        ({"newest": True, "queue_id": 1}, Code.BAD_REQUEST, "queue 1"),
        ({"newest": True, "queue_id": -1}, Code.BAD_REQUEST, "queue -1"),
        ({}, Code.BAD_REQUEST, "oldest, newest"),
        ({"oldest": True, "topic": "nowhere"}, Code.TOPIC_NOT_FOUND, "nowhere"),
        ({"oldest": True, "group": "nobody"}, Code.CONSUMER_GROUP_NOT_FOUND, "nobody"),
        ({"oldest": True, "topic": "%RETRY%g+orders"}, Code.ILLEGAL_TOPIC, "RETRY"),
        ({"newest": True, "queue_id": 0, "skip_retries": True}, Code.BAD_REQUEST, "retries"),
    ],
)
def test_an_impossible_reset_is_refused_and_says_why(
    core: CoreBroker, to: dict[str, object], code: Code, named: str
) -> None:
    send(core, 3)
    topic, group = str(to.pop("topic", "orders")), str(to.pop("group", "g"))
    with pytest.raises(PopmqError, match=named) as caught:
        reset(core, topic, group, **to)
    assert caught.value.code == code


def test_one_offset_for_many_queues_is_refused() -> None:
    core = CoreBroker()
    core.topic("orders", queues=3)
    core.group("g")
    with pytest.raises(PopmqError, match="--queue"):
        reset(core, offset=0)


@pytest.mark.parametrize("end", ["clean", "power"])
def test_a_reset_survives_a_restart(end: str) -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g")
    send(core, 10)
    old = core.receive("orders", "g", limit=5, invisible_ms=1_000)
    changed = core.change("orders", "g", old[4].handle, 2_000)
    reset(core, offset=8)
    for _ in range(2):
        if end == "clean":
            core.stop()
        else:
            disk.restore_power()
        core.start()
        assert in_flight(core) == 0
        for handle in (old[0].handle, changed):
            assert "offset was reset" in core.ack("orders", "g", handle)[0].message
    core.advance(10_000)
    assert heads(core.receive("orders", "g")) == [b"8", b"9"]


def test_a_reset_that_the_power_cut_took_is_as_if_it_never_was() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g")
    send(core, 4)
    old = core.receive("orders", "g", limit=2)
    request = pb.ResetOffsetRequest(group="g", topic="orders", newest=True)
    answer = core.ask(Kind.RESET_OFFSET, request.SerializeToString(), settle=False)
    assert not answer.heard
    disk.restore_power()
    core.start()
    assert core.ack("orders", "g", old[0].handle)[0].code == Code.OK
    assert heads(core.receive("orders", "g")) == [b"2", b"3"]


@pytest.mark.more
def test_resets_during_pops_and_acks_end_at_the_last_one_also_after_a_crash() -> None:
    """Random pops, acks, changes and resets; the log and the snapshots say the same as memory."""
    for seed in range(20):
        rng = random.Random(seed)
        disk = LyingDisk()
        core = CoreBroker(disk=disk, seed=seed)
        core.topic("orders", queues=2)
        core.group("g")
        held: list[Delivery] = []
        for number in range(150):
            match rng.randrange(6):
                case 0:
                    core.send("orders", b"%d" % number)
                case 1:
                    held += core.receive("orders", "g", limit=rng.randrange(1, 9))
                case 2 if held:
                    core.ack("orders", "g", rng.choice(held).handle)
                case 3 if held:
                    core.ask(
                        Kind.CHANGE,
                        hop.encode_change(
                            hop.ChangeRequest("orders", "g", rng.choice(held).handle, 90_000)
                        ),
                    )
                case 4 if rng.random() < 0.3:
                    queue = rng.randrange(2)
                    topic = core.broker.registry.topic("orders")
                    count = core.broker.store.queue(topic.id, queue).count
                    reset(core, offset=rng.randint(0, count), queue_id=queue)
                case _:
                    core.advance(1_000)
        last = [reset(core, offset=0, queue_id=queue)[0] for queue in (0, 1)]
        assert [reset_queue.after for reset_queue in last] == [0, 0], seed
        held = core.receive("orders", "g", limit=3)
        before = state(core)
        if seed % 2:
            disk.restore_power()
        else:
            core.stop()
        core.start()
        assert state(core) == before, seed
        assert all(r.code == Code.OK for r in core.ack("orders", "g", *(h.handle for h in held)))


def test_a_snapshot_that_runs_during_a_reset_states_the_moment_before() -> None:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g")
    send(core, 6)
    old = core.receive("orders", "g", limit=3)
    core.change("orders", "g", old[0].handle, 60_000)
    core.ack("orders", "g", old[1].handle)
    before = state(core)
    pieces = core.broker.table.begin_snapshot()
    reset(core, newest=True)
    core.receive("orders", "g")
    restored = CheckPointTable()
    for content, _ in pieces:
        restored.restore(content)
    restored.restored()
    assert state(restored) == before


def state(of: CoreBroker | CheckPointTable) -> tuple[object, ...]:
    table = of.broker.table if isinstance(of, CoreBroker) else of
    return (
        sorted((ck.key, ck.members, ck.acked, ck.revived, ck.superseded) for ck in table),
        sorted(
            (place, p.committed, p.cursor, p.in_flight, [c.next_offset for c in p.open])
            for place, p in table.progress_items()
        ),
        table.in_flight,
    )


@pytest.mark.parametrize("clean", [True, False])
def test_a_reset_ends_check_points_that_are_in_memory_only(clean: bool) -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g", check_points=CheckPoints.BUFFERED)
    send(core, 8)
    first = core.receive("orders", "g", limit=3, invisible_ms=60_000)
    more = core.receive("orders", "g", limit=3, invisible_ms=60_000)
    assert core.ack("orders", "g", more[1].handle)[0].code == Code.OK
    reset(core, offset=7)
    assert (in_flight(core), core.broker.buffer.held) == (0, 0)
    for _ in range(2):
        for delivery in (first[0], more[0]):
            assert "offset was reset" in core.ack("orders", "g", delivery.handle)[0].message
        if clean:
            core.stop()
        else:
            disk.restore_power()
        core.start()
    assert in_flight(core) == 0
    assert heads(core.receive("orders", "g")) == [b"7"]
