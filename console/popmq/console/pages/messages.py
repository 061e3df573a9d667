"""`/messages/ID`: what became of a message for each group, as a timeline, and what comes next."""

import json

import htpy as h

from popmq.cli.terminal.output import format_age
from popmq.common.quantities import iso_time
from popmq.console.markup import (
    body_of,
    facts,
    group_link,
    missing,
    moment,
    notice,
    section,
    text,
    topic_link,
)
from popmq.console.model import GroupStory, MessageStory, StoredMessage
from popmq.console.page import Console, Page, Request, to

GOOD_STATES = ("ACKED", "COMMITTED")
BAD_STATES = ("DEAD", "LOST", "EXPIRED")
# What a record of the log means for the message; others say it by their names.
STEPS = {
    "message": "stored",
    "check point": "delivered",
    "change": "invisible time changed",
    "ack": "acked",
    "retry": "to be delivered again",
    "dead letter": "became a dead letter",
    "firing": "due, and put into its queue",
}


def show(console: Console, request: Request) -> Page:
    message_id = request.name or request.query.get("id", "").strip()
    if not message_id:
        return Page("Find a message", [h.h1["Find a message"], _finder()])
    view = console.client.message(message_id)
    return Page(
        f"Message {text(message_id)}",
        [
            h.h1["Message ", text(message_id)],
            missing(view.incomplete),
            [_story(story, view.now_ms) for story in view.stories],
            [_content(message, view.now_ms) for message in view.messages],
        ],
    )


def _finder() -> h.Node:
    return h.form(".search", method="get", data_keep=True)[
        h.label["Message id", h.input(name="id", required=True, autocomplete="off")],
        h.button["Explain"],
    ]


def _story(story: MessageStory, now_ms: int) -> h.Node:
    place = f"offset {story.queue_offset}" if story.queue_offset >= 0 else "not in its queue yet"
    where = f"queue {story.queue_id} of {text(story.broker)}, {place}, stored "
    return section(
        "What became of it",
        h.p["In topic ", topic_link(story.topic), ", ", where, moment(story.stored_ms, now_ms)],
        [_group(group, now_ms) for group in story.groups]
        or notice("warn", "No group reads this topic."),
    )


def _group(story: GroupStory, now_ms: int) -> h.Node:
    title: h.Node = group_link(story.group) if story.group else "every group"
    kind = "good" if story.state in GOOD_STATES else ""
    kind = "bad" if story.state.startswith(BAD_STATES) else kind
    until = story.until_ms - now_ms
    return h.article(class_="story")[
        h.h3[
            "Group " if story.group else "",
            title,
            " ",
            h.span(class_=f"state {kind}")[text(story.state)],
        ],
        h.p[h.strong["Why: "], text(story.why)],
        h.p(class_="next")[
            h.strong["Next: "],
            text(story.next),
            until > 0 and f" (in {format_age(until)})",
            bool(story.client)
            and [" Held by ", h.a(href=to("clients", q=story.client))[text(story.client)]],
        ],
        h.ol(class_="timeline")[
            [
                h.li[
                    h.time(datetime=iso_time(step.wall_ms), title=iso_time(step.wall_ms))[
                        clock_time(step.wall_ms)
                    ],
                    " ",
                    h.strong[text(STEPS.get(step.what, step.what))],
                    f" at log position {step.position}",
                    bool(step.text) and f": {text(step.text)}",
                ]
                for step in story.steps
            ]
        ],
    ]


def clock_time(wall_ms: int) -> str:
    """To the millisecond, without the day, in UTC."""
    return iso_time(wall_ms).partition("T")[2].removesuffix("+00:00")


def _content(message: StoredMessage, now_ms: int) -> h.Node:
    known: dict[str, h.Node] = {
        "topic": topic_link(message.topic),
        "queue and offset": f"{message.queue_id} / {message.queue_offset}",
        "stored": moment(message.stored_ms, now_ms),
        "tag": text(message.tag or "-"),
        "keys": text(", ".join(message.keys) or "-"),
        "message group": text(message.message_group or "-"),
    }
    properties: dict[str, h.Node] = {text(k): text(v) for k, v in message.properties.items()}
    return section(
        "Content",
        facts(known),
        bool(properties) and [h.h3["Properties"], facts(properties)],
        body_of(_pretty(message.record or message.text), message.body),
    )


def _pretty(body: str | None) -> str | None:
    """JSON on several lines; other text as it is."""
    if body is None or body[:1] not in ("{", "["):
        return body
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return body
