"""A reset of a group that has parked message groups: what is read again comes once, in order."""

import pytest
from fifo.cores import names
from fifo.test_parked_keys import ack, parked, receive, restart, say, with_a_parked_key

from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker

ENDS = pytest.mark.parametrize("how", ["no", "clean", "crash"])


def reset(core: CoreBroker, **to: object) -> None:
    request = pb.ResetOffsetRequest(group="g", topic="orders", **to)  # type: ignore[arg-type]
    core.reply(Kind.RESET_OFFSET, request.SerializeToString())


def end(core: CoreBroker, how: str) -> None:
    if how != "no":
        restart(core, how)


def read_all(core: CoreBroker) -> list[str]:
    """Receive and ack until nothing comes any more."""
    results: list[str] = []
    while got := receive(core):
        results += names(got)
        ack(core, *got)
        core.run_steps()
    return results


def numbered(first: int, last: int) -> list[str]:
    return [f"a{number}" for number in range(first, last + 1)]


@ENDS
def test_what_was_parked_is_read_again_once_and_in_order_after_a_reset_to_an_older_place(
    how: str,
) -> None:
    core, _ = with_a_parked_key()
    reset(core, oldest=True)
    end(core, how)
    assert parked(core) == {}
    assert read_all(core) == [*numbered(1, 11), "b1", "b2"]
    assert core.broker.table.in_flight == 0


@ENDS
def test_what_was_parked_before_the_offset_stays_parked_and_what_follows_joins_it(how: str) -> None:
    core, _ = with_a_parked_key()
    reset(core, offset=4, queue_id=0)
    end(core, how)
    assert parked(core) == {"a": 3}
    assert read_all(core) == ["b1", "b2"]
    assert parked(core) == {"a": 10}
    say(core, "a", UnparkAction.RESUME)
    assert read_all(core) == numbered(2, 11)


@ENDS
def test_deliveries_of_what_was_parked_end_with_a_reset_where_it_is_read_again(how: str) -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck)
    say(core, "a", UnparkAction.RESUME)
    resumed = receive(core, limit=5)
    assert names(resumed) == numbered(2, 6)
    reset(core, offset=4, queue_id=0)
    end(core, how)
    results = core.ack("orders", "g", *(delivery.handle for delivery in resumed))
    assert [result.code for result in results] == [Code.OK] * 3 + [Code.INVALID_RECEIPT_HANDLE] * 2
    assert all("was reset" in result.message for result in results[3:])
    again = core.ack(
        "orders", "g", *(delivery.handle for delivery in resumed)
    )  # all of them are over now
    assert again == results
    assert read_all(core) == [*numbered(5, 11), "b1", "b2"]
    core.advance(2 * 3_600_000)
    assert receive(core) == []


@ENDS
def test_a_changed_delivery_of_what_was_parked_is_refused_with_the_reset(how: str) -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck)
    say(core, "a", UnparkAction.RESUME)
    (delivery,) = receive(core, limit=1)
    changed = core.change("orders", "g", delivery.handle, 60_000)
    reset(core, oldest=True)
    end(core, how)
    first, second = core.ack("orders", "g", delivery.handle, changed)
    assert ("superseded" in first.message, "was reset" in second.message) == (True, True)
    with pytest.raises(PopmqError, match="was reset"):
        core.change("orders", "g", changed, 1_000)
    assert read_all(core) == [*numbered(1, 11), "b1", "b2"]


@ENDS
def test_a_reset_to_the_newest_skips_what_is_parked(how: str) -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck)
    say(core, "a", UnparkAction.RESUME)
    receive(core, limit=5)
    reset(core, newest=True)
    end(core, how)
    assert parked(core) == {}
    core.advance(2 * 3_600_000)
    assert receive(core) == []


@ENDS
def test_a_reset_to_the_newest_can_keep_what_is_parked(how: str) -> None:
    core, _ = with_a_parked_key()
    reset(core, newest=True, skip_retries=False)
    end(core, how)
    assert parked(core) == {"a": 10}
    say(core, "a", UnparkAction.RESUME)
    assert read_all(core) == numbered(2, 11)
