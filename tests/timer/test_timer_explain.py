"""Explain, from the record that made a timer to the firing that delivered it."""

import pytest
from timer.timer_client import (
    HOUR,
    MINUTE,
    core_with_topic,
    recall,
    received,
    reschedule,
    send_all,
)

from popmq.common.protocol.messaging_payloads import Kind, RecallResult
from popmq.common.quantities import iso_time
from popmq.common.record.message import RecordKind, check_record
from popmq.common.topics import TIMER_DLQ_TOPIC
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic()


def explained(core: CoreBroker, message_id: str, group: str = "") -> pb.ExplainedMessage:
    """Of the only message of that id; each proof is an intact record of the log."""
    request = pb.ExplainRequest(message_id=message_id, group=group)
    reply = pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))
    (message,) = reply.messages
    for explanation in message.groups:
        assert explanation.proofs
        for proof in explanation.proofs:
            log = core.broker.store.reader._log
            size = int.from_bytes(log.read_up_to(proof.position, 4), "big")
            header = check_record(log.read_up_to(proof.position, size), 0, proof.position)
            assert header.wall_ms == proof.wall_ms
            assert header.kind == RecordKind.MESSAGE or proof.what in ("check point", "ack")
    return message


def whats(explanation: pb.Explained) -> list[str]:
    return [proof.what for proof in explanation.proofs]


def test_a_pending_timer_is_delayed_until_its_time_for_every_group(core: CoreBroker) -> None:
    now_ms = core.clock.wall_ms()
    send_all(core, {"A": HOUR})
    message = explained(core, "A")
    (explanation,) = message.groups
    assert (message.topic, message.queue_offset) == ("orders", -1)
    assert (explanation.group, explanation.state, explanation.since_ms) == ("", "DELAYED", now_ms)
    assert explanation.until_ms == now_ms + HOUR
    assert whats(explanation) == ["timer"]
    assert f"due at {iso_time(now_ms + HOUR)}" in explanation.proofs[0].text
    assert explained(core, "A", "g").groups[0].group == "g"


def test_a_rescheduled_timer_is_delayed_until_its_new_time(core: CoreBroker) -> None:
    now_ms = core.clock.wall_ms()
    send_all(core, {"A": MINUTE})
    reschedule(core, "A", now_ms + HOUR)
    (explanation,) = explained(core, "A").groups
    assert (explanation.state, explanation.until_ms) == ("DELAYED", now_ms + HOUR)
    assert whats(explanation) == ["timer", "timer"]
    core.advance(HOUR)
    assert explained(core, "A", "g").groups[0].state == "READY"


def test_a_recalled_timer_is_recalled(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    recall(core, "A")
    for _ in range(2):
        (explanation,) = explained(core, "A").groups
        assert (explanation.state, whats(explanation)) == ("RECALLED", ["timer"])
        core.advance(2 * MINUTE)


def test_a_fired_timer_lives_on_from_its_firing(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    core.advance(MINUTE)
    (explanation,) = explained(core, "A", "g").groups
    assert (explanation.state, whats(explanation)) == ("READY", ["timer", "firing"])
    assert received(core) == [b"A"]
    (explanation,) = explained(core, "A", "g").groups
    assert (explanation.state, whats(explanation)[:3]) == (
        "ACKED",
        ["timer", "firing", "check point"],
    )
    assert recall(core, "A") is RecallResult.ALREADY_VISIBLE


def test_a_timer_of_a_deleted_topic_is_told_until_it_is_a_dead_letter(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    assert explained(core, "A").topic == "orders (deleted)"
    (explanation,) = explained(core, "A").groups
    assert explanation.state == "DELAYED"
    assert TIMER_DLQ_TOPIC in explanation.next
    core.advance(MINUTE)
    (explanation,) = explained(core, "A").groups
    assert (explanation.state, whats(explanation)) == ("DEAD_LETTERED", ["timer", "firing"])


def test_long_after_its_time_nobody_claims_to_know_why_it_is_gone(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE, "later": HOUR})
    recall(core, "A")
    core.advance(2 * HOUR)
    (explanation,) = explained(core, "A").groups
    assert explanation.state == "UNKNOWN"
    assert "recalled" in explanation.text
