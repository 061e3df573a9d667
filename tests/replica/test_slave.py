"""A slave applies what is confirmed, does nothing by itself, and is a master when it is told."""

from dataclasses import replace
from pathlib import Path

import pytest
from replica.pair import OF_TWO, SHORT, Pair, Slave, fill
from timer.timer_client import HOUR, MINUTE, SECOND, recall, received, send, send_all

from popmq.broker.deliveries.ended_check_points import OUTCOME_MS
from popmq.broker.log.commit_log import CommitLog
from popmq.broker.log.store_metrics import EpochLogTime
from popmq.broker.node.metrics import broker_metrics
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.state_hashes import Compared
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import ClientsReport, Kind
from popmq.common.record.message import HEADER_SIZE, RecordKind
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker, bodies, pop


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    new_pair = Pair(tmp_path)
    new_pair.master.topic("orders", queues=2)
    new_pair.master.group("g")
    return new_pair


def test_a_slave_has_nothing_in_its_tables_that_is_not_confirmed(pair: Pair) -> None:
    sent = fill(pair.master, 5)
    slave = pair.slave.broker.store
    pair.slave.take(pair.master)
    pair.slave.run_steps()
    assert slave.durable == slave.end == pair.master.broker.store.end
    assert slave.confirmed == 0
    assert pair.slave.broker.registry.find_topic("orders") is None
    pair.follow()
    topic = pair.slave.broker.registry.topic("orders")
    assert sum(slave.queue(topic.id, queue).count for queue in (0, 1)) == len(sent)


def test_the_lag_of_a_group_is_a_metric_of_its_master_alone(pair: Pair) -> None:
    """A slave has the same tables: sums over all brokers would count each message twice."""

    def counted(core: CoreBroker) -> dict[str, float]:
        core.run_until_idle()
        readings = list(broker_metrics(core.broker))
        kinds = ("consumer_", "dlq_messages", "timer_timing_messages", "half_messages", "audit_")
        return {
            metric.name: metric.value
            for metric in readings
            if metric.name.startswith(kinds) and metric.name != "consumer_pairs_summed"
        }

    pair.master.topic("later", type=MessageType.DELAY)
    fill(pair.master, 5)
    pair.master.receive("orders", "g", limit=1)
    due_ms = pair.master.broker.store.log_ms() + 8 * HOUR
    send(pair.master, "1", due_ms, topic="later")
    pair.follow()
    on_master = counted(pair.master)
    assert on_master["consumer_lag_messages"] == 5
    assert on_master["timer_timing_messages"] == 1
    assert counted(pair.slave) == {}
    promoted = pair.fail_over()
    assert counted(promoted).keys() >= {"consumer_lag_messages", "timer_timing_messages"}


def test_an_ack_of_a_buffered_group_is_ok_again_at_the_promoted_slave(pair: Pair) -> None:
    """The proxy repeats it when the master's answer was lost."""
    pair.master.group("b", check_points=CheckPoints.BUFFERED)
    fill(pair.master, 10)
    held = pair.master.receive("orders", "b", limit=10, invisible_ms=60_000)
    handles = [delivery.handle for delivery in held]
    assert {result.code for result in pair.master.ack("orders", "b", *handles)} == {Code.OK}
    assert pair.master.broker.buffer.written == 0
    promoted = pair.fail_over()
    assert {result.code for result in promoted.ack("orders", "b", *handles)} == {Code.OK}
    assert promoted.receive("orders", "b") == []


def test_a_promoted_slave_knows_what_was_sent_and_what_was_recalled(pair: Pair) -> None:
    pair.master.topic("later", type=MessageType.DELAY)
    due_ms = pair.clock.wall_ms() + HOUR
    kept, gone = (send(pair.master, name, due_ms, topic="later") for name in ("kept", "gone"))
    pair.master.run_steps()
    recall(pair.master, "gone", topic="later")
    promoted = pair.fail_over()
    assert send(promoted, "kept", due_ms, topic="later") == kept
    assert send(promoted, "gone", due_ms, topic="later") != gone


def test_a_change_that_is_repeated_at_the_promoted_slave_gets_the_same_handle(pair: Pair) -> None:
    fill(pair.master, 2)
    held = pair.master.receive("orders", "g", limit=2)
    changed = [pair.master.change("orders", "g", item.handle, 60_000) for item in held]
    promoted = pair.fail_over()
    assert [promoted.change("orders", "g", item.handle, 60_000) for item in held] == changed
    assert {result.code for result in promoted.ack("orders", "g", *changed)} == {Code.OK}


