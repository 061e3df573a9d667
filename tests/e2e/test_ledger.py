"""Each thing that can go wrong is planted once, and the ledger has to say so."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from e2e.ledger import Cause, Delivery, Report, Rule, Sent, check_group, table
from e2e.payloads import Fields, comes_back, payload

SEED = 7
EXPIRED = Rule("group-simple", Cause.EXPIRED, wait_ms=6_000)
NACK = Rule("group-push", Cause.NACK, wait_ms=1_000)
RETURNING = 3


def fields(k: int) -> Fields:
    return payload(seed=SEED, k=k, max_body=4_096).fields()


def sent(count: int = 20) -> list[Sent]:
    return [Sent(k, f"id-{k}", f"id-{k}", (10_000 + k,)) for k in range(count)]


def delivery(k: int, *, attempt: int, at_ms: int) -> Delivery:
    return Delivery(
        message_id=f"id-{k}",
        attempt=attempt,
        fields=fields(k),
        born_ms=10_000 + k,
        corrupted=False,
        delivered_ms=at_ms,
        received_ms=at_ms + 20,
        settled_ms=at_ms + 25,
        acked=attempt > 1 or not comes_back(k),
    )


def good_run(rule: Rule) -> list[Delivery]:
    first = [delivery(k, attempt=1, at_ms=20_000 + k) for k in range(20)]
    again = [
        delivery(k, attempt=2, at_ms=20_000 + k + 25 + rule.wait_ms)
        for k in range(20)
        if comes_back(k)
    ]
    return first + again


def check(
    rule: Rule,
    deliveries: list[Delivery],
    ack_failed: frozenset[tuple[str, int]] = frozenset(),
) -> Report:
    return check_group(
        rule,
        sent(),
        deliveries,
        expected=fields,
        comes_back=comes_back,
        ack_failed=ack_failed,
    )


@pytest.mark.parametrize("rule", [EXPIRED, NACK])
def test_a_good_run_has_no_faults(rule: Rule) -> None:
    report = check(rule, good_run(rule))

    assert report.faults == []
    assert (report.once, report.twice, report.lost, report.duplicated) == (18, 2, 0, 0)
    assert report.causes == {rule.cause: 2}
    assert "late max ms" in table([report, report])


def test_a_lost_message_is_found() -> None:
    report = check(
        EXPIRED, [message for message in good_run(EXPIRED) if message.message_id != "id-5"]
    )

    assert (report.lost, len(report.faults)) == (1, 1)
    assert report.faults == ["message 5: delivered 0 of 1 times"]


def test_a_message_that_never_comes_back_is_lost() -> None:
    report = check(EXPIRED, [item for item in good_run(EXPIRED) if item.attempt == 1])

    assert report.lost == 2


def test_a_duplicate_of_an_acknowledged_message_has_no_known_cause() -> None:
    report = check(EXPIRED, [*good_run(EXPIRED), delivery(5, attempt=2, at_ms=30_000)])

    assert (report.duplicated, report.causes[Cause.UNKNOWN]) == (1, 1)
    assert report.faults == ["message 5: delivered once more than owed (unknown)"]


def test_a_duplicate_after_a_failed_acknowledgement_is_put_down_to_the_crash() -> None:
    report = check(
        EXPIRED,
        [*good_run(EXPIRED), delivery(5, attempt=2, at_ms=30_000)],
        ack_failed=frozenset({("id-5", 1)}),
    )

    assert (report.duplicated, report.causes[Cause.CRASH]) == (1, 1)


def test_a_third_delivery_is_a_duplicate() -> None:
    report = check(EXPIRED, [*good_run(EXPIRED), delivery(RETURNING, attempt=3, at_ms=40_000)])

    assert report.duplicated == 1
    assert report.faults == ["message 3: delivered once more than owed (unknown)"]


@pytest.mark.parametrize("rule", [EXPIRED, NACK])
def test_a_message_that_returns_early_is_found(rule: Rule) -> None:
    moved = shift(good_run(rule), by_ms=-100)

    report = check(rule, moved)

    assert (report.early, report.late) == (1, 0)


@pytest.mark.parametrize("rule", [EXPIRED, NACK])
def test_a_message_that_returns_late_is_found(rule: Rule) -> None:
    moved = shift(good_run(rule), by_ms=501)

    report = check(rule, moved)

    assert (report.early, report.late) == (0, 1)


def test_the_client_may_take_its_time_over_a_large_body() -> None:
    moved = shift(good_run(NACK), by_ms=501)
    size = next(message.fields.size for message in moved if message.message_id == f"id-{RETURNING}")
    generous = replace(NACK, client_ms_per_mib=100 * 2**20 // size)

    report = check(generous, moved)

    assert report.faults == []


def shift(deliveries: list[Delivery], *, by_ms: int) -> list[Delivery]:
    """Move one second delivery in time."""
    return [
        replace(message, received_ms=message.received_ms + by_ms)
        if (message.message_id, message.attempt) == (f"id-{RETURNING}", 2)
        else message
        for message in deliveries
    ]


@pytest.mark.parametrize(
    "alter",
    [
        lambda item: replace(item, fields=replace(item.fields, sha256="0" * 64)),
        lambda item: replace(item, fields=replace(item.fields, size=0)),
        lambda item: replace(item, fields=replace(item.fields, keys=("order-7-5",))),
        lambda item: replace(item, fields=replace(item.fields, tag="other")),
        lambda item: replace(item, fields=replace(item.fields, properties={"k": "5"})),
        lambda item: replace(
            item, fields=replace(item.fields, properties={**item.fields.properties, "more": "1"})
        ),
        lambda item: replace(item, born_ms=item.born_ms - 1),
        lambda item: replace(item, corrupted=True),
    ],
    ids=["body", "size", "keys", "tag", "properties lost", "property added", "born", "digest"],
)
def test_an_altered_message_is_found(alter: Callable[[Delivery], Delivery]) -> None:
    altered = [
        alter(message) if message.message_id == "id-5" else message for message in good_run(EXPIRED)
    ]

    report = check(EXPIRED, altered)

    assert (report.altered, len(report.faults)) == (1, 1)
    assert report.faults[0].startswith("message 5, attempt 1: ")


def test_a_second_delivery_must_be_attempt_two() -> None:
    wrong = [replace(item, attempt=1) for item in good_run(EXPIRED)]

    report = check(EXPIRED, wrong)

    assert "message 3: attempt 1 follows attempt 1" in report.faults


def test_a_message_that_nobody_sent_is_found() -> None:
    stranger = replace(delivery(5, attempt=1, at_ms=20_000), message_id="id-of-nobody")

    report = check(EXPIRED, [*good_run(EXPIRED), stranger])

    assert report.faults == ["id-of-nobody was delivered 1 times and never sent"]


def test_a_receipt_with_another_id_is_found() -> None:
    messages = [replace(message, receipt_id="other") for message in sent(1)]

    report = check_group(
        EXPIRED,
        messages,
        [delivery(0, attempt=1, at_ms=20_000)],
        expected=fields,
        comes_back=comes_back,
    )

    assert report.faults == ["message 0: sent under another id than its receipt's"]
