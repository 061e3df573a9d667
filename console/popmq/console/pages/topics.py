"""`/topics` and `/topics/NAME`: queues, readers and messages; send, create and delete."""

import htpy as h

from popmq.cli.metadata import PERMISSIONS, TOPIC_TYPES
from popmq.cli.terminal.arguments import duration_argument
from popmq.console.markup import (
    LAG_HEADS,
    asked,
    choice,
    done,
    entry,
    facts,
    form,
    group_link,
    lag_cells,
    measured,
    message_link,
    missing,
    moment,
    notice,
    number,
    pager,
    plots,
    rate,
    search,
    section,
    table,
    text,
    tiles,
    topic_link,
)
from popmq.console.model import StoredMessage, TopicView
from popmq.console.page import (
    Console,
    Page,
    Redirect,
    Request,
    bad_input,
    parse_number,
    to,
)
from popmq.console.prometheus import topic_charts

LATEST = 20
BODY_CHARACTERS = 120  # of a row
MAX_QUEUES = 1_024


def show(console: Console, request: Request) -> Page:
    return _topic(console, request) if request.name else _list(console, request)


def _list(console: Console, request: Request) -> Page:
    words = request.query.get("q", "")
    page = console.client.topics(words, request.number("first"))
    rows = [
        (
            topic_link(row.name),
            row.type,
            number(row.queues),
            row.permission,
            number(row.groups),
            number(row.lag),
            h.a(href=to("timers", topic=row.name))[number(row.timers)] if row.timers else "0",
        )
        for row in page.rows
    ]
    heads = ("Topic", "Type", "#Queues", "Permission", "#Reading groups", "#Lag", "#Timers")
    return Page(
        "Topics",
        [
            h.h1["Topics"],
            search(request, "topics"),
            table(
                heads, rows, empty="There is no such topic." if words else "There is no topic yet."
            ),
            pager(page, "topics", q=words),
            section(
                "Create a topic",
                form(
                    to("topics"),
                    "Create",
                    entry("Name", "name", required=True),
                    choice("Type", "type", TOPIC_TYPES),
                    entry("Queues", "queues", "8", type="number", min="1", max=str(MAX_QUEUES)),
                    do="create",
                ),
            ),
        ],
    )


def _topic(console: Console, request: Request) -> Page:
    name = request.name
    view = console.client.topic(name)
    stored = sum(queue.end - queue.start for queue in view.queues)
    last = view.history[-1] if view.history else None
    return Page(
        f"Topic {text(name)}",
        [
            h.h1["Topic ", text(name)],
            _sent(request),
            tiles(
                ("Stored messages", number(stored)),
                ("Stored now", rate(last.stored) if last else "..."),
                ("Delivered now", rate(last.delivered) if last else "..."),
                ("Timers", h.a(href=to("timers", topic=name))[number(view.timers)]),
                ("Reading groups", number(len(view.lags))),
            ),
            plots(view.history),
            measured(console, request, topic_charts(name)),
            section(
                "Reading groups",
                table(
                    ("Group", *LAG_HEADS),
                    [(group_link(row.group), *lag_cells(row)) for row in view.lags],
                    empty="No group has read this topic yet.",
                ),
            ),
            _messages(console, view, request),
            _send_form(console, view, request),
            _queues(view),
            section(
                "Settings",
                facts({k: text(v) for k, v in view.settings.items()}),
                h.div(class_="actions")[_alter_form(view)],
            ),
            section(
                "Delete this topic",
                form(
                    to("topics", name),
                    "Delete",
                    entry("Its name, to be sure", "typed", required=True),
                    danger=True,
                    do="delete",
                ),
            ),
        ],
    )


def _sent(request: Request) -> h.Node:
    sent = request.query.get("sent", "")
    return notice("good", "Sent message ", message_link(sent), ".") if sent else None


def _queues(view: TopicView) -> h.Node:
    rows = [
        (
            h.a(href=to("topics", view.name, queue=queue.key, offset=queue.start))[
                number(queue.queue_id)
            ],
            text(queue.broker),
            number(queue.start),
            number(queue.end),
            number(queue.end - queue.start),
        )
        for queue in view.queues
    ]
    heads = ("Queue", "Broker", "#First offset", "#Next offset", "#Messages")
    return section(
        "Queues",
        missing(view.missing),
        table(heads, rows, empty="No queue is known.", compact=True),
    )


# -- messages


def _messages(console: Console, view: TopicView, request: Request) -> h.Node:
    """The latest, those of a key, or those of a queue from an offset on."""
    key, place = request.query.get("key", ""), request.query.get("queue", "")
    queue = next((each for each in view.queues if each.key == place), None)
    find = h.form(".search", method="get", role="search", data_keep=True)[
        h.label["Key", h.input(name="key", value=key, autocomplete="off")], h.button["Find"]
    ]
    lack = ""
    if key:
        title = f"Messages with key {text(key)}"
        messages, lack = console.client.find(view.name, key=key)
    elif queue is not None:
        offset = max(request.number("offset"), queue.start)
        title = f"Queue {queue.queue_id} of {text(queue.broker)} from offset {offset}"
        place_of = (queue.broker, queue.queue_id)
        messages, _ = console.client.find(view.name, queue=place_of, offset=offset)
        behind = messages[-1].queue_offset + 1 if messages else queue.end
        if behind < queue.end:
            more = to("topics", view.name, queue=queue.key, offset=behind)
            find = h.div[find, h.p[h.a(href=more, rel="next")["Next messages"]]]
    else:
        title = f"The latest {LATEST} messages"
        messages = console.client.latest(view.name, LATEST) if view.queues else []
    back = (
        None
        if not (key or queue)
        else h.p[h.a(href=to("topics", view.name))["The latest messages"]]
    )
    return section(title, find, back, missing(lack), message_table(messages, view.now_ms))


