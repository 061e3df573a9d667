"""Groups with buffered check points: what is written when, and what a crash brings back."""

from collections import Counter
from dataclasses import replace

import pytest

from popmq.broker.deliveries.check_point_buffer import NAMES_PER_RECORD
from popmq.broker.deliveries.ended_check_points import OUTCOME_MS
from popmq.broker.log.commit_log import CommitLog
from popmq.common.errors import Code, Refused
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.message import RecordKind
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import CheckPoints, GroupType, SubscriptionGroup
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

STAY_MS, WRITE_AHEAD_MS = 10_000, 3_000  # the defaults


@pytest.fixture
def core() -> CoreBroker:
    return core_with(PopSettings())


def core_with(limits: PopSettings) -> CoreBroker:
    broker = CoreBroker(disk=LyingDisk(), settings=replace(SMALL, pop=limits))
    broker.topic("orders", queues=1)
    broker.group("g", check_points=CheckPoints.BUFFERED)
    for number in range(10):
        broker.send("orders", b"%d" % number)
    return broker


def power_cut(core: CoreBroker) -> None:
    assert isinstance(core.disk, LyingDisk)
    core.disk.restore_power()
    core.start()


def written(core: CoreBroker) -> Counter[str]:
    """What the log holds of pop, by kind."""
    return Counter(in_order(core))


def in_order(core: CoreBroker) -> list[str]:
    log = CommitLog(
        core.disk,
        f"{core.settings.broker.data}/commitlog",
        segment_bytes=core.settings.store.segment_bytes,
    )
    log.load()
    kinds = (RecordKind(record.header.kind) for record in log.scan(0))
    return [kind.name for kind in kinds if kind in (RecordKind.REVIVE, RecordKind.OFFSET)]


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.head for delivery in deliveries]


def test_a_buffered_pop_writes_nothing_and_does_not_wait_for_the_disk(core: CoreBroker) -> None:
    end = core.broker.store.end
    answer = core.ask(Kind.POP, pop("orders", "g"), settle=False)
    assert answer.body is not None
    assert len(hop.decode_pop_reply(answer.body).deliveries) == 10
    core.run_until_idle()
    assert core.broker.store.end == end


def test_a_batch_that_was_acked_together_is_one_small_record(core: CoreBroker) -> None:
    got = core.receive("orders", "g")
    results = core.ack("orders", "g", *(delivery.handle for delivery in got))
    assert {result.code for result in results} == {Code.OK}
    assert written(core) == {"OFFSET": 1}
    power_cut(core)
    assert core.receive("orders", "g") == []


def test_acks_of_one_group_commit_share_a_record(core: CoreBroker) -> None:
    answers = []
    for delivery in core.receive("orders", "g"):
        body = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
        answers.append(core.ask(Kind.ACK, body, settle=False))
    assert not any(answer.heard for answer in answers)
    core.run_until_idle()
    assert all(answer.body is not None for answer in answers)
    assert written(core) == {"OFFSET": 1}


def test_an_ack_is_answered_only_when_it_is_durable(core: CoreBroker) -> None:
    (delivery,) = core.receive("orders", "g", limit=1)
    body = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
    answer = core.ask(Kind.ACK, body, settle=False)
    before = core.broker.store.confirmed
    while not answer.heard:
        core.tick()
    assert core.broker.store.confirmed > before
    power_cut(core)
    assert bodies(core.receive("orders", "g")) == [b"%d" % n for n in range(1, 10)]


def test_a_crash_brings_unacked_messages_back_early_and_acked_ones_never(core: CoreBroker) -> None:
    first = core.receive("orders", "g", limit=4)
    second = core.receive("orders", "g", limit=4)
    core.ack("orders", "g", first[0].handle, first[1].handle, second[3].handle)
    power_cut(core)
    # The second ack is behind messages that are not acked, so both check points are records.
    assert bodies(core.receive("orders", "g")) == [b"8", b"9"]
    core.advance(60_100)
    again = [
        delivery for delivery in core.receive("orders", "g") if delivery.head not in (b"8", b"9")
    ]
    assert sorted(bodies(again)) == [b"2", b"3", b"4", b"5", b"6"]
    assert {delivery.attempt for delivery in again} == {2}


def test_what_is_not_acked_at_all_comes_back_as_the_same_attempt(core: CoreBroker) -> None:
    core.receive("orders", "g")
    power_cut(core)
    again = core.receive("orders", "g")
    assert bodies(again) == [b"%d" % n for n in range(10)]
    assert {delivery.attempt for delivery in again} == {1}


@pytest.mark.parametrize(
    ("invisible_ms", "held_ms"),
    [(60_000, STAY_MS), (6_000, 6_000 - WRITE_AHEAD_MS)],
    ids=["ten seconds after the pop", "three seconds before it is due"],
)
def test_a_check_point_that_is_not_acked_becomes_a_record(
    core: CoreBroker, invisible_ms: int, held_ms: int
) -> None:
    core.receive("orders", "g", invisible_ms=invisible_ms)
    core.advance(held_ms - 100)
    assert not written(core)
    core.advance(100)
    assert written(core) == {"REVIVE": 1}
    power_cut(core)
    assert core.receive("orders", "g") == []
    core.advance(invisible_ms - held_ms + 100)
    assert {delivery.attempt for delivery in core.receive("orders", "g")} == {2}


