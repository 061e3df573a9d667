"""Groups that a receive made: how many there may be, and how long one lives that nobody uses."""

from dataclasses import replace

import pytest

from popmq.broker.operations.group_expiry import UNUSED_MS
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import GroupSettings, Settings
from popmq.testing.harness.core_broker import CoreBroker, pop

HOUR_MS = 3_600_000


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.topic("orders")
    return core


def exists(core: CoreBroker, name: str) -> bool:
    return core.broker.registry.find_group(name) is not None


def advance_a_day(core: CoreBroker) -> None:
    for _ in range(UNUSED_MS // HOUR_MS + 1):
        core.advance(HOUR_MS)


def test_a_group_that_a_receive_made_and_nobody_used_ends_after_a_day(core: CoreBroker) -> None:
    core.receive("orders", "curious")
    core.advance(UNUSED_MS - HOUR_MS)
    assert exists(core, "curious")
    advance_a_day(core)
    assert not exists(core, "curious")
    assert core.broker.expiries.groups.expired == 1


def test_a_group_that_still_receives_stays(core: CoreBroker) -> None:
    for _ in range(50):
        core.receive("orders", "patient")
        core.advance(HOUR_MS)
    assert exists(core, "patient")


def test_a_group_that_somebody_made_or_altered_stays(core: CoreBroker) -> None:
    core.group("made")
    core.receive("orders", "made")
    core.receive("orders", "altered")
    registry = core.broker.registry
    registry.alter_group(replace(registry.group("altered"), max_attempts=3))
    advance_a_day(core)
    assert exists(core, "made")
    assert exists(core, "altered")


def test_a_group_with_a_message_in_flight_or_acked_stays(core: CoreBroker) -> None:
    core.send("orders", b"one")
    for group in ("holds", "acked"):
        (delivery,) = core.receive("orders", group, invisible_ms=7 * 24 * HOUR_MS)
        if group == "acked":
            core.ack("orders", group, delivery.handle)
    advance_a_day(core)
    assert exists(core, "holds")
    assert exists(core, "acked")


def test_with_other_broker_groups_none_ends(core: CoreBroker) -> None:
    core.receive("orders", "curious")
    core.broker.metadata_resolver.set_cluster_groups(["broker-a", "broker-b"], now_ms=0)
    advance_a_day(core)
    assert exists(core, "curious")


def test_that_a_receive_made_a_group_outlives_a_start(core: CoreBroker) -> None:
    core.receive("orders", "curious")
    core.stop()
    core.start()
    advance_a_day(core)
    assert not exists(core, "curious")


@pytest.mark.more
def test_receives_make_groups_up_to_the_limit() -> None:
    settings = replace(Settings(), group=GroupSettings(auto_created_limit=3))
    core = CoreBroker(settings=settings)
    core.topic("orders")
    for number in range(3):
        core.receive("orders", f"g{number}")
    with pytest.raises(
        PopmqError, match=r"3 groups already \(group.auto_created_limit\)"
    ) as refused:
        core.reply(Kind.POP, pop("orders", "one-more"))
    assert refused.value.code is Code.TOO_MANY_REQUESTS
    core.group("by-hand")
    core.receive("orders", "by-hand")
    core.broker.registry.delete_group("g0")
    core.receive("orders", "one-more")
