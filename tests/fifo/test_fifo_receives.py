"""FIFO groups under virtual time: receives that wait or are repeated, filters, bounds, ends."""

from dataclasses import replace

import pytest
from fifo.cores import ack, attempts, made_core, names, progress, receive, restart, send

from popmq.broker.handlers.client_requests import ClientRequests
from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType, StartAt
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    return made_core()


# -- waiting receives


def wait(core: CoreBroker, **kwargs: object) -> object:
    return core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000, **kwargs))  # type: ignore[arg-type]


def answered(waiting: object) -> list[tuple[str, int]] | None:
    body = waiting.body  # type: ignore[attr-defined]
    return None if body is None else attempts(list(hop.decode_pop_reply(body).deliveries))


def test_a_waiting_receive_is_answered_when_the_block_ends_without_an_ack(
    core: CoreBroker,
) -> None:
    send(core, "a1")
    receive(core, invisible_ms=3_000)
    waiting = wait(core)
    core.advance(2_990)
    assert answered(waiting) is None
    core.advance(30)
    assert answered(waiting) == [("a1", 2)]


def test_a_waiting_receive_is_answered_within_one_step_of_the_ack(core: CoreBroker) -> None:
    send(core, "a1", "a2")
    (delivery,) = receive(core, limit=1)
    waiting = wait(core)
    assert answered(waiting) is None
    ack(core, delivery)
    core.broker.step()
    core.run_until_idle()
    assert answered(waiting) == [("a2", 1)]


@pytest.mark.parametrize("new_ms", [5_000, 1_000])
def test_a_waiting_receive_is_answered_at_the_changed_time(core: CoreBroker, new_ms: int) -> None:
    send(core, "a1")
    (delivery,) = receive(core, invisible_ms=3_000)
    core.change("orders", "g", delivery.handle, new_ms)
    waiting = wait(core)
    core.advance(new_ms - 10)
    assert answered(waiting) is None
    core.advance(30)
    assert answered(waiting) == [("a1", 2)]


def test_a_waiting_receive_is_answered_when_a_block_from_before_a_restart_ends(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2")
    receive(core, limit=1, invisible_ms=3_000)
    restart(core)
    waiting = wait(core)
    core.advance(2_900)
    assert answered(waiting) is None
    core.advance(200)
    assert answered(waiting) == [("a1", 2), ("a2", 1)]


def test_a_waiting_receive_of_a_blocked_queue_does_not_keep_the_broker_busy(
    core: CoreBroker,
) -> None:
    send(core, "a1", *(f"a{n}" for n in range(2, 900)))
    receive(core, limit=1)
    wait(core)
    core.run_steps()
    before = core.broker.pop.service.metrics.pops
    core.run_steps()
    assert core.broker.pop.service.metrics.pops == before
    send(core, "b1")
    assert core.broker.polling.count == 0


# -- the same receive again


def test_the_same_attempt_id_gets_the_same_deliveries_again_at_once(core: CoreBroker) -> None:
    send(core, "a1", "b1", "a2")
    first = core.receive("orders", "g", limit=2, attempt_id="one")
    assert core.receive("orders", "g", limit=2, attempt_id="one") == first
    ack(core, first[0])
    assert core.receive("orders", "g", limit=2, attempt_id="one") == first[1:]


def test_another_attempt_id_or_client_or_none_does_not_get_them(core: CoreBroker) -> None:
    send(core, "a1")
    core.receive("orders", "g", attempt_id="one")
    assert core.receive("orders", "g", attempt_id="two") == []
    assert core.receive("orders", "g", attempt_id="one", client_id="other") == []
    assert receive(core) == []


def test_the_same_attempt_id_gets_the_same_after_a_restart_with_and_without_a_snapshot(
    core: CoreBroker,
) -> None:
    send(core, "a1", "b1")
    first = core.receive("orders", "g", attempt_id="one")
    restart(core)
    assert core.receive("orders", "g", attempt_id="one") == first
    core.stop()
    core.start()
    assert core.receive("orders", "g", attempt_id="one") == first
    ack(core, *first)
    assert core.receive("orders", "g", attempt_id="one") == []


def test_attempts_of_repeated_receives_are_counted_once_for_each_delivery(
    core: CoreBroker,
) -> None:
    send(core, "a1")
    seen = []
    for attempt_id, wait_ms in (("1", 1_100), ("2", 10), ("2", 1_100), ("3", 10), ("3", 1_100)):
        got = core.receive("orders", "g", attempt_id=attempt_id, invisible_ms=1_000)
        seen += [delivery.attempt for delivery in got]
        core.advance(wait_ms)
    seen += [delivery.attempt for delivery in receive(core)]
    assert seen == [1, 2, 2, 3, 3, 4]


def test_a_receive_whose_time_is_over_is_not_given_again(core: CoreBroker) -> None:
    send(core, "a1")
    core.receive("orders", "g", attempt_id="one", invisible_ms=1_000)
    core.clock.advance(1_050)
    assert core.receive("orders", "g", attempt_id="one") == []
    core.run_steps()
    assert attempts(core.receive("orders", "g", attempt_id="one")) == [("a1", 2)]


def test_a_notification_is_true_for_the_attempt_that_holds_the_messages_only(
    core: CoreBroker,
) -> None:
    send(core, "a1")

    def ready(attempt_id: str) -> bool:
        request = hop.decode_pop(pop("orders", "g", attempt_id=attempt_id))
        return core.broker.fifo.has_ready(ClientRequests(core.broker).resolve_pop(request))

    assert ready("one")
    core.receive("orders", "g", attempt_id="one")
    assert (ready("one"), ready("two")) == (True, False)


# -- filters, bounds, starts and ends


def test_a_filter_passes_over_what_does_not_match_and_the_offset_moves_on(
    core: CoreBroker,
) -> None:
    send(core, "a1", tag="A")
    send(core, "a2", "b1", tag="B")
    send(core, "a3", tag="A")
    got = core.receive("orders", "g", expression="A")
    assert names(got) == ["a1", "a3"]
    ack(core, *got)
    assert progress(core).committed == 4


def test_the_offset_after_a_restart_includes_what_a_filter_passed_over(core: CoreBroker) -> None:
    for number in range(20):
        send(core, f"a{number}", tag="AB"[number % 2])
    for _ in range(10):
        (delivery,) = core.receive("orders", "g", limit=1, expression="A")
        ack(core, delivery)
    restart(core)
    assert progress(core).committed >= 18
    assert core.receive("orders", "g", expression="A") == []


def test_at_the_bound_of_open_offsets_nothing_more_is_looked_at_until_one_is_over() -> None:
    settings = replace(SMALL, pop=PopSettings(fifo_open_offsets=10))
    core = CoreBroker(settings=settings)
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)
    send(core, *(f"a{number}" for number in range(1, 11)), "b1")
    (delivery,) = receive(core, limit=1)
    assert receive(core) == []
    waiting = wait(core)
    ack(core, delivery)
    core.broker.step()
    core.run_until_idle()
    assert answered(waiting) == [(f"a{number}", 1) for number in range(2, 11)] + [("b1", 1)]


