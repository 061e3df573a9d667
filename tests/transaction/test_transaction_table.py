"""The table of transactions by itself: bounded wherever it is, and whole in a snapshot."""

import struct

import pytest

from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.persistence.retention import LiveBody
from popmq.broker.transaction.transaction_table import ENDED_LIMIT, TransactionTable
from popmq.common import topics
from popmq.common.record.transaction_token import HalfToken, TransactionEnd, TransactionEndToken

TOKEN = HalfToken(64, 1, 500)


def stored(table: TransactionTable, offset: int, log_ms: int) -> None:
    table.stored(TOKEN, offset, QueueUnit(offset * 100, 90, 7), log_ms)


@pytest.mark.more
def test_on_a_slave_which_asks_for_nothing_it_stays_as_small_as_what_is_pending() -> None:
    table = TransactionTable(1_000)
    stored(table, 0, 0)
    for offset in range(1, ENDED_LIMIT + 10_000):
        stored(table, offset, offset)
        table.apply(TransactionEndToken(TransactionEnd.CHECKED, 64, offset, 1), offset)
        table.apply(TransactionEndToken(TransactionEnd.COMMITTED, 64, offset), offset)
    assert list(table.pending) == [0]
    assert len(table._due) <= 1_010  # the bounds themselves
    assert len(list(table.endings())) == ENDED_LIMIT
    table.apply(TransactionEndToken(TransactionEnd.ROLLED_BACK, 64, 0), 1)
    stored(table, ENDED_LIMIT * 2, 0)
    assert len(table._order) == 1


def test_what_was_taken_as_due_is_not_taken_again_when_the_heap_is_cleared() -> None:
    table = TransactionTable(1_000)
    stored(table, 0, 0)
    (taken,) = table.take_due(10_000, 10)
    for offset in range(1, 5_000):
        stored(table, offset, 1 << 40)
        table.apply(TransactionEndToken(TransactionEnd.ROLLED_BACK, 64, offset), 1 << 40)
    assert taken.offset == 0
    assert table.take_due(10_000, 10) == []


def test_a_snapshot_has_what_was_there_when_it_began() -> None:
    table = TransactionTable(1_000)
    for offset in range(2_000):
        stored(table, offset, offset)
    table.apply(TransactionEndToken(TransactionEnd.CHECKED, 64, 5, 3), 9_000)
    table.moved(LiveBody(topics.HALF_TOPIC_ID, 0, 6, QueueUnit(777, 90, 7)))
    table.apply(TransactionEndToken(TransactionEnd.COMMITTED, 64, 7), 9_001)
    before, endings = dict(table.pending), list(table.endings())
    pieces = table.begin_snapshot()
    first = next(pieces)
    for offset in range(1_000):
        table.apply(TransactionEndToken(TransactionEnd.ROLLED_BACK, 64, offset), 9_002)
    table.moved(LiveBody(topics.HALF_TOPIC_ID, 0, 1_999, QueueUnit(888, 90, 7)))
    other = TransactionTable(1_000)
    for content, _ in (first, *pieces):
        other.restore(content)
    other.restored()
    assert other.pending == before
    assert list(other.endings()) == endings
    assert [half.offset for half in other.take_due(1 << 60, 3)] == [0, 1, 2]


@pytest.mark.parametrize("own_interval_ms", [1_000, 30_000])
def test_the_next_check_is_due_after_the_interval_that_the_record_names(
    own_interval_ms: int,
) -> None:
    table = TransactionTable(own_interval_ms)
    stored(table, 0, 100)
    body = TransactionEndToken(TransactionEnd.CHECKED, 0, 0, 2, next_check_ms=7_000).encode()
    table.apply(TransactionEndToken.decode(body), 10_000)
    assert (table.pending[0].due_ms, table.pending[0].checks) == (17_000, 2)


def test_a_check_that_an_older_popmq_wrote_is_due_after_the_interval_that_is_set() -> None:
    table = TransactionTable(30_000)
    stored(table, 0, 100)
    body = struct.pack(">BBHIQ", 6, 5, 2, 64, 0)
    table.apply(TransactionEndToken.decode(body), 10_000)
    assert (table.pending[0].due_ms, table.pending[0].checks) == (40_000, 2)


def test_an_older_popmq_reads_what_it_uses_of_a_check() -> None:
    """It takes 16 bytes of any version: the second, third and last field."""
    body = TransactionEndToken(TransactionEnd.CHECKED, 0, 9, 2, next_check_ms=7_000).encode()
    _, ending, checks, _, half_offset = struct.unpack(">BBHIQ", body)
    assert (ending, checks, half_offset) == (5, 2, 9)