def test_a_slave_forgets_ended_check_points_after_ten_minutes(pair: Pair) -> None:
    pair.master.group("b", check_points=CheckPoints.BUFFERED)
    fill(pair.master, 10)
    for group in ("g", "b"):
        held = pair.master.receive("orders", group, limit=10)
        pair.master.ack("orders", group, *(delivery.handle for delivery in held))
    pair.follow()
    table = pair.slave.broker.table
    assert table.outcomes.order()
    assert table.acked_in_memory.order()
    pair.master.advance(OUTCOME_MS + SECOND)
    fill(pair.master, 1)
    pair.follow()
    assert table.outcomes.order() == table.acked_in_memory.order() == []


def test_clients_go_on_with_the_promoted_slave(pair: Pair) -> None:
    sent = fill(pair.master, 10)
    first = pair.master.receive("orders", "g", limit=4, invisible_ms=60_000)
    pair.master.ack("orders", "g", first[0].handle)
    pair.follow()
    promoted = pair.fail_over()
    # Handles from before the switch still work.
    (result,) = promoted.ack("orders", "g", first[1].handle)
    assert result.code == Code.OK
    assert promoted.change("orders", "g", first[2].handle, 30_000)
    rest = promoted.receive("orders", "g")
    assert bodies(rest) == sorted(set(sent) - {delivery.head for delivery in first})
    promoted.ack("orders", "g", *(delivery.handle for delivery in rest))
    promoted.advance(61_000)
    assert bodies(promoted.receive("orders", "g")) == sorted(
        delivery.head for delivery in first[2:]
    )
    assert promoted.send("orders", b"new").code == Code.OK


def test_what_the_last_master_may_not_have_answered_is_not_renewed_by_the_next(pair: Pair) -> None:
    """A push consumer that lives would keep for hours what it was never given."""
    pair.master.send("orders", b"answered")
    pair.master.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    pair.master.advance(30_000)
    pair.master.send("orders", b"lost")
    pair.master.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    pair.follow()
    second = pair.core(Slave, "second")
    pair.slave.take(pair.master)
    pair.slave.promote()
    pair.slave.advance(20_000)
    pair.slave.send("orders", b"between")
    pair.slave.advance(10_000)
    second.follow(pair.slave)
    second.promote()
    promoted = second
    promoted.send("orders", b"later")
    promoted.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    for _ in range(60):
        promoted.advance(5_000)
        promoted.reply(Kind.CLIENTS, hop.encode_clients(ClientsReport(alive=["a-client"])))
    (back,) = promoted.receive("orders", "g")
    assert (back.head, back.attempt) == (b"lost", 2)


@pytest.mark.parametrize("known", ["applied", "confirmed", "of the master", "nothing"])
def test_a_delivery_that_was_answered_for_sure_is_renewed_by_the_next_master(
    pair: Pair, known: str
) -> None:
    pair.master.send("orders", b"long work")
    pair.master.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    epoch = pair.master.broker.store.epoch
    if known == "of the master":
        pair.follow()
        pair.clock.advance(6_000)
        lived = EpochLogTime(epoch, pair.master.broker.store.log_ms())
        pair.slave.broker.records.slave_lifecycle.master_lived = lived
    else:
        pair.clock.advance(6_000)
        pair.master.send("orders", b"later")
        pair.slave.take(pair.master)
        store = pair.slave.broker.store
        store.confirm(store.end if known != "nothing" else 0)
        if known == "applied":
            pair.slave.run_steps()
    pair.slave.promote()
    for _ in range(60):
        pair.slave.advance(5_000)
        pair.slave.reply(Kind.CLIENTS, hop.encode_clients(ClientsReport(alive=["a-client"])))
    heads = [delivery.head for delivery in pair.slave.receive("orders", "g")]
    assert (b"long work" in heads) == (known == "nothing")


@pytest.mark.parametrize("other", [-1, 1])
def test_what_another_master_told_of_its_life_says_nothing_of_the_last_one(
    pair: Pair, other: int
) -> None:
    pair.follow()
    store = pair.master.broker.store
    lived = EpochLogTime(store.epoch + other, store.log_ms() + 60_000)
    pair.slave.broker.records.slave_lifecycle.master_lived = lived
    pair.master.send("orders", b"lost")
    pair.master.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    pair.follow()
    pair.slave.promote()
    for _ in range(60):
        pair.slave.advance(5_000)
        pair.slave.reply(Kind.CLIENTS, hop.encode_clients(ClientsReport(alive=["a-client"])))
    assert [delivery.head for delivery in pair.slave.receive("orders", "g")] == [b"lost"]