def test_a_short_invisible_time_is_a_record_at_once(core: CoreBroker) -> None:
    core.receive("orders", "g", invisible_ms=4_499)
    assert written(core) == {"REVIVE": 1}
    core.receive("orders", "g", invisible_ms=4_500)
    assert written(core) == {"REVIVE": 1}


def test_an_ack_out_of_order_writes_its_check_point_and_those_before_it(core: CoreBroker) -> None:
    core.receive("orders", "g", limit=3)
    (fourth,) = core.receive("orders", "g", limit=1)
    core.receive("orders", "g", limit=3)
    core.ack("orders", "g", fourth.handle)
    assert written(core) == {"REVIVE": 3}  # two check points and an ack
    power_cut(core)
    assert bodies(core.receive("orders", "g")) == [b"%d" % n for n in range(4, 10)]


def test_an_offset_is_written_behind_the_acks_that_it_counts(core: CoreBroker) -> None:
    """Seed 104899: torn between the two, a message below the offset was in flight."""
    got = core.receive("orders", "g")
    core.ack("orders", "g", got[0].handle, got[2].handle)
    assert in_order(core) == ["REVIVE", "REVIVE", "OFFSET"]


def test_a_repeated_ack_is_ok_and_one_from_before_a_crash_says_why_not(core: CoreBroker) -> None:
    got = core.receive("orders", "g")
    for _ in range(2):
        assert core.ack("orders", "g", got[0].handle)[0].code == Code.OK
    assert core.broker.pop.acks.repeated == 1
    power_cut(core)
    (late,) = core.ack("orders", "g", got[5].handle)
    assert late.code == Code.INVALID_RECEIPT_HANDLE
    assert "in memory only (a buffered group) when the broker stopped" in late.message


def test_an_ack_that_is_durable_is_ok_again_after_a_crash(core: CoreBroker) -> None:
    """Its answer may have been lost with the broker, and the message does not come again."""
    first, *rest = core.receive("orders", "g", limit=6)
    last = core.receive("orders", "g", limit=4)
    assert core.ack("orders", "g", first.handle)[0].code == Code.OK
    assert core.ack("orders", "g", rest[0].handle, rest[1].handle)[0].code == Code.OK
    assert written(core) == {"OFFSET": 2}
    power_cut(core)
    done = [first.handle, rest[0].handle, rest[1].handle]
    assert {result.code for result in core.ack("orders", "g", *done)} == {Code.OK}
    refused = core.ack("orders", "g", rest[2].handle, last[0].handle)
    assert {result.code for result in refused} == {Code.INVALID_RECEIPT_HANDLE}
    again = core.receive("orders", "g")
    assert bodies(again) == [b"%d" % n for n in range(3, 10)]


@pytest.mark.parametrize("cut", [True, False], ids=["crash", "clean stop"])
def test_an_ack_is_ok_again_for_ten_minutes_whatever_was_started_meanwhile(
    core: CoreBroker, cut: bool
) -> None:
    handles = [delivery.handle for delivery in core.receive("orders", "g")]
    core.ack("orders", "g", *handles)
    for _ in range(2):  # the second start reads what the first one knew from its snapshot
        if cut:
            power_cut(core)
        core.stop()
        core.start()
    assert core.broker.store.snapshots.position
    assert {result.code for result in core.ack("orders", "g", *handles)} == {Code.OK}
    core.advance(OUTCOME_MS + 60_000)
    (late,) = core.ack("orders", "g", handles[0])
    assert late.code == Code.INVALID_RECEIPT_HANDLE


def test_a_retry_is_no_ack_of_the_delivery_that_a_crash_took(core: CoreBroker) -> None:
    """The committed offset passes a message that waits for its next attempt: no handle is OK."""
    (lost,) = core.receive("orders", "g", limit=1)
    power_cut(core)
    (again,) = core.receive("orders", "g", limit=1)
    core.change("orders", "g", again.handle, 0)
    core.advance(100)
    rest = core.receive("orders", "g", limit=10)
    core.ack("orders", "g", *(d.handle for d in rest if d.head != b"0"))
    power_cut(core)
    codes = {result.code for result in core.ack("orders", "g", lost.handle, again.handle)}
    assert codes == {Code.INVALID_RECEIPT_HANDLE}


def test_acks_of_very_many_check_points_are_several_records_of_bounded_size(
    core: CoreBroker,
) -> None:
    for number in range(10, NAMES_PER_RECORD + 20):
        core.send("orders", b"%d" % number)
    handles = [core.receive("orders", "g", limit=1)[0].handle for _ in range(NAMES_PER_RECORD + 20)]
    core.ack("orders", "g", *handles)
    assert written(core) == {"OFFSET": 2}
    power_cut(core)
    assert {result.code for result in core.ack("orders", "g", *handles)} == {Code.OK}
    assert core.receive("orders", "g") == []


