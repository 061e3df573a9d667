"""`popmq explain MESSAGE_ID`: where a message is for each group, why, and what proves it."""

from popmq.cli.resource_names import GROUP, TOPIC, check_names, client_of
from popmq.cli.terminal.command_line import Args, argument, command, option
from popmq.cli.terminal.namespace_option import belongs
from popmq.cli.terminal.output import Row, folded, print_incomplete, print_rows
from popmq.common.errors import Code, Refused
from popmq.common.escaping import escaped
from popmq.common.quantities import iso_time
from popmq.common.wire import admin_pb2 as admin


def run_explain(args: Args) -> int:
    request = admin.ExplainRequest(message_id=args.message_id, group=args.group, topic=args.topic)
    with client_of(args) as client:
        check_names(client, topic=args.topic, group=args.group)
        reply = client.call_admin(request, admin.ExplainReply)
    print_incomplete(reply.incomplete)
    messages = [message for message in reply.messages if belongs(args, message.topic)]
    if not messages:
        where = f"in topic {args.topic}" if args.topic else "in any topic"
        raise Refused(Code.MESSAGE_NOT_FOUND, f"no message {args.message_id} {where}")
    rows = [row for message in messages for row in explained_rows(message)]
    lines = [line for message in messages for line in explained_lines(message)]
    print_rows(args, rows, map(folded, lines))
    return 0


def explained_lines(message: admin.ExplainedMessage) -> list[str]:
    place = f"offset {message.queue_offset}" if message.queue_offset >= 0 else "(not there yet)"
    lines = [
        f"message in topic {message.topic} broker {message.broker} queue {message.queue_id} "
        f"{place}, stored {iso_time(message.stored_ms)}"
    ]
    if not message.groups:
        lines.append("  no group reads this topic (`--group G` tells of lite topics that ended)")
    for group in message.groups:
        lines += _group_lines(group)
    return lines


def _group_lines(explanation: admin.Explained) -> list[str]:
    head = f"  {explanation.group or 'every group'}: {explanation.state}"
    if explanation.since_ms:
        head += f" since {iso_time(explanation.since_ms)}"
    if explanation.until_ms:
        head += f" until {iso_time(explanation.until_ms)}"
    if explanation.client:
        head += f" by client {escaped(explanation.client)}"
    lines = [head, f"    why:  {explanation.text}", f"    next: {explanation.next}"]
    for proof in explanation.proofs:
        place = f"    log position {proof.position}: {proof.what}"
        when = f" at {iso_time(proof.wall_ms)}"
        lines.append(place + when + (f", {escaped(proof.text)}" if proof.text else ""))
    return lines


def explained_rows(message: admin.ExplainedMessage) -> list[Row]:
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
        return [{"message": place, "group": None, "state": None}]
    return [
        {
            "message": place,
            "group": group.group or None,
            "state": group.state,
            "since_ms": group.since_ms or None,
            "until_ms": group.until_ms or None,
            "attempt": group.attempt,
            "client": group.client or None,
            "why": group.text,
            "next": group.next,
            "proofs": [
                {
                    "what": proof.what,
                    "position": proof.position,
                    "wall_ms": proof.wall_ms,
                    "text": proof.text,
                }
                for proof in group.proofs
            ],
        }
        for group in message.groups
    ]


explain = command(
    "explain",
    run_explain,
    argument("message_id"),
    option("--group", default="", type=GROUP, metavar="G", help="For this group alone."),
    option("--topic", default="", type=TOPIC, metavar="T", help="Look in this topic alone."),
    help="Tell what became of a message, for each group, and what proves it.",
    examples=("popmq explain 01ABCDEF", "popmq explain 01ABCDEF --group billing -o yaml"),
    namespaced=True,
)