def test_a_promoted_slave_opens_when_its_epoch_is_confirmed_and_not_before(pair: Pair) -> None:
    fill(pair.master, 3)
    pair.slave.take(pair.master)
    store = pair.slave.broker.store
    assert store.slave is not None
    end, served = store.end, []
    pair.slave.broker.records.slave_lifecycle.promote(7, lambda: served.append(store.epoch))
    pair.slave.run_until_idle()
    pair.slave.run_steps()
    assert not pair.slave.broker.serving
    assert store.durable == store.end == end + HEADER_SIZE + len(EpochStart().encode())
    store.confirm(end)
    pair.slave.run_steps()
    assert not pair.slave.broker.serving
    store.confirm(store.end)
    pair.slave.run_steps()
    assert pair.slave.broker.serving
    assert served == [7]


def test_an_epoch_that_the_log_has_already_begins_nothing(pair: Pair) -> None:
    pair.follow()
    with pytest.raises(AssertionError, match="epoch 1 behind epoch 1"):
        pair.slave.broker.records.slave_lifecycle.promote(1)


def test_a_slave_fires_nothing_and_the_promoted_one_fires_each_timer_once(pair: Pair) -> None:
    pair.master.broker.registry.alter_topic(
        replace(pair.master.broker.registry.topic("orders"), queues=2)
    )
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    due = {"a": 2 * SECOND, "b": 5 * SECOND, "c": 40 * SECOND, "d": 45 * SECOND, "e": HOUR}
    send_all(pair.master, due, topic="later")
    pair.follow()
    pair.master.advance(10 * SECOND)
    assert received(pair.master, "later") == [b"a", b"b"]
    recall(pair.master, "d", topic="later", due_ms=0)
    pair.follow()
    end = pair.slave.broker.store.end
    pair.slave.run_steps()
    assert pair.slave.broker.store.end == end
    pair.clock.advance(10 * SECOND)
    promoted = pair.fail_over()
    assert received(promoted, "later") == []
    promoted.advance(30 * SECOND)
    assert received(promoted, "later") == [b"c"]
    promoted.advance(2 * HOUR)
    assert received(promoted, "later") == [b"e"]


def test_a_slave_counts_the_timers_that_wait_as_its_master_does(pair: Pair) -> None:
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    pair.master.topic("others", queues=1, type=MessageType.MIXED)
    due = {"fired": 2 * SECOND, "recalled": HOUR, "waits": HOUR, "far": 300 * HOUR}
    send_all(pair.master, due, topic="later")
    send_all(pair.master, {"other": HOUR}, topic="others")
    pair.master.advance(5 * SECOND)
    recall(pair.master, "recalled", topic="later")
    pair.follow()
    ours, theirs = (master.broker.timers.state for master in (pair.master, pair.slave))
    assert sorted(ours.pending.values()) == [1, 2]
    assert theirs.pending == ours.pending
    pair.clock.advance(MINUTE)
    promoted = pair.fail_over().broker.timers
    assert promoted.state.pending == ours.pending
    promoted.check.start()
    while promoted.check.running:
        promoted.check.step()
    assert promoted.check.mismatches == 0


def test_a_timer_that_the_master_took_late_is_not_over_for_a_slave_that_was_early(
    pair: Pair,
) -> None:
    """The slave sees the record before the firing that passed it by (RULES 18)."""
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    send_all(pair.master, {"first": 10 * SECOND}, topic="later")
    service = pair.master.broker.timers.service
    pair.master.clock.advance(11 * SECOND)
    # Stored and confirmed, but not enqueued when the other one fires: it is due before that.
    service.enqueue_limit = 0
    now_ms = pair.clock.wall_ms()
    send(pair.master, "early", now_ms + 1, topic="later")
    pair.clock.advance(1)
    pair.follow()
    service.enqueue_limit = 512
    pair.master.advance(5 * SECOND)
    assert sorted(received(pair.master, "later")) == [b"early", b"first"]
    pair.follow()
    ours, theirs = pair.master.broker.timers.state, pair.slave.broker.timers.state
    assert (theirs.cursor, theirs.classified) == (ours.cursor, ours.classified)
    assert not theirs.late
    promoted = pair.fail_over()
    promoted.advance(MINUTE)
    assert received(promoted, "later") == []


