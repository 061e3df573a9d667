"""The live audit: what is stored is accounted for, and a loss in the tables is seen."""

import random
from collections import deque
from contextlib import suppress
from dataclasses import replace

import pytest

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.diagnostics import audit as audit_module
from popmq.broker.diagnostics.audit import APART_MS, STATES, Balance
from popmq.broker.node.metrics import broker_metrics
from popmq.common.errors import InvalidReceiptHandle
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.message import EndedDelivery, RevivalToken
from popmq.common.topics import CheckPoints, GroupType
from popmq.common.wire.pull_pb2 import UpdateOffsetRequest
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.start()
    core.topic("orders", queues=2)
    core.group("g", max_attempts=2)
    return core


def audited(core: CoreBroker, group: str = "g") -> Balance:
    """One more recount, whole."""
    audit = core.broker.diagnostics.audit
    audit.on_scrape()
    before, start = audit.passes, core.clock.boot_ms()
    while audit.passes == before:
        core.tick()
        assert core.clock.boot_ms() - start < 10 * APART_MS, "no recount"
        core.advance(20)
    known = core.broker.registry.group(group)
    return audit.balances.get(known.id, Balance())


def sums_up(balance: Balance) -> bool:
    others: int = sum(getattr(balance, state) for state in STATES[1:])
    return balance.stored == others


def begun(core: CoreBroker, count: int = 10) -> list[Delivery]:
    """Messages, 6 of them delivered, and a first recount behind it."""
    for number in range(count):
        core.send("orders", b"%d" % number, tag="a" if number % 2 else "b")
    taken = core.receive("orders", "g", limit=6)
    assert audited(core).in_flight == 6
    return taken


def test_every_message_of_a_group_is_in_one_state(core: CoreBroker) -> None:
    taken = begun(core)
    core.ack("orders", "g", *(entry.handle for entry in taken[:2]))
    core.reject("orders", "g", taken[2].handle)
    changed = core.change("orders", "g", taken[3].handle, 1_000)
    core.advance(2_000)  # back, as attempt 2
    for delivery in core.receive("orders", "g", limit=1, invisible_ms=1_000, expression=""):
        assert delivery.attempt in (1, 2)
    core.receive("orders", "g", limit=8, expression="a")
    balance = audited(core)
    assert changed
    assert (balance.stored, balance.acked, balance.dead) == (10, 2, 1)
    assert balance.filtered > 0
    assert sums_up(balance)
    assert core.broker.diagnostics.audit.unaccounted == 0
    core.advance(10_000_000)
    while taken := core.receive("orders", "g", invisible_ms=1_000):
        core.advance(2_000)
    balance = audited(core)
    assert (balance.ready, balance.in_flight, balance.acked) == (0, 0, 2)
    assert balance.dead + balance.filtered == 8
    assert sums_up(balance)
    assert core.broker.diagnostics.audit.unaccounted == 0


def test_the_page_shows_the_audit_and_sums_up(core: CoreBroker) -> None:
    names = {metric.name for metric in broker_metrics(core.broker)}
    assert "audit_unaccounted_messages" not in names, "nothing was counted"
    begun(core)
    values = {
        metric.name + metric.labels.get("state", ""): metric.value
        for metric in broker_metrics(core.broker)
        if metric.name.startswith("audit_")
    }
    assert values["audit_unaccounted_messages"] == 0
    assert values["audit_messagesstored"] == 10
    assert (values["audit_messagesready"], values["audit_messagesin_flight"]) == (4, 6)
    core.clock.advance(5_000)
    ages = [
        metric.value for metric in broker_metrics(core.broker) if metric.name == "audit_age_seconds"
    ]
    assert ages[0] >= 5


@pytest.mark.more
def test_a_delivery_that_the_table_lost_is_seen(
    core: CoreBroker, caplog: pytest.LogCaptureFixture
) -> None:
    begun(core)
    table = core.broker.table
    ck = next(iter(table))
    group, topic, queue = ck.place
    progress = table.progress(group, topic, queue)
    assert progress is not None
    lost = ck.waiting.bit_count()
    table.due_times.remove(ck)
    del table._live[ck.key]
    progress.open.clear()
    progress.in_flight -= lost
    table.in_flight -= lost
    assert audited(core).unaccounted == lost
    assert core.broker.diagnostics.audit.unaccounted == lost
    (line,) = [
        record for record in caplog.records if record.message == "messages are unaccounted for"
    ]
    assert (vars(line)["messages"], vars(line)["groups"]) == (lost, ["g"])
    assert audited(core).unaccounted == lost
    assert len(caplog.records) == 1, "it is logged once"


def test_a_message_that_a_pop_stepped_over_is_seen(core: CoreBroker) -> None:
    begun(core)
    queues = [
        (progress, core.broker.store.queue(topic, queue).count)
        for (_, topic, queue), progress in core.broker.table.progress_items()
    ]
    next(progress for progress, count in queues if progress.waiting(count)).cursor += 1
    assert audited(core).unaccounted == 1


