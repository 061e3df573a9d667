"""The truth table of verdicts: each row, and which of two rows counts."""

import pytest

from popmq.common.metric_table.verdicts import (
    TABLE,
    Facts,
    Verdict,
    VerdictRules,
    verdict_of,
    worst_verdict,
)

RULES = VerdictRules()
BUSY = Facts(lag=50, ready=40, delivered=100, acked=90, moved=1)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (Facts(), Verdict.OK),
        (BUSY, Verdict.OK),
        (BUSY._replace(age_ms=60_000), Verdict.OK),
        (BUSY._replace(age_ms=60_001), Verdict.BEHIND),
        (BUSY._replace(unknown_ages=1), Verdict.UNKNOWN),
        (BUSY._replace(unknown_ages=1, age_ms=60_001), Verdict.BEHIND),  # whatever the others wait
        (BUSY._replace(watched_ms=59_999), Verdict.UNKNOWN),
        (BUSY._replace(watched_ms=60_000), Verdict.OK),
        (BUSY._replace(watched_ms=0), Verdict.UNKNOWN),
        (BUSY._replace(watched_ms=0, age_ms=90_000), Verdict.BEHIND),
        (BUSY._replace(standing=1), Verdict.STUCK),
        (BUSY._replace(standing=1, watched_ms=0), Verdict.UNKNOWN),
        (BUSY._replace(standing=1, age_ms=90_000), Verdict.STUCK),
        (Facts(lag=5, ready=5), Verdict.STOPPED),
        (Facts(lag=5, ready=5, unknown_ages=1), Verdict.STOPPED),
        (Facts(lag=5, ready=5, watched_ms=0), Verdict.UNKNOWN),
        (Facts(lag=5, ready=5, moved=1), Verdict.OK),  # a pull consumer
        (Facts(lag=5, ready=0), Verdict.OK),  # all of it in flight
        (BUSY._replace(acked=40, returned=10), Verdict.FAILING),
        (BUSY._replace(acked=40, returned=5, dead=5), Verdict.FAILING),
        (BUSY._replace(acked=41, returned=10), Verdict.OK),  # below 20 %
        (BUSY._replace(acked=0, returned=9), Verdict.OK),  # fewer than 10
        # Nothing is left: all that there was became dead letters.
        (Facts(delivered=4_010, returned=2_005, dead=2_005), Verdict.FAILING),
        (Facts(delivered=4_010, returned=2_005, dead=2_005, watched_ms=0), Verdict.FAILING),
    ],
)
def test_each_row_is_a_verdict(facts: Facts, verdict: Verdict) -> None:
    assert verdict_of(facts, RULES) is verdict


def test_both_bounds_of_failing_are_settings() -> None:
    facts = BUSY._replace(acked=90, returned=3)
    assert verdict_of(facts, RULES) is Verdict.OK
    assert verdict_of(facts, VerdictRules(failing_percent=3, failing_least=3)) is Verdict.FAILING


def test_every_verdict_has_a_row_or_is_what_is_left() -> None:
    assert {row.verdict for row in TABLE} | {Verdict.OK} == set(Verdict)


def test_the_worst_verdict_of_several_brokers_counts() -> None:
    assert worst_verdict("OK", "FAILING", "STOPPED", "") == "FAILING"
    assert worst_verdict("", "") == ""
    assert worst_verdict("OK", "a later version's") == "OK"
