"""What the table of check points takes for a message in flight: 16 bytes is the aim."""

import gc
import tracemalloc

import pytest

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.client_liveness import ClientNames
from popmq.broker.deliveries.pop_check_point import CheckPointRecord

BATCH = 32
START_MS = 1_700_000_000_000


def popped(number: int, clients: ClientNames, *, apart_ms: float) -> tuple[CheckPointRecord, int]:
    """A receive of 32 from one of 8 queues, for an hour, and its log time."""
    offset = 1_000 + number // 8 * BATCH
    log_ms = START_MS + int(number * apart_ms)
    record = CheckPointRecord(
        1,
        1_000 + number,
        (1 << BATCH) - 1,
        start_offset=offset,
        topic_id=70,
        group_id=71,
        queue_id=number % 8,
        attempt_id=0,
        next_offset=offset + BATCH,
        revive_at_ms=log_ms + 3_600_000,
        client=clients.number(f"client-{number % 3}"),
    )
    return record, log_ms


def bytes_each(receives: int, *, apart_ms: float) -> float:
    table, clients = CheckPointTable(), ClientNames()
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(receives):
            table.apply(*popped(number, clients, apart_ms=apart_ms))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.in_flight == receives * BATCH
    return taken / table.in_flight


@pytest.mark.more
def test_a_message_in_flight_takes_no_more_than_16_bytes_among_many() -> None:
    assert bytes_each(10_000, apart_ms=1) < 16


@pytest.mark.more
def test_receives_of_one_millisecond_share_its_times() -> None:
    assert bytes_each(3_000, apart_ms=0.25) < bytes_each(3_000, apart_ms=1) - 1


@pytest.mark.more
def test_receives_of_which_each_is_due_at_a_time_of_its_own_take_little_more() -> None:
    assert bytes_each(2_000, apart_ms=100) < 24
