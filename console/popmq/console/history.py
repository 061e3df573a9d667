"""The last hour of lag, ages and rates, in memory, from one look every ten seconds.

A look that did not see every broker is left out: less would wait in it than there is.
"""

from array import array
from collections.abc import Iterable, Mapping

from popmq.console.model import CountKey, LagRow, Overview, Reading

EVERY_S = 10.0
READINGS = 360  # an hour
MAX_SERIES = 1_000  # of groups, and of topics
FIELDS = 5  # of a reading

SeriesKey = tuple[str, str]  # ("group" or "topic", its name); both empty: all groups together


class History:
    def __init__(self) -> None:
        self._series: dict[SeriesKey, array[float]] = {}
        self._counts: Mapping[CountKey, int] | None = None  # of the last look
        self._looked_ms = 0

    def of_all(self) -> list[Reading]:
        return self._of(("", ""))

    def of_group(self, name: str) -> list[Reading]:
        return self._of(("group", name))

    def of_topic(self, name: str) -> list[Reading]:
        return self._of(("topic", name))

    def _of(self, key: SeriesKey) -> list[Reading]:
        values = self._series.get(key, array("d"))[:]  # it may grow meanwhile
        return [
            Reading(int(at_ms), int(lag), int(oldest_ms), stored, delivered)
            for at_ms, lag, oldest_ms, stored, delivered in (
                values[at : at + FIELDS] for at in range(0, len(values), FIELDS)
            )
        ]

    def add(self, overview: Overview) -> None:
        """The first look has no rates yet, and makes no reading."""
        passed_s = (overview.now_ms - self._looked_ms) / 1_000
        if overview.lag_missing or passed_s <= 0:
            return
        before, self._counts, self._looked_ms = self._counts, overview.counts, overview.now_ms
        if before is None:
            return
        series = _series_of(overview)
        for gone in self._series.keys() - series.keys():
            del self._series[gone]
        _add_rates(series, before, overview.counts, passed_s)
        for key, values in series.items():
            known = self._series.setdefault(key, array("d"))
            known.extend((overview.now_ms, *values))
            del known[: -READINGS * FIELDS]


def _series_of(overview: Overview) -> dict[SeriesKey, list[float]]:
    """Lag and oldest age of each, and no rates yet; the worst come first."""
    series: dict[SeriesKey, list[float]] = {("", ""): _waiting(overview.lags)}
    for kind, name_of in (("group", _group_of), ("topic", _topic_of)):
        rows: dict[str, list[LagRow]] = {}
        for row in overview.lags:
            rows.setdefault(name_of(row), []).append(row)
        if kind == "topic":
            for _, group, topic in overview.counts:
                if not group:
                    rows.setdefault(topic, [])
        for name in list(rows)[:MAX_SERIES]:
            series[kind, name] = _waiting(rows[name])
    return series


def _group_of(row: LagRow) -> str:
    return row.group


def _topic_of(row: LagRow) -> str:
    return row.topic


def _waiting(rows: Iterable[LagRow]) -> list[float]:
    oldest_ms = max((row.oldest_age_ms or 0 for row in rows), default=0)
    return [sum(row.lag for row in rows), oldest_ms, 0.0, 0.0]


def _add_rates(
    series: Mapping[SeriesKey, list[float]],
    before: Mapping[CountKey, int],
    counts: Mapping[CountKey, int],
    passed_s: float,
) -> None:
    """What is stored in a topic counts for the topic, and for each group that reads it."""
    readers: dict[str, set[str]] = {}
    for _, group, topic in counts:
        if group:
            readers.setdefault(topic, set()).add(group)
    for key, count in counts.items():
        _, group, topic = key
        # A broker that started again counts from 0.
        new = count - before.get(key, 0) if count >= before.get(key, 0) else count
        keys = [("", ""), ("topic", topic)]
        keys += [("group", name) for name in ([group] if group else readers.get(topic, ()))]
        for each in keys:
            if each in series:
                series[each][3 if group else 2] += new / passed_s
