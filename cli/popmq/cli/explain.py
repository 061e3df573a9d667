"""`popmq explain MESSAGE_ID`: where a message is for each group, why, and what proves it."""

import argparse
import json
from datetime import UTC, datetime

from popmq.cli.client import Client
from popmq.cli.messages import Subparsers
from popmq.cli.metadata import say_incomplete
from popmq.cli.namespace_option import belongs
from popmq.common.errors import Code, Refused
from popmq.common.wire import admin_pb2 as admin


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "explain", parents=[common], help="what became of a message, for each group"
    )
    parser.set_defaults(run=run_explain)
    parser.add_argument("message_id", metavar="MESSAGE_ID")
    parser.add_argument("--group", default="", metavar="G", help="for this group alone")
    parser.add_argument("--topic", default="", metavar="T", help="look in this topic alone")


def run_explain(args: argparse.Namespace) -> int:
    request = admin.ExplainRequest(message_id=args.message_id, group=args.group, topic=args.topic)
    with Client(args.endpoint) as client:
        reply = client.call_admin(request, admin.ExplainReply)
    say_incomplete(reply.incomplete)
    found = [one for one in reply.messages if belongs(args, one.topic)]
    for message in found:
        for line in explained_json(message) if args.json else explained_lines(message):
            print(line)
    if not found:
        where = f"in topic {args.topic}" if args.topic else "in any topic"
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {args.message_id} {where}")
    return 0


def explained_lines(message: admin.ExplainedMessage) -> list[str]:
    place = f"offset {message.queue_offset}" if message.queue_offset >= 0 else "(not there yet)"
    lines = [
        f"message in topic {message.topic} broker {message.broker} queue {message.queue_id} "
        f"{place}, stored {_time(message.stored_ms)}"
    ]
    if not message.groups:
        lines.append("  no group reads this topic (`--group G` tells of lite topics that ended)")
    for told in message.groups:
        lines += _group_lines(told)
    return lines


def _group_lines(told: admin.Explained) -> list[str]:
    head = f"  {told.group or 'every group'}: {told.state}"
    if told.since_ms:
        head += f" since {_time(told.since_ms)}"
    if told.until_ms:
        head += f" until {_time(told.until_ms)}"
    if told.client:
        head += f" by client {told.client}"
    lines = [head, f"    why:  {told.text}", f"    next: {told.next}"]
    for proof in told.proofs:
        place = f"    log position {proof.position}: {proof.what}"
        when = f" at {_time(proof.wall_ms)}"
        lines.append(place + when + (f", {proof.text}" if proof.text else ""))
    return lines


def explained_json(message: admin.ExplainedMessage) -> list[str]:
    """One object for each group."""
    place = {
        "topic": message.topic,
        "broker": message.broker,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "stored_ms": message.stored_ms,
        "position": message.position,
    }
    if not message.groups:
        return [json.dumps({"message": place, "group": None, "state": None})]
    return [
        json.dumps(
            {
                "message": place,
                "group": told.group or None,
                "state": told.state,
                "since_ms": told.since_ms or None,
                "until_ms": told.until_ms or None,
                "attempt": told.attempt,
                "client": told.client or None,
                "why": told.text,
                "next": told.next,
                "proofs": [
                    {
                        "what": proof.what,
                        "position": proof.position,
                        "wall_ms": proof.wall_ms,
                        "text": proof.text,
                    }
                    for proof in told.proofs
                ],
            },
            ensure_ascii=False,
        )
        for told in message.groups
    ]


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
