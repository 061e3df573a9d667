"""Half messages of Remoting clients are checked by proxies with producers of their group."""

import pytest
from transaction.rig import (
    FIRST_MS,
    INTERVAL_MS,
    begin,
    broker,
    checks,
    end,
    names,
    received,
    restart,
    wait,
)


def test_a_half_message_of_a_group_is_checked_by_proxies_with_a_producer_of_that_group() -> None:
    core = broker()
    begin(core, "paid", producers="payers")
    begin(core, "plain")
    of_topic = wait(core, "orders", wait_ms=100_000)
    of_another = wait(core, "orders", wait_ms=100_000, producer_groups=["others"])
    of_group = wait(core, wait_ms=100_000, producer_groups=["others", "payers"])
    core.advance(FIRST_MS)
    assert (names(of_topic), names(of_another), names(of_group)) == (["plain"], None, ["paid"])
    (check,) = checks(of_group) or []
    assert (check.topic, check.producer_group) == ("orders", "payers")
    core.advance(INTERVAL_MS)
    assert names(of_another) == ["plain"]  # and no more: its group is another one


@pytest.mark.parametrize("clean", [True, False])
def test_the_group_of_a_half_message_outlives_the_broker(clean: bool) -> None:
    core = broker()
    begin(core, "paid", producers="payers")
    restart(core, clean=clean)
    of_topic = wait(core, "orders")
    of_group = wait(core, producer_groups=["payers"])
    core.advance(FIRST_MS)
    assert (names(of_topic), names(of_group)) == (None, ["paid"])


def test_the_same_message_id_may_begin_two_transactions_of_a_group() -> None:
    core = broker()
    first = begin(core, "paid", producers="payers").message
    second = begin(core, "paid", producers="payers").message
    assert first != second
    proxy = wait(core, producer_groups=["payers"])
    core.advance(FIRST_MS)
    assert [check.transaction_id for check in checks(proxy) or []] == [first, second]
    # Remoting clients before 5 name no topic, and the id of the message does not count.
    assert end(core, "", first, topic="") is None
    assert end(core, "", second, commit=False, topic="") is None
    assert received(core) == ["paid"]
