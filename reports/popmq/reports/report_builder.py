"""Makes a report: reads the tables that a job needs, runs its plans, and collects what is small."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from popmq.common.metric_table.verdicts import WINDOW_MS, VerdictRules
from popmq.reports.inputs import Inputs, made_now_ms
from popmq.reports.report import Report, ReportTable, rows_of

CHARTED = 8  # groups whose lag over time is shown
_SERIES_POINTS = 500
# What the lag report reads of the sampled tables, and the revive report of its own.
LAG_TABLES = ("offsets", "topics", "timers")
REVIVE_TABLES = ("revive", *LAG_TABLES)
DELAY_TABLES = ("fired", "timers")
TABLES = {"lag": LAG_TABLES, "revive": REVIVE_TABLES, "delay": DELAY_TABLES}
_REVIVE_COLUMNS = (
    *("broker", "kind", "wall_time", "log_ms", "epoch", "sequence", "messages", "group", "topic"),
    *("queue", "start_offset", "revive_at_ms", "old_epoch", "old_sequence", "client", "attempt"),
    *("reason", "members", "position", "group_id", "topic_id", "first_topic_id", "offset"),
)
_HIDDEN = ("level", "moved")
# With `since_ms` so much more is read: samples that speeds and verdicts compare the newest with,
# and check points of what ended since.
_SAMPLES_MS, _DELIVERIES_MS = 3_600_000, 60_000


OnProgress = Callable[[str], None]  # what is being done now, for somebody who waits


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report is to look at."""

    group: str = ""
    topic: str = ""
    since_ms: int = 0  # events since so long before now count; 0: all that is kept
    window_ms: int = 300_000  # of speeds
    failing_percent: int = 0  # 0: as each broker group has group.failing_percent
    failing_least: int = 0
    dead_letters: int = 20  # of which the newest are listed


def make_report(
    name: str, inputs: Inputs, requested: ReportOptions, tell: OnProgress = lambda text: None
) -> Report:
    """`lag`, `revive` or `delay`; the title of each table is told before it is calculated."""

    def table(name: str, title: str, frame: Any) -> ReportTable:
        tell(title)
        columns = tuple(column for column in frame.columns if column not in _HIDDEN)
        return ReportTable(name, title, columns, list(rows_of(frame)))

    tables, notes, series = _MAKERS[name](inputs, requested, table)
    return Report(
        name=name,
        source=inputs.source,
        made_ms=max((moment.wall_ms for moment in inputs.moments), default=made_now_ms()),
        moments=inputs.moments,
        tables=tuple(tables),
        incomplete=inputs.incomplete,
        notes=tuple(notes),
        series=series,
    )


_Table = Callable[[str, str, Any], ReportTable]
_Made = tuple[list[ReportTable], list[str], dict[str, Sequence[tuple[int, float]]]]


def _lag(inputs: Inputs, requested: ReportOptions, table: _Table) -> _Made:
    from popmq.reports.jobs import lag

    rules = _lag_rules(inputs, requested)
    offsets, topics, timers = _samples(inputs, requested)
    some = _of(offsets, requested, "group", "topic")
    queues = lag.plan_queues(some, topics, timers, rules).cache()
    groups = table(
        "groups", "Consumer groups", lag.plan_groups(queues, some, topics, timers, rules)
    )
    tables = [
        groups,
        table("queues", "Queues", queues),
        table(
            "dead_letters",
            "Dead letters that are kept",
            _of(lag.plan_dead_letters(topics, timers), requested, "group"),
        ),
        table("topics", "Topics", _of(lag.plan_topics(topics, timers), requested, "topic")),
    ]
    series: dict[str, list[tuple[int, float]]] = {}
    shown = {(row["group"], row["topic"]) for row in groups.rows[:CHARTED]}
    begin_ms = _since(inputs, "wall_ms", requested.since_ms)
    lags: dict[str, dict[str, float]] = {}  # of each line, at each broker group now
    history = [
        row
        for row in rows_of(lag.plan_history(some, rules))
        if (row["group"], row["topic"]) in shown
        and row["wall_ms"] >= begin_ms.get(row["broker"], 0)
    ]
    places = {(row["group"], row["topic"], row["broker"]) for row in history}
    brokers = Counter((group, topic) for group, topic, _ in places)
    for row in history:
        name = f"{row['group']} · {row['topic']}"
        now = lags.setdefault(name, {})
        now[row["broker"]] = float(row["lag"])
        if len(now) == brokers[row["group"], row["topic"]]:  # before that it is not all of it
            series.setdefault(name, []).append((row["wall_ms"], sum(now.values())))
    for frame in (queues, offsets, topics, timers):
        frame.unpersist()
    notes = []
    if any(row["status"] == "UNKNOWN" for row in groups.rows):
        notes.append(
            "UNKNOWN: the samples are of less than a minute, or the age of the oldest ready "
            "message is not known"
        )
    return tables, notes, {name: series[-_SERIES_POINTS:] for name, series in series.items()}


