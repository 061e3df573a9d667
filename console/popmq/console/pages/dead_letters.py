"""`/dead-letters`: what groups gave up on; look, and redrive with a dry run first."""

import htpy as h

from popmq.cli.terminal.arguments import time_argument
from popmq.common.record.message import DeadReason
from popmq.console.markup import (
    asked,
    choice,
    done,
    entry,
    facts,
    group_link,
    link,
    message_link,
    missing,
    moment,
    notice,
    number,
    section,
    table,
    text,
    topic_link,
)
from popmq.console.model import DeadLetter, RedriveCounts, RedriveFilter, RedriveJob
from popmq.console.page import Console, Page, Redirect, Request, bad_input, now_ms, parse_number, to
from popmq.console.pages.topics import short_body

MAX_RATE = 1_000_000
# The first means any.
REASONS = ("", *(reason.name.lower().replace("_", " ") for reason in DeadReason))
# These have no topic to go back to.
OTHER_REASONS = ("topic deleted", "transaction without an end")
FILTERS = (
    ("Topic", "topic", ""),
    ("Tag", "tag", ""),
    ("Key", "key", ""),
    ("Dead since", "after", "24h ago"),
    ("Dead before", "before", ""),
)


def show(console: Console, request: Request) -> Page:
    group = request.query.get("group", "")
    return _group(console, request, group) if group else _list(console)


def _list(console: Console) -> Page:
    counts = console.client.dead_letter_groups()
    rows = [
        (link(to("dead-letters", group=group), group), number(count), group_link(group))
        for group, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Page(
        "Dead letters",
        [
            h.h1["Dead letters"],
            h.p["Messages that a group gave up after its most attempts. Redrive sends them back."],
            table(("Dead letters of", "#Count", "Group"), rows, empty="There is no dead letter."),
        ],
    )


def _group(console: Console, request: Request, group: str) -> Page:
    reason = request.query.get("reason", "")
    letters, ranges, lack = console.client.dead_letters(
        group, broker=request.query.get("broker", ""), from_offset=request.number("from")
    )
    shown = [letter for letter in letters if reason in ("", letter.reason)]
    more = [
        h.li[
            h.a(href=to("dead-letters", group=group, broker=broker, **{"from": at}))[
                f"{end - at} later ones of {text(broker)}"
            ]
        ]
        for broker, (at, end) in ranges.items()
        if at < end
    ]
    return Page(
        f"Dead letters of {text(group)}",
        [
            h.h1["Dead letters of ", group_link(group)],
            h.p[h.a(href=to("dead-letters"))["All groups"]],
            _jobs(console.redrives.jobs(group), group),
            missing(lack),
            h.form(".search", method="get", role="search", data_keep=True)[
                h.input(type="hidden", name="group", value=group),
                choice("Reason", "reason", (*REASONS, *OTHER_REASONS), reason),
                h.button["Filter"],
            ],
            section(f"{len(shown)} dead letters, the oldest first", _letters(shown)),
            bool(more) and h.ul[more],
            _redrive_forms(group, reason),
        ],
    )


def _letters(letters: list[DeadLetter]) -> h.Node:
    now = now_ms()
    rows = [
        (
            "redriven"
            if letter.redriven
            else h.input(
                type="checkbox",
                name="select",
                form="redrive",
                value=letter.place,
                aria_label=f"select {text(letter.message.message_id)}",
            ),
            moment(letter.dead_ms, now),
            message_link(letter.message.message_id),
            topic_link(letter.origin_topic) if letter.origin_topic else "(deleted)",
            text(letter.message.tag or "-"),
            text(", ".join(letter.message.keys) or "-"),
            number(letter.attempts),
            text(letter.reason),
            h.code[text(short_body(letter.message))],
        )
        for letter in letters
    ]
    keys = [letter.place for letter in letters]
    heads = ("Select", "Dead", "Message", "Topic", "Tag", "Keys", "#Attempts", "Reason", "Body")
    return table(heads, rows, empty="There is no such dead letter.", keys=keys)


def _jobs(jobs: list[RedriveJob], group: str) -> h.Node:
    if not jobs:
        return None
    rows = [
        (
            moment(job.started_ms, now_ms()),
            f"{job.rate} /s" if job.rate else "no limit",
            number(job.done.redriven),
            text(job.end or "runs"),
            None
            if job.end
            else h.form(method="post", action=to("dead-letters", group=group))[
                h.input(type="hidden", name="job", value=job.id),
                h.button(name="do", value="stop")["Stop"],
            ],
        )
        for job in jobs
    ]
    heads = ("Started", "Rate", "#Redriven", "State", "")
    return section("Redrives of this console", table(heads, rows, empty=""))


def _redrive_forms(group: str, reason: str) -> h.Node:
    fields = [
        choice("Reason", "reason", REASONS, reason),
        *(entry(label, name, placeholder=example) for label, name, example in FILTERS),
    ]
    return section(
        "Redrive",
        h.p["The next page counts what would be sent back; nothing is sent before it asks."],
        h.form(id="redrive", method="post", action=to("dead-letters", group=group), data_keep=True)[
            entry("At most a second (0: no limit)", "rate", "100", type="number", min="0"),
            h.button(name="do", value="selected")["Count the selected"],
            h.button(name="do", value="all")["Count all"],
            h.details[h.summary["Which of all are meant"], fields],
        ],
    )


def act(console: Console, request: Request) -> Page | Redirect:
    group = request.query.get("group", "")
    what = request.sent("do")
    back = to("dead-letters", group=group)
    if what == "stop":
        console.redrives.stop(request.sent("job"))
        return Redirect(back)
    if what not in ("all", "selected"):
        raise bad_input(f"{what[:40]!r} is no action of dead letters")
    chosen = _chosen(request, group, selected=what == "selected")
    rate = parse_number(request, "rate", least=0, most=MAX_RATE, label="The rate")
    if request.sent("sure"):
        console.redrives.start(chosen, rate=rate)
        return Redirect(back)
    counts = console.redrives.count(chosen)
    if not counts.redriven:
        return done("Nothing to redrive", back, _counts(counts))
    pace = f" at {rate} a second" if rate else ""
    kept = {name: request.sent(name) for name in ("reason", *(name for _, name, _ in FILTERS))}
    return asked(
        f"Redrive {counts.redriven} dead letters of {text(group)}?",
        back,
        f"Redrive {counts.redriven}{pace}",
        back,
        notice("warn", f"{counts.redriven} messages go back to group {text(group)}{pace}."),
        _counts(counts),
        do=what,
        rate=str(rate),
        selected=chosen.places,
        **kept,
    )


def _chosen(request: Request, group: str, *, selected: bool) -> RedriveFilter:
    if selected:
        places = list(request.form.get("select", ()))
        if not places:
            raise bad_input("no dead letter is selected: check the box before each that is meant")
        return RedriveFilter(group, places=places)
    after, before = request.sent("after"), request.sent("before")
    return RedriveFilter(
        group,
        topic=request.sent("topic"),
        reason=request.sent("reason"),
        tag=request.sent("tag"),
        key=request.sent("key"),
        after_ms=time_argument(after) if after else 0,
        before_ms=time_argument(before) if before else 0,
    )


def _counts(counts: RedriveCounts) -> h.Node:
    return facts(
        {
            "would be redriven": number(counts.redriven),
            "redriven before": number(counts.already),
            "not meant by the filter": number(counts.filtered),
            "of a topic that was deleted": number(counts.orphaned),
            "damaged": number(counts.damaged),
        }
    )
