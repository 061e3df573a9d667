"""The pieces that pages are made of.  htpy escapes every text, and links are made by `to`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from urllib.parse import quote, urlencode
from zlib import crc32

import htpy as h

from popmq.cli.terminal.output import format_age, format_ago, format_due
from popmq.common.escaping import escaped, escaped_lines
from popmq.common.quantities import iso_time
from popmq.console.model import LagRow, Line, PageOf, Reading
from popmq.console.page import Console, Page, Request, to, to_message
from popmq.console.prometheus import Chart, Unit

CHART_WIDTH, CHART_HEIGHT = 600, 90
SHOWN_BODY = 64 << 10  # characters


# -- texts


def text(value: object) -> str:
    """On one line, without characters that turn the direction of what follows."""
    return escaped(str(value))


def lines(value: str) -> str:
    return escaped_lines(value)


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def size(count: int) -> str:
    """Bytes."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rate(value: float) -> str:
    """Messages a second."""
    return f"{value:,.0f} /s" if value >= 100 else f"{value:.1f} /s"


def age(milliseconds: int | None) -> str:
    return "-" if milliseconds is None else format_age(milliseconds)


def moment(then_ms: int, now_ms: int) -> h.Node:
    """How long ago, or until when; the time itself when pointed at."""
    if not then_ms:
        return "-"
    shown = format_due(then_ms, now_ms) if then_ms > now_ms else format_ago(then_ms, now_ms)
    return h.time(datetime=iso_time(then_ms), title=iso_time(then_ms))[shown]


def link(target: str, label: str) -> h.Element:
    return h.a(href=target)[text(label)]


def group_link(name: str) -> h.Element:
    return link(to("groups", name), name)


def topic_link(name: str) -> h.Element:
    return link(to("topics", name), name)


def message_link(message_id: str) -> h.Node:
    return link(to_message(message_id), message_id) if message_id else "-"


# -- blocks


def section(title: str, *content: h.Node) -> h.Element:
    return h.section[h.h2[title], content]


def notice(kind: str, *content: h.Node) -> h.Element:
    """`kind` is good, warn or bad."""
    return h.p(class_=f"notice {kind}")[content]


def missing(reason: str) -> h.Node:
    return notice("warn", f"This is not everything: {text(reason)}") if reason else None


def tiles(*values: tuple[str, h.Node]) -> h.Element:
    """Figures with what they are."""
    return h.dl(class_="tiles")[[h.div[h.dt[label], h.dd[value]] for label, value in values]]


def facts(values: Mapping[str, h.Node]) -> h.Element:
    return h.dl(class_="facts")[
        [h.div[h.dt[label], h.dd[value]] for label, value in values.items()]
    ]


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[h.Node]],
    *,
    empty: str,
    keys: Sequence[str] | None = None,
    compact: bool = False,
) -> h.Element:
    """A head that begins with # is of numbers; `keys` tell rows apart that come and go.

    On narrow screens each row is a card, so that every cell has its head's words; not one of a
    table that is `compact`.
    """
    names = [head.removeprefix("#") for head in heads]
    kinds = ["n" if head.startswith("#") else None for head in heads]
    body = [
        h.tr(id=f"row-{quote(keys[at])}" if keys else None)[
            [
                h.td(class_=kind, data_label=name)[cell]
                for name, kind, cell in zip(names, kinds, row, strict=True)
            ]
        ]
        for at, row in enumerate(rows)
    ]
    if not body:
        return h.p(class_="empty")[empty]
    head = h.tr[[h.th(class_=kind, scope="col")[n] for n, kind in zip(names, kinds, strict=True)]]
    kind = "scroll compact" if compact else "scroll"
    return h.div(class_=kind, tabindex="0", role="region", aria_label=", ".join(names[:4]))[
        h.table[h.thead[head], h.tbody[body]]
    ]


LAG_HEADS = ("#Lag", "#Ready", "#In flight", "#Blocked", "#Delayed", "#Retries", "#Oldest ready")


def lag_cells(row: LagRow) -> tuple[h.Node, ...]:
    return (
        *map(number, (row.lag, row.ready, row.in_flight, row.blocked, row.delayed, row.retries)),
        age(row.oldest_age_ms),
    )


