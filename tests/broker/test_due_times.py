"""ReviveBuckets: in the order in which they came, each once, whatever happens meanwhile."""

from popmq.broker.deliveries.pop_check_point import CheckPointRecord, PopCheckPoint
from popmq.broker.deliveries.revive_buckets import ReviveBuckets


def check_point(sequence: int, due_ms: int) -> PopCheckPoint:
    record = CheckPointRecord(1, sequence, 1, 0, 0, 0, 0, 0, 0, due_ms, 0)
    return record.check_point(0)


def taken(times: ReviveBuckets, now_ms: int) -> list[int]:
    sequences = []
    while (ck := times.take(now_ms)) is not None:
        sequences.append(ck.sequence)
    return sequences


def test_what_is_due_in_one_bucket_comes_in_its_order_and_once() -> None:
    times = ReviveBuckets(16)
    for sequence in (3, 1, 2):
        times.add(check_point(sequence, 10))
    assert taken(times, 15) == []
    assert taken(times, 16) == [3, 1, 2]
    assert taken(times, 1_000) == []


def test_one_that_waits_in_no_bucket_can_be_removed_beside_one_that_is_due_at_once() -> None:
    """Of a start: a check point that others took over was never added."""
    times = ReviveBuckets(16)
    undone = check_point(1, 10)
    times.add(undone, 0)
    times.remove(check_point(2, 10))
    times.check_invariants()
    assert taken(times, 0) == [1]


def test_one_that_ended_while_its_bucket_is_taken_does_not_come() -> None:
    times = ReviveBuckets(16)
    some = [check_point(sequence, 10) for sequence in range(4)]
    for ck in some:
        times.add(ck)
    assert times.take(16) is some[0]
    times.remove(some[2])
    assert taken(times, 16) == [1, 3]


def test_one_that_is_added_again_to_its_bucket_meanwhile_comes_again_behind_the_others() -> None:
    times = ReviveBuckets(16)
    some = [check_point(sequence, 10) for sequence in range(3)]
    for ck in some:
        times.add(ck)
    assert times.take(16) is some[0]
    times.add(some[0])
    assert taken(times, 16) == [1, 2, 0]


def test_an_older_bucket_that_turns_up_while_one_is_taken_loses_nobody() -> None:
    times = ReviveBuckets(16)
    for sequence in range(3):
        times.add(check_point(sequence, 20))
    assert times.take(32) is not None
    times.add(check_point(9, 0))
    assert sorted(taken(times, 32)) == [1, 2, 9]


def test_one_that_ended_before_its_time_comes_never_and_the_others_keep_their_order() -> None:
    times = ReviveBuckets(16)
    some = [check_point(sequence, 10) for sequence in range(9)]
    for ck in some:
        times.add(ck)
    for ck in (some[0], *some[2:7]):  # more than half of them
        times.remove(ck)
        times.remove(ck)
    assert len(times) == 3
    assert times.overdue(16) == (3, 0)
    assert taken(times, 16) == [1, 7, 8]
    assert len(times) == 0


def test_one_that_was_put_off_comes_at_its_new_time_only() -> None:
    times = ReviveBuckets(16)
    put_off, other = check_point(1, 10), check_point(2, 10)
    times.add(put_off)
    times.add(other)
    times.remove(put_off)
    times.add(put_off, 100)
    assert taken(times, 99) == [2]
    assert taken(times, 112) == [1]


def test_those_that_ended_are_let_go_of_long_before_their_time() -> None:
    times = ReviveBuckets(16)
    kept = check_point(0, 10)
    times.add(kept)
    for sequence in range(1, 5_000):
        ck = check_point(sequence, 10)
        times.add(ck)
        times.remove(ck)
    assert sum(len(bucket.line) for bucket in times._buckets.values()) <= 3
    assert taken(times, 16) == [0]


def test_one_that_ended_after_it_was_to_come_at_once_does_not_come() -> None:
    """Given back, due at 0, and then ended by a reset."""
    times = ReviveBuckets(16)
    some = [check_point(sequence, 100) for sequence in range(3)]
    for ck in some:
        times.add(ck)
        times.remove(ck)
        times.add(ck, 0)
    times.remove(some[1])
    assert len(times) == 2
    assert taken(times, 50) == [0, 2]
