"""A message id that is sent again stores nothing new, whatever happened to the first reply."""

from typing import cast

import pytest

from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutResult
from popmq.common.record.send_fingerprint import fingerprint_field
from popmq.common.settings.send_settings import DedupSettings
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, Answer, CoreBroker


def settings(**dedup: int) -> Settings:
    return Settings(
        store=SMALL.store,
        message=SMALL.message,
        timer=SMALL.timer,
        dedup=DedupSettings(**dedup),
    )


def broker(**dedup: int) -> CoreBroker:
    new_broker = CoreBroker(settings=settings(**dedup))
    new_broker.topic("orders", queues=4, type=MessageType.MIXED)
    new_broker.topic("others", queues=1)
    new_broker.group("g")
    return new_broker


@pytest.fixture
def core() -> CoreBroker:
    return broker()


def entry(
    message_id: str, *, due_ms: int = 0, group: str = "", sender: int = 0, host: str = ""
) -> hop.PutEntry:
    """`sender` 0: a proxy of before, which writes no fingerprint."""
    kind = MessageType.DELAY if due_ms else MessageType.NORMAL
    kind = MessageType.FIFO if group else kind
    sent = api.SystemProperties(message_id=message_id, message_group=group, born_host=host)
    properties = sent.SerializeToString()
    if sender:
        properties += fingerprint_field(sender, bytes(16))
    return hop.PutEntry(
        kind,
        message_id.encode(),
        properties,
        due_ms=due_ms,
        message_id=message_id,
    )


def ask(core: CoreBroker, *entries: hop.PutEntry, topic: str = "orders") -> Answer:
    return core.ask(Kind.PUT, hop.encode_put(hop.PutRequest(topic, entries)), settle=False)


def results(core: CoreBroker, *entries: hop.PutEntry, topic: str = "orders") -> list[PutResult]:
    answer = ask(core, *entries, topic=topic)
    core.run_until_idle()
    assert answer.body is not None, answer.error
    return hop.decode_put_reply(answer.body)


def stored(core: CoreBroker, topic: str = "orders") -> int:
    config = core.broker.registry.topic(topic)
    return sum(core.broker.store.queue(config.id, q).count for q in range(config.queues))


def crash(core: CoreBroker) -> None:
    cast(LyingDisk, core.disk).restore_power()
    core.start()


def test_a_resend_stores_nothing_and_gets_the_first_receipt(core: CoreBroker) -> None:
    (first,) = results(core, entry("a"))
    results(core, entry("b"))
    assert results(core, entry("a")) == [first]
    assert stored(core) == 2
    assert core.broker.send_deduplication.duplicates == 1


def test_within_one_request_too(core: CoreBroker) -> None:
    first, second, other = results(core, entry("a"), entry("a"), entry("b"))
    assert first == second != other
    assert stored(core) == 2


def test_the_same_id_in_another_topic_is_another_message(core: CoreBroker) -> None:
    results(core, entry("a"))
    results(core, entry("a"), topic="others")
    assert (stored(core), stored(core, "others")) == (1, 1)


def test_a_message_without_an_id_is_always_another(core: CoreBroker) -> None:
    results(core, entry(""), entry(""))
    assert stored(core) == 2


def test_a_resend_is_answered_when_its_first_attempt_is_durable(core: CoreBroker) -> None:
    first, again = ask(core, entry("a")), ask(core, entry("a"))
    assert not first.heard
    assert not again.heard
    core.run_until_idle()
    assert first.body == again.body is not None