def test_a_revival_without_its_retry_is_seen(core: CoreBroker) -> None:
    begun(core)
    ck = next(iter(core.broker.table))
    token = RevivalToken(
        False, EndedDelivery(*ck.key, 0), ck.topic_id, ck.queue_id, ck.start_offset, 0
    )
    core.broker.table.apply_revival(token, core.broker.store.log_ms())
    assert audited(core).unaccounted == 1


@pytest.mark.more
def test_progress_that_the_table_lost_is_seen(core: CoreBroker) -> None:
    begun(core)
    table: CheckPointTable = core.broker.table
    for place, progress in list(table.progress_items()):
        if progress.in_flight:
            del table._progress[place]
    assert audited(core).unaccounted == 6


def test_a_lost_delivery_of_a_group_that_keeps_order_is_seen(core: CoreBroker) -> None:
    core.group("ordered", type=GroupType.FIFO)
    for number in range(4):
        core.send("orders", b"%d" % number, queue_id=0)
    assert len(core.receive("orders", "ordered", limit=3)) >= 1
    assert audited(core, "ordered").unaccounted == 0
    progress = next(
        progress
        for place, progress in core.broker.table.progress_items()
        if progress.in_flight and place[0] == core.broker.registry.group("ordered").id
    )
    progress.in_flight -= 1
    assert audited(core, "ordered").unaccounted == 1


@pytest.mark.more
def test_groups_with_buffered_check_points_are_left_out(core: CoreBroker) -> None:
    core.group("fast", check_points=CheckPoints.BUFFERED)
    begun(core)
    core.receive("orders", "fast", limit=5)
    audited(core)
    assert core.broker.diagnostics.audit.unaccounted == 0
    assert core.broker.registry.group("fast").id not in core.broker.diagnostics.audit.balances


@pytest.mark.more
@pytest.mark.parametrize("acked", [False, True])
def test_a_group_that_was_buffered_between_two_recounts_is_left_out(
    core: CoreBroker, acked: bool
) -> None:
    taken = begun(core)
    core.ack("orders", "g", *(entry.handle for entry in taken))
    registry = core.broker.registry
    group = registry.group("g")
    registry.alter_group(replace(group, check_points=CheckPoints.BUFFERED))
    (delivery,) = core.receive("orders", "g", limit=1)
    registry.alter_group(group)
    if acked:
        core.ack("orders", "g", delivery.handle)
    for _ in range(3):
        assert audited(core).stored == 0
        assert core.broker.diagnostics.audit.unaccounted == 0
        core.receive("orders", "g", limit=1)


def test_what_happened_before_it_began_and_after_a_start_is_no_fault(core: CoreBroker) -> None:
    for number in range(10):
        core.send("orders", b"%d" % number)
    taken = core.receive("orders", "g", limit=3)
    core.ack("orders", "g", *(delivery.handle for delivery in taken))
    core.receive("orders", "g", limit=3)
    assert audited(core).in_flight == 3
    core.stop()
    core.start()
    core.receive("orders", "g", limit=2)
    balance = audited(core)
    assert (balance.in_flight, core.broker.diagnostics.audit.unaccounted) == (5, 0)


@pytest.mark.more
def test_an_offset_that_was_set_and_a_topic_that_was_deleted_are_no_faults(
    core: CoreBroker,
) -> None:
    taken = begun(core)
    core.ack("orders", "g", *(delivery.handle for delivery in taken[:2]))
    assert audited(core).acked == 2
    registry = core.broker.registry
    group, topic = registry.group("g"), registry.topic("orders")
    for _ in range(2):
        for queue_id in range(2):
            core.broker.operations.offset_reset.apply(group, topic, queue_id, 0)
        core.run_until_idle()
        assert audited(core).unaccounted == 0
        assert core.receive("orders", "g", limit=3)
        balance = audited(core)
        assert balance.unaccounted == 0
    registry.delete_topic("orders")
    assert audited(core).stored == 0
    assert core.broker.diagnostics.audit.unaccounted == 0


@pytest.mark.more
@pytest.mark.parametrize("offset", [0, 4])
def test_an_offset_that_a_pull_consumer_said_is_no_fault(core: CoreBroker, offset: int) -> None:
    for number in range(8):
        core.send("orders", b"%d" % number)
    for at in (1, offset):
        asked = UpdateOffsetRequest(topic="orders", group="g", queue_id=0, offset=at)
        core.reply(Kind.UPDATE_OFFSET, asked.SerializeToString())
        balance = audited(core)
        assert balance.unaccounted == 0
        assert sums_up(balance)
        assert balance.ready == 4 - at


def test_a_topic_that_is_deleted_during_a_recount_is_no_fault(core: CoreBroker) -> None:
    begun(core)
    core.clock.advance(60_000)
    assert core.broker.pop.revive.step() == 6
    core.run_until_idle()
    core.broker.diagnostics.audit.step()  # a cut, which has the topic's places
    core.broker.registry.delete_topic("orders")
    assert audited(core).stored == 0
    assert core.broker.diagnostics.audit.unaccounted == 0