def message_table(messages: list[StoredMessage], now_ms: int) -> h.Element:
    rows = [
        (
            moment(message.stored_ms, now_ms),
            message_link(message.message_id),
            text(message.tag or "-"),
            text(", ".join(message.keys) or "-"),
            f"{message.queue_id} / {message.queue_offset}",
            h.code[text(short_body(message))],
        )
        for message in messages
    ]
    heads = ("Stored", "Message", "Tag", "Keys", "Queue / offset", "Body")
    return table(heads, rows, empty="There is no message.")


def short_body(message: StoredMessage) -> str:
    body = message.record or message.text
    if body is None:
        return f"{len(message.body)} bytes: {message.body[:16].hex(' ', 4)}"
    return body if len(body) <= BODY_CHARACTERS else body[:BODY_CHARACTERS] + "..."


# -- changes


def _send_form(console: Console, view: TopicView, request: Request) -> h.Node:
    if "w" not in view.permission:
        return section("Send a message", h.p[f"The permission is {text(view.permission)}."])
    return section(
        "Send a message",
        form(
            to("topics", view.name),
            "Send",
            h.label["Body", h.textarea(name="body", rows="3", required=True)],
            entry("Tag", "tag"),
            entry("Key", "key"),
            view.type in ("fifo", "mixed")
            and entry("Message group", "message_group", required=view.type == "fifo"),
            view.type in ("delay", "mixed") and entry("Deliver after", "delay", placeholder="90s"),
            do="send",
            # A form that is sent twice stores one message.
            message_id="" if request.shared else console.client.new_message_id(),
        ),
    )


def _alter_form(view: TopicView) -> h.Node:
    return form(
        to("topics", view.name),
        "Alter",
        choice("Permission", "permission", PERMISSIONS, view.permission),
        entry("Queues", "queues", view.settings["queues"], type="number", min="1"),
        entry("Retention", "retention", placeholder="24h, or store"),
        do="alter",
    )


def act(console: Console, request: Request) -> Page | Redirect:
    match request.sent("do"):
        case "send":
            return _send(console, request)
        case "create":
            return _create(console, request)
        case "alter":
            return _alter(console, request)
        case "delete":
            return _delete(console, request)
        case other:
            raise bad_input(f"{other[:40]!r} is no action of a topic")


def _send(console: Console, request: Request) -> Redirect:
    message_id = request.sent("message_id") or console.client.new_message_id()
    delay = request.sent("delay")
    console.client.send(
        request.name,
        # A form writes line ends as two characters.
        (request.form.get("body") or [""])[0].replace("\r\n", "\n").encode(),
        message_id=message_id,
        tag=request.sent("tag"),
        key=request.sent("key"),
        message_group=request.sent("message_group"),
        delay_ms=duration_argument(delay) if delay else 0,
    )
    return Redirect(to("topics", request.name, sent=message_id))


def _create(console: Console, request: Request) -> Redirect:
    name = request.sent("name")
    queues = parse_number(request, "queues", least=1, most=MAX_QUEUES, label="Queues")
    console.client.create_topic(name, request.sent("type"), queues)
    return Redirect(to("topics", name))


def _alter(console: Console, request: Request) -> Page | Redirect:
    """An empty retention stays what it is."""
    name, permission = request.name, request.sent("permission")
    queues = parse_number(request, "queues", least=1, most=MAX_QUEUES, label="Queues")
    retention = request.sent("retention")
    retention_ms = -1 if retention == "store" else duration_argument(retention) if retention else 0
    if request.sent("sure"):
        console.client.alter_topic(
            name, queues=queues, permission=permission, retention_ms=retention_ms
        )
        return Redirect(to("topics", name))
    view = console.client.topic(name)
    after = {"permission": permission, "queues": str(queues), "retention": retention}
    changes = [
        f"{setting}: {view.settings[setting]} becomes {value}"
        for setting, value in after.items()
        if value and value != view.settings[setting]
    ]
    if not changes:
        return done("Nothing to alter", to("topics", name))
    return asked(
        f"Alter topic {text(name)}?",
        to("topics", name),
        f"Alter {len(changes)} of its settings",
        to("topics", name),
        notice("warn", f"{len(view.lags)} groups read this topic."),
        h.ul[[h.li[text(change)] for change in changes]],
        do="alter",
        permission=permission,
        queues=str(queues),
        retention=retention,
    )


def _delete(console: Console, request: Request) -> Page | Redirect:
    name = request.name
    if request.sent("typed") != name:
        raise bad_input(f"the name that was typed is not {name}: nothing was deleted")
    if request.sent("sure"):
        console.client.delete_topic(name)
        return done("Deleted", to("topics"), h.p[f"Topic {text(name)} is deleted."])
    view = console.client.topic(name)
    stored = sum(queue.end - queue.start for queue in view.queues)
    words = f"{stored} messages in {len(view.queues)} queues, {len(view.lags)} groups read them."
    return asked(
        f"Delete topic {text(name)}?",
        to("topics", name),
        f"Delete the topic and its {stored} messages",
        to("topics", name),
        notice("bad", words),
        do="delete",
        typed=name,
    )
