"""Operators and FIFO groups: reset, reject, lag and explain."""

import pytest
from fifo.cores import ack, attempts, made_core, names, progress, receive, restart, send

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record import message_deadline as expiry
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return made_core()


def reset(core: CoreBroker, **to: object) -> list[pb.ResetQueue]:
    request = pb.ResetOffsetRequest(group="g", topic="orders", **to)  # type: ignore[arg-type]
    reply = core.reply(Kind.RESET_OFFSET, request.SerializeToString())
    return list(pb.ResetOffsetReply.FromString(reply).queues)


def lag(core: CoreBroker) -> pb.Lag:
    request = pb.LagRequest(group="g", topic="orders")
    reply = pb.LagReply.FromString(core.reply(Kind.LAG, request.SerializeToString()))
    (found_lag,) = reply.lags
    return found_lag


def told(core: CoreBroker, message_id: str) -> tuple[str, int]:
    request = pb.ExplainRequest(message_id=message_id, group="g", topic="orders")
    reply = pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))
    (message,) = reply.messages
    (explained,) = message.groups
    return explained.state, explained.attempt


def send_with_ids(core: CoreBroker, *message_ids: str, for_ms: int = 0) -> None:
    """With `for_ms` as a proxy puts messages that expire."""
    for message_id in message_ids:
        system = api.SystemProperties(message_id=message_id, message_group=message_id[:1])
        properties = system.SerializeToString()
        if for_ms:
            properties = expiry.with_deadline(properties, core.clock.wall_ms() + for_ms)
        entry = hop.PutEntry(
            MessageType.FIFO, message_id.encode(), properties, 0, 0, due_ms=int(for_ms > 0)
        )
        core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))


@pytest.mark.parametrize("restarted", [False, True])
def test_old_acks_after_a_reset_do_not_move_the_offset_and_order_begins_anew(
    core: CoreBroker, restarted: bool
) -> None:
    send(core, "a1", "a2", "a3", "a4")
    old = receive(core)
    ack(core, old[0])
    (done,) = reset(core, queue_id=0, offset=2)
    assert (done.after, done.in_flight) == (2, 3)
    if restarted:
        restart(core)
    results = core.ack("orders", "g", *(delivery.handle for delivery in old[1:]))
    assert {result.code for result in results} == {Code.INVALID_RECEIPT_HANDLE}
    assert progress(core).committed == 2
    assert core.broker.table.in_flight == 0
    new = receive(core)
    assert attempts(new) == [("a3", 1), ("a4", 1)]
    ack(core, *new)
    assert progress(core).committed == 4


def test_a_reset_skips_forward_in_a_fifo_group_and_back(core: CoreBroker) -> None:
    send(core, "a1", "b1", "a2", "b2")
    receive(core, limit=1)
    reset(core, newest=True)
    assert receive(core) == []
    send(core, "a3")
    assert names(receive(core)) == ["a3"]
    reset(core, oldest=True)
    assert names(receive(core)) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_group_that_never_read_is_reset_and_keeps_order_from_there(core: CoreBroker) -> None:
    send(core, "a1", "a2", "a3")
    reset(core, queue_id=0, offset=1)
    restart(core)
    (delivery,) = receive(core, limit=1)
    assert (delivery.head, receive(core)) == (b"a2", [])


