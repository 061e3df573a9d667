"""`popmq drain GROUP`: empties a broker group, which takes no new messages, so that it can go.

A FIFO topic stays on the broker group until none of its messages is left there.  Only then is it
assigned to the other broker groups, so that the order of its message groups holds.  The broker
group moves its timers itself; this command shows the progress.
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

POLL_S = 1.0


def run_drain(args: Args) -> int:
    """Exit code: 0 when the broker group is empty, or with --undo; 1 when something is left."""
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
            remainder = read_remainder(client, args.group)
            text = remainder_text(args.group, remainder)
            print_rows(args, [remainder_fields(args.group, remainder)], [text])
            if remainder.is_drained or time.monotonic() >= until_s:
                return 0 if remainder.is_drained else 1
            time.sleep(POLL_S)


def read_remainder(client: Client, group: str) -> DrainRemainder:
    """What is left. Assigns FIFO topics of which nothing is left to the other broker groups."""
    reply = client.call_admin(admin.DrainRequest(group=group, look=True), admin.DrainReply)
    topics = client.topics(system=False)
    lag = client.call_admin(admin.LagRequest(), admin.LagReply)
    remainder, emptied = drain_remainder(group, lag, topics, reply)
    for topic in emptied:
        _reassign(client, topic, group)
    return remainder


def _reassign(client: Client, topic: admin.Topic, group: str) -> None:
    others = [broker for broker in topic.brokers if broker != group] or _other_groups(client, group)
    altered = admin.Topic(name=topic.name, brokers=others)
    client.topic(admin.AlterTopicRequest(topic=altered))


def _other_groups(client: Client, group: str) -> Sequence[str]:
    return [
        state.group
        for state in client.call_admin(
            admin.ListBrokersRequest(group=""), admin.ListBrokersReply
        ).found.groups
        if state.group != group
    ]


def remainder_fields(group: str, remainder: DrainRemainder) -> Row:
    return {
        "group": group,
        "drained": remainder.is_drained,
        "messages": remainder.messages,
        "timers": remainder.timers,
        "leaving": remainder.leaving,
        "moved": remainder.moved,
        "waits": remainder.waits,
        "transactions": remainder.transactions,
        "unknown": remainder.unknown,
        "homed": list(remainder.homed),
        "dead_letters": remainder.dead_letters,
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
        help="Wait until it is empty, at most for this time.  [default: check once]",
    ),
    YES,
    help="Empty a broker group, so that it can be removed. Asks on a terminal.",
    examples=("popmq drain broker-b --wait 1h",),
)
