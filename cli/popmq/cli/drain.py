"""`popmq drain GROUP`: a broker group takes no new messages, is consumed to its end, and can go.

Message groups of FIFO topics stay where they are until nothing of their topic is left there: only
then are they given to the other broker groups, so that their order holds.  Its timers the group
hands to the others itself; here it is asked how far it is.
"""

import argparse
import json
import time
from collections.abc import Sequence

from popmq.cli.client import Client
from popmq.cli.messages import Subparsers, duration_argument
from popmq.common.drain_remainder import DrainRemainder, drain_remainder, remainder_text
from popmq.common.wire import admin_pb2 as admin

LOOK_S = 1.0


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    drain = subparsers.add_parser(
        "drain", parents=[common], help="empty a broker group, so that it can be removed"
    )
    drain.add_argument("group", metavar="GROUP")
    drain.add_argument("--undo", action="store_true", help="let it take messages again")
    drain.add_argument(
        "--wait",
        type=duration_argument,
        default=0,
        metavar="TIME",
        help="look until it is empty, at most for so long (default: one look)",
    )
    drain.set_defaults(run=run_drain)


def run_drain(args: argparse.Namespace) -> int:
    """0 when it is empty or was told to go on, 1 when something is left."""
    with Client(args.endpoint) as client:
        client.call_admin(admin.DrainRequest(group=args.group, undo=args.undo), admin.DrainReply)
        if args.undo:
            print(f"{args.group} takes messages again")
            return 0
        until_s = time.monotonic() + args.wait / 1000
        while True:
            rest = look(client, args.group)
            print(rest_json(args.group, rest) if args.json else remainder_text(args.group, rest))
            if rest.is_drained or time.monotonic() >= until_s:
                return 0 if rest.is_drained else 1
            time.sleep(LOOK_S)


def look(client: Client, group: str) -> DrainRemainder:
    """What is left; FIFO topics of which nothing is left are given to the others on the way."""
    told = client.call_admin(admin.DrainRequest(group=group, look=True), admin.DrainReply)
    topics = client.topics(system=False)
    lag = client.call_admin(admin.LagRequest(), admin.LagReply)
    rest, free = drain_remainder(group, lag, topics, told)
    for topic in free:
        _give_away(client, topic, group)
    return rest


def _give_away(client: Client, topic: admin.Topic, group: str) -> None:
    others = [one for one in topic.brokers if one != group] or _all_but(client, group)
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


def rest_json(group: str, rest: DrainRemainder) -> str:
    return json.dumps(
        {
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
    )
