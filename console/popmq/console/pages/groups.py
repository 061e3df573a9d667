"""`/groups` and `/groups/NAME`: who is behind, since when, and why; reset and unpark."""

import htpy as h

from popmq.cli.consumer_offsets import target_argument
from popmq.console.markup import (
    LAG_HEADS,
    age,
    asked,
    choice,
    done,
    entry,
    facts,
    form,
    group_link,
    lag_cells,
    link,
    measured,
    missing,
    moment,
    notice,
    number,
    pager,
    plots,
    search,
    section,
    table,
    text,
    tiles,
    topic_link,
)
from popmq.console.model import GroupView, ResetRow
from popmq.console.page import Console, Page, Redirect, Request, bad_input, to
from popmq.console.prometheus import group_charts

SHOWN_QUEUES = 50
SHOWN_HOLDERS = 5  # of a queue
UNPARK = {
    "resume": "deliver them again",
    "skip": "skip them",
    "dead-letter": "make them dead letters",
}


def show(console: Console, request: Request) -> Page:
    return _group(console, request) if request.name else _list(console, request)


def _list(console: Console, request: Request) -> Page:
    words = request.query.get("q", "")
    page = console.client.groups(words, request.number("first"))
    rows = [
        (
            group_link(row.name),
            row.type,
            number(row.topics),
            *lag_cells(row.lag),
            h.a(href=to("dead-letters", group=row.name))[number(row.dead)] if row.dead else "0",
        )
        for row in page.rows
    ]
    return Page(
        "Groups",
        [
            h.h1["Consumer groups"],
            search(request, "groups"),
            table(
                ("Group", "Type", "#Topics", *LAG_HEADS, "#Dead letters"),
                rows,
                empty="There is no such group." if words else "There is no group yet.",
            ),
            pager(page, "groups", q=words),
        ],
    )


def _group(console: Console, request: Request) -> Page:
    name = request.name
    view = console.client.group(name)
    return Page(
        f"Group {text(name)}",
        [
            h.h1["Group ", text(name)],
            missing(view.incomplete),
            [notice("warn", finding) for finding in view.findings]
            or notice("good", "Nothing seems to hold this group up."),
            tiles(
                ("Lag", number(sum(row.lag for row in view.lags))),
                ("In flight", number(sum(row.in_flight for row in view.lags))),
                ("Retries", number(sum(row.retries for row in view.lags))),
                ("Members", number(len(view.members))),
                (
                    "Dead letters",
                    h.a(href=to("dead-letters", group=name))[number(view.dead)],
                ),
            ),
            plots(view.history),
            measured(console, request, group_charts(name)),
            section(
                "Topics",
                table(
                    ("Topic", *LAG_HEADS, "#Expired"),
                    [
                        (topic_link(row.topic), *lag_cells(row), number(row.expired))
                        for row in view.lags
                    ],
                    empty="The group has not read a topic yet.",
                ),
            ),
            _queues(view),
            _members(view),
            _parked(view),
            section("Settings", facts({k: text(v) for k, v in view.settings.items()})),
            _reset_form(view),
        ],
    )


def _queues(view: GroupView) -> h.Node:
    rows = [
        (
            topic_link(queue.topic),
            number(queue.queue_id),
            text(queue.broker),
            number(queue.unread),
            moment(queue.next_ms, view.now_ms),
            moment(queue.newest_ms, view.now_ms),
            [
                h.div[link(to("clients", q=client), client), f": {number(count)}"]
                for client, count in queue.holders[:SHOWN_HOLDERS]
            ]
            or "-",
        )
        for queue in view.queues[:SHOWN_QUEUES]
    ]
    heads = (
        "Topic",
        "Queue",
        "Broker",
        "#Unread",
        "First unread stored",
        "Newest stored",
        "Held by",
    )
    more = len(view.queues) - len(rows)
    return section(
        "Queues",
        table(heads, rows, empty="The group has read no queue yet.", compact=True),
        more > 0 and h.p[f"{more} other queues have no older message."],
    )


