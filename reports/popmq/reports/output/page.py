"""A report as one page that needs nothing else: no script from elsewhere, no font, no picture."""

from collections.abc import Iterator
from html import escape

from popmq.reports.output import svg
from popmq.reports.output.formatting import NONE, UNKNOWN, cell, cell_of, head, moment, span
from popmq.reports.report import Report, ReportTable, Row

ROWS_SHOWN = 1_000
# Said by other columns.
_LEFT_OUT = {"oldest_ready_ms", "unknown_ages", "retry", "parked", "fifo"}
_TITLES = {"lag": "Consumer lag", "revive": "Deliveries and retries", "delay": "Delayed messages"}
_STYLE = """
:root{color-scheme:light dark;--line:#8883;--soft:#8881;--bg:#fff;--fg:#1a1d21;--dim:#5d6673}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e8eb;--dim:#9aa4b1}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1280px;background:var(--bg);color:var(--fg);
font:14px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}
.dim{color:var(--dim)}.bad{color:#c2362b;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.tile{border:1px solid var(--line);border-radius:8px;padding:12px}
.tile b{display:block;font-size:24px;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{cursor:pointer;font-weight:600;background:var(--soft)}tr:last-child td{border-bottom:0}
th.t,td.t{text-align:left}
.chart{width:100%;height:auto;max-width:1000px}
.OK{color:#23855a}.BEHIND{color:#b7791f}.STUCK,.STOPPED,.FAILING{color:#c2362b;font-weight:600}
.UNKNOWN{color:var(--dim)}
input{font:inherit;padding:6px 10px;border:1px solid var(--line);border-radius:6px;
background:transparent;color:inherit;width:min(320px,100%)}
@media(max-width:600px){body{padding:12px}th,td{padding:5px 7px;font-size:13px}}
"""
_SCRIPT = """
for(const th of document.querySelectorAll('th'))th.onclick=()=>{const t=th.closest('table'),
b=t.tBodies[0],i=th.cellIndex,d=th.dataset.d=th.dataset.d=='1'?-1:1,
v=r=>{const c=r.cells[i];return c.dataset.v!==undefined?+c.dataset.v:c.textContent};
[...b.rows].sort((x,y)=>(v(x)>v(y)?1:v(x)<v(y)?-1:0)*d).forEach(r=>b.append(r))};
const f=document.getElementById('f');f.oninput=()=>{const w=f.value.toLowerCase();for(const r of
document.querySelectorAll('tbody tr'))r.hidden=!r.textContent.toLowerCase().includes(w)};
"""


def to_html(report: Report) -> str:
    title = _TITLES[report.name]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>popmq: {escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"{''.join(_body(report, title))}<script>{_SCRIPT}</script></body></html>\n"
    )


def _body(report: Report, title: str) -> Iterator[str]:
    yield f"<header><h1>{escape(title)}</h1>"
    brokers = ", ".join(
        f"{broker_moment.broker} up to position {broker_moment.end_position:,}"
        for broker_moment in report.moments
    )
    summary = " · ".join(filter(None, (report.source, moment(report.made_ms), brokers)))
    yield f'<div class="dim">{escape(summary)}</div>'
    if report.incomplete:
        yield f'<div class="bad">Incomplete: {escape(report.incomplete)}</div>'
    yield "</header>"
    tiles = _TILES[report.name](report)
    yield '<section class="tiles">'
    for name, value in tiles:
        yield f'<div class="tile"><span class="dim">{escape(name)}</span>'
        yield f"<b>{escape(value)}</b></div>"
    yield "</section>"
    yield '<input id="f" placeholder="filter rows" aria-label="filter rows">'
    for number, table in enumerate(report.tables):
        yield from _table(table)
        if number == 0:
            yield from _charts(report)
    for note in report.notes:
        yield f'<p class="dim">{escape(note)}</p>'


