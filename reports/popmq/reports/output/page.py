"""A report as one page that needs nothing else: no script from elsewhere, no font, no picture.

The most urgent comes first: one line with the verdict, tiles in the colour of their urgency, rows
in the order of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

import htpy as h
from markupsafe import Markup

from popmq.common.metric_table.verdicts import Verdict, VerdictRules
from popmq.reports.output import svg
from popmq.reports.output.formatting import (
    NONE,
    SYMBOLS,
    UNKNOWN,
    cell,
    cell_of,
    head,
    moment,
    span,
)
from popmq.reports.report import Report, ReportTable, Row

ROWS_SHOWN = 1_000
# Other columns say the same.
_LEFT_OUT = {"oldest_ready_ms", "unknown_ages", "retry", "parked", "fifo", "standing"}
_TITLES = {"lag": "Consumer lag", "revive": "Deliveries and retries", "delay": "Delayed messages"}
_STYLE = """
:root{color-scheme:light dark;--line:#8883;--soft:#8881;--bg:#fff;--fg:#1a1d21;--dim:#5d6673;
--ok:#1d7a50;--warn:#96600f;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e8eb;--dim:#9aa4b1;
--ok:#5cc492;--warn:#e2b25b;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1280px;background:var(--bg);color:var(--fg);
font:14px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}
.dim{color:var(--dim)}.OK{color:var(--ok)}.BEHIND{color:var(--warn)}.UNKNOWN{color:var(--dim)}
.STUCK,.STOPPED,.FAILING{color:var(--bad)}
.verdict{font-size:17px;font-weight:600;margin:16px 0 0;padding:10px 14px;border-radius:8px;
border:1px solid;border-left-width:6px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.tile{border:1px solid var(--line);border-radius:8px;padding:12px}
.tile b{display:block;font-size:24px;font-variant-numeric:tabular-nums}
.tile.BEHIND,.tile.STUCK,.tile.STOPPED,.tile.FAILING{border-color:currentColor}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:12.5px}
th,td{padding:5px 5px;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}
td{white-space:nowrap}
th{cursor:pointer;font-weight:600;background:var(--soft)}tr:last-child td{border-bottom:0}
th.t,td.t{text-align:left}td.name{white-space:normal;overflow-wrap:anywhere;min-width:70px}
td.OK,td.BEHIND,td.UNKNOWN,td.STUCK,td.STOPPED,td.FAILING{font-weight:600}
.chart{width:100%;height:auto}
input{font:inherit;padding:6px 10px;border:1px solid var(--line);border-radius:6px;
background:transparent;color:inherit;width:min(320px,100%)}
@media(max-width:600px){body{padding:12px}}
"""
_SCRIPT = """
for(const th of document.querySelectorAll('th'))th.onclick=()=>{const t=th.closest('table'),
b=t.tBodies[0],i=th.cellIndex,d=th.dataset.d=th.dataset.d=='1'?-1:1,
v=r=>{const c=r.cells[i];return c.dataset.v!==undefined?+c.dataset.v:c.textContent};
[...b.rows].sort((x,y)=>(v(x)>v(y)?1:v(x)<v(y)?-1:0)*d).forEach(r=>b.append(r))};
const f=document.getElementById('f');f.oninput=()=>{const w=f.value.toLowerCase();for(const r of
document.querySelectorAll('tbody tr'))r.hidden=!r.textContent.toLowerCase().includes(w)};
"""


class Tile(NamedTuple):
    name: str
    value: str
    urgency: str = ""  # a verdict's name, whose colour it has


def to_html(report: Report) -> str:
    title = _TITLES[report.name]
    page = h.html(lang="en")[
        h.head[
            h.meta(charset="utf-8"),
            h.meta(name="viewport", content="width=device-width,initial-scale=1"),
            h.title[f"popmq: {title}"],
            h.style[Markup(_STYLE)],
        ],
        h.body[_body(report, title), h.script[Markup(_SCRIPT)]],
    ]
    return f"{page}\n"


def _body(report: Report, title: str) -> Iterator[h.Node]:
    brokers = ", ".join(
        f"{broker_moment.broker} up to position {broker_moment.end_position:,}"
        for broker_moment in report.moments
    )
    summary = " · ".join(filter(None, (report.source, moment(report.made_ms), brokers)))
    yield h.header[
        h.h1[title],
        h.div(".dim")[summary],
        _verdict(report),
        report.incomplete and h.div(".FAILING")[f"Incomplete: {report.incomplete}"],
    ]
    yield h.section(".tiles")[
        [
            h.div(class_=["tile", tile.urgency])[h.span(".dim")[tile.name], h.b[tile.value]]
            for tile in _TILES[report.name](report)
        ]
    ]
    yield h.input(id="f", placeholder="filter rows", aria_label="filter rows")
    for number, table in enumerate(report.tables):
        for part in _parts(report, table):
            yield from _table(part)
        if number == 0:
            yield from _charts(report)
    yield [h.p(".dim")[note] for note in report.notes]


def _verdict(report: Report) -> h.Node:
    """One line: how things are, and where to look first."""
    summary = report.summary()
    if not summary:
        return None
    verdict = summary["verdict"]
    counts: dict[str, set[str]] = {}
    for row in report.first.rows:
        if row["status"] != Verdict.OK.name:
            counts.setdefault(row["status"], set()).add(row["group"])
    order = sorted(counts, key=lambda name: -Verdict[name])
    parts = [f"{len(counts[name])} {name}" for name in order]
    many = "group" if summary["groups"] == 1 else "groups"
    text = f"{summary['groups']} {many}: {', '.join(parts) or 'all OK'}"
    if order:
        worst = summary["worst"][0]
        text += f". Look first at {worst['group']} in {worst['topic']}"
    return h.p(class_=["verdict", verdict])[f"{SYMBOLS[verdict]} {verdict}. {text}."]


def _parts(report: Report, table: ReportTable) -> Iterator[ReportTable]:
    """Two tables of one that is wider than a page: how many, and how long it took."""
    if (report.name, table.name) != ("revive", "groups"):
        yield table
        return
    times = tuple(column for column in table.columns if column.endswith("_ms"))
    counts = tuple(column for column in table.columns if column not in times)
    yield replace(table, columns=counts)
    names = ("group", "topic", "status")
    yield replace(table, title="How long acks and retries took", columns=(*names, *times))


def _table(table: ReportTable) -> Iterator[h.Node]:
    yield h.h2[table.title]
    if not table.rows:
        yield h.p(".dim")["none"]
        return
    columns = [column for column in table.columns if column not in _LEFT_OUT]
    texts = {column for column in columns if _is_text(table, column)}
    yield h.div(".scroll")[
        h.table[
            h.thead[
                h.tr[(h.th(class_=[column in texts and "t"])[head(column)] for column in columns)]
            ],
            h.tbody[
                (
                    h.tr[(_cell(row, column, column in texts) for column in columns)]
                    for row in table.rows[:ROWS_SHOWN]
                )
            ],
        ]
    ]
    if len(table.rows) > ROWS_SHOWN:
        yield h.p(".dim")[f"and {len(table.rows) - ROWS_SHOWN:,} more"]


def _cell(row: Row, column: str, text: bool) -> h.Node:
    value = row[column]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    name = isinstance(value, str) and column != "status"
    return h.td(
        class_=[text and "t", name and "name", column == "status" and str(value)],
        data_v=str(value) if number else None,
    )[cell_of(row, column)]


def _is_text(table: ReportTable, column: str) -> bool:
    """Not of values that are all unknown: they are dashes in a column of numbers."""
    return any(isinstance(row[column], str | bool | datetime) for row in table.rows)


# -- tiles and charts


def _sum(rows: Sequence[Row], column: str) -> int:
    return sum(row[column] or 0 for row in rows)


def _urgent(count: int, verdict: Verdict) -> str:
    return (verdict if count else Verdict.OK).name


def _lag_tiles(report: Report) -> list[Tile]:
    rows = report.table("groups").rows
    waits = [row["waits_ms"] for row in rows if row["waits_ms"] is not None]
    oldest = span(max(waits)) if waits else NONE
    unknown = any(row.get("unknown_ages") for row in rows)
    if unknown:
        oldest = f"≥ {oldest}" if waits else UNKNOWN
    late = max(waits, default=0) > VerdictRules().old_ms
    dead = _sum(report.table("dead_letters").rows, "dead_letters")
    return [
        _not_ok(rows),
        Tile("oldest waits", oldest, "BEHIND" if late else "UNKNOWN" if unknown else "OK"),
        Tile("dead letters", f"{dead:,}", _urgent(dead, Verdict.BEHIND)),
        Tile("lag", f"{_sum(rows, 'lag'):,}"),
        Tile("in flight", f"{_sum(rows, 'in_flight'):,}"),
    ]


def _not_ok(rows: Sequence[Row]) -> Tile:
    groups = {row["group"] for row in rows if row["status"] != Verdict.OK.name}
    worst = max((Verdict[row["status"]] for row in rows), default=Verdict.OK)
    return Tile("groups not OK", str(len(groups)), worst.name)


def _revive_tiles(report: Report) -> list[Tile]:
    rows = report.table("groups").rows
    late = [row["revive_late_p99_ms"] for row in rows if row["revive_late_p99_ms"] is not None]
    stuck = sum(bool(row["stuck"]) for row in report.table("consumers").rows)
    dead = _sum(rows, "dead_lettered")
    return [
        _not_ok(rows),
        Tile("stuck consumers", str(stuck), _urgent(stuck, Verdict.STUCK)),
        Tile("dead lettered", f"{dead:,}", _urgent(dead, Verdict.BEHIND)),
        *(
            Tile(name.replace("_", " "), f"{_sum(rows, name):,}")
            for name in ("delivered", "retried", "in_flight")
        ),
        Tile("retries late, p99", span(max(late)) if late else NONE),
    ]


def _delay_tiles(report: Report) -> list[Tile]:
    rows = report.table("topics").rows
    late = [row["late_p99_ms"] for row in rows if row["late_p99_ms"] is not None]
    early, over = _sum(rows, "early"), _sum(rows, "over_1s")
    return [
        Tile("early", f"{early:,}", _urgent(early, Verdict.FAILING)),
        Tile("over 1 s late", f"{over:,}", _urgent(over, Verdict.BEHIND)),
        Tile("fired", f"{_sum(rows, 'fired'):,}"),
        Tile("late, p99", span(max(late)) if late else NONE),
        Tile("waiting", f"{_sum(report.table('waiting').rows, 'timers'):,}"),
    ]


_TILES: dict[str, Any] = {"lag": _lag_tiles, "revive": _revive_tiles, "delay": _delay_tiles}


def _charts(report: Report) -> Iterator[h.Node]:
    if report.series:
        yield h.h2["Lag over time"]
        yield Markup(svg.lines(report.series))
    if report.name == "revive":
        counts: dict[str, float] = {}
        for row in report.table("attempts").rows:
            name = str(row["attempts"])
            counts[name] = counts.get(name, 0) + row["messages"]
        ordered = dict(sorted(counts.items(), key=lambda bucket: int(bucket[0])))
        if ordered:
            yield h.h2["Messages by attempts"]
            yield Markup(svg.bars(ordered, "messages by attempts"))
    if report.name == "delay":
        waiting = {
            cell("within_s", row["within_s"]): row["timers"] for row in report.table("waiting").rows
        }
        if any(waiting.values()):
            yield h.h2["Timers by due time"]
            yield Markup(svg.bars(waiting, "timers by due time"))
