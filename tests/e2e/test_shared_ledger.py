"""Each broken promise is planted once, and each honest duplicate is given its cause."""

from e2e.shared_ledger import (
    INVALID_RECEIPT_HANDLE,
    OK,
    Call,
    Cause,
    Consumer,
    Letter,
    Op,
    Rules,
    Seen,
    Sent,
    SharedReport,
    check_shared,
    unsettled,
)

KILLED_MS = 2_000
SIMPLE, PUSH = Consumer("simple", push=False), Consumer("push", push=True)
DEAD_SIMPLE = Consumer("dead-simple", push=False, killed_ms=KILLED_MS)
DEAD_PUSH = Consumer("dead-push", push=True, killed_ms=KILLED_MS)
ACKED = (Op.ACK, OK)


def seen(
    attempt: int,
    at_ms: int,
    *calls: tuple[Op, int | None],
    by: Consumer = SIMPLE,
    message_id: str = "a",
    receive: int | None = None,
    place: int = 0,
    wait_ms: int = 0,
) -> Seen:
    new_calls = [Call(op, at_ms + 10, wait_ms, code) for op, code in calls]
    return Seen(message_id, attempt, by, receive, place, at_ms, at_ms, new_calls)


def check(
    *deliveries: Seen,
    sent: str = "a",
    letters: tuple[Letter, ...] = (),
    explained: dict[str, str] | None = None,
    ordered: bool = False,
) -> SharedReport:
    return check_shared(
        sent=[Sent(message_id, "key", number) for number, message_id in enumerate(sent)],
        seen=deliveries,
        letters=letters,
        explained=explained or {},
        rules=Rules(max_attempts=3, invisible_ms=5_000, back_off_ms=1_000, ordered=ordered),
        kills_ms=[KILLED_MS],
    )


def causes(report: SharedReport) -> list[Cause]:
    assert report.faults == []
    return list(report.duplicates.elements())


def test_a_message_that_was_seen_and_acknowledged_is_in_order() -> None:
    report = check(seen(1, 0, ACKED))

    assert (report.faults, report.acked, report.deliveries) == ([], 1, 1)
    assert "lost 0, unknown 0" in report.table()


def test_a_message_that_nobody_saw_is_lost() -> None:
    report = check(seen(1, 0, ACKED), sent="ab", explained={"b": "READY"})

    assert (report.lost, report.unknown) == (1, 0)
    assert report.faults == ["b: sent and never seen; the broker says READY"]


def test_a_message_without_an_end_is_unknown_even_if_its_ack_may_have_arrived() -> None:
    report = check(
        seen(1, 0, (Op.ACK, None), by=DEAD_SIMPLE),
        seen(1, 0, message_id="b"),
        sent="ab",
        explained={"a": "INVISIBLE", "b": "ACKED"},
    )

    assert (report.lost, report.unknown, len(report.faults)) == (0, 2, 2)


def test_the_broker_can_tell_of_an_ack_whose_answer_died_with_the_consumer() -> None:
    delivery = seen(1, 0, (Op.ACK, None), by=DEAD_SIMPLE)
    report = check(delivery, explained={"a": "ACKED"})

    assert unsettled([Sent("a", "", 0)], [delivery], []) == ["a"]
    assert (report.faults, report.acked, report.acked_unanswered) == ([], 1, 1)


def test_a_message_seen_after_its_acknowledgement_is_found() -> None:
    for attempt in (2, 3):
        report = check(seen(1, 0, ACKED), seen(attempt, 9_000, ACKED))
        assert report.duplicates[Cause.NONE] == 1
        assert report.faults != []


def test_an_acknowledged_dead_letter_is_found() -> None:
    report = check(seen(3, 3_000, ACKED, by=DEAD_PUSH), letters=(Letter("a", 3, 9_000),))

    assert "a: acknowledged, and a dead letter" in report.faults


def test_duplicates_get_their_causes() -> None:
    again = seen(2, 9_000, ACKED)
    nack = (Op.NACK, OK)

    assert causes(check(seen(1, 0), again)) == [Cause.EXPIRED]
    assert causes(check(seen(1, 0, (Op.ACK, INVALID_RECEIPT_HANDLE)), again)) == [Cause.EXPIRED]
    assert causes(check(seen(1, 0, nack), again)) == [Cause.NACK]
    assert causes(check(seen(1, 0, by=DEAD_SIMPLE), again)) == [Cause.CRASH]
    assert causes(check(seen(1, 0, by=DEAD_PUSH), again)) == [Cause.CRASH]
    assert causes(check(seen(1, 0, (Op.NACK, None), by=DEAD_PUSH), again)) == [Cause.CRASH]
    dead_ack = seen(1, 0, (Op.ACK, None), by=DEAD_SIMPLE)
    assert causes(check(dead_ack, again)) == [Cause.ACK_UNANSWERED]


def test_a_message_of_a_living_push_consumer_has_no_cause_to_come_again() -> None:
    report = check(seen(1, 0, by=PUSH), seen(2, 90_000, ACKED))

    assert (report.duplicates[Cause.NONE], len(report.faults)) == (1, 1)