def test_a_rejected_message_is_a_dead_letter_and_its_message_group_goes_on(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2")
    (delivery,) = receive(core, limit=1)
    assert core.reject("orders", "g", delivery.handle).code == Code.OK
    assert names(receive(core)) == ["a2"]
    core.group("reader")
    assert names(core.receive("%DLQ%g", "reader")) == ["a1"]


def test_lag_counts_what_waits_behind_a_busy_message_group_as_blocked(core: CoreBroker) -> None:
    send(core, "a1", "a2", "a3", "b1")
    (delivery,) = receive(core, limit=1)
    found_lag = lag(core)
    assert (found_lag.ready, found_lag.blocked, found_lag.in_flight) == (1, 2, 1)
    ack(core, delivery)
    assert (lag(core).ready, lag(core).blocked) == (3, 0)


def test_explain_tells_of_blocked_returned_and_acked_messages(core: CoreBroker) -> None:
    send_with_ids(core, "a1", "a2")
    (delivery,) = receive(core, limit=1, invisible_ms=1_000)
    assert told(core, "a1") == ("INVISIBLE", 1)
    assert told(core, "a2") == ("BLOCKED", 1)
    core.advance(1_100)
    assert told(core, "a1") == ("READY", 2)
    (again, later) = receive(core)
    assert told(core, "a1") == ("INVISIBLE", 2)
    ack(core, again)
    assert told(core, "a1")[0] == "ACKED"
    assert (told(core, "a2"), later.head, delivery.attempt) == (("INVISIBLE", 1), b"a2", 1)


def test_explain_tells_of_parked_messages_and_of_those_that_became_dead_letters(
    core: CoreBroker,
) -> None:
    core.group("h", type=GroupType.FIFO)
    send_with_ids(core, "a1", "a2")
    receive(core, limit=1)
    group, topic = core.broker.registry.group("g"), core.broker.registry.topic("orders")
    order = progress(core).order
    assert order is not None
    order.park(b"a")  # as at the bound
    receive(core)
    core.run_steps()
    assert told(core, "a2") == ("BLOCKED", 1)
    assert lag(core).blocked == 1
    core.broker.fifo.parking.apply_action(group, topic, "a", UnparkAction.DEAD_LETTER)
    core.run_steps()
    assert told(core, "a2")[0] == "DEAD_LETTERED"


def test_what_went_by_retention_is_no_lag_before_a_receive_passes_over_it(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2", "b1", "c1", "c2")
    receive(core, limit=1)
    assert (lag(core).ready, lag(core).blocked, lag(core).in_flight) == (3, 1, 1)
    topic = core.broker.registry.topic("orders")
    core.broker.store.queue(topic.id, 0).raise_minimum(4)
    for restarted in (False, True):
        if restarted:
            restart(core)
            core.broker.store.queue(topic.id, 0).raise_minimum(4)
        found_lag = lag(core)
        assert (found_lag.ready, found_lag.blocked, found_lag.in_flight, found_lag.expired) == (
            1,
            0,
            1,
            3,
        )
    assert names(receive(core)) == ["c2"]
    found_lag = lag(core)
    assert (found_lag.ready, found_lag.blocked, found_lag.in_flight, found_lag.expired) == (
        0,
        0,
        2,
        3,
    )


def test_explain_does_not_call_expired_what_retention_keeps_for_its_next_delivery(
    core: CoreBroker,
) -> None:
    send_with_ids(core, "a1", "b1")
    receive(core, limit=1, invisible_ms=1_000)
    core.advance(1_100)
    topic = core.broker.registry.topic("orders")
    core.broker.store.queue(topic.id, 0).raise_minimum(2)
    assert [told(core, "a1"), told(core, "b1")] == [("READY", 2), ("EXPIRED", 1)]
    assert attempts(receive(core)) == [("a1", 2)]


def test_explain_says_that_a_dead_letter_was_sent_back(core: CoreBroker) -> None:
    send_with_ids(core, "a1")
    (delivery,) = receive(core)
    core.reject("orders", "g", delivery.handle)
    request = pb.ExplainRequest(message_id="a1", group="g", topic="orders")

    def next_of_each() -> list[str]:
        reply = pb.ExplainReply.FromString(core.reply(Kind.EXPLAIN, request.SerializeToString()))
        return [group.next for message in reply.messages for group in message.groups]

    (stays,) = next_of_each()
    assert stays.endswith("`popmq dlq redrive g` sends it back")
    core.reply(Kind.REDRIVE, pb.RedriveRequest(group="g").SerializeToString())
    copy, letter = next_of_each()
    assert copy == "a receive whose filter accepts it gets it as attempt 1"
    assert letter.startswith("was sent back to the end of its queue")


@pytest.mark.parametrize(("for_ms", "state"), [(0, "FILTERED"), (2_000, "EXPIRED")])
def test_what_came_back_and_was_passed_over_in_its_place_is_explained(
    core: CoreBroker, for_ms: int, state: str
) -> None:
    send_with_ids(core, "a1", for_ms=for_ms)
    receive(core, invisible_ms=1_000)
    core.advance(1_100)
    assert told(core, "a1") == ("READY", 2)
    core.advance(for_ms)
    assert core.receive("orders", "g", expression="" if for_ms else "wanted") == []
    assert told(core, "a1") == (state, 2)
    send_with_ids(core, "b1")
    ack(core, *receive(core))
    assert told(core, "a1") == (state, 2)
