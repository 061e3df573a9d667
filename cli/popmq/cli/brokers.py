"""`popmq broker list` and `popmq failover`: the master of a broker group, and a change of it."""

from google.protobuf.json_format import MessageToDict

from popmq.cli.resource_names import check_broker_group, client_of
from popmq.cli.terminal.command_line import Args, argument, command, flag, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.output import Row, columns, format_age, print_rows
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

# Left out on narrow terminals, the last one first.
OPTIONAL = ("ADDRESS", "EPOCH", "HEARD", "END")
BROKER_COLUMNS = (
    *("GROUP", "NODE", "ROLE", "EPOCH", "END", "BEHIND", "IN-SYNC", "HEARD", "ADDRESS"),
)


def run_list(args: Args) -> int:
    request = admin.ListBrokersRequest(group=args.group)
    with client_of(args) as client:
        result = client.call_admin(request, admin.ListBrokersReply).found
    print_rows(args, list_rows(result), list_lines(result, wide=args.output == "wide"))
    return 0


def list_lines(reply: pb.ListReplicasReply, *, wide: bool = False) -> list[str]:
    """A row for each broker, then what is wrong."""
    rows = [_row(state, member) for state in reply.groups for member in state.members]
    if not rows:
        return ["no broker group is known"]
    lines = [columns(BROKER_COLUMNS, rows, optional=OPTIONAL, wide=wide)]
    for state in reply.groups:
        for member in state.members:
            if progress := _progress(member):
                lines.append(f"{state.group}: {member.broker.node} {progress}")
            if member.tables_differ_at:
                lines.append(
                    f"{state.group}: {member.broker.node} has other tables than the master at "
                    f"position {member.tables_differ_at}: see its folder `differing` (popmq doctor "
                    "diff)"
                )
        if state.trouble:
            lines.append(f"{state.group}: {state.trouble}")
    return lines


def _row(state: pb.GroupState, member: pb.Member) -> tuple[object, ...]:
    ends = [member.end for member in state.members]
    return (
        state.group,
        member.broker.node or state.group,
        _role(state, member),
        member.broker.epoch,
        member.end,
        max(ends) - member.end,
        "yes" if _is_in_sync(state, member) else "no",
        format_age(member.silent_ms),
        member.broker.address,
    )


def _role(state: pb.GroupState, member: pb.Member) -> str:
    name = pb.BrokerRole.Name(member.role).lower().replace("_", "-")
    marks = [
        mark
        for mark, holds in (("draining", member.broker.draining), ("dead", not member.alive))
        if holds
    ]
    return ", ".join([name, *marks])


def _is_in_sync(state: pb.GroupState, member: pb.Member) -> bool:
    if not state.HasField("record"):
        return member.replicas <= 1
    return member.broker.store_id in state.record.sync_state_set


def _progress(member: pb.Member) -> str:
    """Of a replica that copies what it lacks."""
    whole = member.catch_up_to - member.catch_up_from
    if member.role != pb.COPYING or whole <= 0:
        return ""
    done = max(0, min(member.end, member.catch_up_to) - member.catch_up_from)
    return f"copies: {done * 100 // whole} % of {whole} bytes"


def list_rows(reply: pb.ListReplicasReply) -> list[Row]:
    return [
        MessageToDict(
            state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for state in reply.groups
    ]


def run_failover(args: Args) -> int:
    request = admin.FailoverRequest(
        group=args.group, node=args.to, unclean=args.unclean, dry_run=args.dry_run
    )
    with client_of(args) as client:
        check_broker_group(client, args.group)
        if not args.dry_run:
            loss = ", and what only the SyncStateSet has may be lost" if args.unclean else ""
            confirm(args, f"another broker becomes the master of {args.group}{loss}")
        done = client.call_admin(request, admin.FailoverReply).done
    row = MessageToDict(done, preserving_proto_field_name=True)
    print_rows(args, [row], failover_lines(args.group, done, dry_run=args.dry_run))
    return 0


def failover_lines(group: str, done: pb.FailoverReply, *, dry_run: bool) -> list[str]:
    """What happened, or would, and what is lost by it."""
    lines = [f"- {step}" for step in done.steps]
    would = "would lead" if dry_run else "leads"
    before = f" after {done.from_node}" if done.from_node else ""
    lines.append(f"{done.to_node} {would} {group} in epoch {done.after.epoch}{before}")
    if done.lost_to or done.lost_nodes:
        lines.append(_loss(done, dry_run=dry_run))
    elif done.handed_over:
        lines.append("nothing is lost: the master before hands over all that it confirmed")
    else:
        lines.append("nothing that was confirmed is lost: it was in the SyncStateSet")
    return lines


def _loss(done: pb.FailoverReply, *, dry_run: bool) -> str:
    nodes = ", ".join(done.lost_nodes) or "other brokers"
    bytes_lost = max(0, done.lost_to - done.lost_from)
    what = "would be lost" if dry_run else "is lost"
    return (
        f"{what}: up to {bytes_lost} bytes of log, from {done.lost_from} to {done.lost_to} as far "
        f"as is known, and whatever {nodes} confirmed since; make sure that none of them runs"
    )


broker_list = command(
    "list",
    run_list,
    option("--group", default="", metavar="GROUP", help="This broker group alone."),
    help="Show the broker groups and their replicas: which leads, and which lag.",
    examples=("popmq broker list", "popmq broker list -o json"),
)
failover = command(
    "failover",
    run_failover,
    argument("group"),
    option("--to", default="", metavar="NODE", help="[default: the replica that is furthest]"),
    flag(
        "--unclean",
        help="Also a replica that is not in the SyncStateSet: what only the set has is lost.",
    ),
    flag("--dry-run", help="Only show what would be done."),
    YES,
    help="Make another replica of a broker group its master. Asks on a terminal.",
    examples=("popmq failover broker-a --dry-run", "popmq failover broker-a --to broker-a-1"),
)
