"""Auto-renew: a push consumer's delivery stays with it while it lives, and not longer (D6)."""

import pytest

from popmq.broker.deliveries.client_liveness import CLIENT_LIMIT, ClientLiveness
from popmq.broker.pop.pop_rollback import DOUBT_MS
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import ClientsReport, Delivery, Kind
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders")
    broker.group("g")
    broker.advance(31_000)  # the grace of the start is over
    return broker


def push_receive(core: CoreBroker) -> list[Delivery]:
    reply = core.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    return list(hop.decode_pop_reply(reply).deliveries)


def hear(core: CoreBroker, *, gone: bool = False) -> None:
    names = ["a-client"]  # the one that `pop` receives for
    report = ClientsReport(closed=names) if gone else ClientsReport(alive=names)
    core.reply(Kind.CLIENTS, hop.encode_clients(report))


def live(core: CoreBroker, seconds: int) -> None:
    for _ in range(seconds // 5):
        core.advance(5_000)
        hear(core)


def test_a_delivery_stays_with_its_consumer_while_that_is_heard(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    (delivery,) = push_receive(core)
    records = core.broker.store.metrics.records
    live(core, 900)
    assert core.receive("orders", "g") == []
    assert core.broker.store.metrics.records == records, "renewal wrote something"
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    live(core, 120)
    assert core.receive("orders", "g") == []


def test_after_30_s_of_silence_the_message_comes_back(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    push_receive(core)
    live(core, 120)
    core.advance(29_000)
    assert core.receive("orders", "g") == []
    core.advance(7_000)
    assert [delivery.attempt for delivery in core.receive("orders", "g")] == [2]


def test_a_client_is_alive_for_30_s_after_its_last_call_and_not_a_millisecond_longer() -> None:
    liveness = ClientLiveness()
    liveness.mark_seen(7, 1_000)
    assert liveness.is_alive(7, 31_000)
    assert not liveness.is_alive(7, 31_001)
    liveness.start_grace(1_000)
    assert liveness.is_alive(8, 30_999)
    assert not liveness.is_alive(8, 31_000)


def test_a_good_bye_hands_the_messages_back_at_once(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    push_receive(core)
    hear(core)
    hear(core, gone=True)
    core.advance(50)
    assert [delivery.attempt for delivery in core.receive("orders", "g")] == [2]


def test_a_good_bye_hands_back_what_is_renewed_no_more_but_no_earlier_what_was_given_back() -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"given back")
    (delivery,) = push_receive(core)
    core.change("orders", "g", delivery.handle, 60_000)
    core.send("orders", b"in doubt")
    push_receive(core)
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    hear(core, gone=True)
    core.advance(50)
    assert [(entry.head, entry.attempt) for entry in core.receive("orders", "g")] == [
        (b"in doubt", 2)
    ]


def test_a_good_bye_of_a_simple_consumer_changes_nothing(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=60_000)
    hear(core, gone=True)
    core.advance(50_000)
    assert core.receive("orders", "g") == []


@pytest.mark.more
def test_renewal_ends_after_three_hours(core: CoreBroker) -> None:
    core.send("orders", b"stuck")
    push_receive(core)
    live(core, 3 * 3600 - 60)
    assert core.receive("orders", "g") == []
    live(core, 120)
    assert [delivery.attempt for delivery in core.receive("orders", "g")] == [2]


def test_a_nack_ends_the_renewal_and_the_back_off_counts(core: CoreBroker) -> None:
    core.send("orders", b"failed")
    (delivery,) = push_receive(core)
    hear(core)
    core.change("orders", "g", delivery.handle, 0)
    core.advance(500)
    assert core.receive("orders", "g") == []
    core.advance(600)
    hear(core)
    assert [again.attempt for again in core.receive("orders", "g")] == [2]


def test_a_started_broker_gives_every_consumer_30_s_once() -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"slow")
    push_receive(core)
    live(core, 300)
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    core.advance(24_000)
    assert core.receive("orders", "g") == []
    live(core, 60)
    assert core.receive("orders", "g") == []
    core.start()
    core.advance(36_000)
    assert [delivery.attempt for delivery in core.receive("orders", "g")] == [2]


def test_a_delivery_whose_answer_a_crash_may_have_taken_comes_back_though_its_consumer_lives() -> (
    None
):
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"seen")
    push_receive(core)
    live(core, 30)
    core.send("orders", b"lost")
    push_receive(core)  # and nobody is told of it
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    core.send("orders", b"later")
    push_receive(core)
    live(core, 20)
    core.send("orders", b"last")
    core.start()  # another end, and not the one that counts
    live(core, 600)
    back = core.receive("orders", "g")
    assert {(delivery.head, delivery.attempt) for delivery in back} == {(b"lost", 2), (b"last", 1)}
    core.ack("orders", "g", *(delivery.handle for delivery in back))
    live(core, 600)
    assert core.receive("orders", "g") == []


def test_an_answer_that_a_broken_connection_may_have_taken_ends_by_its_invisible_time(
    core: CoreBroker,
) -> None:
    invisible_ms = core.settings.pop.invisible_default_ms
    kept, acked, lost = (
        lose_the_answer(core, body, after_ms=after_ms)
        for body, after_ms in ((b"kept", DOUBT_MS + 5_000), (b"acked", 0), (b"lost", 5_000))
    )
    assert core.ack("orders", "g", acked.handle)[0].code == Code.OK
    live(core, invisible_ms // 1_000 - 15)
    assert core.receive("orders", "g") == []
    live(core, 40)
    assert [(delivery.head, delivery.attempt) for delivery in core.receive("orders", "g")] == [
        (b"lost", 2)
    ]
    assert core.ack("orders", "g", lost.handle)[0].code == Code.INVALID_RECEIPT_HANDLE
    live(core, 600)
    assert core.ack("orders", "g", kept.handle)[0].code == Code.OK


def lose_the_answer(core: CoreBroker, body: bytes, *, after_ms: int) -> Delivery:
    """The connection that the answer left on breaks so much later."""
    core.send("orders", body)
    answer = core.ask(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    hear(core)
    core.advance(after_ms)
    core.server.answer_lost(answer.id)
    assert answer.body is not None
    (delivery,) = hop.decode_pop_reply(answer.body).deliveries
    return delivery


def test_what_was_delivered_long_before_the_end_of_an_idle_broker_stays_with_its_consumer() -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"long work")
    push_receive(core)  # and that is the newest record
    live(core, 300)
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    live(core, 600)
    assert core.receive("orders", "g") == []


def test_a_broker_whose_answers_wait_for_the_disk_does_not_say_that_it_lives() -> None:
    """Push seed 3070: a sync took, and failed after, more than 5 s."""
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"one")
    cursors = core.broker.timers.service.cursors
    assert cursors().log_ms == core.broker.store.log_ms()
    request = pop("orders", "g", auto_renew=True, invisible_ms=0)
    answer = core.ask(Kind.POP, request, settle=False)
    core.clock.advance(8_000)
    assert (answer.heard, cursors().log_ms) == (False, 0)
    core.run_until_idle()
    assert (answer.heard, cursors().log_ms) == (True, core.broker.store.log_ms())


@pytest.mark.parametrize(("seconds", "stays"), [(4, False), (6, True)])
def test_what_was_delivered_in_the_last_5_s_before_the_newest_record_may_be_unanswered(
    seconds: int, stays: bool
) -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.topic("others")
    core.send("orders", b"one")
    push_receive(core)
    core.clock.advance(seconds * 1_000)
    core.send("others", b"newest")
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    live(core, 300)
    assert (core.receive("orders", "g") == []) == stays


def test_after_a_clean_stop_nothing_is_in_doubt() -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    core.send("orders", b"one")
    push_receive(core)
    core.stop()
    core.start()
    live(core, 300)
    assert core.receive("orders", "g") == []


def test_a_clock_that_went_back_makes_no_broker_live_longer() -> None:
    """The TimerCheckPoint of an earlier life told of a time that was to come."""
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders")
    live(core, 300)
    for _ in range(2):
        core.disk.restore_power()  # type: ignore[attr-defined]
        core.clock.step_wall(-3_600_000)
        core.start()
    core.send("orders", b"lost")
    push_receive(core)  # and nobody is told of it
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    live(core, 600)
    (back,) = core.receive("orders", "g")
    assert (back.head, back.attempt) == (b"lost", 2)


@pytest.mark.timeout(10)  # a plain dict took 16 s for it
def test_clients_that_are_remembered_are_bounded() -> None:
    liveness = ClientLiveness()
    for client in range(CLIENT_LIMIT + 10):
        liveness.mark_seen(client, 1_000)
    assert len(liveness._heard_ms) == CLIENT_LIMIT
    liveness.forget(100_000)
    assert not liveness._heard_ms