def test_a_change_writes_the_check_point_that_it_takes_over(core: CoreBroker) -> None:
    (delivery,) = core.receive("orders", "g", limit=1)
    handle = core.change("orders", "g", delivery.handle, 20_000)
    assert written(core) == {"REVIVE": 2}
    power_cut(core)
    assert b"0" not in bodies(core.receive("orders", "g"))
    assert core.ack("orders", "g", handle)[0].code == Code.OK


def test_a_clean_stop_leaves_messages_invisible(core: CoreBroker) -> None:
    core.receive("orders", "g", limit=4)
    core.stop()
    core.start()
    assert bodies(core.receive("orders", "g")) == [b"%d" % n for n in range(4, 10)]


def test_a_group_that_is_made_durable_writes_what_it_held_first(core: CoreBroker) -> None:
    core.receive("orders", "g", limit=4)
    registry = core.broker.registry
    registry.alter_group(replace(registry.group("g"), check_points=CheckPoints.DURABLE))
    core.receive("orders", "g", limit=4)
    assert written(core) == {"REVIVE": 2}
    power_cut(core)
    assert bodies(core.receive("orders", "g")) == [b"8", b"9"]


@pytest.mark.parametrize(
    ("limits", "invisible_ms", "held_ms"),
    [
        (PopSettings(check_point_stay_ms=2_000), 60_000, 2_000),
        (PopSettings(check_point_stay_ms=30_000), 60_000, 30_000),
        (PopSettings(check_point_write_ahead_ms=1_000), 6_000, 5_000),
        (PopSettings(check_point_write_ahead_ms=4_000), 6_000, 2_000),
    ],
)
def test_the_settings_say_when_a_buffered_check_point_becomes_a_record(
    limits: PopSettings, invisible_ms: int, held_ms: int
) -> None:
    core = core_with(limits)
    core.receive("orders", "g", invisible_ms=invisible_ms)
    core.advance(held_ms - 100)
    assert not written(core)
    core.advance(100)
    assert written(core) == {"REVIVE": 1}


@pytest.mark.parametrize(
    ("limits", "invisible_ms"),
    [
        (PopSettings(), 4_500),
        (PopSettings(check_point_min_stay_ms=0), 3_000),
        (PopSettings(check_point_min_stay_ms=5_000), 8_000),
        (PopSettings(check_point_write_ahead_ms=1), 1_501),
    ],
)
def test_the_settings_say_which_invisible_times_are_too_short_for_the_buffer(
    limits: PopSettings, invisible_ms: int
) -> None:
    core = core_with(limits)
    core.receive("orders", "g", limit=1, invisible_ms=invisible_ms)
    assert not written(core)
    core = core_with(limits)
    core.receive("orders", "g", limit=1, invisible_ms=invisible_ms - 1)
    assert written(core) == {"REVIVE": 1}


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_buffer_holds_as_many_check_points_as_its_setting_says(size: int) -> None:
    core = core_with(PopSettings(check_point_buffer_size=size))
    for _ in range(size):
        core.receive("orders", "g", limit=1)
    assert core.broker.buffer.held == size
    assert not written(core)
    core.receive("orders", "g", limit=1)
    # One more becomes a record at once, and those before it in its queue become records first.
    assert written(core) == {"REVIVE": size + 1}
    assert core.broker.buffer.held == 0


def test_a_snapshot_knows_what_was_held_when_it_began() -> None:
    settings = replace(SMALL, store=replace(SMALL.store, snapshot_bytes=4_096))
    core = CoreBroker(disk=LyingDisk(), settings=settings)
    core.topic("orders", queues=1)
    core.group("g", check_points=CheckPoints.BUFFERED)
    held = []
    for number in range(200):
        core.send("orders", b"%d" % number)
        held += core.receive("orders", "g", limit=1, invisible_ms=3_600_000)
        core.run_steps()
    core.advance(STAY_MS + 1_000)
    assert core.broker.store.snapshots.made
    power_cut(core)
    assert core.broker.store.snapshots.position
    assert core.receive("orders", "g") == []
    results = core.ack("orders", "g", *(delivery.handle for delivery in held))
    assert {result.code for result in results} == {Code.OK}
    assert core.broker.table.in_flight == 0


def test_deleting_the_topic_forgets_what_was_held(core: CoreBroker) -> None:
    got = core.receive("orders", "g", limit=4)
    core.ack("orders", "g", got[0].handle)
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    core.topic("orders", queues=1)
    core.send("orders", b"new")
    assert bodies(core.receive("orders", "g")) == [b"new"]
    core.advance(120_000)
    assert core.broker.buffer.held == 0


def test_a_fifo_group_cannot_be_buffered() -> None:
    core = CoreBroker()
    expected = SubscriptionGroup(0, "f", GroupType.FIFO, check_points=CheckPoints.BUFFERED)
    with pytest.raises(Refused, match="f is FIFO: its check points cannot be buffered"):
        core.broker.registry.create_group(expected)
