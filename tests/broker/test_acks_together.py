"""Acks that wait for their group commit: one record for all of a check point, and nobody who
looks at what is acked overlooks them."""

import pytest

from popmq.broker.deliveries.pop_check_point import EndRecord, ReviveKind, decode_revive
from popmq.common import topics
from popmq.common.errors import Code, InvalidReceiptHandle
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.message import HEADER_SIZE
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import Answer, CoreBroker, pop


def ask_ack(core: CoreBroker, delivery: Delivery) -> Answer:
    """An ack whose group commit has not begun."""
    request = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
    return core.ask(Kind.ACK, request, settle=False)


def held(core: CoreBroker, count: int, *, invisible_ms: int = 60_000) -> list[Delivery]:
    core.topic("orders", queues=1)
    for number in range(count):
        core.send("orders", b"%d" % number)
    return core.receive("orders", "g", invisible_ms=invisible_ms)


def ack_records(core: CoreBroker) -> list[EndRecord]:
    revive_records = []
    for queue_id in range(topics.REVIVE_QUEUES):
        queue = core.broker.store.queue(topics.REVIVE_TOPIC_ID, queue_id)
        for offset in range(queue.count):
            record = decode_revive(queue.raw(offset, 1)[HEADER_SIZE:])
            if isinstance(record, EndRecord) and record.kind is ReviveKind.ACK:
                revive_records.append(record)
    return revive_records


def test_acks_of_one_receive_in_requests_of_their_own_are_one_record() -> None:
    core = CoreBroker()
    answers = [ask_ack(core, delivery) for delivery in held(core, 5)]
    assert not any(answer.heard for answer in answers)
    core.run_until_idle()
    assert [answer.body is not None for answer in answers] == [True] * 5
    assert [record.members for record in ack_records(core)] == [0b11111]
    assert core.broker.pop.acks.acked == 5


def test_an_ack_that_is_repeated_before_its_record_is_ok_and_counted_once() -> None:
    core = CoreBroker()
    (delivery,) = held(core, 1)
    answers = [ask_ack(core, delivery), ask_ack(core, delivery)]
    core.run_until_idle()
    assert all(answer.body is not None for answer in answers)
    assert (core.broker.pop.acks.acked, core.broker.pop.acks.repeated) == (1, 1)


def test_no_answer_leaves_before_the_record_of_its_ack_is_durable() -> None:
    core = CoreBroker()
    (delivery,) = held(core, 1)
    answer = ask_ack(core, delivery)
    core.start()  # nothing of it was written
    assert not answer.heard
    core.advance(60_100)
    assert [again.attempt for again in core.receive("orders", "g")] == [2]


def test_a_message_that_is_due_in_the_moment_of_its_ack_is_not_revived() -> None:
    core = CoreBroker()
    (delivery,) = held(core, 1, invisible_ms=1_000)
    core.clock.advance(2_000)
    answer = ask_ack(core, delivery)
    core.broker.step()
    core.run_until_idle()
    assert answer.body is not None
    assert core.broker.pop.revive.retried == 0
    assert core.receive("orders", "g") == []


def test_a_change_behind_an_ack_of_the_same_turn_is_refused() -> None:
    core = CoreBroker()
    (delivery,) = held(core, 1)
    ask_ack(core, delivery)
    with pytest.raises(InvalidReceiptHandle, match="was acked"):
        core.broker.pop.acks.change(
            topic="orders", group="g", handle=delivery.handle, invisible_ms=0
        )
    core.run_until_idle()


def test_a_reject_behind_an_ack_of_the_same_turn_is_refused() -> None:
    core = CoreBroker()
    (delivery,) = held(core, 1)
    ask_ack(core, delivery)
    result = core.reject("orders", "g", delivery.handle)
    assert (result.code, "was acked" in result.message) == (Code.INVALID_RECEIPT_HANDLE, True)


def test_a_repeated_fifo_receive_does_not_give_again_what_was_acked_in_the_same_turn() -> None:
    core = CoreBroker()
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)
    for number in range(2):
        core.send("orders", b"%d" % number, message_group=f"key {number}")
    first, _ = core.receive("orders", "g", attempt_id="x")
    ask_ack(core, first)
    again = core.ask(Kind.POP, pop("orders", "g", attempt_id="x"))
    assert again.body is not None
    assert [delivery.head for delivery in hop.decode_pop_reply(again.body).deliveries] == [b"1"]
