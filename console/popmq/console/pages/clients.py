"""`/clients`: who is connected, with what, and what each reads."""

import htpy as h

from popmq.console.markup import age, link, missing, moment, search, table, text
from popmq.console.model import ConnectedClient
from popmq.console.page import Console, Page, Request, now_ms, to

HEADS = (
    *("Client", "Kind", "Language", "Reads", "Publishes to", "Address", "Proxy"),
    *("Connected", "Heard"),
)


def show(console: Console, request: Request) -> Page:
    words = request.query.get("q", "")
    group, topic = request.query.get("group", ""), request.query.get("topic", "")
    clients, until, lack = console.client.clients(
        group=group, topic=topic, after=request.query.get("after", "")
    )
    shown = [client for client in clients if words.lower() in client.client_id.lower()]
    more = to("clients", q=words, group=group, topic=topic, after=until)
    return Page(
        "Clients",
        [
            h.h1["Clients"],
            search(request, "clients"),
            missing(lack),
            table(HEADS, map(_cells, shown), empty="No client is connected."),
            bool(until) and h.p[h.a(href=more, rel="next")["Next clients"]],
        ],
    )


def _cells(client: ConnectedClient) -> tuple[h.Node, ...]:
    reads = [
        h.li[
            link(to("groups", group), group),
            bool(topic) and [" from ", link(to("topics", topic), topic)],
            bool(wanted) and f" where {text(wanted)}",
        ]
        for group, topic, wanted in client.subscriptions
    ]
    topics = [h.li[link(to("topics", topic), topic)] for topic in client.topics]
    return (
        text(client.client_id),
        text(client.kind or "-"),
        text(f"{client.language} {client.version}".strip() or "-"),
        h.ul[reads] if reads else "-",
        h.ul[topics] if topics else "-",
        text(client.address or "-"),
        text(client.proxy or "-"),
        moment(client.since_ms, now_ms()),
        age(client.silent_ms),
    )
