"""`popmq group resume | skip | dead-letter`: what is to become of a parked message group."""

import argparse
import json
from collections.abc import Sequence

from popmq.cli.client import Client
from popmq.cli.messages import Subparsers
from popmq.common.wire import admin_pb2 as admin

ACTIONS = {
    "resume": "receive a parked message group again, its parked messages first",
    "skip": "forget the parked messages of a message group",
    "dead-letter": "make the parked messages of a message group dead letters",
}
COLUMNS = ("broker", "topic", "key", "queue", "messages", "parked_ms", "state")

Fields = dict[str, str | int]


def add_actions(actions: Subparsers, common: argparse.ArgumentParser) -> None:
    for name, text in ACTIONS.items():
        parser = actions.add_parser(name, parents=[common], help=text)
        parser.add_argument("name", metavar="GROUP")
        parser.add_argument("--topic", required=True, metavar="T")
        parser.add_argument(
            "--key", required=True, metavar="K", help="the message group; '' for messages without"
        )
        parser.set_defaults(run=run_unpark, action=name)


def run_unpark(args: argparse.Namespace) -> int:
    request = admin.UnparkRequest(
        group=args.name, topic=args.topic, key=args.key, action=args.action
    )
    with Client(args.endpoint) as client:
        messages = client.unpark(request)
    if args.json:
        print(json.dumps({"action": args.action, "messages": messages}))
    else:
        print(f"{args.action}: {messages} messages of message group {args.key!r}")
    return 0


def parked_fields(parked: Sequence[admin.ParkedKey]) -> list[Fields]:
    return [
        {
            "broker": one.broker,
            "topic": one.topic,
            "key": one.key,
            "queue": one.queue_id,
            "messages": one.messages,
            "parked_ms": one.parked_ms,
            "state": one.state,
        }
        for one in parked
    ]