def search(request: Request, what: str) -> h.Element:
    """Part of a name, in the URL."""
    given = request.query.get("q", "")
    return h.form(".search", method="get", role="search", data_keep=True)[
        h.label[f"Filter {what}", h.input(name="q", type="search", value=given)],
        h.button["Filter"],
    ]


def pager(page: PageOf[object], path: str, **query: object) -> h.Node:
    """Links to the rows before and behind."""
    shown = len(page.rows)
    if page.total <= shown:
        return h.p(class_="pager")[f"{page.total} in all"]
    last = page.first + shown
    step = max(shown, 1)
    before = max(0, page.first - max(step, 50))
    return h.nav(class_="pager", aria_label="pages")[
        page.first > 0 and h.a(href=to(path, **query, first=before), rel="prev")["Before"],
        h.span[f" {page.first + 1} to {last} of {page.total} "],
        last < page.total and h.a(href=to(path, **query, first=last), rel="next")["Next"],
    ]


def body_of(content: str | None, raw: bytes) -> h.Element:
    """As text where it is text, else in hex."""
    if content is None:
        shown, kind = raw[:1024].hex(" ", 4), f"{len(raw)} bytes that are no text, in hex"
        return h.figure[h.figcaption[kind], h.pre[shown + (" ..." if len(raw) > 1024 else "")]]
    cut = len(content) > SHOWN_BODY
    kind = f"{len(raw)} bytes" + (f", the first {SHOWN_BODY} characters of them" if cut else "")
    return h.figure[h.figcaption[kind], h.pre[lines(content[:SHOWN_BODY])]]


# -- forms


def form(
    action: str,
    button: str,
    /,
    *fields: h.Node,
    danger: bool = False,
    selected: Sequence[str] = (),
    **hidden: str,
) -> h.Element:
    """A POST.  `hidden` are fields that say what is meant; the browser keeps what was typed."""
    named = [*hidden.items(), *(("select", each) for each in selected)]
    # The id of a message to send is new each time, and the first one is as good.
    meant = [button, sorted(hidden.items() - {("message_id", hidden.get("message_id", ""))})]
    about = crc32(f"{meant} {h.div[fields]}".encode())
    return h.form(method="post", action=action, data_keep=f"{about:x}")[
        [h.input(type="hidden", name=name, value=value) for name, value in named],
        fields,
        h.button(class_="danger" if danger else None)[button],
    ]


def entry(label: str, name: str, value: str = "", **attributes: str | bool) -> h.Element:
    return h.label[label, h.input(name=name, value=value, autocomplete="off", **attributes)]


def choice(label: str, name: str, values: Sequence[str], chosen: str = "") -> h.Element:
    options = [h.option(value=v, selected=v == chosen)[text(v) or "any"] for v in values]
    return h.label[label, h.select(name=name)[options]]


def asked(
    title: str,
    action: str,
    button: str,
    back: str,
    /,
    *content: h.Node,
    selected: Sequence[str] = (),
    **hidden: str,
) -> Page:
    """What a change touches, and the question whether it shall be made."""
    return Page(
        title,
        [
            h.h1[title],
            content,
            h.div(class_="answer")[
                form(action, button, danger=True, selected=selected, **hidden, sure="yes"),
                h.a(href=back, class_="button")["No, change nothing"],
            ],
        ],
        live=False,
    )


def done(title: str, back: str, *content: h.Node) -> Page:
    """How a change ended."""
    return Page(title, [h.h1[title], content, h.p[h.a(href=back)["Go on"]]], live=False)


# -- plots


