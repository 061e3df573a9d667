"""`--namespace`: the commands ask for whole names, as brokers know them, and print those."""

import argparse

from popmq.common.errors import Code, Refused
from popmq.common.namespaces import check_namespace, without_namespace, wrap_namespace

# What arguments call a topic or a consumer group.
FIELDS = ("topic", "group", "name")


def arguments(common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Those common to all commands, and the namespace."""
    parser = argparse.ArgumentParser(add_help=False, parents=[common])
    parser.add_argument(
        "--namespace",
        default="",
        metavar="NS",
        help="of the topics and groups that are named, as clients have it (they are NS%%NAME)",
    )
    return parser


def name_whole(args: argparse.Namespace) -> None:
    """Raises BAD_REQUEST for what can be no namespace."""
    namespace = getattr(args, "namespace", "")
    if not namespace:
        return
    check_namespace(namespace)
    for field in FIELDS:
        if isinstance(name := getattr(args, field, None), str):
            setattr(args, field, wrap_namespace(namespace, name))


def belongs(args: argparse.Namespace, *names: str) -> bool:
    """Whether one of these is a name of the namespace; without one everything belongs."""
    return not args.namespace or any(without_namespace(args.namespace, one) for one in names)


def need_topic(args: argparse.Namespace) -> None:
    """For what brokers add up over all topics."""
    if args.namespace and not args.topic:
        raise Refused(Code.BAD_REQUEST, f"--namespace {args.namespace} needs --topic T here")
