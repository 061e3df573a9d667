"""`popmq broker list` and `popmq failover`: who leads a broker group, and who shall."""

import argparse
import json

from google.protobuf.json_format import MessageToDict

from popmq.cli.client import Client
from popmq.cli.messages import Subparsers
from popmq.cli.metadata import columns, format_duration
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

BROKER_COLUMNS = (
    *("GROUP", "NODE", "ROLE", "EPOCH", "END", "BEHIND", "IN-SYNC", "HEARD", "ADDRESS"),
)


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    """The role's command, if it is there, gets `list` below it."""
    broker = subparsers.choices.get("broker")
    if broker is not None:
        _add_list(broker.add_subparsers(metavar="", dest="broker_command"), common)
    failover = subparsers.add_parser(
        "failover", parents=[common], help="make another replica of a broker group its master"
    )
    failover.add_argument("group", metavar="GROUP")
    failover.add_argument(
        "--to", default="", metavar="NODE", help="without it: the one that is furthest"
    )
    failover.add_argument(
        "--unclean",
        action="store_true",
        help="also one that is not in the SyncStateSet: what only the set has is lost",
    )
    failover.add_argument("--dry-run", action="store_true", help="only say what would be done")
    failover.set_defaults(run=run_failover)


def _add_list(below: Subparsers, common: argparse.ArgumentParser) -> None:
    listing = below.add_parser(
        "list", parents=[common], help="the broker groups, their replicas, who leads and who lags"
    )
    listing.add_argument("--group", default="", metavar="GROUP")
    listing.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        found = client.call_admin(
            admin.ListBrokersRequest(group=args.group), admin.ListBrokersReply
        ).found
    for line in list_json(found) if args.json else list_lines(found):
        print(line)
    return 0


def list_lines(found: pb.ListReplicasReply) -> list[str]:
    """A row for each broker, then what is wrong."""
    rows = [_row(state, member) for state in found.groups for member in state.members]
    lines = [columns(BROKER_COLUMNS, rows)]
    for state in found.groups:
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
    ends = [one.end for one in state.members]
    heard = format_duration(member.silent_ms)
    return (
        state.group,
        member.broker.node or state.group,
        _role(state, member),
        member.broker.epoch,
        member.end,
        max(ends) - member.end,
        "yes" if _is_in_sync(state, member) else "no",
        heard if member.alive else f"{heard}, dead",
        member.broker.address,
    )


def _role(state: pb.GroupState, member: pb.Member) -> str:
    name = pb.BrokerRole.Name(member.role).lower().replace("_", "-")
    return f"{name}, draining" if member.broker.draining else name


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


def list_json(found: pb.ListReplicasReply) -> list[str]:
    return [
        json.dumps(
            MessageToDict(
                state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
        for state in found.groups
    ]


def run_failover(args: argparse.Namespace) -> int:
    request = admin.FailoverRequest(
        group=args.group, node=args.to, unclean=args.unclean, dry_run=args.dry_run
    )
    with Client(args.endpoint) as client:
        done = client.call_admin(request, admin.FailoverReply).done
    if args.json:
        print(json.dumps(MessageToDict(done, preserving_proto_field_name=True)))
        return 0
    for line in failover_lines(args.group, done, dry_run=args.dry_run):
        print(line)
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
