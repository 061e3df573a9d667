"""`/`: is the cluster well, why not, and how much waits."""

import htpy as h

from popmq.console.markup import (
    LAG_HEADS,
    age,
    group_link,
    lag_cells,
    measured,
    moment,
    notice,
    number,
    plots,
    rate,
    section,
    table,
    text,
    tiles,
    topic_link,
)
from popmq.console.model import Overview
from popmq.console.page import Console, Page, Request, to
from popmq.console.prometheus import CLUSTER

SHOWN = 10


def show(console: Console, request: Request) -> Page:
    view = console.client.overview()
    nodes = [node for group in view.brokers for node in group.nodes]
    dead = sum(view.dead.values())
    last = view.history[-1] if view.history else None
    return Page(
        "Overview",
        [
            h.h1["Overview"],
            _verdict(view),
            tiles(
                ("Stored now", rate(last.stored) if last else "..."),
                ("Delivered now", rate(last.delivered) if last else "..."),
                ("Lag", number(sum(row.lag for row in view.lags))),
                ("In flight", number(sum(row.in_flight for row in view.lags))),
                ("Oldest ready", age(view.oldest_age_ms)),
                ("Dead letters", h.a(href=to("dead-letters"))[number(dead)]),
                ("Timers", h.a(href=to("timers"))[number(view.timers)]),
                ("Due in 1 h", number(view.timers_in_an_hour)),
                ("Next due", moment(view.next_due_ms, view.now_ms)),
                ("Topics", h.a(href=to("topics"))[number(view.topics)]),
                (
                    "Brokers alive",
                    h.a(href=to("cluster"))[f"{sum(n.alive for n in nodes)} of {len(nodes)}"],
                ),
            ),
            plots(view.history),
            measured(console, request, CLUSTER),
            section(
                "Groups with the oldest messages",
                table(
                    ("Group", "Topic", *LAG_HEADS),
                    [
                        (group_link(row.group), topic_link(row.topic), *lag_cells(row))
                        for row in view.lags[:SHOWN]
                    ],
                    empty="No group has read a topic yet.",
                ),
                h.p[h.a(href=to("groups"))["All groups"]],
            ),
        ],
    )


def _verdict(view: Overview) -> h.Node:
    if view.troubles:
        reasons = h.ul[[h.li[text(trouble)] for trouble in view.troubles]]
        return h.div(class_="notice bad")[h.strong["Not healthy"], reasons]
    if view.notes:
        reasons = h.ul[[h.li[text(note)] for note in view.notes[:SHOWN]]]
        more = len(view.notes) - SHOWN
        return h.div(class_="notice warn")[
            h.strong["Healthy, but have a look"], reasons, more > 0 and f"and {more} more"
        ]
    return notice("good", h.strong["Healthy"], ": every broker group has a master.")
