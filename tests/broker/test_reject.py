"""Reject: a consumer makes its delivery a dead letter at once, by its handle."""

import struct

import pytest

from popmq.broker.persistence.retention import LiveBody
from popmq.common.errors import Code, InvalidReceiptHandle
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import (
    BadRecord,
    DeadReason,
    EndedDelivery,
    RevivalToken,
    StoredMessage,
)
from popmq.common.topics import CheckPoints
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=1)
    broker.group("g", max_attempts=2)
    broker.group("reader")
    return broker


def dead_letters(core: CoreBroker, group: str = "g") -> list[StoredMessage]:
    topic = core.broker.registry.find_topic(f"%DLQ%{group}")
    if topic is None:
        return []
    count = core.broker.store.queue(topic.id, 0).count
    return core.broker.lookup.at(topic.id, 0, 0, limit=count).messages if count else []


def test_a_rejected_message_is_a_dead_letter_now_and_never_comes_back(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.advance(50)
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    delivered_ms = core.broker.store.log_ms()
    core.advance(30)
    assert core.reject("orders", "g", delivery.handle).code == Code.OK
    (dead,) = dead_letters(core)
    assert (dead.head, dead.attempt) == (b"one", 1)
    assert dead.token is not None
    assert dead.token.reason is DeadReason.REJECTED
    assert (dead.token.first_log_ms, dead.token.last_log_ms) == (delivered_ms, delivered_ms)
    core.advance(10_000)
    assert core.receive("orders", "g") == []
    assert [d.head for d in core.receive("%DLQ%g", "reader")] == [b"one"]


def test_the_other_deliveries_of_its_check_point_go_on(core: CoreBroker) -> None:
    for body in (b"one", b"two", b"three"):
        core.send("orders", body)
    delivery, two, three = core.receive("orders", "g", invisible_ms=1_000)
    assert core.reject("orders", "g", two.handle).code == Code.OK
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    core.advance(2_000)
    (again,) = core.receive("orders", "g")
    assert (again.head, again.attempt) == (three.head, 2)
    assert [dead.head for dead in dead_letters(core)] == [b"two"]


def test_rejecting_twice_with_one_handle_makes_one_dead_letter(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    for _ in range(3):
        assert core.reject("orders", "g", delivery.handle).code == Code.OK
    assert len(dead_letters(core)) == 1
    assert core.broker.pop.acks.rejected == 1


def test_an_ack_after_a_reject_says_that_it_is_a_dead_letter(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    core.reject("orders", "g", delivery.handle)
    (result,) = core.ack("orders", "g", delivery.handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert "became a dead letter after attempt 1" in result.message
    with pytest.raises(InvalidReceiptHandle, match="became a dead letter"):
        core.change("orders", "g", delivery.handle, 1_000)


def test_an_ack_after_the_last_attempt_says_that_it_is_a_dead_letter(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    (last,) = core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    (result,) = core.ack("orders", "g", last.handle)
    assert "became a dead letter after attempt 2" in result.message
    (dead,) = dead_letters(core)
    assert dead.token is not None
    assert dead.token.reason is DeadReason.MAX_ATTEMPTS
    assert 1_000 <= dead.token.last_log_ms - dead.token.first_log_ms <= 2_000


def test_what_is_no_waiting_delivery_cannot_be_rejected(core: CoreBroker) -> None:
    for body in (b"acked", b"revived", b"moved"):
        core.send("orders", body)
    acked, revived, moved = core.receive("orders", "g", invisible_ms=1_000)
    core.ack("orders", "g", acked.handle)
    core.change("orders", "g", moved.handle, 60_000)
    core.advance(2_000)
    for delivery, why in ((acked, "was acked"), (revived, "revived"), (moved, "superseded")):
        result = core.reject("orders", "g", delivery.handle)
        assert result.code == Code.INVALID_RECEIPT_HANDLE
        assert why in result.message
    assert core.reject("orders", "g", b"nonsense").code == Code.INVALID_RECEIPT_HANDLE
    assert "was given to" in core.reject("orders", "reader", acked.handle).message
    assert dead_letters(core) == []


def test_after_a_change_the_new_handle_rejects_and_the_first_delivery_counts(
    core: CoreBroker,
) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    delivered_ms = core.broker.store.log_ms()
    core.advance(500)
    new = core.change("orders", "g", delivery.handle, 60_000)
    assert core.reject("orders", "g", new).code == Code.OK
    (dead,) = dead_letters(core)
    assert dead.token is not None
    assert (dead.token.first_log_ms, dead.token.last_log_ms) == (delivered_ms, delivered_ms)
    place = core.broker.registry.group("g").id, core.broker.registry.topic("orders").id, 0
    progress = core.broker.table.progress(*place)
    assert progress is not None
    assert (progress.committed, progress.in_flight) == (1, 0)


@pytest.mark.parametrize("clean", [True, False])
def test_a_rejection_and_its_fate_survive_a_restart(clean: bool) -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g")
    core.send("orders", b"one")
    core.send("orders", b"two")
    delivery, two = core.receive("orders", "g", invisible_ms=600_000)
    assert core.reject("orders", "g", delivery.handle).code == Code.OK
    if clean:
        core.stop()
    else:
        disk.restore_power()
    core.start()
    assert core.reject("orders", "g", delivery.handle).code == Code.OK
    assert "became a dead letter" in core.ack("orders", "g", delivery.handle)[0].message
    assert core.ack("orders", "g", two.handle)[0].code == Code.OK
    assert len(dead_letters(core)) == 1


def test_a_rejection_that_the_power_cut_took_is_as_if_it_never_was() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g")
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    core.broker.pop.acks.reject(
        topic="orders", group="g", handle=delivery.handle
    )  # never confirmed
    disk.restore_power()
    core.start()
    assert dead_letters(core) == []
    core.advance(2_000)
    assert [d.head for d in core.receive("orders", "g")] == [b"one"]


def test_a_dead_letter_that_its_reader_rejects_stays_where_it_is(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.reject("orders", "g", core.receive("orders", "g")[0].handle)
    core.reject("%DLQ%g", "reader", core.receive("%DLQ%g", "reader")[0].handle)
    assert (len(dead_letters(core, "g")), dead_letters(core, "reader")) == (1, [])
    core.advance(100_000)
    assert core.receive("%DLQ%g", "reader") == []


def test_a_token_of_the_first_version_is_still_read() -> None:
    old = struct.pack(">BBHIQIIQQ", 1, 3, 1, 5, 7, 64, 2, 99, 1234)
    assert RevivalToken.decode(old) == RevivalToken(True, EndedDelivery(5, 7, 3), 64, 2, 99, 1234)
    new = RevivalToken(True, EndedDelivery(5, 7, 3), 64, 2, 99, 1234, 5678, DeadReason.REJECTED)
    assert RevivalToken.decode(new.encode()) == new
    for bad in (b"", b"\x03" + old[1:], old[:-1], b"\x02" + old[1:]):
        with pytest.raises(BadRecord):
            RevivalToken.decode(bad)
    unknown_reason = bytearray(new.encode())
    unknown_reason[2] = 77
    with pytest.raises(BadRecord, match="reason 77"):
        RevivalToken.decode(bytes(unknown_reason))


def test_a_delivery_whose_check_point_is_in_memory_only_can_be_rejected() -> None:
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    core.group("g", check_points=CheckPoints.BUFFERED)
    for body in (b"one", b"two"):
        core.send("orders", body)
    delivery, two = core.receive("orders", "g", invisible_ms=60_000)
    assert core.reject("orders", "g", two.handle).code == Code.OK
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    disk.restore_power()
    core.start()
    assert [dead.head for dead in dead_letters(core)] == [b"two"]
    core.advance(120_000)
    assert core.receive("orders", "g") == []
    assert core.reject("orders", "g", two.handle).code == Code.OK


def test_a_rejection_reads_a_body_where_it_was_while_retention_moves_it(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    topic = core.broker.registry.topic("orders")
    (unit,) = core.broker.store.queue(topic.id, 0).units(0, 1)
    core.broker.deliveries.bodies.move(LiveBody(topic.id, 0, 0, unit))
    request = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
    answer = core.ask(Kind.REJECT, request, settle=False)
    assert not answer.heard
    core.run_until_idle()
    assert answer.body is not None
    assert hop.decode_ack_reply(answer.body)[0].code == Code.OK
    assert [dead.head for dead in dead_letters(core)] == [b"one"]
