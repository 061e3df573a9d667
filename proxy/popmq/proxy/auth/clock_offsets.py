"""ClockOffsets: whether a signed date is fresh, for clients whose clocks show local time.

The offset of a user's clients is one of a list, or is learned from the first success.  From then on
a date counts for `skew_ms` around that offset, so a stolen header is worth minutes, not a day.  For
summer time, a step forward by 30 or 60 min is taken at once, because no older header can show it;
a step back only within the hour in which a zone with that offset steps back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from popmq.common.users import CLOCK_OFFSETS, CLOCK_STEP

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
SUMMER_STEPS = (30, 60)  # minutes


@dataclass(frozen=True, slots=True)
class Fresh:
    """The date is good until `until_ms` of the wall clock. `learned` is an offset that the user
    gets, instead of `instead_of` if that is set."""

    until_ms: int
    learned: int | None = None
    instead_of: int | None = None


def judge(
    ahead_ms: int,
    offsets: Sequence[int],
    *,
    learns: bool,
    now_ms: int,
    skew_ms: int,
    steps_back: Callable[[int, int], frozenset[int]],
) -> Fresh | None:
    """None: the date is too old, of the future, or of another clock than the user's.

    `ahead_ms` is the date less `now_ms`.  `steps_back(now_ms, by)` are the offsets that a zone
    leaves for one `by` minutes less, within this hour.
    """

    def fresh(offset: int, **learned: int) -> Fresh:
        return Fresh(now_ms + ahead_ms - offset * MINUTE_MS + skew_ms, **learned)

    for offset in offsets:
        if abs(ahead_ms - offset * MINUTE_MS) <= skew_ms:
            return fresh(offset)
    if learns and not offsets:
        nearest = round(ahead_ms / (CLOCK_STEP * MINUTE_MS)) * CLOCK_STEP
        low, high = CLOCK_OFFSETS
        if low <= nearest <= high and abs(ahead_ms - nearest * MINUTE_MS) <= skew_ms:
            return fresh(nearest, learned=nearest)
        return None
    for offset in offsets:
        for step in SUMMER_STEPS:
            later, earlier = offset + step, offset - step
            if abs(ahead_ms - later * MINUTE_MS) <= skew_ms and later <= CLOCK_OFFSETS[1]:
                return fresh(later, learned=later, instead_of=offset)
            is_back = abs(ahead_ms - earlier * MINUTE_MS) <= skew_ms
            if is_back and offset in steps_back(now_ms, step):
                return fresh(earlier, learned=earlier, instead_of=offset)
    return None


def zones_that_step_back(now_ms: int, step: int) -> frozenset[int]:
    """Offsets in minutes that a zone of the tz database left for one `step` minutes less within
    the last hour, or leaves within a quarter of an hour."""
    return _stepping_back(now_ms // (15 * MINUTE_MS), step)


@lru_cache(maxsize=8)
def _stepping_back(quarter: int, step: int) -> frozenset[int]:
    at = datetime.fromtimestamp(quarter * 15 * 60, UTC)
    before, after = at - timedelta(hours=1), at + timedelta(minutes=15)
    offsets = set()
    for zone in _zones():
        old, new = zone.utcoffset(before.astimezone(zone)), zone.utcoffset(after.astimezone(zone))
        if old is not None and new is not None and old - new == timedelta(minutes=step):
            offsets.add(int(old.total_seconds()) // 60)
    return frozenset(offsets)


@lru_cache(maxsize=1)
def _zones() -> tuple[ZoneInfo, ...]:
    return tuple(ZoneInfo(name) for name in sorted(available_timezones()))