def _revive(inputs: Inputs, requested: ReportOptions, table: _Table) -> _Made:
    from popmq.reports.jobs import lag, revive

    now = {moment.broker: moment.log_ms for moment in inputs.moments}
    rules = revive.ReviveRules(now, _since(inputs, "log_ms", requested.since_ms))
    before_ms = max(requested.since_ms, _DELIVERIES_MS)
    read_since = _since(inputs, "log_ms", requested.since_ms, before_ms)
    records = inputs.table("revive", _REVIVE_COLUMNS, read_since).cache()
    offsets, topics, timers = _samples(inputs, requested)
    places = revive.plan_places(offsets, timers).cache()
    lag_rules = _lag_rules(inputs, requested)
    queues = lag.plan_queues(offsets, topics, timers, lag_rules).cache()
    verdicts = lag.plan_verdicts(queues, offsets, timers, lag_rules)
    deliveries = revive.plan_deliveries(records, places).cache()

    def of(frame: Any, *names: str) -> Any:
        return _of(frame, requested, *names)

    tables = [
        table(
            "groups",
            "What became of deliveries",
            of(revive.plan_groups(records, deliveries, places, verdicts, rules), "group", "topic"),
        ),
        table(
            "attempts",
            "Attempts of messages that came back",
            of(revive.plan_attempts(records, rules), "group"),
        ),
        table(
            "consumers",
            "Consumers",
            of(revive.plan_consumers(records, deliveries, places, rules), "group"),
        ),
        table(
            "dead_letters",
            "Last dead letters",
            of(revive.plan_dead_letters(records, rules, requested.dead_letters), "group", "topic"),
        ),
    ]
    for frame in (queues, deliveries, places, offsets, topics, timers, records):
        frame.unpersist()
    return tables, [], {}


def _samples(inputs: Inputs, requested: ReportOptions) -> tuple[Any, ...]:
    before_ms = max(requested.window_ms, WINDOW_MS) + _SAMPLES_MS
    since = _since(inputs, "wall_ms", requested.since_ms, before_ms)
    return tuple(inputs.table(name, since=since).cache() for name in LAG_TABLES)


def _since(inputs: Inputs, clock: str, since_ms: int, before_ms: int = 0) -> dict[str, int]:
    """By broker group, when that was by `clock`, less `before_ms`; nothing without `since_ms`."""
    if not since_ms:
        return {}
    return {
        moment.broker: max(1, getattr(moment, clock) - since_ms - before_ms)
        for moment in inputs.moments
    }


def _lag_rules(inputs: Inputs, requested: ReportOptions) -> Any:
    """What somebody asked for, else what each broker group told, else the defaults."""
    from popmq.reports.jobs.lag import LagRules

    usual = VerdictRules()
    return LagRules(
        requested.window_ms,
        {
            moment.broker: VerdictRules(
                requested.failing_percent or moment.failing_percent or usual.failing_percent,
                requested.failing_least or moment.failing_least or usual.failing_least,
            )
            for moment in inputs.moments
        },
    )


def _delay(inputs: Inputs, requested: ReportOptions, table: _Table) -> _Made:
    from popmq.reports.jobs import delay

    since = _since(inputs, "log_ms", requested.since_ms)
    fired = _of(inputs.table("fired", since=since), requested, "topic").cache()
    tables = [
        table("topics", "How late, by topic", delay.plan_topics(fired)),
        table("hours", "How late, by hour", delay.plan_hours(fired)),
        table("waiting", "Timers that wait", delay.plan_waiting(inputs.table("timers"))),
    ]
    fired.unpersist()
    return tables, [], {}


_MAKERS: dict[str, Callable[[Inputs, ReportOptions, _Table], _Made]] = {
    "lag": _lag,
    "revive": _revive,
    "delay": _delay,
}


def _of(frame: Any, requested: ReportOptions, *names: str) -> Any:
    for name in names:
        value = getattr(requested, name)
        if value:
            frame = frame.where(frame[name] == value)
    return frame