def _members(view: GroupView) -> h.Node:
    rows = [
        (
            link(to("clients", q=member.client_id), member.client_id),
            text(member.kind or "-"),
            text(f"{member.language} {member.version}".strip() or "-"),
            text(member.address or "-"),
            moment(member.since_ms, view.now_ms),
            age(member.silent_ms),
        )
        for member in view.members
    ]
    heads = ("Member", "Kind", "Language", "Address", "Connected", "Heard")
    return section("Members", table(heads, rows, empty="No member is connected."))


def _parked(view: GroupView) -> h.Node:
    if not view.parked:
        return None
    rows = [
        (
            topic_link(key.topic),
            text(key.key or "(without a message group)"),
            number(key.queue_id),
            number(key.messages),
            age(key.parked_ms),
            text(key.state),
            form(
                to("groups", view.name),
                "Unpark",
                choice("How", "action", list(UNPARK)),
                do="unpark",
                topic=key.topic,
                key=key.key,
            ),
        )
        for key in view.parked
    ]
    heads = ("Topic", "Message group", "Queue", "#Messages", "Parked for", "State", "")
    return section("Parked message groups", table(heads, rows, empty=""))


def _reset_form(view: GroupView) -> h.Node:
    topics = sorted({row.topic for row in view.lags})
    if not topics:
        return None
    return section(
        "Reset",
        h.p["Sets where the group reads on. The next page shows what would change."],
        form(
            to("groups", view.name),
            "Preview the reset",
            choice("Topic", "topic", topics),
            entry("To", "to", "oldest", list="targets", required=True),
            h.datalist(id="targets")[[h.option(value=v) for v in ("oldest", "newest", "1h ago")]],
            do="reset",
        ),
    )


def act(console: Console, request: Request) -> Page | Redirect:
    match request.sent("do"):
        case "reset":
            return _reset(console, request)
        case "unpark":
            return _unpark(console, request)
        case other:
            raise bad_input(f"{other[:40]!r} is no action of a group")


def _reset(console: Console, request: Request) -> Page:
    name, topic, to_text = request.name, request.sent("topic"), request.sent("to")
    target = target_argument(to_text)
    back = to("groups", name)
    if request.sent("sure"):
        rows = console.client.reset(name, topic, target, dry_run=False)
        return done("The group reads on", back, _reset_rows(rows))
    rows = console.client.reset(name, topic, target, dry_run=True)
    ended = sum(row.in_flight for row in rows)
    moved = sum(row.before != row.after for row in rows)
    words = f"{moved} of {len(rows)} queues move, and {ended} deliveries in flight end."
    return asked(
        f"Reset group {text(name)} in topic {text(topic)} to {text(to_text)}?",
        back,
        f"Reset {moved} queues",
        back,
        notice("warn", words),
        _reset_rows(rows),
        do="reset",
        topic=topic,
        to=to_text,
    )


def _reset_rows(rows: list[ResetRow]) -> h.Node:
    cells = [
        (
            text(row.topic),
            number(row.queue_id),
            text(row.broker),
            *map(number, (row.before, row.after, row.in_flight)),
        )
        for row in rows
    ]
    heads = ("Topic", "Queue", "Broker", "#Offset before", "#Offset after", "#In flight")
    return table(heads, cells, empty="There is nothing to reset.")


def _unpark(console: Console, request: Request) -> Page:
    name, topic = request.name, request.sent("topic")
    key = (request.form.get("key") or [""])[0]  # with the spaces that it may have
    action = request.sent("action")
    if action not in UNPARK:
        raise bad_input(f"{action[:40]!r} is no way to unpark: {', '.join(UNPARK)}")
    back = to("groups", name)
    if request.sent("sure"):
        count = console.client.unpark(name, topic, key, action)
        return done("Unparked", back, h.p[f"It was about {count} messages."])
    parked = [p for p in console.client.group(name).parked if (p.topic, p.key) == (topic, key)]
    count = sum(each.messages for each in parked)
    return asked(
        f"Unpark {text(key or 'messages without a message group')}?",
        back,
        f"{UNPARK[action].capitalize()}: {count} messages",
        back,
        notice("warn", f"{count} messages of topic {text(topic)}: {UNPARK[action]}."),
        do="unpark",
        topic=topic,
        key=key,
        action=action,
    )
