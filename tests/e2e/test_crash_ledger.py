"""Each broken promise is planted once, and each honest duplicate is given its cause."""

from e2e.crash_ledger import Ack, Cause, CrashReport, Seen, check_crashes

INVISIBLE_MS = 3_000


def check(
    *seen: Seen, sent_ok: tuple[str, ...] = ("a",), sent_unknown: tuple[str, ...] = ()
) -> CrashReport:
    return check_crashes(
        sent_ok=sent_ok, sent_unknown=sent_unknown, deliveries=seen, invisible_ms=INVISIBLE_MS
    )


def seen(attempt: int, at_ms: float, ack: Ack, message_id: str = "a") -> Seen:
    return Seen(
        message_id=message_id,
        attempt=attempt,
        asked_ms=at_ms,
        received_ms=at_ms + 10,
        ack=ack,
        ack_ms=at_ms + 20,
    )


def test_one_delivery_and_its_acknowledgement_are_in_order() -> None:
    report = check(seen(1, 0, Ack.OK))

    assert report.faults == []
    assert (report.received, report.acked, report.lost) == (1, 1, 0)


def test_a_lost_message_is_found() -> None:
    report = check(seen(1, 0, Ack.OK), sent_ok=("a", "b"))

    assert (report.lost, report.faults) == (1, ["b was sent and never received"])


def test_a_message_with_an_unknown_send_may_appear_or_not() -> None:
    report = check(seen(1, 0, Ack.OK), seen(1, 0, Ack.OK, "b"), sent_unknown=("b", "c"))

    assert report.faults == []
    assert (report.sent_unknown, report.unknown_appeared) == (2, 1)


def test_a_message_seen_after_its_acknowledgement_is_found() -> None:
    report = check(seen(1, 0, Ack.OK), seen(2, 3_500, Ack.OK))

    assert (report.acked_seen_again, report.duplicates[Cause.NONE]) == (1, 1)
    assert len(report.faults) == 2


def test_an_acknowledgement_that_crossed_the_next_delivery_is_no_excuse() -> None:
    first = Seen("a", 1, asked_ms=0, received_ms=10, ack=Ack.OK, ack_ms=3_400)
    report = check(first, seen(2, 3_100, Ack.OK))

    assert (report.acked_seen_again, report.duplicates[Cause.NONE]) == (0, 1)


def test_a_message_left_alone_comes_back_as_expired() -> None:
    report = check(seen(1, 0, Ack.NONE), seen(2, 3_100, Ack.OK))

    assert report.faults == []
    assert report.duplicates == {Cause.EXPIRED: 1}


def test_an_acknowledgement_that_came_too_late_is_an_expiry() -> None:
    first = Seen("a", 1, asked_ms=0, received_ms=10, ack=Ack.REFUSED, ack_ms=3_200)
    report = check(first, seen(2, 3_100, Ack.OK))

    assert report.faults == []
    assert report.duplicates == {Cause.EXPIRED: 1}


def test_a_refusal_within_the_invisible_time_is_found() -> None:
    report = check(seen(1, 0, Ack.REFUSED), seen(2, 3_100, Ack.OK))

    assert report.duplicates == {Cause.NONE: 1}
    assert len(report.faults) == 1


def test_a_lost_acknowledgement_is_the_cause_of_the_next_delivery() -> None:
    report = check(seen(1, 0, Ack.UNKNOWN), seen(2, 3_100, Ack.OK))

    assert report.faults == []
    assert report.duplicates == {Cause.ACK_LOST: 1}


def test_an_attempt_that_nobody_saw_is_a_lost_reply() -> None:
    report = check(seen(2, 3_100, Ack.OK))

    assert report.faults == []
    assert report.replies_lost == 1


def test_a_message_stored_twice_is_found_unless_its_send_had_no_answer() -> None:
    twice = (seen(1, 0, Ack.OK), seen(1, 5, Ack.OK))

    assert check(*twice).duplicates == {Cause.NONE: 1}
    excused = check(*twice, sent_ok=(), sent_unknown=("a",))
    assert excused.duplicates == {Cause.SEND_UNKNOWN: 1}
    assert excused.faults == []


def test_a_message_that_comes_back_early_is_found() -> None:
    report = check(seen(1, 0, Ack.UNKNOWN), seen(2, 2_900, Ack.OK))

    assert (report.early, len(report.faults)) == (1, 1)


def test_a_message_that_stays_unacknowledged_is_found() -> None:
    report = check(seen(1, 0, Ack.NONE))

    assert (report.unsettled, len(report.faults)) == (1, 1)


def test_a_message_that_nobody_sent_is_found() -> None:
    report = check(seen(1, 0, Ack.OK), seen(1, 0, Ack.OK, "ghost"))

    assert report.faults == ["ghost was received and never sent"]


def test_the_table_names_every_figure() -> None:
    text = check(seen(1, 0, Ack.OK)).table()

    for words in ("sent OK", "received", "acked", "sent OK and lost", "acked and seen again"):
        assert words in text
    assert all(f"duplicates: {cause}" in text for cause in Cause)
