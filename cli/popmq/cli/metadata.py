"""`popmq topic` and `popmq group`: create, alter, delete, list and show.

What `alter` is not told stays as it is; in the request such a field is empty.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from popmq.cli.client import Client, GroupRequest, TopicRequest
from popmq.cli.messages import Subparsers, count_argument, duration_argument
from popmq.cli.namespace_option import belongs
from popmq.common.back_off import INITIAL_MS, MAX_MS, MULTIPLIER_MILLI
from popmq.common.wire import admin_pb2 as admin

TOPIC_TYPES = ("normal", "fifo", "delay", "transaction", "priority", "lite", "mixed")
GROUP_TYPES = ("normal", "fifo")
PERMISSIONS = ("rw", "r", "w", "none")
STARTS = ("oldest", "newest")
CHECK_POINTS = ("durable", "buffered")
DURABILITIES = ("disk", "memory")

ACTIONS = {
    "create": "make a new one",
    "alter": "change what is given, leave the rest",
    "delete": "delete it and what belongs to it",
    "show": "its settings",
}

TOPIC_COLUMNS = (
    *("name", "type", "queues", "permission", "retention", "durability", "lite"),
    "brokers",
)
GROUP_COLUMNS = (
    *("name", "type", "max_attempts", "start", "check_points"),
    *("retry", "back_off_ms"),
)
RETRIES = ("customised", "exponential")

Fields = dict[str, str | int | list[int]]
Run = Callable[[argparse.Namespace], int]


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    _add_topic(subparsers.add_parser("topic", help="create, change and list topics"), common)
    _add_group(subparsers.add_parser("group", help="create, change and list groups"), common)


def _add_topic(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    create = _action(actions, common, "create", on_topic(admin.CreateTopicRequest))
    create.add_argument("--type", choices=TOPIC_TYPES, default="normal")
    create.add_argument(
        "--queues",
        type=count_argument,
        default=0,
        metavar="N",
        help="if it is not said: as the setting topic.queues says (8)",
    )
    create.add_argument("--permission", choices=PERMISSIONS, default="rw")
    create.add_argument(
        "--durability",
        choices=DURABILITIES,
        default="disk",
        help="what a send waits for: disks, or the memory of all in-sync replicas",
    )
    alter = _action(actions, common, "alter", on_topic(admin.AlterTopicRequest))
    alter.add_argument("--type", choices=TOPIC_TYPES, default="")
    alter.add_argument("--queues", type=count_argument, default=0, metavar="N")
    alter.add_argument("--permission", choices=PERMISSIONS, default="")
    alter.add_argument("--durability", choices=DURABILITIES, default="")
    for one in (create, alter):
        one.add_argument(
            "--brokers",
            type=broker_groups_argument,
            default=(),
            metavar="broker-a,broker-b",
            help="the broker groups that message groups and lite topics are placed over (create: "
            "all that take messages); altered, keys lose their order unless all is consumed",
        )
        one.add_argument(
            "--retention",
            type=retention_argument,
            default=0,
            metavar="24h",
            help="how long messages are kept; `store`: as long as the store keeps any",
        )
        one.add_argument(
            "--lite-ttl",
            type=lite_ttl_argument,
            default=0,
            metavar="3d",
            help="of type lite: how long a lite topic lives without a message; `default`: as the "
            "setting lite.ttl_ms says",
        )
    _action(actions, common, "delete", on_topic(admin.DeleteTopicRequest))
    _action(actions, common, "show", on_topic(admin.DescribeTopicRequest))
    every = actions.add_parser("list", parents=[common], help="all there are")
    every.set_defaults(run=run_topic_list)
    every.add_argument("--system", action="store_true", help="popmq's own topics too")


def _add_group(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    create = _action(actions, common, "create", on_group(admin.CreateGroupRequest))
    create.add_argument("--type", choices=GROUP_TYPES, default="normal")
    create.add_argument(
        "--max-attempts",
        type=count_argument,
        default=0,
        metavar="N",
        help="if it is not said: as the setting group.max_attempts says (17)",
    )
    create.add_argument("--start", choices=STARTS, default="oldest")
    _add_retry(create)
    create.set_defaults(complete=True)
    create.add_argument("--check-points", choices=CHECK_POINTS, default="durable")
    alter = _action(actions, common, "alter", on_group(admin.AlterGroupRequest))
    alter.add_argument("--type", choices=GROUP_TYPES, default="")
    alter.add_argument("--max-attempts", type=count_argument, default=0, metavar="N")
    alter.add_argument("--start", choices=STARTS, default="")
    _add_retry(alter)
    alter.set_defaults(complete=False)
    alter.add_argument("--check-points", choices=CHECK_POINTS, default="")
    _action(actions, common, "delete", on_group(admin.DeleteGroupRequest))
    _action(actions, common, "show", run_group_show)
    every = actions.add_parser("list", parents=[common], help="all there are")
    every.set_defaults(run=run_group_list)
    add_actions(actions, common)


def _add_retry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--back-off",
        type=back_off_argument,
        default=(),
        metavar="1s,5s,10s",
        help="customised steps: the wait after each failed delivery",
    )
    parser.add_argument("--retry", choices=RETRIES, default="")
    only = "; with an exponential retry"
    parser.add_argument(
        "--initial", type=duration_argument, metavar="1s", help=f"the first wait{only}"
    )
    parser.add_argument("--max", type=duration_argument, metavar="2h", help=f"the longest{only}")
    parser.add_argument(
        "--multiplier", type=multiplier_argument, metavar="2", help=f"each wait to the next{only}"
    )
    parser.add_argument(
        "--jitter", type=percent_argument, metavar="20%", help=f"up to so much longer{only}"
    )


def _action(
    actions: Subparsers, common: argparse.ArgumentParser, name: str, run: Run
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, parents=[common], help=ACTIONS[name])
    parser.add_argument("name", metavar="NAME")
    parser.set_defaults(run=run)
    return parser


def on_topic(kind: type[TopicRequest]) -> Run:
    """A command that asks for one topic and prints what became of it."""

    def run(args: argparse.Namespace) -> int:
        request: TopicRequest
        if issubclass(kind, (admin.CreateTopicRequest, admin.AlterTopicRequest)):
            request = kind(topic=topic_of(args))
        else:
            request = kind(name=args.name)
        with Client(args.endpoint) as client:
            topic = client.topic(request)
        if kind is admin.DeleteTopicRequest:
            _print_deleted("topic", args)
        else:
            _print([topic_fields(topic)], TOPIC_COLUMNS, as_json=args.json)
        return 0

    return run


def on_group(kind: type[GroupRequest]) -> Run:
    """The same for one group."""

    def run(args: argparse.Namespace) -> int:
        request: GroupRequest
        if issubclass(kind, (admin.CreateGroupRequest, admin.AlterGroupRequest)):
            request = kind(group=group_of(args))
        else:
            request = kind(name=args.name)
        with Client(args.endpoint) as client:
            group = client.group(request)
        if kind is admin.DeleteGroupRequest:
            _print_deleted("group", args)
        else:
            _print([group_fields(group)], GROUP_COLUMNS, as_json=args.json)
        return 0

    return run


def run_group_show(args: argparse.Namespace) -> int:
    """Its settings and, if there are any, the message groups that are parked for it."""
    with Client(args.endpoint) as client:
        reply = client.call_admin(
            admin.DescribeGroupRequest(name=args.name, parked=True), admin.GroupReply
        )
    say_incomplete(reply.incomplete)
    parked = parked_fields(reply.parked)
    if args.json:
        fields = group_fields(reply.group)
        print(json.dumps({**fields, "parked_keys": reply.parked_keys, "parked": parked}))
        return 0
    _print([group_fields(reply.group)], GROUP_COLUMNS, as_json=False)
    if parked:
        shown = f", the {len(parked)} parked for longest" if len(parked) < reply.parked_keys else ""
        print(f"\nparked message groups: {reply.parked_keys}{shown}")
        header = [name.upper().removesuffix("_MS") for name in PARKED_COLUMNS]
        rows = [
            [
                format_duration(int(one[name]) // 1000 * 1000) if name == "parked_ms" else one[name]
                for name in PARKED_COLUMNS
            ]
            for one in parked
        ]
        print(columns(header, rows))
    return 0


def say_incomplete(reason: str) -> None:
    if reason:
        print(f"popmq: not everything: {reason}", file=sys.stderr)


def run_topic_list(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        topics = client.topics(system=args.system)
    topics = [one for one in topics if belongs(args, one.name)]
    _print(list(map(topic_fields, topics)), TOPIC_COLUMNS, as_json=args.json)
    return 0


def run_group_list(args: argparse.Namespace) -> int:
    with Client(args.endpoint) as client:
        groups = client.groups()
    groups = [one for one in groups if belongs(args, one.name)]
    _print(list(map(group_fields, groups)), GROUP_COLUMNS, as_json=args.json)
    return 0


def topic_of(args: argparse.Namespace) -> admin.Topic:
    return admin.Topic(
        name=args.name,
        type=args.type,
        queues=args.queues,
        permission=args.permission,
        retention_ms=args.retention,
        durability=args.durability,
        lite_ttl_ms=args.lite_ttl,
        brokers=args.brokers,
    )


def group_of(args: argparse.Namespace) -> admin.Group:
    return admin.Group(
        name=args.name,
        type=args.type,
        max_attempts=args.max_attempts,
        start_at=args.start,
        check_points=args.check_points,
        back_off_ms=args.back_off,
        retry=args.retry,
        exponential=_exponential_of(args),
    )


def _exponential_of(args: argparse.Namespace) -> admin.ExponentialBackOff | None:
    """What was given; a new group gets the rest here, so that asking twice asks for the same."""
    given = admin.ExponentialBackOff(
        initial_ms=args.initial,
        max_ms=args.max,
        multiplier_milli=args.multiplier,
        jitter_percent=args.jitter,
    )
    if args.complete and (given.ListFields() or args.retry == "exponential"):
        whole = admin.ExponentialBackOff(
            initial_ms=INITIAL_MS,
            max_ms=MAX_MS,
            multiplier_milli=MULTIPLIER_MILLI,
            jitter_percent=0,
        )
        whole.MergeFrom(given)
        return whole
    return given if given.ListFields() else None


def topic_fields(topic: admin.Topic) -> Fields:
    return {
        "name": topic.name,
        "type": topic.type,
        "queues": topic.queues,
        "permission": topic.permission,
        "retention": format_duration(topic.retention_ms) if topic.retention_ms else "store",
        "durability": topic.durability,
        "lite": topic.lite_topics if topic.type == "lite" else "-",
        "brokers": ",".join(topic.brokers) or "-",
    }


def group_fields(group: admin.Group) -> Fields:
    """An exponential back-off is shown instead of the steps that do not count then."""
    if group.HasField("exponential"):
        told = group.exponential
        return {
            "name": group.name,
            "type": group.type,
            "max_attempts": group.max_attempts,
            "start": group.start_at,
            "check_points": group.check_points,
            "retry": "exponential",
            "back_off_ms": [told.initial_ms, told.max_ms],
            "multiplier": f"{told.multiplier_milli / 1000:g}",
            "jitter": f"{told.jitter_percent}%",
        }
    return {
        "name": group.name,
        "type": group.type,
        "max_attempts": group.max_attempts,
        "start": group.start_at,
        "retry": "customised",
        "check_points": group.check_points,
        "back_off_ms": list(group.back_off_ms),
    }


def format_duration(milliseconds: int) -> str:
    """The largest unit that keeps it whole: 90000 is 90s, 120000 is 2m."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in aligned plain columns, the last one as long as it is."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _print(rows: Sequence[Fields], names: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    header = [name.upper().removesuffix("_MS").replace("_", "-") for name in names]
    print(columns(header, [[_cell(row, name) for name in names] for row in rows]))


def _cell(row: Fields, name: str) -> str:
    value = row[name]
    if name == "retry" and "multiplier" in row:
        return f"{value} x{row['multiplier']} +{row['jitter']}"
    return ",".join(map(format_duration, value)) if isinstance(value, list) else str(value)


def _print_deleted(kind: str, args: argparse.Namespace) -> None:
    print(json.dumps({"deleted": args.name}) if args.json else f"deleted {kind} {args.name}")


def back_off_argument(text: str) -> tuple[int, ...]:
    """`1s,5s,10s` in milliseconds: the wait after each failed delivery, the last one repeated."""
    return tuple(map(duration_argument, text.split(",")))


def broker_groups_argument(text: str) -> tuple[str, ...]:
    """`broker-a,broker-b`, checked by the broker."""
    return tuple(text.split(","))


def retention_argument(text: str) -> int:
    """Milliseconds; -1 says: that of the store."""
    return -1 if text == "store" else _not_zero(text, "store")


def lite_ttl_argument(text: str) -> int:
    """Milliseconds; -1 says: what the setting says."""
    return -1 if text == "default" else _not_zero(text, "default")


def _not_zero(text: str, instead: str) -> int:
    """0 is how a request says that nothing was said."""
    if milliseconds := duration_argument(text):
        return milliseconds
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is no time: write 1h, or `{instead}`")


def multiplier_argument(text: str) -> int:
    """In thousandths: `1.5` is 1500."""
    whole, _, part = text.partition(".")
    digits = whole + part
    if (
        not whole
        or len(digits) > 9
        or len(part) > 3
        or not (digits.isascii() and digits.isdecimal())
    ):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a multiplier: write 2 or 1.5")
    return int(whole) * 1000 + int(part.ljust(3, "0"))


def percent_argument(text: str) -> int:
    digits = text.removesuffix("%")
    if len(digits) > 3 or not (digits.isascii() and digits.isdecimal()) or int(digits) > 100:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a percentage: write 20%")
    return int(digits)


UNPARK_ACTIONS = {
    "resume": "receive a parked message group again, its parked messages first",
    "skip": "forget the parked messages of a message group",
    "dead-letter": "make the parked messages of a message group dead letters",
}
PARKED_COLUMNS = ("broker", "topic", "key", "queue", "messages", "parked_ms", "state")


def add_actions(actions: Subparsers, common: argparse.ArgumentParser) -> None:
    for name, text in UNPARK_ACTIONS.items():
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
        messages = client.call_admin(request, admin.UnparkReply).messages
    if args.json:
        print(json.dumps({"action": args.action, "messages": messages}))
    else:
        print(f"{args.action}: {messages} messages of message group {args.key!r}")
    return 0


def parked_fields(parked: Sequence[admin.ParkedKey]) -> list[dict[str, str | int]]:
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
