"""`/timers`: which messages are due when; cancel or reschedule those that are selected."""

import htpy as h

from popmq.cli.terminal.arguments import duration_argument, time_argument
from popmq.common.errors import PopmqError
from popmq.common.quantities import format_duration, iso_time
from popmq.console.client import ROWS
from popmq.console.markup import (
    asked,
    bars,
    done,
    entry,
    link,
    message_link,
    missing,
    moment,
    notice,
    number,
    section,
    table,
    text,
    tiles,
    topic_link,
)
from popmq.console.model import TimersView
from popmq.console.page import Console, Page, Redirect, Request, bad_input, to

FILTERS = ("topic", "key", "from", "to")


def show(console: Console, request: Request) -> Page:
    topic = request.query.get("topic", "")
    begin, end = (_time(request.query.get(name, "")) for name in ("from", "to"))
    key = request.query.get("key", "")
    view = console.client.timers(topic=topic, key=key, begin_ms=begin, end_ms=end)
    return Page(
        "Timers",
        [
            h.h1["Timers"],
            _filter(request),
            missing(view.incomplete),
            tiles(
                ("Waiting", number(sum(view.pending.values()))),
                ("Next due", moment(view.next_due_ms, view.now_ms)),
            ),
            section("Due within, each counted once", bars(_buckets(view)))
            if view.buckets
            else None,
            _by_topic(view),
            _list(view, request),
        ],
    )


def _time(words: str) -> int:
    return time_argument(words) if words else 0


def _filter(request: Request) -> h.Node:
    fields = [
        h.label[label, h.input(name=name, value=request.query.get(name, ""), placeholder=example)]
        for label, name, example in (
            ("Topic", "topic", "all"),
            ("Key", "key", "any"),
            ("Due from", "from", "2030-01-31T09:00"),
            ("Due before", "to", "2030-02-01"),
        )
    ]
    return h.form(".search", method="get", role="search", data_keep=True)[fields, h.button["Show"]]


def _buckets(view: TimersView) -> list[tuple[str, int]]:
    return [
        (format_duration(within) if within >= 0 else "later", count)
        for within, count in view.buckets
    ]


def _by_topic(view: TimersView) -> h.Node:
    rows = [
        (link(to("timers", topic=name), name), number(count))
        for name, count in sorted(view.pending.items(), key=lambda item: (-item[1], item[0]))
    ]
    return section("By topic", table(("Topic", "#Timers"), rows[:50], empty="No message waits."))


def _list(view: TimersView, request: Request) -> h.Node:
    rows = [
        (
            h.input(
                type="checkbox",
                name="select",
                form="change",
                value=f"{timer.topic} {timer.message_id}",
                aria_label=f"select {text(timer.message_id)}",
            ),
            moment(timer.due_ms, view.now_ms),
            message_link(timer.message_id),
            topic_link(timer.topic),
            moment(timer.stored_ms, view.now_ms),
            text(timer.state.lower()),
        )
        for timer in view.timers
    ]
    keys = [f"{timer.topic} {timer.message_id}" for timer in view.timers]
    heads = ("Select", "Due", "Message", "Topic", "Stored", "State")
    listed = table(heads, rows, empty="No message waits for its delivery time.", keys=keys)
    if not rows:
        return section("Next timers", listed)
    filters = {name: request.query.get(name, "") for name in FILTERS}
    is_filtered = any(filters.values())
    later = filters | {"from": iso_time(view.timers[-1].due_ms)}
    total = sum(view.pending.values())
    title = f"{len(rows)} that match" if is_filtered else f"The next {len(rows)} of {total}"
    return section(
        title,
        listed,
        len(rows) == ROWS and h.p[h.a(href=to("timers", **later))["Later ones"]],
        h.form(id="change", method="post", action=to("timers"), data_keep=True)[
            h.button(name="do", value="cancel", class_="danger")["Cancel the selected"],
            entry("or deliver them after", "delay", "1h"),
            h.button(name="do", value="reschedule")["Reschedule the selected"],
        ],
        # It follows the list, so the browser does not keep what it has.
        is_filtered
        and h.form(id="change-all", method="post", action=to("timers"))[
            [h.input(type="hidden", name="select", value=each) for each in keys],
            h.button(name="do", value="cancel", class_="danger")[f"Cancel all {len(rows)} shown"],
        ],
    )


def act(console: Console, request: Request) -> Page | Redirect:
    what = request.sent("do")
    selected = list(request.form.get("select", ()))
    if what not in ("cancel", "reschedule"):
        raise bad_input(f"{what[:40]!r} is no action of timers")
    if not selected:
        raise bad_input("no timer is selected: check the box before each that is meant")
    delay = request.sent("delay")
    delay_ms = duration_argument(delay) if what == "reschedule" else 0
    if request.sent("sure"):
        return _change(console, what, selected, delay_ms)
    count = len(selected)
    words = "are never delivered" if what == "cancel" else f"are delivered in {delay}"
    title = f"{what.capitalize()} {count} {'timer' if count == 1 else 'timers'}?"
    return asked(
        title,
        to("timers"),
        title.rstrip("?"),
        to("timers"),
        notice("warn", f"{count} messages {text(words)}."),
        h.ul[[h.li[text(each)] for each in selected]],
        do=what,
        delay=delay,
        selected=selected,
    )


def _change(console: Console, what: str, selected: list[str], delay_ms: int) -> Page:
    failed = []
    for each in selected:
        topic, _, message_id = each.partition(" ")
        try:
            if what == "cancel":
                console.client.cancel_timer(topic, message_id)
            else:
                console.client.reschedule_timer(topic, message_id, delay_ms)
        except PopmqError as error:
            failed.append(f"{message_id}: {error}")
    well = len(selected) - len(failed)
    verb = "cancelled" if what == "cancel" else "rescheduled"
    return done(
        f"{well} of {len(selected)} {verb}",
        to("timers"),
        [notice("bad", text(reason)) for reason in failed],
    )
