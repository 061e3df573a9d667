"""`popmq clients`: which clients are connected, at all proxies together."""

from collections.abc import Sequence
from contextlib import suppress

from popmq.cli.client import Client
from popmq.cli.resource_names import GROUP, TOPIC, check_names, client_of
from popmq.cli.terminal.command_line import Args, command, option
from popmq.cli.terminal.namespace_option import belongs
from popmq.cli.terminal.output import (
    Row,
    columns,
    format_age,
    print_incomplete,
    print_note,
    print_rows,
)
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin

CLIENT_COLUMNS = (
    *("CLIENT", "KIND", "GROUP", "TOPICS", "LANGUAGE", "VERSION", "PROTOCOL"),
    *("ADDRESS", "PROXY", "SINCE", "HEARD"),
)
# Left out on narrow terminals, the last one first.
OPTIONAL = (
    *("KIND", "GROUP", "PROXY", "HEARD", "ADDRESS", "LANGUAGE", "TOPICS"),
    *("SINCE", "VERSION", "PROTOCOL"),
)
MEMBER_COLUMNS = ("CLIENT", "KIND", "LANGUAGE", "ADDRESS", "PROXY", "SINCE", "HEARD")
USERS_SHOWN = 5  # of a topic that is deleted
USERS_S = 0.5  # for the list of them: the deletion itself may wait for a broker group
SHOWN_NAMES = 2  # in one cell, unless all columns are wanted


def run_clients(args: Args) -> int:
    with client_of(args) as client:
        reply = list_clients(client, args)
        if not reply.clients:
            check_names(client, topic=args.topic, group=args.group)
    print_incomplete(reply.incomplete)
    lines = client_lines(reply, wide=args.output == "wide") or [_empty_text(args)]
    print_rows(args, client_rows(reply), lines)
    return 0


def list_clients(client: Client, args: Args, timeout_s: float = 0) -> admin.ListClientsReply:
    """Of all brokers, page by page."""
    request = admin.ListClientsRequest(group=args.group, topic=args.topic)
    whole = admin.ListClientsReply()
    while True:
        reply = client.call_admin(request, admin.ListClientsReply, timeout_s)
        kept = (item for item in reply.clients if belongs(args, *_groups(item), *_topics(item)))
        whole.clients.extend(kept)
        whole.now_ms = reply.now_ms
        whole.incomplete = whole.incomplete or reply.incomplete
        if not reply.until:
            return whole
        request.after = reply.until


def users_of_topic(client: Client, args: Args) -> Sequence[admin.ConnectedClient]:
    """Connected clients that send to the topic or subscribe to it. Names who does not answer."""
    asked = Args(**{**vars(args), "group": "", "topic": args.name})
    with suppress(PopmqError):  # the deletion needs no list
        reply = list_clients(client, asked, USERS_S)
        if reply.incomplete:
            print_note(f"there may be more clients: {reply.incomplete}")
        return reply.clients
    return ()


def users_text(users: Sequence[admin.ConnectedClient]) -> str:
    if not users:
        return ""
    shown = [f"{user.client_id} ({user.kind or 'kind unknown'})" for user in users[:USERS_SHOWN]]
    more = f", and {len(users) - USERS_SHOWN} more" if len(users) > USERS_SHOWN else ""
    return f"; connected clients that use it: {', '.join(shown)}{more}"


def client_lines(reply: admin.ListClientsReply, *, wide: bool = False) -> list[str]:
    """A table, and how many clients are left out of it; empty when there is no client."""
    shown = [client for client in reply.clients if wide or not _has_only_called(client)]
    cells = [_cells(client, reply.now_ms, wide=wide) for client in shown]
    lines = [columns(CLIENT_COLUMNS, cells, optional=OPTIONAL, wide=wide)] if shown else []
    if hidden := len(reply.clients) - len(shown):
        subject = f"{hidden} client{'s' if hidden != 1 else ''}"
        lines += [] if shown else ["no client is connected that has told its groups or topics"]
        lines.append(f"{subject} without them called in the last minute (-o wide shows them)")
    return lines


def _has_only_called(client: admin.ConnectedClient) -> bool:
    """As `popmq send` does, which has ended since: it told neither what it is nor its groups."""
    return not (client.kind or client.groups or client.topics)


def member_lines(reply: admin.ListClientsReply) -> list[str]:
    """The clients of one group."""
    rows = [_cells(client, reply.now_ms, wide=False) for client in reply.clients]
    kept = [CLIENT_COLUMNS.index(name) for name in MEMBER_COLUMNS]
    header = ("MEMBER", *MEMBER_COLUMNS[1:])
    cells = [[row[at] for at in kept] for row in rows]
    return [columns(header, cells, optional=OPTIONAL)] if rows else ["no member is connected"]


def client_rows(reply: admin.ListClientsReply) -> list[Row]:
    return [
        {
            "client_id": client.client_id,
            "kind": client.kind,
            "protocol": client.protocol,
            "language": client.language,
            "version": client.version,
            "groups": [
                {
                    "name": group.name,
                    "subscriptions": [
                        {"topic": entry.topic, "filter": entry.filter}
                        for entry in group.subscriptions
                    ],
                }
                for group in client.groups
            ],
            "topics": list(client.topics),
            "connections": [
                {
                    "proxy": connection.proxy,
                    "address": connection.address,
                    "since_ms": connection.since_ms,
                    "silent_ms": connection.silent_ms,
                }
                for connection in client.connections
            ],
            "shortened": client.shortened,
        }
        for client in reply.clients
    ]


def _empty_text(args: Args) -> str:
    named = f" of group {args.group}" if args.group else ""
    named += f" that uses topic {args.topic}" if args.topic else ""
    return f"no client{named} is connected"


def _groups(client: admin.ConnectedClient) -> list[str]:
    return [group.name for group in client.groups]


def _topics(client: admin.ConnectedClient) -> list[str]:
    """That it publishes to or is subscribed to."""
    subscribed = (entry.topic for group in client.groups for entry in group.subscriptions)
    return list(dict.fromkeys((*client.topics, *subscribed)))


def _cells(client: admin.ConnectedClient, now_ms: int, *, wide: bool) -> tuple[object, ...]:
    last, *others = client.connections or [admin.ClientConnection()]
    more = f" +{len(others)}" if others else ""
    return (
        client.client_id,
        client.kind or "-",
        _names(_groups(client), wide=wide),
        _names(_topics(client), wide=wide, shortened=client.shortened),
        client.language.lower() or "-",
        client.version or "-",
        client.protocol or "-",
        f"{last.address or '-'}{more}",
        f"{last.proxy or '-'}{more}",
        format_age(max(0, now_ms - last.since_ms)),
        format_age(last.silent_ms),
    )


def _names(names: Sequence[str], *, wide: bool, shortened: bool = False) -> str:
    shown = names if wide else names[:SHOWN_NAMES]
    more = f" +{len(names) - len(shown)}" if len(names) > len(shown) else ""
    return f"{','.join(shown) or '-'}{more}{' ...' if shortened else ''}"


clients = command(
    "clients",
    run_clients,
    option("--group", default="", type=GROUP, metavar="G", help="Consumers of this group alone."),
    option("--topic", default="", type=TOPIC, metavar="T", help="Clients that use this topic."),
    help="List the connected clients of all proxies.",
    examples=("popmq clients", "popmq clients --group billing -o wide", "popmq clients -o json"),
    namespaced=True,
)
