"""Auto-renew: a push consumer's delivery stays with it while it lives, and not longer (D6)."""

import pytest

from popmq.broker.pop.liveness import CLIENT_LIMIT, Liveness
from popmq.common import hop
from popmq.common.errors import Code
from popmq.common.hop import ClientsReport, Delivery, Kind
from popmq.testing.core import CoreBroker, pop
from popmq.testing.disk import LyingDisk


@pytest.fixture
def core() -> CoreBroker:
    made = CoreBroker()
    made.topic("orders")
    made.group("g")
    made.advance(31_000)  # the grace of the start is over
    return made


def push_receive(core: CoreBroker) -> list[Delivery]:
    reply = core.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    return list(hop.decode_pop_reply(reply).deliveries)


def hear(core: CoreBroker, *, gone: bool = False) -> None:
    names = ["a-client"]  # the one that `pop` receives for
    report = ClientsReport(gone=names) if gone else ClientsReport(heard=names)
    core.reply(Kind.CLIENTS, hop.encode_clients(report))


def live(core: CoreBroker, seconds: int) -> None:
    for _ in range(seconds // 5):
        core.advance(5_000)
        hear(core)


def test_a_delivery_stays_with_its_consumer_while_that_is_heard(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    (one,) = push_receive(core)
    records = core.broker.store.metrics.records
    live(core, 900)
    assert core.receive("orders", "g") == []
    assert core.broker.store.metrics.records == records, "renewal wrote something"
    assert core.ack("orders", "g", one.handle)[0].code == Code.OK
    live(core, 120)
    assert core.receive("orders", "g") == []


def test_after_30_s_of_silence_the_message_comes_back(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    push_receive(core)
    live(core, 120)
    core.advance(29_000)
    assert core.receive("orders", "g") == []
    core.advance(7_000)
    assert [one.attempt for one in core.receive("orders", "g")] == [2]


def test_a_good_bye_hands_the_messages_back_at_once(core: CoreBroker) -> None:
    core.send("orders", b"slow")
    push_receive(core)
    hear(core)
    hear(core, gone=True)
    core.advance(50)
    assert [one.attempt for one in core.receive("orders", "g")] == [2]


def test_a_good_bye_of_a_simple_consumer_changes_nothing(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=60_000)
    hear(core, gone=True)
    core.advance(50_000)
    assert core.receive("orders", "g") == []


def test_renewal_ends_after_three_hours(core: CoreBroker) -> None:
    core.send("orders", b"stuck")
    push_receive(core)
    live(core, 3 * 3600 - 60)
    assert core.receive("orders", "g") == []
    live(core, 120)
    assert [one.attempt for one in core.receive("orders", "g")] == [2]


def test_a_nack_ends_the_renewal_and_the_back_off_counts(core: CoreBroker) -> None:
    core.send("orders", b"failed")
    (one,) = push_receive(core)
    hear(core)
    core.change("orders", "g", one.handle, 0)
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
    assert [one.attempt for one in core.receive("orders", "g")] == [2]


@pytest.mark.timeout(10)  # a plain dict took 16 s for it
def test_clients_that_are_remembered_are_bounded() -> None:
    liveness = Liveness()
    for client in range(CLIENT_LIMIT + 10):
        liveness.heard(client, 1_000)
    assert len(liveness._heard_ms) == CLIENT_LIMIT
    liveness.forget(100_000)
    assert not liveness._heard_ms
