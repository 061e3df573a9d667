"""Sends whose proxy says what cannot be: a queue that is not there, a time that is none."""

import pytest

from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, PutResult
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import CoreBroker


def put(core: CoreBroker, kind: MessageType, queue_id: int, *, due_ms: int = 0) -> PutResult:
    """As a proxy does that chose the queue out of more than there are."""
    request = PutRequest("orders", [PutEntry(kind, b"body", b"", 0, queue_id, due_ms)])
    (result,) = hop.decode_put_reply(core.reply(Kind.PUT, hop.encode_put(request)))
    return result


@pytest.mark.parametrize("kind", [MessageType.NORMAL, MessageType.DELAY, MessageType.TRANSACTION])
def test_a_message_without_a_group_goes_into_a_queue_that_is_there(kind: MessageType) -> None:
    core = CoreBroker()
    core.topic("orders", queues=4, type=MessageType.MIXED)
    due_ms = core.clock.wall_ms() + 1_000 if kind is MessageType.DELAY else 0
    assert put(core, kind, 6, due_ms=due_ms)[:1] == (Code.OK,)
    core.advance(3_000)
    if kind is not MessageType.TRANSACTION:
        (delivery,) = core.receive("orders", "g")
        assert delivery.queue_id == 2


def test_one_with_a_message_group_is_to_be_sent_again_so_that_it_keeps_its_queue() -> None:
    core = CoreBroker()
    core.topic("orders", queues=4, type=MessageType.FIFO)
    refused = put(core, MessageType.FIFO, 6)
    assert refused.code == Code.HA_NOT_AVAILABLE
    assert "topic orders has 4 queues here, and no queue 6" in refused.message
    assert core.receive("orders", "g") == []


def test_one_with_a_priority_is_among_the_highest() -> None:
    core = CoreBroker()
    core.topic("orders", queues=4, type=MessageType.PRIORITY)
    assert put(core, MessageType.PRIORITY, 6).queue_id == 3
    assert len(core.receive("orders", "g")) == 1


@pytest.mark.parametrize("check_ms", [-1, 1 << 32])
def test_a_first_check_at_a_time_that_is_none_is_refused_and_others_are_stored(
    check_ms: int,
) -> None:
    core = CoreBroker()
    core.topic("orders", queues=1, type=MessageType.TRANSACTION)
    halves = [
        PutEntry(MessageType.TRANSACTION, b"half", b"", 0, 0, due_ms) for due_ms in (0, check_ms, 1)
    ]
    reply = core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", halves)))
    results = hop.decode_put_reply(reply)
    assert [result.code for result in results] == [Code.OK, Code.BAD_REQUEST, Code.OK]
    assert f"a first check {check_ms} ms after the send" in results[1].message
    assert len(core.broker.transactions.table.pending) == 2
