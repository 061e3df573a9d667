"""QueueLeases by itself: who holds a queue, and what a master that has just begun may grant."""

import random

import pytest

from popmq.broker.operations.queue_leases import LEASE_MS, SILENT_MS, TRUST_MS, Queue, QueueLeases
from popmq.common.errors import TooManyRequests

A, B = ("orders", 0), ("orders", 1)


def lock(
    leases: QueueLeases, client: str, *queues: Queue, now_ms: int, first: bool = True
) -> list[Queue]:
    leases.check_invariants()
    return leases.lock("g", client, queues, now_ms=now_ms, first_master=first)


def test_a_queue_has_one_holder_until_its_lease_is_over() -> None:
    leases = QueueLeases()
    assert lock(leases, "one", A, now_ms=0) == [A]
    assert lock(leases, "two", A, B, now_ms=1) == [B]
    assert lock(leases, "two", A, now_ms=LEASE_MS - 1) == []
    assert lock(leases, "two", A, now_ms=LEASE_MS) == [A]


def test_a_renewal_makes_a_lease_longer() -> None:
    leases = QueueLeases()
    lock(leases, "one", A, now_ms=0)
    assert lock(leases, "one", A, now_ms=LEASE_MS - 1) == [A]
    assert lock(leases, "two", A, now_ms=2 * LEASE_MS - 2) == []


def test_an_unlock_counts_for_its_holder_only() -> None:
    leases = QueueLeases()
    lock(leases, "one", A, now_ms=0)
    leases.unlock("g", "two", [A])
    assert lock(leases, "two", A, now_ms=1) == []
    leases.unlock("g", "one", [A, B])
    assert lock(leases, "two", A, now_ms=2) == [A]


def test_groups_do_not_see_each_other() -> None:
    leases = QueueLeases()
    lock(leases, "one", A, now_ms=0)
    assert leases.lock("h", "two", [A], now_ms=0, first_master=True) == [A]
    assert leases.is_ordered("h", 0)
    assert not leases.is_ordered("other", 0)
    leases.step(LEASE_MS)
    assert not leases.is_ordered("h", LEASE_MS)


def test_a_later_master_grants_nothing_while_a_consumer_may_trust_the_one_before() -> None:
    leases = QueueLeases()
    assert lock(leases, "one", A, now_ms=5, first=False) == []
    assert lock(leases, "one", A, now_ms=SILENT_MS + 4, first=False) == []
    assert lock(leases, "one", A, now_ms=SILENT_MS + 5, first=False) == [A]


def test_there_are_no_more_leases_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("popmq.broker.operations.queue_leases.LEASES_LIMIT", 1)
    leases = QueueLeases()
    lock(leases, "one", A, now_ms=0)
    assert lock(leases, "one", A, now_ms=1) == [A]
    with pytest.raises(TooManyRequests, match="which is the limit"):
        lock(leases, "one", B, now_ms=1)


def test_no_queue_has_two_holders_over_changes_of_the_master() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    leases, now_ms = QueueLeases(), 0
    trusts: dict[Queue, dict[str, int]] = {A: {}, B: {}}  # until when each client trusts its lease
    first = True
    for _ in range(3_000):
        now_ms += chance.randrange(8_000)
        if chance.random() < 0.05:
            leases, first = QueueLeases(), False
        client = chance.choice(["one", "two", "three"])
        if chance.random() < 0.2:
            leases.unlock("g", client, [A])
            trusts[A].pop(client, None)
        for queue in lock(leases, client, A, B, now_ms=now_ms, first=first):
            trusts[queue][client] = now_ms + TRUST_MS
        leases.step(now_ms)
        for queue in trusts:
            holders = [holder for holder, until_ms in trusts[queue].items() if now_ms < until_ms]
            assert len(holders) <= 1, (queue, holders, now_ms)