def plot(title: str, lines: Sequence[Line], shown: Callable[[float], str]) -> h.Node:
    """Lines over the same time, each with its last and its highest value."""
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return None
    times = [at for line in lines for at, _ in line.points]
    begin, span = min(times), max(max(times) - min(times), 1)
    top = max(*(value for line in lines for _, value in line.points), 1)
    label = f"{title}, last {format_age(span)}"
    paths, legend = [], []
    for number, line in enumerate(lines):
        values = [value for _, value in line.points]
        legend.append(
            h.span(class_=f"line-{number}")[
                f"{text(line.name)}: now {shown(values[-1])}, at most {shown(max(values))}"
            ]
        )
        paths += [
            h.polyline(
                class_=f"line-{number}",
                points=" ".join(
                    f"{(at - begin) * CHART_WIDTH / span:.1f},"
                    f"{CHART_HEIGHT - value * (CHART_HEIGHT - 4) / top:.1f}"
                    for at, value in points
                ),
            )
            for points in _without_gaps(line.points)
        ]
    return h.figure(class_="plot")[
        h.figcaption[h.strong[label], legend],
        h.svg(
            viewBox=f"0 0 {CHART_WIDTH} {CHART_HEIGHT}",
            preserveAspectRatio="none",
            role="img",
            aria_label=label,
        )[paths],
    ]


def _without_gaps(points: Sequence[tuple[int, float]]) -> Iterator[Sequence[tuple[int, float]]]:
    """Pieces between which nothing was read for longer than usual."""
    steps = sorted(after - at for (at, _), (after, _) in pairwise(points))
    usual, begin = steps[len(steps) // 2], 0
    for number, ((at, _), (after, _)) in enumerate(pairwise(points), 1):
        if after - at > 3 * usual:
            yield points[begin:number]
            begin = number
    yield points[begin:]


def plots(history: Sequence[Reading]) -> h.Node:
    """Of the last hour: rates, what waits, and for how long."""

    def line(name: str, value: Callable[[Reading], float]) -> Line:
        return Line(name, [(reading.at_ms, value(reading)) for reading in history])

    return h.div(class_="plots")[
        plot(
            "Messages a second",
            [
                line("stored", lambda reading: reading.stored),
                line("delivered", lambda reading: reading.delivered),
            ],
            rate,
        ),
        plot("Lag", [line("messages", lambda reading: reading.lag)], lambda lag: number(int(lag))),
        plot(
            "Oldest ready message",
            [line("age", lambda reading: reading.oldest_ms)],
            lambda oldest_ms: age(int(oldest_ms)),
        ),
    ]


HOURS = (1, 6, 24, 168)


def measured(console: Console, request: Request, charts: Sequence[Chart]) -> h.Node:
    """What Prometheus has, where one is named; for those who may see the whole cluster."""
    if console.prometheus is None or not console.client.sees_cluster():
        return None
    hours = min(max(request.number("hours"), 1), HOURS[-1])
    drawn, reason = console.prometheus.charts(charts, hours)
    names = {each: f"{each} h" if each <= 24 else f"{each // 24} d" for each in HOURS}
    others = [
        name if each == hours else h.a(href="?" + urlencode({**request.query, "hours": each}))[name]
        for each, name in names.items()
    ]
    shown = [plot(chart.title, chart.lines, _SHOWN[chart.unit]) for chart in drawn]
    return section(
        "From Prometheus",
        h.p(class_="ranges")["Last ", [[each, " "] for each in others]],
        bool(reason)
        and notice("warn", f"{text(console.prometheus.url)} (console.prometheus): {text(reason)}"),
        h.div(class_="plots")[shown]
        if any(chart.lines[0].points for chart in drawn)
        else not reason and h.p(class_="empty")["It has no values of this time."],
    )


_SHOWN: Mapping[Unit, Callable[[float], str]] = {
    Unit.RATE: rate,
    Unit.MESSAGES: lambda value: number(int(value)),
    Unit.SECONDS: lambda value: f"{value * 1000:,.0f} ms" if value < 10 else f"{value:,.0f} s",
}


def bars(rows: Sequence[tuple[str, int]]) -> h.Element:
    """A histogram whose figures are text too."""
    most = max((count for _, count in rows), default=0) or 1
    return h.table(class_="bars")[
        h.tbody[
            [
                h.tr[
                    h.th(scope="row")[label],
                    h.td(class_="n")[number(count)],
                    h.td(aria_hidden="true")[h.progress(max=most, value=count)],
                ]
                for label, count in rows
            ]
        ]
    ]
