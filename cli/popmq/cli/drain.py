"""`popmq drain GROUP`: a broker group takes no new messages, is consumed to its end, and can go.

Message groups of FIFO topics stay where they are until nothing of their topic is left there: only
then are they given to the other broker groups, so that their order holds.  Its timers the group
hands to the others itself; here it is asked how far it is.
"""

import time
from collections.abc import Sequence

from popmq.cli.client import Client
from popmq.cli.resource_names import check_broker_group, client_of
from popmq.cli.terminal.arguments import DURATION
from popmq.cli.terminal.command_line import Args, argument, command, flag, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.output import Row, print_rows
from popmq.common.protocol.drain_remainder import DrainRemainder, drain_remainder, remainder_text
from popmq.common.wire import admin_pb2 as admin

LOOK_S = 1.0


def run_drain(args: Args) -> int:
    """0 when it is empty or was told to go on, 1 when something is left."""
    with client_of(args) as client:
        check_broker_group(client, args.group)
        if not args.undo:
            confirm(args, f"broker group {args.group} takes no new messages from now on")
        client.call_admin(admin.DrainRequest(group=args.group, undo=args.undo), admin.DrainReply)
        if args.undo:
            text = f"{args.group} takes messages again"
            print_rows(args, [{"group": args.group, "draining": False}], [text])
            return 0
        until_s = time.monotonic() + args.wait / 1000
        while True:
            rest = look(client, args.group)
            text = remainder_text(args.group, rest)
            print_rows(args, [rest_fields(args.group, rest)], [text])
            if rest.is_drained or time.monotonic() >= until_s:
                return 0 if rest.is_drained else 1
            time.sleep(LOOK_S)


def look(client: Client, group: str) -> DrainRemainder:
    """What is left; FIFO topics of which nothing is left are given to the others on the way."""
    reply = client.call_admin(admin.DrainRequest(group=group, look=True), admin.DrainReply)
    topics = client.topics(system=False)
    lag = client.call_admin(admin.LagRequest(), admin.LagReply)
    rest, free = drain_remainder(group, lag, topics, reply)
    for topic in free:
        _give_away(client, topic, group)
    return rest


def _give_away(client: Client, topic: admin.Topic, group: str) -> None:
    others = [broker for broker in topic.brokers if broker != group] or _all_but(client, group)
    altered = admin.Topic(name=topic.name, brokers=others)
    client.topic(admin.AlterTopicRequest(topic=altered))


def _all_but(client: Client, group: str) -> Sequence[str]:
    return [
        state.group
        for state in client.call_admin(
            admin.ListBrokersRequest(group=""), admin.ListBrokersReply
        ).found.groups
        if state.group != group
    ]


def rest_fields(group: str, rest: DrainRemainder) -> Row:
    return {
        "group": group,
        "drained": rest.is_drained,
        "messages": rest.messages,
        "timers": rest.timers,
        "leaving": rest.leaving,
        "moved": rest.moved,
        "waits": rest.waits,
        "transactions": rest.transactions,
        "unknown": rest.unknown,
        "homed": list(rest.homed),
        "dead_letters": rest.dead_letters,
    }


drain = command(
    "drain",
    run_drain,
    argument("group"),
    flag("--undo", help="Let it take messages again."),
    option(
        "--wait",
        type=DURATION,
        default=0,
        metavar="TIME",
        help="Look until it is empty, at most for so long.  [default: one look]",
    ),
    YES,
    help="Empty a broker group, so that it can be removed. Asks on a terminal.",
    examples=("popmq drain broker-b --wait 1h",),
)