def test_a_message_that_comes_before_its_time_is_found() -> None:
    early = [
        (seen(1, 0), seen(2, 4_999, ACKED)),
        (seen(1, 0, (Op.NACK, OK), wait_ms=2_000), seen(2, 2_009, ACKED)),
        (seen(1, 0, (Op.NACK, OK), by=PUSH), seen(2, 1_009, ACKED)),
    ]
    for pair in early:
        assert check(*pair).duplicates[Cause.NONE] == 1
        pair[1].seen_ms += 1
        assert check(*pair).faults == []


def test_the_same_attempt_twice_is_found() -> None:
    report = check(seen(1, 0), seen(1, 9_000, ACKED))

    assert report.duplicates[Cause.NONE] == 1


def test_an_attempt_that_nobody_saw_needs_a_consumer_that_was_killed() -> None:
    assert check(seen(2, KILLED_MS, ACKED)).unseen == 1
    assert check(seen(2, KILLED_MS, ACKED)).faults == []
    assert len(check(seen(2, KILLED_MS - 1, ACKED)).faults) == 1
    assert len(check(seen(3, KILLED_MS, ACKED)).faults) == 1
    assert len(check(seen(1, 0), letters=(Letter("a", 3, 9_000),)).faults) == 1


def test_a_dead_letter_has_used_its_attempts_or_was_rejected() -> None:
    deliveries = [seen(1, 0), seen(2, 5_000), seen(3, 10_000)]
    rejected = seen(1, 0, (Op.REJECT, OK), by=PUSH)

    assert check(*deliveries, letters=(Letter("a", 3, 15_000),)).faults == []
    assert check(rejected, letters=(Letter("a", 1, 20),)).faults == []
    assert len(check(seen(1, 0), letters=(Letter("a", 1, 5_000),)).faults) == 1
    assert check(rejected, seen(2, 9_000, ACKED)).duplicates[Cause.NONE] == 1
    assert len(check(*deliveries, letters=(Letter("a", 2, 15_000),)).faults) == 2


def test_calls_that_fail_for_any_other_reason_are_found() -> None:
    again = seen(2, 9_000, ACKED)

    assert len(check(seen(1, 0, (Op.ACK, 50_000)), again).faults) == 1
    assert len(check(seen(1, 0, (Op.ACK, None)), again).faults) == 1


def test_strangers_are_found() -> None:
    report = check(
        seen(1, 0, ACKED),
        seen(1, 0, ACKED, message_id="x"),
        sent="aa",
        letters=(Letter("y", 1, 0), Letter("y", 1, 0)),
    )

    assert report.faults[:4] == [
        "a: sent twice",
        "x: seen and never sent",
        "y: a dead letter and never sent",
        "y: a dead letter twice",
    ]


def test_a_key_is_in_order_when_each_message_waits_for_the_end_of_the_one_before() -> None:
    report = check(
        seen(1, 0, ACKED),
        seen(1, 10, (Op.REJECT, OK), by=PUSH, message_id="b"),
        seen(1, 20, by=DEAD_SIMPLE, message_id="c", receive=7, place=0),
        seen(1, 20, by=DEAD_SIMPLE, message_id="d", receive=7, place=1),
        seen(2, 9_000, ACKED, message_id="c"),
        seen(2, 9_010, ACKED, message_id="d"),
        sent="abcd",
        letters=(Letter("b", 1, 15),),
        ordered=True,
    )

    assert (report.faults, report.order_checked, report.keys) == ([], 3, 1)


def order_faults(*deliveries: Seen, letters: tuple[Letter, ...] = ()) -> list[str]:
    report = check(*deliveries, sent="ab", letters=letters, ordered=True)
    return [fault for fault in report.faults if fault.startswith("key: number 1")]


def test_a_message_first_seen_before_its_predecessor_ended_is_out_of_order() -> None:
    def second(at_ms: int) -> Seen:
        return seen(1, at_ms, ACKED, message_id="b")

    letters = (Letter("a", 3, 21),)
    refused = seen(1, 0, (Op.ACK, INVALID_RECEIPT_HANDLE))
    third = seen(3, 0, by=PUSH)

    assert len(order_faults(seen(1, 0, ACKED), second(9))) == 1, "the ack began at 10"
    assert len(order_faults(refused, second(20))) == 1
    assert len(order_faults(third, second(20), letters=letters)) == 1
    assert order_faults(third, second(21), letters=letters) == []
    assert len(order_faults(seen(1, 50, ACKED), second(20))) == 1


def test_a_predecessor_that_comes_again_was_not_over() -> None:
    unanswered = seen(1, 0, (Op.ACK, None), by=DEAD_SIMPLE)
    later = seen(1, 20, ACKED, message_id="b")

    assert order_faults(unanswered, later) == []
    assert len(order_faults(unanswered, later, seen(2, 9_000, ACKED))) == 1


def test_one_reply_may_hold_several_messages_of_a_key_if_they_are_in_order() -> None:
    def pair(place_a: int, place_b: int, receive_b: int = 1) -> list[str]:
        return order_faults(
            seen(1, 0, ACKED, receive=1, place=place_a),
            seen(1, 0, ACKED, message_id="b", receive=receive_b, place=place_b),
        )

    assert pair(0, 1) == []
    assert len(pair(1, 0)) == 1
    assert len(pair(0, 1, receive_b=2)) == 1