def test_the_wheel_of_a_slave_turns_with_its_masters(pair: Pair) -> None:
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    for _ in range(20):
        send_all(pair.master, {f"m{pair.clock.boot_ms()}": 30 * MINUTE}, topic="later")
        pair.master.advance(20 * MINUTE)
        pair.follow()
    slave = pair.slave.broker.timers.service
    cursor_ms = slave.state.cursor[0]
    assert cursor_ms > 0
    assert slave.enqueue.base_ms > cursor_ms - 2 * MINUTE
    assert slave.enqueue.rolled == 0
    promoted = pair.fail_over()
    promoted.advance(HOUR)
    assert len(received(promoted, "later")) > 0


def test_hashes_of_snapshots_are_compared_and_a_difference_is_told(pair: Pair) -> None:
    comparisons: list[Compared] = []
    assert pair.slave.broker.store.slave is not None
    hashes = pair.slave.broker.store.slave.hashes
    hashes.on_compared = comparisons.append
    for _ in range(4):
        fill(pair.master, 100, size=400)
        pair.master.advance(2 * SECOND)
        pair.follow()
    assert hashes.compared >= 3
    assert hashes.diverged == 0
    assert [comparison.equal for comparison in comparisons] == [True] * hashes.compared
    # One record that the slave's tables take otherwise than the master's did.
    pair.slave.broker.deliveries.redriven._add(77, 5)
    fill(pair.master, 100, size=400)
    pair.master.advance(2 * SECOND)
    pair.follow()
    assert hashes.diverged == 1
    (differing,) = [comparison for comparison in comparisons if not comparison.equal]
    assert differing.position == pair.slave.broker.store.snapshots.position
    assert differing.epoch == pair.master.broker.store.epoch


def test_a_broker_alone_writes_no_records_for_slaves(tmp_path: Path) -> None:
    pair = Pair(
        tmp_path, settings=replace(OF_TWO, replication=replace(OF_TWO.replication, replicas=1))
    )
    pair.master.topic("orders", queues=2)
    fill(pair.master, 300, size=400)
    pair.master.advance(2 * SECOND)
    assert pair.master.broker.store.snapshots.made > 0
    kinds = {record.header.kind for record in pair.master.broker.store._log.scan(0)}
    assert kinds == {RecordKind.EPOCH_START, RecordKind.META, RecordKind.MESSAGE}


def log_starts(pair: Pair) -> tuple[int, int]:
    return pair.master.broker.store.start, pair.slave.broker.store.start


def test_a_slave_deletes_what_its_master_deleted_and_nothing_else(tmp_path: Path) -> None:
    pair = Pair(tmp_path, settings=SHORT)
    pair.master.topic("orders", queues=2)
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    pair.master.group("g")
    send_all(pair.master, {"far": 10 * HOUR}, topic="later")
    pair.master.send("orders", b"in flight")
    (held,) = pair.master.receive("orders", "g", invisible_ms=9 * HOUR)
    for _ in range(8):
        fill(pair.master, 30, size=50_000)
        pair.master.advance(30 * MINUTE)
        pair.slave.take(pair.master)
        pair.slave.run_steps()
    masters, slaves = log_starts(pair)
    assert masters > 0 == slaves  # the slave has the records, and nothing of it is confirmed
    for _ in range(4):  # its own older snapshot has to be behind
        fill(pair.master, 10, size=50_000)
        pair.master.advance(MINUTE)
        pair.follow()
        pair.slave.advance(MINUTE)
    masters, slaves = log_starts(pair)
    assert masters - (2 << 20) <= slaves <= masters
    promoted = pair.fail_over()
    assert [result.code for result in promoted.ack("orders", "g", held.handle)] == [Code.OK]
    promoted.advance(10 * HOUR)
    assert received(promoted, "later") == [b"far"]


def test_a_slave_whose_disk_is_full_takes_no_blocks_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    disk = LyingDisk()
    pair = Pair(tmp_path)
    pair.slave = pair.core(Slave, "slave", disk)
    pair.master.topic("orders", queues=1)
    pair.follow()
    pair.slave.advance(2 * SECOND)
    capacity, disk.capacity = disk.capacity, disk.capacity - disk.space("")[0]

    def go_on() -> None:
        for _ in range(20):
            fill(pair.master, 10, size=40_000)
            pair.slave.advance(2 * SECOND)
            pair.follow()

    with pytest.raises(TooManyRequests, match=r"is full: \d+ bytes of the master's log do not fit"):
        go_on()
    assert pair.slave.broker.store.guard.full
    assert 0 < pair.slave.broker.store.end < pair.master.broker.store.end
    disk.capacity = capacity
    pair.slave.advance(2 * SECOND)
    pair.follow()
    assert pair.slave.broker.store.end == pair.master.broker.store.end