def _table(table: ReportTable) -> Iterator[str]:
    yield f"<h2>{escape(table.title)}</h2>"
    if not table.rows:
        yield '<p class="dim">none</p>'
        return
    columns = [column for column in table.columns if column not in _LEFT_OUT]
    texts = {column for column in columns if _is_text(table, column)}
    yield '<div class="scroll"><table><thead><tr>'
    for column in columns:
        yield f"<th{' class=t' if column in texts else ''}>{escape(head(column))}</th>"
    yield "</tr></thead><tbody>"
    for row in table.rows[:ROWS_SHOWN]:
        yield (
            "<tr>" + "".join(_cell(row, column, column in texts) for column in columns) + "</tr>"
        )
    yield "</tbody></table></div>"
    if len(table.rows) > ROWS_SHOWN:
        yield f'<p class="dim">and {len(table.rows) - ROWS_SHOWN:,} more</p>'


def _cell(row: Row, column: str, text: bool) -> str:
    value = row[column]
    kinds = (["t"] if text else []) + ([str(value)] if column == "status" else [])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    sort = f' data-v="{value}"' if number else ""
    names = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<td{names}{sort}>{escape(cell_of(row, column))}</td>"


def _is_text(table: ReportTable, column: str) -> bool:
    return not any(
        isinstance(row[column], int | float) and not isinstance(row[column], bool)
        for row in table.rows
    )


# -- tiles and charts


def _lag_tiles(report: Report) -> list[tuple[str, str]]:
    rows = report.table("groups").rows
    waits = [row["waits_ms"] for row in rows if row["waits_ms"] is not None]
    oldest = span(max(waits)) if waits else NONE
    if any(row.get("unknown_ages") for row in rows):
        oldest = f"≥ {oldest}" if waits else UNKNOWN
    dead = sum(row["dead_letters"] for row in report.table("dead_letters").rows)
    return [
        ("groups not OK", str(sum(row["status"] != "OK" for row in rows))),
        ("lag", f"{sum(row['lag'] for row in rows):,}"),
        ("in flight", f"{sum(row['in_flight'] for row in rows):,}"),
        ("oldest waits", oldest),
        ("dead letters", f"{dead:,}"),
    ]


def _revive_tiles(report: Report) -> list[tuple[str, str]]:
    rows = report.table("groups").rows
    late = [row["revive_late_p99_ms"] for row in rows if row["revive_late_p99_ms"] is not None]
    return [
        *(
            (name.replace("_", " "), f"{sum(row[name] for row in rows):,}")
            for name in ("delivered", "acked", "retried", "dead_lettered", "in_flight")
        ),
        ("retries late, p99", span(max(late)) if late else NONE),
        ("stuck consumers", str(sum(bool(r["stuck"]) for r in report.table("consumers").rows))),
    ]


def _delay_tiles(report: Report) -> list[tuple[str, str]]:
    rows = report.table("topics").rows
    late = [row["late_p99_ms"] for row in rows if row["late_p99_ms"] is not None]
    return [
        ("fired", f"{sum(row['fired'] for row in rows):,}"),
        ("early", f"{sum(row['early'] for row in rows):,}"),
        ("over 1 s late", f"{sum(row['over_1s'] for row in rows):,}"),
        ("late, p99", span(max(late)) if late else NONE),
        ("waiting", f"{sum(row['timers'] for row in report.table('waiting').rows):,}"),
    ]


_TILES = {"lag": _lag_tiles, "revive": _revive_tiles, "delay": _delay_tiles}


def _charts(report: Report) -> Iterator[str]:
    if report.series:
        yield f"<h2>Lag over time</h2>{svg.lines(report.series)}"
    if report.name == "revive":
        counts: dict[str, float] = {}
        for row in report.table("attempts").rows:
            name = str(row["attempts"])
            counts[name] = counts.get(name, 0) + row["messages"]
        ordered = dict(sorted(counts.items(), key=lambda bucket: int(bucket[0])))
        if ordered:
            yield f"<h2>Messages by attempts</h2>{svg.bars(ordered, 'messages by attempts')}"
    if report.name == "delay":
        waiting = {
            cell("within_s", row["within_s"]): row["timers"] for row in report.table("waiting").rows
        }
        if any(waiting.values()):
            yield f"<h2>Timers by due time</h2>{svg.bars(waiting, 'timers by due time')}"
