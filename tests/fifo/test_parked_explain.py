"""Explain tells of parked messages: what an operator said of them, and what is next."""

import pytest
from fifo.cores import ack, made_core, names, progress, receive, restart
from fifo.test_fifo_operators import send_with_ids

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker

KEYS = ("a", "b")


def explained(core: CoreBroker, message_id: str) -> pb.Explained:
    request = pb.ExplainRequest(message_id=message_id, group="g", topic="orders")
    reply = pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))
    (message,) = reply.messages
    (explanation,) = message.groups
    return explanation


def state(core: CoreBroker, message_id: str) -> str:
    return explained(core, message_id).state


def say(core: CoreBroker, key: str, what: UnparkAction) -> None:
    registry = core.broker.registry
    core.broker.fifo.parking.apply_action(registry.group("g"), registry.topic("orders"), key, what)
    core.run_until_idle()


def parked_core() -> tuple[CoreBroker, list[Delivery]]:
    """`a1` and `b1` are in flight, `a2`, `a3`, `b2`, `b3` parked in this order."""
    core = made_core()
    send_with_ids(core, "a1", "b1")
    stuck = receive(core)
    send_with_ids(core, "a2", "a3", "b2", "b3")
    order = progress(core).order
    assert order is not None
    for key in KEYS:
        order.park(key.encode())  # as at the bound
    assert receive(core) == []
    core.run_steps()
    return core, stuck


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_a_skipped_message_is_told_as_skipped_with_the_record_that_says_so(
    key: str, restarted: bool
) -> None:
    core, _ = parked_core()
    say(core, key, UnparkAction.SKIP)
    if restarted:
        restart(core)
    for number in (2, 3):
        explanation = explained(core, f"{key}{number}")
        assert explanation.state == "SKIPPED"
        assert "operator" in explanation.text
        assert [proof.what for proof in explanation.proofs] == ["message", "parked", "skip"]
        assert 0 < explanation.since_ms == explanation.proofs[-1].wall_ms
    assert state(core, "b2" if key == "a" else "a2") == "BLOCKED"


def test_the_skip_of_one_message_group_is_no_proof_for_another() -> None:
    core, stuck = parked_core()
    ack(core, *stuck)
    say(core, "a", UnparkAction.RESUME)
    ack(core, *receive(core))
    say(core, "b", UnparkAction.SKIP)
    assert [state(core, name) for name in ("a2", "a3")] == ["ACKED", "ACKED"]


def test_a_message_that_came_back_and_was_skipped_then_is_told_as_skipped() -> None:
    core, stuck = parked_core()
    ack(core, *stuck)
    say(core, "b", UnparkAction.RESUME)
    assert names(receive(core, invisible_ms=1_000)) == ["b2", "b3"]
    core.advance(1_100)
    say(core, "b", UnparkAction.SKIP)
    explanation = explained(core, "b3")
    assert explanation.state == "SKIPPED"
    assert [proof.what for proof in explanation.proofs][-1] == "skip"
    assert state(core, "a2") == "BLOCKED"


def test_a_message_in_flight_while_its_group_is_skipped_stays_invisible() -> None:
    core, stuck = parked_core()
    ack(core, *stuck)
    say(core, "b", UnparkAction.RESUME)
    (delivery,) = receive(core, limit=1)
    say(core, "b", UnparkAction.SKIP)
    assert (delivery.head, state(core, "b2"), state(core, "b3")) == (b"b2", "INVISIBLE", "SKIPPED")


def test_the_first_of_a_resumed_message_group_is_ready_and_the_others_wait_for_it() -> None:
    core, stuck = parked_core()
    say(core, "b", UnparkAction.RESUME)
    explanation = explained(core, "b2")
    assert (explanation.state, "resumed" in explanation.text) == ("BLOCKED", True), (
        "b1 is in flight"
    )
    ack(core, *stuck)
    assert [state(core, name) for name in ("b2", "b3")] == ["READY", "BLOCKED"]
    assert names(receive(core, limit=1)) == ["b2"]
    assert [state(core, name) for name in ("b2", "b3")] == ["INVISIBLE", "BLOCKED"]


def test_a_message_on_its_way_to_the_dead_letters_is_told_as_blocked_by_that() -> None:
    core, _ = parked_core()
    say(core, "b", UnparkAction.DEAD_LETTER)
    explanation = explained(core, "b3")
    assert explanation.state in ("BLOCKED", "DEAD_LETTERED")
    core.run_steps()
    assert state(core, "b3") == "DEAD_LETTERED"
    assert state(core, "a3") == "BLOCKED"


def test_after_a_reset_the_first_place_counts_and_not_the_parked_copy() -> None:
    core, _ = parked_core()
    request = pb.ResetOffsetRequest(group="g", topic="orders", oldest=True)
    core.reply(Kind.RESET_OFFSET, request.SerializeToString())
    assert names(receive(core, limit=1)) == ["a1"]
    explanation = explained(core, "a2")
    assert (explanation.state, "earlier message" in explanation.text) == ("BLOCKED", True)
    assert [proof.what for proof in explanation.proofs] == ["message"]
