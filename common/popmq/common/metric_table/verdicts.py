"""Verdicts: how a consumer group does in one topic, from what happened in the last five minutes.

One table for all that tell it: the first row that fits is the verdict, and the rows stand in the
order of their urgency but for OK, which is what is left.  Facts and rules are numbers that are only
added, compared and joined by & and |, so that reports give columns of Spark in their place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Verdict(IntEnum):
    """The most urgent last, so that the worst of several is their maximum."""

    OK = 0
    UNKNOWN = 1
    BEHIND = 2
    STUCK = 3
    STOPPED = 4
    FAILING = 5


@dataclass(frozen=True, slots=True)
class VerdictRules:
    failing_percent: int = 20  # of the deliveries that ended
    failing_least: int = 10  # and at least so many
    old_ms: int = 60_000  # a ready message that waits longer is late
    watched_ms: int = 60_000  # so long it takes to tell what does not happen


# Counts are of so long, and an offset that did not move for STANDS_MS is a queue that stands.
WINDOW_MS, STANDS_MS = 300_000, 120_000


class Facts(NamedTuple):
    """Counts are of the last five minutes, or since the broker began to look."""

    watched_ms: int = WINDOW_MS  # how long that is
    lag: int = 0  # now: ready, in flight and blocked
    ready: int = 0
    age_ms: int = 0  # of the oldest ready message of those whose age is known
    unknown_ages: int = 0  # queues with ready messages of which nobody knows how long they wait
    delivered: int = 0
    acked: int = 0
    returned: int = 0  # came back: not acked in time, or refused
    dead: int = 0  # became dead letters
    moved: int = 0  # queues whose offset moved
    standing: int = 0  # queues with messages in flight or blocked whose offset did not move


class Row(NamedTuple):
    verdict: Verdict
    when: str
    fits: Callable[[Facts, VerdictRules], bool]


def _fails(facts: Facts, rules: VerdictRules) -> bool:
    bad = facts.returned + facts.dead
    ended = facts.acked + bad
    return (bad >= rules.failing_least) & (100 * bad >= rules.failing_percent * ended)


def _is_watched(facts: Facts, rules: VerdictRules) -> bool:
    return facts.watched_ms >= rules.watched_ms


def _did_nothing(facts: Facts) -> bool:
    return facts.delivered + facts.acked + facts.returned + facts.moved == 0


TABLE = (
    Row(
        Verdict.FAILING,
        "dead letters and returns are at least failing_percent of what ended, and failing_least",
        _fails,
    ),
    Row(Verdict.OK, "nothing is left to do", lambda facts, _: facts.lag == 0),
    Row(
        Verdict.STOPPED,
        "messages are ready, none was delivered, acked or returned, and no offset moved",
        lambda facts, rules: _is_watched(facts, rules) & (facts.ready > 0) & _did_nothing(facts),
    ),
    Row(
        Verdict.STUCK,
        "a queue has messages in flight or blocked, and its offset did not move",
        lambda facts, rules: _is_watched(facts, rules) & (facts.standing > 0),
    ),
    Row(
        Verdict.BEHIND,
        "a ready message waits for longer than a minute",
        lambda facts, rules: facts.age_ms > rules.old_ms,
    ),
    Row(
        Verdict.UNKNOWN,
        "the group was not watched for long enough, or nobody knows how long messages wait",
        lambda facts, rules: (facts.watched_ms < rules.watched_ms) | (facts.unknown_ages > 0),
    ),
)


def verdict_of(facts: Facts, rules: VerdictRules) -> Verdict:
    for row in TABLE:
        if row.fits(facts, rules):
            return row.verdict
    return Verdict.OK


def worst_verdict(*names: str) -> str:
    """The most urgent of several broker groups'; empty if none has one."""
    known = [Verdict[name] for name in names if name in Verdict.__members__]
    return max(known).name if known else ""
