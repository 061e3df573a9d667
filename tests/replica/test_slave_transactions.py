"""Transactions that are pending when the master dies end with the slave that is promoted."""

from dataclasses import replace
from pathlib import Path

import pytest
from replica.pair import OF_TWO, Pair, Slave
from transaction.rig import (
    FIRST_MS,
    INTERVAL_MS,
    ask_end,
    begin,
    end,
    names,
    received,
    wait,
)

from popmq.common.settings.send_settings import TransactionSettings
from popmq.common.topics import MessageType


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    settings = replace(OF_TWO, transaction=TransactionSettings(max_checks=2))
    new_pair = Pair(tmp_path, settings)
    new_pair.master.topic("orders", queues=2, type=MessageType.TRANSACTION)
    new_pair.master.group("g")
    return new_pair


def pending(slave: Slave) -> int:
    return len(slave.broker.transactions.table.pending)


def test_what_was_pending_is_committed_and_rolled_back_at_the_next_master(pair: Pair) -> None:
    kept, dropped = begin(pair.master, "kept"), begin(pair.master, "dropped")
    pair.follow()
    promoted = pair.fail_over()
    assert pending(promoted) == 2
    assert received(promoted) == []
    assert end(promoted, "kept", kept.message) is None
    assert end(promoted, "dropped", dropped.message, commit=False) is None
    promoted.advance(3_600_000)
    assert received(promoted) == ["kept"]
    assert pending(promoted) == 0


def test_an_end_that_the_dead_master_answered_is_the_same_at_the_next(pair: Pair) -> None:
    """It comes once, and the producer that asks again hears the same."""
    done = begin(pair.master, "done")
    assert end(pair.master, "done", done.message) is None
    pair.follow()
    promoted = pair.fail_over()
    assert pending(promoted) == 0
    assert end(promoted, "done", done.message) is None
    assert received(promoted) == ["done"]
    assert end(promoted, "done", done.message, commit=False) is not None


def test_an_end_that_nobody_confirmed_is_made_again(pair: Pair) -> None:
    half = begin(pair.master, "half")
    pair.follow()
    asked = ask_end(pair.master, "half", half.message)
    assert not asked.heard
    promoted = pair.fail_over()
    assert pending(promoted) == 1
    assert end(promoted, "half", half.message) is None
    assert received(promoted) == ["half"]


def test_the_promoted_slave_asks_producers_and_gives_up_in_the_end(pair: Pair) -> None:
    begin(pair.master, "silent")
    pair.follow()
    pair.slave.advance(FIRST_MS + 1_000)
    assert pending(pair.slave) == 1, "a slave ends nothing"
    promoted = pair.fail_over()
    asked = wait(promoted)
    promoted.advance(FIRST_MS)
    assert names(asked) == ["silent"]
    for _ in range(4):
        wait(promoted)
        promoted.advance(INTERVAL_MS + 1_000)
    assert pending(promoted) == 0
    assert received(promoted) == []
