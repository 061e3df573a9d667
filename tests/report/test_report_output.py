"""Reports as pages, metrics and files, without Spark."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from popmq.common.metric_table.table import TABLE
from popmq.reports.output import svg
from popmq.reports.output.exposition import _GAUGES, PREFIX, exposition, push, write_file
from popmq.reports.output.files import to_json, write_csv
from popmq.reports.output.formatting import cell, span
from popmq.reports.output.page import to_html
from popmq.reports.report import BrokerMoment, Report, ReportTable

GROUP = {
    "group": "g<1>",
    "topic": "orders",
    "status": "STUCK",
    "lag": 1_200,
    "ready": 1_000,
    "in_flight": 200,
    "blocked": 0,
    "retries": 3,
    "expired": 0,
    "waits_ms": 61_000,
    "unknown_ages": 0,
    "in_rate": 12.5,
    "ack_rate": None,
    "eta_s": None,
    "skew": 1.5,
}


def lag_report(incomplete: str = "", **more: object) -> Report:
    groups = ReportTable("groups", "Consumer groups", tuple(GROUP), [GROUP | more])
    dead = ReportTable(
        "dead_letters",
        "Dead letters",
        ("group", "dead_letters"),
        [{"group": "g<1>", "dead_letters": 4}],
    )
    empty = ReportTable("queues", "Queues", ("queue", "lag"), [])
    return Report(
        name="lag",
        source="127.0.0.1:8081",
        made_ms=1_700_000_000_000,
        moments=(BrokerMoment("broker-a", 1, 1_234, 1_700_000_000_000, 5),),
        tables=(groups, dead, empty),
        incomplete=incomplete,
        series={"g<1> · orders": [(1_699_999_000_000, 10.0), (1_700_000_000_000, 1_200.0)]},
    )


class _Tags(HTMLParser):
    """Whether every tag that is opened is closed in order."""

    VOID = frozenset(("meta", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_summary_has_the_verdict_the_figures_and_the_most_urgent_groups() -> None:
    rows = [
        GROUP | {"group": "a", "status": "FAILING", "lag": 0, "waits_ms": None},
        GROUP | {"group": "a", "topic": "other", "status": "FAILING", "lag": 0},
        GROUP | {"group": "b", "status": "STOPPED", "lag": 900, "waits_ms": 754_321},
        GROUP | {"group": "c", "status": "OK", "lag": 30},
    ]
    report = replace(
        lag_report(), tables=(ReportTable("groups", "Consumer groups", tuple(GROUP), rows),)
    )
    assert report.summary() == {
        **{"verdict": "FAILING", "groups": 3, "failing": 1, "stopped": 1, "lag": 930},
        "oldest": "12m34s",
        "worst": [
            {"verdict": "FAILING", "group": "a", "topic": "orders", "lag": 0},
            {"verdict": "FAILING", "group": "a", "topic": "other", "lag": 0},
            {"verdict": "STOPPED", "group": "b", "topic": "orders", "lag": 900},
        ],
    }
    assert replace(report, tables=(ReportTable("topics", "", ("topic",), []),)).summary() == {}
    nothing = ReportTable("groups", "", tuple(GROUP), [])
    assert replace(report, tables=(nothing,)).summary()["verdict"] == "OK"
    incomplete = replace(report, tables=(nothing,), incomplete="broker b: away")
    assert incomplete.summary()["verdict"] == "UNKNOWN"


def test_a_page_is_whole_and_needs_nothing_else() -> None:
    page = to_html(lag_report())
    tags = _Tags()
    tags.feed(page)
    assert (tags.open, tags.links) == ([], [])
    assert "http" not in page.replace("http-equiv", "")
    assert "g&lt;1&gt;" in page
    assert "g<1>" not in page
    assert "1,200" in page
    assert re.search(r"<polyline[^>]* points=", page)
    assert "prefers-color-scheme:dark" in page


def test_a_page_begins_with_its_verdict_and_where_to_look_first() -> None:
    rows = [
        GROUP | {"group": "a", "status": "FAILING"},
        GROUP | {"group": "b", "status": "STOPPED"},
        GROUP | {"group": "c", "status": "STOPPED"},
        GROUP | {"group": "d", "status": "OK"},
    ]
    tables = lag_report().tables
    page = to_html(replace(lag_report(), tables=(replace(tables[0], rows=rows), *tables[1:])))
    line = "✖ FAILING. 4 groups: 1 FAILING, 2 STOPPED. Look first at a in orders."
    assert f'<p class="verdict FAILING">{line}</p>' in page
    assert '<div class="tile FAILING"><span class="dim">groups not OK</span><b>3</b></div>' in page
    assert '<div class="tile BEHIND"><span class="dim">oldest waits</span>' in page
    well = lag_report(status="OK", waits_ms=5)
    page = to_html(replace(well, tables=(well.tables[0], replace(tables[1], rows=[]), tables[2])))
    assert '<p class="verdict OK">✓ OK. 1 group: all OK.</p>' in page
    assert page.count('<div class="tile OK">') == 3


def test_a_page_says_that_it_is_incomplete() -> None:
    assert "Incomplete: broker b: away" in to_html(lag_report("broker b: away"))


def test_metrics_leave_out_what_is_unknown_and_escape_labels() -> None:
    text = exposition(lag_report())
    labels = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert labels["popmq_report_lag_messages"] == ({"group": "g<1>", "topic": "orders"}, 1_200)
    assert labels["popmq_report_oldest_ready_seconds"][1] == 61
    assert labels["popmq_report_group_ok"][1] == 0
    assert labels["popmq_report_dead_letter_messages"] == ({"group": "g<1>"}, 4)
    assert labels["popmq_report_lag_complete"][1] == 1
    assert "popmq_report_eta_seconds" not in labels
    assert "NaN" not in text


def test_the_table_of_metrics_has_what_reports_are_exposed_as() -> None:
    exposed = {name for gauges in _GAUGES.values() for name, _ in gauges.values()} | {"group_ok"}
    for report in ("lag", "revive", "delay"):
        exposed |= {f"{report}_timestamp_seconds", f"{report}_complete"}
    described = {row.exposed for row in TABLE.values() if row.role == "report"}
    assert {f"{PREFIX}{name}" for name in exposed} - described == set()
    others = [row.exposed for row in TABLE.values() if row.role != "report"]
    assert [name for name in others if name.startswith(PREFIX)] == []


def test_a_file_of_metrics_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "lag.prom"
    path.write_text("old")
    write_file(lag_report(), path)
    assert path.read_text() == exposition(lag_report())
    assert [path.name for path in tmp_path.iterdir()] == ["lag.prom"]


def test_a_gateway_that_is_away_is_named() -> None:
    with pytest.raises(Exception, match="did not take the report"):
        push(lag_report(), "http://127.0.0.1:1")


def test_json_and_csv_have_every_row(tmp_path: Path) -> None:
    document = json.loads(to_json(lag_report("x")))
    assert document["groups"] == [GROUP]
    assert (document["incomplete"], document["queues"]) == ("x", [])
    paths = write_csv(lag_report(), tmp_path)
    assert [path.name for path in paths] == [
        "lag-groups.csv",
        "lag-dead_letters.csv",
        "lag-queues.csv",
    ]
    assert paths[0].read_text().splitlines()[1].startswith("g<1>,orders,STUCK,1200,")


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("lag", 1_234_567, "1,234,567"),
        ("waits_ms", 61_000, "1.02 min"),
        ("eta_s", None, "not draining"),
        ("eta_s", 0.0, "0 ms"),
        ("ack_rate", None, "-"),
        ("retry_ratio", 0.125, "12.5 %"),
        ("stuck", True, "yes"),
        ("status", "BEHIND", "▲ BEHIND"),
        ("within_s", None, "later"),
    ],
)
def test_values_are_written_for_people(column: str, value: object, text: str) -> None:
    assert cell(column, value) == text


def test_spans_have_a_unit() -> None:
    assert [span(ms) for ms in (5, 1_500, 90_000, 7_200_000, 172_800_000)] == [
        *("5 ms", "1.5 s", "1.5 min", "2 h"),
        "2 d",
    ]


@pytest.mark.parametrize(
    ("seconds", "first", "last", "count"),
    [
        (5, "22:13:20", "22:13:25", 6),
        (600, "22:14", "22:22", 5),
        (7_200, "22:30", "00:00", 4),
        (200_000, "11-15 00:00", "11-17 00:00", 5),
        (900_000, "11-15", "11-25", 6),
    ],
)
def test_times_of_an_axis_are_round_and_few(
    seconds: int, first: str, last: str, count: int
) -> None:
    begin = 1_700_000_000_000  # 22:13:20
    ticks = list(svg.times(begin, begin + seconds * 1_000))
    assert (ticks[0][1], ticks[-1][1], len(ticks)) == (first, last, count)


@pytest.mark.parametrize("value", [0, 50, 52, 100])
def test_labels_of_lines_that_end_together_do_not_lie_on_each_other(value: int) -> None:
    series = {f"g{number}": [(0, 100.0), (1_000, value + number / 9)] for number in range(8)}
    chart = svg.lines(series)
    places = [float(match) for match in re.findall(r'<text x="[^"]*" y="([^"]*)"[^>]*>g\d', chart)]
    assert len(places) == 8
    ordered = sorted(places)
    assert min(b - a for a, b in pairwise(ordered)) >= 12


def test_labels_are_in_the_order_of_their_lines() -> None:
    series = {"low": [(0, 1.0), (1_000, 98.0)], "high": [(0, 1.0), (1_000, 100.0)]}
    places = dict(re.findall(r'y="([^"]*)"[^>]*>(low|high)<', svg.lines(series)))
    high, low = sorted(map(float, places))
    assert (places[f"{high:.1f}"], places[f"{low:.1f}"]) == ("high", "low")


def test_a_long_name_of_a_line_keeps_both_ends() -> None:
    names = [f"a-group-with-a-long-name · orders-of-europe · broker-{item}" for item in "ab"]
    chart = svg.lines({name: [(0, 1.0), (1_000, 2.0)] for name in names})
    shown = re.findall(r">(a-group[^<]*)<", chart)
    assert [item[-8:] for item in shown] == ["broker-a", "broker-b"]
    assert all("…" in item and len(item) == 40 for item in shown)


def test_an_age_that_nobody_knows_is_shown_as_such_and_is_no_metric() -> None:
    unknown = lag_report(waits_ms=None, unknown_ages=1, status="UNKNOWN")
    page = to_html(unknown)
    assert '<span class="dim">oldest waits</span><b>unknown</b>' in page
    assert "<td>unknown</td>" in page
    text = exposition(unknown)
    assert "popmq_report_oldest_ready_seconds" not in text
    assert 'popmq_report_unknown_age_queues{group="g<1>",topic="orders"} 1' in text
    assert 'popmq_report_group_ok{group="g<1>",topic="orders"} 0' in text
    # Of one queue it is known, of another one not.
    page = to_html(lag_report(unknown_ages=1))
    assert page.count("≥ 1.02 min") == 2
    nothing_ready = lag_report(ready=0, waits_ms=None)
    assert '<span class="dim">oldest waits</span><b>-</b>' in to_html(nothing_ready)