def test_messages_in_flight_are_bounded_also_in_a_fifo_group() -> None:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(max_in_flight_per_queue=2)))
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)
    send(core, "a1", "b1", "c1")
    assert len(receive(core)) == 2
    with pytest.raises(PopmqError, match=r"pop.max_in_flight_per_queue"):
        receive(core)


def test_at_the_limit_of_messages_in_flight_a_receive_waits_where_none_may_leave() -> None:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(max_in_flight_per_queue=2)))
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)
    send(core, "a1", "b1")
    taken = receive(core)
    assert len(taken) == 2
    assert receive(core) == []
    waiting = wait(core)
    assert answered(waiting) is None
    ack(core, *taken)
    send(core, "a2")
    assert answered(waiting) == [("a2", 1)]


def test_a_reply_stays_within_its_bytes_and_goes_on_in_order(core: CoreBroker) -> None:
    for number in range(4):
        core.send("orders", bytes(1000) + b"%d" % number, queue_id=0, message_group="a")
    reply = core.reply(Kind.POP, pop("orders", "g", reply_bytes=2_400))
    got = list(hop.decode_pop_reply(reply).deliveries)
    assert [delivery.head[-1:] for delivery in got] == [b"0", b"1"]
    ack(core, *got)
    assert [delivery.head[-1:] for delivery in receive(core)] == [b"2", b"3"]


def test_a_fifo_group_that_starts_at_the_newest_does_so_also_after_a_restart(
    core: CoreBroker,
) -> None:
    core.group("new", type=GroupType.FIFO, start_at=StartAt.NEWEST)
    send(core, "a1")
    assert core.receive("orders", "new") == []
    send(core, "a2")
    restart(core)
    assert names(core.receive("orders", "new")) == ["a2"]


def test_order_info_of_a_deleted_group_or_topic_is_gone(core: CoreBroker) -> None:
    core.group("h", type=GroupType.FIFO)
    send(core, "a1")
    core.receive("orders", "h", attempt_id="one")
    receive(core)
    core.broker.registry.delete_group("h")
    assert len(list(core.broker.table.progress_items())) == 4
    core.broker.registry.delete_topic("orders")
    assert list(core.broker.table.progress_items()) == []
    assert (core.broker.table.in_flight, len(core.broker.table)) == (0, 0)
    core.topic("orders", type=MessageType.FIFO)
    core.group("h", type=GroupType.FIFO)
    assert core.receive("orders", "h", attempt_id="one") == []


def test_a_span_wider_than_64_makes_several_check_points(core: CoreBroker) -> None:
    for number in range(200):
        send(core, f"k{number:03d}x", tag="A" if number % 50 == 0 else "B")
    got = core.receive("orders", "g", expression="A")
    assert len(got) == 4
    assert len(core.broker.table) == 2
    ack(core, *got)
    assert (len(core.broker.table), progress(core).committed) == (0, 200)


# -- auto-renew and good-byes


def test_a_push_consumer_keeps_its_message_group_until_it_says_good_bye(core: CoreBroker) -> None:
    send(core, "a1", "a2")
    reply = core.reply(Kind.POP, pop("orders", "g", limit=1, auto_renew=True))
    assert names(list(hop.decode_pop_reply(reply).deliveries)) == ["a1"]
    for _ in range(20):
        core.advance(10_000)
        ClientRequests(core.broker).on_clients_report(hop.ClientsReport(["a-client"], []))
    assert receive(core) == []
    ClientRequests(core.broker).on_clients_report(hop.ClientsReport([], ["a-client"]))
    core.run_steps()
    assert attempts(receive(core)) == [("a1", 2), ("a2", 1)]