def test_a_delayed_message_too_and_its_due_time_is_the_first_ones(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + 60_000
    (first,) = results(core, entry("a", due_ms=due_ms))
    assert results(core, entry("a", due_ms=due_ms + 5_000)) == [first]
    assert first.due_ms == due_ms
    core.advance(70_000)
    assert results(core, entry("a", due_ms=due_ms)) == [first]  # it was delivered by now
    assert stored(core) == 1


def test_a_message_in_order_too(core: CoreBroker) -> None:
    (first,) = results(core, entry("a", group="key"))
    assert results(core, entry("a", group="key")) == [first]
    assert stored(core) == 1


def test_a_delivery_or_a_retry_of_the_message_changes_nothing(core: CoreBroker) -> None:
    (first,) = results(core, entry("a"))
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    (again,) = core.receive("orders", "g")
    core.ack("orders", "g", again.handle)
    assert results(core, entry("a")) == [first]
    crash(core)
    assert results(core, entry("a")) == [first]


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
def test_a_resend_after_a_start_is_recognised(core: CoreBroker, clean: bool) -> None:
    kept = results(core, *(entry(f"m-{number}") for number in range(600)))
    delayed = results(core, entry("late", due_ms=core.clock.wall_ms() + 60_000))
    if clean:
        core.stop()  # leaves a snapshot of all of it
        core.start()
    else:
        crash(core)
    assert results(core, *(entry(f"m-{number}") for number in range(600))) == kept
    assert results(core, entry("late", due_ms=core.clock.wall_ms() + 60_000)) == delayed
    assert stored(core) == 600


def test_a_first_attempt_that_was_lost_with_its_broker_is_stored_by_the_resend(
    core: CoreBroker,
) -> None:
    assert not ask(core, entry("a")).heard
    crash(core)
    results(core, entry("a"))
    assert stored(core) == 1


def test_what_was_refused_is_not_remembered(core: CoreBroker) -> None:
    (refused,) = results(core, entry("a")._replace(head=bytes(64 << 20)))
    (taken,) = results(core, entry("a"))
    assert (refused.code, taken.code) == (Code.PAYLOAD_TOO_LARGE, Code.OK)
    assert stored(core) == 1


def test_an_id_is_forgotten_after_the_window_and_not_before() -> None:
    core = broker(window_ms=160_000)
    results(core, entry("a"))
    core.advance(159_000)
    results(core, entry("a"))
    assert stored(core) == 1
    core.advance(12_000)  # a sixteenth of the window later at most
    assert len(core.broker.send_deduplication) == 0
    results(core, entry("a"))
    assert stored(core) == 2


def test_a_start_has_the_newest_receipt_of_an_id_that_was_forgotten_in_between() -> None:
    """A replay may know the first one still: it forgets only as records come."""
    core = broker(window_ms=160_000)
    results(core, entry("a"))
    core.advance(172_000)
    (second,) = results(core, entry("a"))
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    assert results(core, entry("a")) == [second]
    core.advance(159_000)
    assert results(core, entry("a")) == [second]
    assert stored(core) == 2


def test_a_rescheduled_message_keeps_the_receipt_of_its_send_over_a_start() -> None:
    core = broker(window_ms=160_000)
    due_ms = core.clock.wall_ms() + 60_000
    first = results(core, entry("a", due_ms=due_ms))
    core.run_steps()
    request = admin_pb2.RescheduleRequest(topic="orders", message_id="a", new_due_ms=-90_000)
    core.reply(Kind.RESCHEDULE, request.SerializeToString())
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    assert results(core, entry("a", due_ms=due_ms)) == first


def test_a_window_of_0_switches_it_off() -> None:
    core = broker(window_ms=0)
    results(core, entry("a"), entry("a"))
    assert stored(core) == 2


def test_at_the_bound_the_oldest_ids_leave_and_are_counted() -> None:
    core = broker(max_ids=3)
    for name in "abcde":
        results(core, entry(name))
    receipts = core.broker.send_deduplication
    assert (len(receipts), receipts.evicted) == (3, 2)
    results(core, entry("c"), entry("d"), entry("e"))
    assert stored(core) == 5
    results(core, entry("a"))
    assert stored(core) == 6


# -- another message with the same id


def test_the_same_id_with_another_fingerprint_is_another_message(core: CoreBroker) -> None:
    mine, other = results(core, entry("a", sender=1))[0], results(core, entry("a", sender=2))[0]
    assert stored(core) == 2
    assert results(core, entry("a", sender=1)) == [mine]
    assert results(core, entry("a", sender=2)) == [other]
    assert stored(core) == 2
    assert (
        core.broker.send_deduplication.duplicates,
        core.broker.send_deduplication.collisions,
    ) == (2, 1)


def test_within_one_request_each_has_its_place(core: CoreBroker) -> None:
    mine, other, again = results(core, *(entry("a", sender=number) for number in (1, 2, 1)))
    assert (stored(core), again) == (2, mine)
    assert other != mine


@pytest.mark.parametrize("clean", [True, False], ids=["clean stop", "crash"])
def test_messages_of_one_id_are_told_apart_after_a_start(core: CoreBroker, clean: bool) -> None:
    senders = range(1, 6)
    entries = [entry("a", sender=sender) for sender in senders]
    kept = results(core, *entries)
    if clean:
        core.stop()
        core.start()
    else:
        crash(core)
    assert results(core, *entries) == kept
    assert stored(core) == len(senders)
    assert results(core, entry("a", sender=6))[0] not in kept


def test_what_is_left_of_one_id_is_known_when_its_first_message_is_forgotten() -> None:
    core = broker(window_ms=160_000)
    results(core, entry("a", sender=1))
    core.advance(100_000)
    second = results(core, entry("a", sender=2))
    core.advance(75_000)
    assert results(core, entry("a", sender=2)) == second
    assert results(core, entry("a", sender=1))  # another one by now
    assert stored(core) == 3
    assert results(core, entry("a", sender=2)) == second
    core.advance(172_000)
    assert len(core.broker.send_deduplication) == 0


def test_a_collision_is_warned_of_once_for_each_host(
    core: CoreBroker, caplog: pytest.LogCaptureFixture
) -> None:
    for sender, host in enumerate(("pod-1", "pod-1", "pod-1", "pod-2", "pod-2"), 1):
        results(core, entry("a", sender=sender, host=host))
    warnings = [record for record in caplog.records if "one message id" in record.message]
    assert [vars(record)["born_host"] for record in warnings] == ["pod-1", "pod-2"]
    assert core.broker.send_deduplication.collisions == 4


# -- a message that will not be delivered


def recall(core: CoreBroker, message_id: str, due_ms: int = 0) -> None:
    request = admin_pb2.RecallRequest(topic="orders", message_id=message_id, due_ms=due_ms)
    reply = admin_pb2.RecallReply.FromString(core.reply(Kind.RECALL, request.SerializeToString()))
    assert reply.outcome == hop.RecallResult.DONE


@pytest.mark.parametrize("rescheduled", [False, True])
@pytest.mark.parametrize("start", ["no start", "clean stop", "crash"])
def test_a_message_that_was_recalled_is_stored_when_it_is_sent_again(
    core: CoreBroker, start: str, rescheduled: bool
) -> None:
    delayed = entry("a", due_ms=core.clock.wall_ms() + 60_000, sender=1)
    (first,) = results(core, delayed)
    if rescheduled:
        core.run_steps()
        request = admin_pb2.RescheduleRequest(topic="orders", message_id="a", new_due_ms=-90_000)
        core.reply(Kind.RESCHEDULE, request.SerializeToString())
        assert results(core, delayed) == [first]
    core.run_steps()
    recall(core, "a")
    if start == "clean stop":
        core.stop()
        core.start()
    elif start == "crash":
        crash(core)
    (second,) = results(core, delayed)
    assert second.queue_offset > first.queue_offset
    assert results(core, delayed) == [second]
    core.advance(61_000)
    assert [delivery.head for delivery in core.receive("orders", "g")] == [b"a"]


def test_a_recall_names_one_of_two_messages_of_an_id_by_its_time(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + 60_000
    mine, other = entry("a", due_ms=due_ms, sender=1), entry("a", due_ms=due_ms + 1, sender=2)
    results(core, mine, other)
    core.run_steps()
    with pytest.raises(PopmqError, match="2 messages of different clients or bodies have the id"):
        recall(core, "a")
    for _ in range(2):  # the second time it is over, and the other one stays
        recall(core, "a", due_ms)
    core.advance(61_000)
    assert len(core.receive("orders", "g")) == 1


def test_a_recall_that_a_start_reads_behind_its_snapshot_counts() -> None:
    core = broker()
    delayed = entry("a", due_ms=core.clock.wall_ms() + 60_000, sender=1)
    (first,) = results(core, delayed)
    core.stop()  # leaves a snapshot that knows the send
    core.start()
    assert results(core, delayed) == [first]
    core.run_steps()
    recall(core, "a")
    crash(core)
    assert results(core, delayed) != [first]


def test_a_snapshot_has_what_was_recalled_or_rescheduled_since_it_began() -> None:
    """The log behind it says so again."""
    table = SendDeduplication(DedupSettings())
    for number in range(1, 1_200):
        result = PutResult(queue_offset=number, due_ms=9)
        table.record_send(7, f"m-{number}", result, 1, fingerprint=number, timer=number * 100)
    table.forget_timer(109_900)  # before it begins
    pieces = table.begin_snapshot()
    first, _ = next(pieces)
    other = SendDeduplication(DedupSettings())
    table.forget_timer(110_000)
    table.replace_timer(110_100, 500_000, 2)
    for content in (first, *(piece for piece, _ in pieces)):
        other.restore(content)
    assert other.find(7, "m-1099", 1_099) is None
    for number in (1_100, 1_101):
        assert other.find(7, f"m-{number}", number) is not None
    other.forget_timer(110_000)
    other.replace_timer(110_100, 500_000, 2)
    assert other.find(7, "m-1100", 1_100) is None
    assert other.find(7, "m-1101", 1_101) is not None
    assert sorted(other.items()) == sorted(table.items())


def test_what_ended_stays_out_of_a_snapshot_also_when_it_is_pushed_out_meanwhile() -> None:
    table = SendDeduplication(DedupSettings(max_ids=1_600))
    for number in range(1, 1_601):
        result = PutResult(queue_offset=number, due_ms=9)
        table.record_send(7, f"m-{number}", result, 1, timer=number * 100)
    table.forget_timer(160_000)
    pieces = table.begin_snapshot()
    filled(table, 0, 3_000, 0)
    other = SendDeduplication(DedupSettings(max_ids=1_600))
    for content, _ in pieces:
        other.restore(content)
    assert other.find(7, "m-1599") is not None
    assert other.find(7, "m-1600") is None


def test_a_snapshot_of_an_older_popmq_is_read() -> None:
    """Entries without fingerprints: key size, queue, offset, due time, key."""
    key = (7).to_bytes(4, "big") + b"m-1"
    content = bytes.fromhex("0000000000000001 00000001") + bytes.fromhex("0007 00000002")
    content += (5).to_bytes(8, "big") + (0).to_bytes(8, "big") + key
    table = SendDeduplication(DedupSettings())
    table.restore(content)
    assert table.find(7, "m-1") == (PutResult(queue_id=2, queue_offset=5, due_ms=0), False)
    assert table.find(7, "m-1", 1) is None


# -- the table by itself


def filled(receipts: SendDeduplication, first: int, end: int, log_ms: int) -> None:
    for number in range(first, end):
        receipts.restore_entry(7, b"m-%d" % number, number % 8, number, 0, log_ms + number)


def test_a_snapshot_has_what_was_there_when_it_began() -> None:
    table = SendDeduplication(DedupSettings(window_ms=16_000, max_ids=5_000))
    filled(table, 0, 3_000, 0)
    before = sorted(table.items())
    pieces = table.begin_snapshot()
    first, _ = next(pieces)
    filled(table, 3_000, 6_000, 0)  # pushes a thousand out
    table.step(20_000)
    other = SendDeduplication(DedupSettings(window_ms=16_000, max_ids=5_000))
    for content in (first, *(piece for piece, _ in pieces)):
        other.restore(content)
    assert sorted(other.items()) == before


def test_forgetting_is_bounded_in_one_step() -> None:
    table = SendDeduplication(DedupSettings(window_ms=1_600, max_ids=10_000))
    for number in range(5_000):
        table.restore_entry(7, b"%d" % number, 0, number, 0, 0)
    assert [table.step(10_000) for _ in range(4)] == [2_048, 2_048, 904, 0]


def test_a_receipt_comes_back_whole_whatever_its_numbers() -> None:
    table = SendDeduplication(DedupSettings())
    result = PutResult(queue_id=1_023, queue_offset=(1 << 63) + 5, due_ms=1_800_000_000_000)
    table.record_send((1 << 32) - 1, "é" * 127, result, 1)
    other = SendDeduplication(DedupSettings())
    for content, _ in table.begin_snapshot():
        other.restore(content)
    assert other.find((1 << 32) - 1, "é" * 127) == (result, False)
    assert other.find(7, "é" * 127) is None


def test_a_replay_of_many_ids_holds_no_more_than_the_bound_and_a_sixteenth() -> None:
    """All of them lie in one sixteenth of the window."""
    table = SendDeduplication(DedupSettings(window_ms=600_000, max_ids=1_600))
    filled(table, 0, 20_000, 0)
    assert (len(table), table.evicted) == (1_600, 18_400)
    assert table.held_ids <= 1_700
    assert sum(1 for _ in table.items()) == 1_600


def test_a_replay_of_a_long_time_holds_the_window_and_a_sixteenth_of_it() -> None:
    table = SendDeduplication(DedupSettings(window_ms=1_600, max_ids=100_000))
    filled(table, 0, 20_000, 0)  # one each millisecond
    assert 1_600 <= len(table) == table.held_ids <= 1_800
    assert table.evicted == 0


def test_an_id_that_is_sent_again_and_again_after_its_window_is_held_within_the_bound() -> None:
    table = SendDeduplication(DedupSettings(window_ms=600_000, max_ids=160))
    for number in range(5_000):
        table.restore_entry(7, b"m", 0, number, 0, number)
    assert table.held_ids <= 170
    assert table.find(7, "m") == (PutResult(queue_id=0, queue_offset=4_999, due_ms=0), False)


def test_an_id_that_came_back_from_a_snapshot_is_known_for_the_whole_window() -> None:
    settings = DedupSettings(window_ms=16_000, max_ids=160)
    table, other = SendDeduplication(settings), SendDeduplication(settings)
    # The first bucket is full, and half of it is gone.
    stored_ms = [0, *[990] * 9, 991, 1_985, *[1_986] * 153]
    for number, log_ms in enumerate(stored_ms):
        table.restore_entry(7, b"m-%d" % number, 0, number, 0, log_ms)
    for content, _ in table.begin_snapshot():
        other.restore(content)
    assert sorted(other.items()) == sorted(table.items())
    for receipts in (table, other):
        receipts.step(1_985 + 15_999)
        assert receipts.find(7, "m-11") is not None


def test_of_a_snapshot_with_more_ids_than_fit_the_newest_stay() -> None:
    table = SendDeduplication(DedupSettings(max_ids=5_000))
    filled(table, 0, 3_000, 0)
    other = SendDeduplication(DedupSettings(max_ids=100))
    for content, _ in table.begin_snapshot():
        other.restore(content)
    assert sorted(key for key, _, _ in other.items()) == sorted(
        (7).to_bytes(4, "big") + b"m-%d" % number for number in range(2_900, 3_000)
    )