@pytest.mark.more
def test_dead_letters_that_are_deleted_before_a_recount_saw_them_are_no_fault(
    core: CoreBroker,
) -> None:
    taken = begun(core)
    core.reject("orders", "g", taken[0].handle)
    core.broker.registry.delete_topic("%DLQ%g")
    for _ in range(2):
        assert audited(core).in_flight == 5
        assert core.broker.diagnostics.audit.unaccounted == 0


def test_what_retention_took_is_counted_as_expired(core: CoreBroker) -> None:
    begun(core)
    registry = core.broker.registry
    registry.alter_topic(replace(registry.topic("orders"), retention_ms=60_000))
    core.advance(120_000)
    core.advance(120_000)
    core.receive("orders", "g", limit=1, invisible_ms=1_000)
    balance = audited(core)
    assert balance.expired > 0
    assert sums_up(balance)
    assert core.broker.diagnostics.audit.unaccounted == 0


@pytest.mark.more
def test_a_recount_whose_records_are_gone_begins_anew(core: CoreBroker) -> None:
    begun(core)
    audit = core.broker.diagnostics.audit
    source = next(iter(audit._at))
    audit._at[source] = -1
    audited(core)
    assert (audit.restarts, audit.unaccounted) == (1, 0)
    assert core.receive("orders", "g", limit=1)
    assert audited(core).unaccounted == 0


def test_a_recount_begins_anew_when_retention_took_the_first_retries_before_it_saw_them(
    core: CoreBroker,
) -> None:
    core.send("orders", b"first")
    core.receive("orders", "g", limit=1, invisible_ms=400_000)
    audit = core.broker.diagnostics.audit
    assert audited(core).in_flight == 1
    core.advance(500_000)  # nobody scrapes, and the retry is stored, in a new topic
    (retry,) = (topic for topic in core.broker.registry.topics() if "RETRY" in topic.name)
    store = core.broker.store
    assert store.queue(retry.id, 0).count == 1
    deque(store.dispatch.log_starts_at(store.end), maxlen=0)
    audited(core)
    assert (audit.restarts, audit.unaccounted) == (1, 0)


def test_a_cut_waits_until_its_records_are_confirmed(core: CoreBroker) -> None:
    begun(core)
    audit = core.broker.diagnostics.audit
    before = audit.passes
    core.clock.advance(APART_MS)
    core.ask(Kind.POP, pop("orders", "g", limit=2), settle=False)
    audit.on_scrape()
    for _ in range(50):
        core.clock.advance(10)
        audit.step()
    assert audit.passes == before
    core.run_until_idle()
    assert audited(core).in_flight == 8
    assert audit.unaccounted == 0


def test_what_was_not_confirmed_when_it_began_is_read(core: CoreBroker) -> None:
    core.send("orders", b"first")
    core.send("orders", b"second")
    core.ask(Kind.POP, pop("orders", "g", limit=1, invisible_ms=1_000), settle=False)
    core.clock.advance(2_000)
    assert core.broker.pop.revive.step() == 1
    core.ask(Kind.POP, pop("orders", "g", limit=1), settle=False)
    core.broker.diagnostics.audit.on_scrape()
    # The oldest check point is the second, and neither is confirmed.
    core.broker.diagnostics.audit.step()
    core.run_until_idle()
    assert audited(core).in_flight == 1
    assert core.broker.diagnostics.audit.unaccounted == 0


def test_with_too_many_check_points_it_waits(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(core)
    monkeypatch.setattr(audit_module, "OPEN_LIMIT", 1)
    monkeypatch.setattr(audit_module, "BEGIN_LIMIT", 1)
    audit = core.broker.diagnostics.audit
    for _ in range(4):
        audit.on_scrape()
        core.advance(APART_MS)
    assert (audit.passes, audit.restarts > 1, audit._ledger) == (1, True, None)
    monkeypatch.undo()
    assert audited(core).in_flight == 6


@pytest.mark.more
@pytest.mark.parametrize("seed", range(8))
def test_under_any_history_nothing_is_unaccounted_for(core: CoreBroker, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    held: dict[str, list[Delivery]] = {"g": [], "h": []}
    for _ in range(80):
        group = rng.choice(["g", "h"])
        mine = held[group]
        match rng.randrange(8):
            case 0 | 1:
                core.send("orders", b"x", tag=rng.choice(["a", "b"]))
            case 2 | 3:
                expression = rng.choice(["", "", "a"])
                invisible_ms = rng.choice([1_000, 60_000])
                mine += core.receive(
                    "orders", group, limit=4, invisible_ms=invisible_ms, expression=expression
                )
            case 4 | 5 if mine:
                rng.shuffle(mine)
                core.ack("orders", group, *(delivery.handle for delivery in mine[:3]))
                del mine[:3]
            case 6 if mine:
                with suppress(InvalidReceiptHandle):  # it came back meanwhile
                    core.change("orders", group, mine.pop().handle, rng.choice([500, 5_000]))
            case _:
                core.advance(rng.choice([10, 1_500, 20_000]))
        core.broker.diagnostics.audit.on_scrape()
    for group in held:
        balance = audited(core, group)
        assert sums_up(balance), (seed, group, balance)
    assert core.broker.diagnostics.audit.unaccounted == 0, seed
    assert core.broker.diagnostics.audit.passes > 1
