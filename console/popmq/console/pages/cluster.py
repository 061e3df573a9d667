"""`/cluster`: broker groups and their replicas; planned failover with its dry run, and drain."""

import htpy as h

from popmq.console.markup import (
    age,
    asked,
    choice,
    done,
    facts,
    form,
    notice,
    number,
    section,
    size,
    table,
    text,
)
from popmq.console.model import BrokerGroup, Failover
from popmq.console.page import Console, Page, Redirect, Request, bad_input, to

HEADS = (
    *("Node", "Role", "In sync", "#Epoch", "#End of log", "#Behind", "#Not confirmed"),
    *("#Heard", "Address"),
)


def show(console: Console, request: Request) -> Page:
    groups = console.client.brokers()
    return Page(
        "Cluster",
        [
            h.h1["Cluster"],
            [_group(console, group) for group in groups]
            or notice("bad", "No broker group is known."),
        ],
    )


def _group(console: Console, group: BrokerGroup) -> h.Node:
    rows = [
        (
            text(node.node),
            h.span(class_="state good" if node.leads else "state")[_role(node.role, node.alive)],
            "yes" if node.in_sync else "no",
            number(node.epoch),
            number(node.end),
            size(node.behind),
            size(max(0, node.end - node.confirmed)),
            age(node.silent_ms),
            text(node.address),
        )
        for node in group.nodes
    ]
    differ = [node.node for node in group.nodes if node.tables_differ]
    return section(
        f"Broker group {text(group.name)}",
        bool(group.trouble) and notice("bad", text(group.trouble)),
        bool(differ) and notice("bad", f"Other tables than the master: {text(', '.join(differ))}"),
        group.draining
        and notice(
            "warn",
            "This group is drained: it takes no new messages. ",
            text(console.client.drain_rest(group.name)),
        ),
        table(HEADS, rows, empty="It has no broker."),
        h.div(class_="actions")[_failover_form(group), _drain_form(group)],
    )


def _role(role: str, alive: bool) -> str:
    return role if alive else f"{role}, dead"


def _failover_form(group: BrokerGroup) -> h.Node:
    nodes = [n.node for n in group.nodes if n.in_sync and n.alive and not n.leads]
    if not nodes:
        return None
    return form(
        to("cluster"),
        "Preview the failover",
        choice("New master", "node", nodes),
        do="failover",
        group=group.name,
    )


def _drain_form(group: BrokerGroup) -> h.Node:
    what, label = ("undrain", "End the drain") if group.draining else ("drain", "Drain")
    return form(to("cluster"), label, do=what, group=group.name)


def act(console: Console, request: Request) -> Page | Redirect:
    group = request.sent("group")
    match request.sent("do"):
        case "failover":
            return _failover(console, request, group)
        case "drain" | "undrain" as what:
            return _drain(console, request, group, undo=what == "undrain")
        case other:
            raise bad_input(f"{other[:40]!r} is no action of the cluster")


def _failover(console: Console, request: Request, group: str) -> Page:
    node = request.sent("node")
    if not node:
        raise bad_input("no broker is named that shall become the master")
    if request.sent("sure"):
        made = console.client.failover(group, node, dry_run=False)
        return done(f"{text(made.to_node)} leads {text(group)}", to("cluster"), _steps(made))
    would = console.client.failover(group, node, dry_run=True)
    return asked(
        f"Make {text(would.to_node)} the master of {text(group)}?",
        to("cluster"),
        "Fail over 1 broker group",
        to("cluster"),
        notice("warn", "Sends and receives of this broker group wait until the new master serves."),
        _steps(would),
        do="failover",
        group=group,
        node=node,
    )


def _steps(failover: Failover) -> h.Node:
    known: dict[str, h.Node] = {
        "master before": text(failover.from_node or "-"),
        "master after": text(failover.to_node),
        "epoch after": number(failover.epoch),
    }
    return [
        h.p[text(failover.loss[:1].upper() + failover.loss[1:]), "."],
        facts(known),
        h.ol[[h.li[text(step)] for step in failover.steps]],
    ]


def _drain(console: Console, request: Request, group: str, *, undo: bool) -> Page | Redirect:
    if request.sent("sure"):
        console.client.drain(group, undo=undo)
        return Redirect(to("cluster"))
    words = "takes new messages again" if undo else "takes no new messages from now on"
    return asked(
        f"{'End the drain of' if undo else 'Drain'} broker group {text(group)}?",
        to("cluster"),
        "End the drain" if undo else "Drain 1 broker group",
        to("cluster"),
        notice("warn", f"Broker group {text(group)} {words}."),
        do=request.sent("do"),
        group=group,
    )