def test_records_that_the_new_master_never_had_are_cut_before_they_are_applied(pair: Pair) -> None:
    fill(pair.master, 3)
    pair.follow()
    agreed = pair.master.broker.store.end
    fill(pair.master, 3)
    pair.slave.take(pair.master)  # of which nothing is confirmed
    store, done = pair.slave.broker.store, []
    assert store.slave is not None
    store.slave.truncate(agreed, lambda: done.append(store.end))
    pair.slave.run_until_idle()
    assert done == [agreed]
    with pytest.raises(AssertionError, match="applied"):
        store.slave.truncate(agreed - 100, lambda: None)
    other = Pair(pair.folder / "other")
    other.master.topic("elsewhere")
    promoted = pair.fail_over()
    assert len(promoted.receive("orders", "g")) == 6


def test_a_slave_goes_on_after_a_clean_stop_and_after_a_crash(pair: Pair) -> None:
    sent = fill(pair.master, 50)
    pair.follow()
    pair.slave.stop()
    pair.slave.start()
    sent += fill(pair.master, 50)
    pair.follow()
    sent += fill(pair.master, 50)
    pair.slave.take(pair.master)
    pair.slave.broker.release_files()
    pair.slave.start()
    store = pair.slave.broker.store
    assert store.end == store.durable == pair.master.broker.store.end
    assert store.confirmed <= store.end
    pair.follow()
    promoted = pair.fail_over()
    results: list[bytes] = []
    while batch := promoted.receive("orders", "g"):
        results += [delivery.head for delivery in batch]
    assert sorted(results) == sorted(sent)


def test_a_torn_tail_of_a_slave_is_no_damage_whatever_its_master_had_confirmed(
    tmp_path: Path,
) -> None:
    """The master confirmed these records without this slave; its power goes before they are on
    its disk, but for the last one."""
    pair = Pair(tmp_path)
    pair.master.topic("orders", queues=1)
    pair.follow()
    fill(pair.master, 40, size=3_000)
    before = pair.slave.broker.store.end
    pair.slave.take(pair.master)
    pair.slave.broker.release_files()
    path = tmp_path / "slave" / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[before : before + 60_000] = bytes(60_000)
    path.write_bytes(data)
    pair.slave.start()
    assert pair.slave.broker.store.end == before
    pair.follow()


def test_fifo_order_goes_on_after_a_failover(pair: Pair) -> None:
    pair.master.topic("lines", queues=1, type=MessageType.FIFO)
    pair.master.group("f", type=GroupType.FIFO)
    for number in range(6):
        pair.master.send("lines", b"%d" % number, message_group="k", queue_id=0)
    first = pair.master.receive("lines", "f", limit=2, invisible_ms=5 * SECOND)
    pair.master.ack("lines", "f", first[0].handle)
    pair.follow()
    promoted = pair.fail_over()
    assert promoted.receive("lines", "f") == []
    promoted.advance(6 * SECOND)
    heads: list[bytes] = []
    while batch := promoted.receive("lines", "f"):
        heads += [delivery.head for delivery in batch]
        promoted.ack("lines", "f", *(delivery.handle for delivery in batch))
    assert heads == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.more
def test_records_that_are_cold_are_waited_for_and_applied_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = fill(pair.master, 3_000, size=1_000)
    store = pair.slave.broker.store
    assert store.slave is not None
    store.slave.apply.keep_bytes = 0  # all of it is read from the file
    pair.slave.take(pair.master)
    view, calls = CommitLog.view_warm, 0

    def cold_at_first(self: CommitLog, position: int, size: int) -> bytes | memoryview:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise ColdRead(lambda: None)
        return view(self, position, size)

    monkeypatch.setattr(CommitLog, "view_warm", cold_at_first)
    store.confirm(store.end)
    pair.slave.run_steps()
    assert calls > 10
    monkeypatch.undo()
    topic = pair.slave.broker.registry.topic("orders")
    assert sum(store.queue(topic.id, queue).count for queue in (0, 1)) == len(sent)
    assert store.slave.applied == store.end
