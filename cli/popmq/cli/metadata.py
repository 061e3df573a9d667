"""`popmq topic` and `popmq group`: create, alter, delete, list and show.

What `alter` is not told stays as it is; in the request such a field is empty.
"""

from collections.abc import Iterator, Sequence

import click

from popmq.cli.client import GroupRequest, TopicRequest
from popmq.cli.clients import users_of_topic, users_text
from popmq.cli.resource_names import (
    GROUP,
    TOPIC,
    check_broker_group,
    check_names,
    client_of,
    nearest_named,
)
from popmq.cli.terminal.arguments import COUNT, DURATION, Parsed, duration_argument
from popmq.cli.terminal.command_line import Args, Run, argument, command, flag, group, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.namespace_option import belongs
from popmq.cli.terminal.output import (
    columns,
    format_age,
    print_incomplete,
    print_rows,
)
from popmq.common.back_off import INITIAL_MS, MAX_MS, MULTIPLIER_MILLI
from popmq.common.quantities import format_duration
from popmq.common.topics import unordered_text
from popmq.common.wire import admin_pb2 as admin

TOPIC_TYPES = ("normal", "fifo", "delay", "transaction", "priority", "lite", "mixed")
GROUP_TYPES = ("normal", "fifo")
PERMISSIONS = ("rw", "r", "w", "none")
STARTS = ("oldest", "newest")
CHECK_POINTS = ("durable", "buffered")
DURABILITIES = ("disk", "memory")

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


def on_topic(kind: type[TopicRequest]) -> Run:
    """A command that asks for one topic and prints what became of it."""

    def run(args: Args) -> int:
        request: TopicRequest
        users: Sequence[admin.ConnectedClient] = ()
        if issubclass(kind, (admin.CreateTopicRequest, admin.AlterTopicRequest)):
            request = kind(topic=topic_of(args))
        else:
            request = kind(name=args.name)
        with client_of(args) as client, nearest_named(client, topic=args.name):
            if kind is admin.DeleteTopicRequest:
                if not args.yes:
                    check_names(client, topic=args.name)
                users = users_of_topic(client, args)
                confirm(
                    args, f"topic {args.name} is deleted with all its messages{users_text(users)}"
                )
            for name in getattr(args, "brokers", None) or ():
                check_broker_group(client, name)
            reply = client.call_admin(request, admin.TopicReply)
        print_incomplete(reply.incomplete)
        if kind is admin.DeleteTopicRequest:
            _print_deleted("topic", args, users)
        else:
            _print(args, [topic_fields(reply.topic)], TOPIC_COLUMNS)
        return 0

    return run


def on_group(kind: type[GroupRequest]) -> Run:
    """The same for one group."""

    def run(args: Args) -> int:
        request: GroupRequest
        if issubclass(kind, (admin.CreateGroupRequest, admin.AlterGroupRequest)):
            request = kind(group=group_of(args))
        else:
            request = kind(name=args.name)
        with client_of(args) as client, nearest_named(client, group=args.name):
            if kind is admin.DeleteGroupRequest:
                if not args.yes:
                    check_names(client, group=args.name)
                confirm(args, f"group {args.name} is deleted with its offsets and dead letters")
            reply = client.call_admin(request, admin.GroupReply)
        print_incomplete(reply.incomplete)
        if kind is admin.DeleteGroupRequest:
            _print_deleted("group", args)
        else:
            _print(args, [group_fields(reply.group)], GROUP_COLUMNS)
        return 0

    return run


def run_group_show(args: Args) -> int:
    """Its settings, what it has still to do, and the message groups that are parked for it."""
    from popmq.cli.consumer_offsets import lag_rows, parked_fields, unordered_topics

    with client_of(args) as client, nearest_named(client, group=args.name):
        request = admin.DescribeGroupRequest(name=args.name, parked=True)
        reply = client.call_admin(request, admin.GroupReply)
        lag = client.call_admin(admin.LagRequest(group=args.name), admin.LagReply)
        unordered = unordered_topics(client, reply.group, lag)
    print_incomplete(reply.incomplete or lag.incomplete)
    row: dict[str, object] = {
        **group_fields(reply.group),
        "lags": [row for row in lag_rows(lag) if "topic" in row],
        "parked_keys": reply.parked_keys,
        "parked": parked_fields(reply.parked),
        "unordered_topics": unordered,
    }
    lines = group_lines(args, reply, lag)
    if unordered:
        lines += ["", f"out of order: {unordered_text(args.name, unordered)}"]
    print_rows(args, [row], lines)
    return 0


def group_lines(args: Args, reply: admin.GroupReply, lag: admin.LagReply) -> list[str]:
    from popmq.cli.consumer_offsets import lag_lines, parked_fields

    wide = args.output == "wide"
    lines = [_table([group_fields(reply.group)], GROUP_COLUMNS, wide=wide)]
    if lag.lags:
        lines += ["", *lag_lines(lag, wide=wide)]
    if reply.parked:
        parked = parked_fields(reply.parked)
        some = len(parked) < reply.parked_keys
        shown = f", the {len(parked)} parked for longest" if some else ""
        header = [name.upper().removesuffix("_MS") for name in PARKED_COLUMNS]
        cells = [
            [
                format_age(int(key[name])) if name == "parked_ms" else key[name]
                for name in PARKED_COLUMNS
            ]
            for key in parked
        ]
        lines += ["", f"parked message groups: {reply.parked_keys}{shown}", columns(header, cells)]
    return lines


def run_topic_list(args: Args) -> int:
    with client_of(args) as client:
        topics = client.topics(system=args.system)
    topics = [topic for topic in topics if belongs(args, topic.name)]
    _print(args, list(map(topic_fields, topics)), TOPIC_COLUMNS, empty="no topic")
    return 0


def run_purge(args: Args) -> int:
    """Each group that reads the topic skips what is stored.  Messages stay until retention deletes
    them: a group that begins later at the oldest message gets them."""
    with client_of(args) as client:
        check_names(client, topic=args.name)
        lag = client.call_admin(admin.LagRequest(topic=args.name), admin.LagReply)
        groups = sorted({row.group for row in lag.lags})
        waiting = sum(row.ready + row.in_flight + row.blocked for row in lag.lags)
        readers = f"{len(groups)} group{'s' if len(groups) != 1 else ''}"
        text = f"{readers} of topic {args.name}: {waiting} messages are skipped"
        if not args.dry_run:
            confirm(args, text)
        incomplete = lag.incomplete
        for group in groups:
            request = admin.ResetOffsetRequest(
                group=group,
                topic=args.name,
                newest=True,
                skip_retries=True,
                dry_run=args.dry_run,
            )
            reply = client.call_admin(request, admin.ResetOffsetReply)
            incomplete = reply.incomplete or incomplete  # it says whether the outcome is known
    print_incomplete(incomplete)
    row = {"topic": args.name, "groups": groups, "messages": waiting, "dry_run": args.dry_run}
    print_rows(args, [row], [f"would do: {text}" if args.dry_run else f"purged: {text}"])
    return 1 if incomplete else 0


def run_group_list(args: Args) -> int:
    with client_of(args) as client:
        groups = client.groups()
    groups = [group for group in groups if belongs(args, group.name)]
    _print(args, list(map(group_fields, groups)), GROUP_COLUMNS, empty="no consumer group")
    return 0


def topic_of(args: Args) -> admin.Topic:
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


def group_of(args: Args) -> admin.Group:
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


def _exponential_of(args: Args) -> admin.ExponentialBackOff | None:
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
        back_off = group.exponential
        return {
            "name": group.name,
            "type": group.type,
            "max_attempts": group.max_attempts,
            "start": group.start_at,
            "check_points": group.check_points,
            "retry": "exponential",
            "back_off_ms": [back_off.initial_ms, back_off.max_ms],
            "multiplier": f"{back_off.multiplier_milli / 1000:g}",
            "jitter": f"{back_off.jitter_percent}%",
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


def _print(args: Args, rows: Sequence[Fields], names: Sequence[str], *, empty: str = "") -> None:
    def lines() -> Iterator[str]:
        yield _table(rows, names, wide=args.output == "wide") if rows or not empty else empty

    print_rows(args, rows, lines())


def _table(rows: Sequence[Fields], names: Sequence[str], *, wide: bool) -> str:
    header = [name.upper().removesuffix("_MS").replace("_", "-") for name in names]
    cells = [[_cell(row, name) for name in names] for row in rows]
    return columns(header, cells, optional=OPTIONAL, wide=wide)


def _cell(row: Fields, name: str) -> str:
    value = row[name]
    if name == "retry" and "multiplier" in row:
        return f"{value} x{row['multiplier']} +{row['jitter']}"
    return ",".join(map(format_duration, value)) if isinstance(value, list) else str(value)


def _print_deleted(
    kind: str, args: Args, users: Sequence[admin.ConnectedClient] | None = None
) -> None:
    row: dict[str, object] = {"deleted": args.name}
    if users is not None:
        row["clients"] = [client.client_id for client in users]
    print_rows(args, [row], [f"deleted {kind} {args.name}{users_text(users or ())}"])


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
    raise click.BadParameter(f"{text[:40]!r} is no time: write 1h, or `{instead}`")


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
        raise click.BadParameter(f"{text[:40]!r} is not a multiplier: write 2 or 1.5")
    return int(whole) * 1000 + int(part.ljust(3, "0"))


def percent_argument(text: str) -> int:
    digits = text.removesuffix("%")
    if len(digits) > 3 or not (digits.isascii() and digits.isdecimal()) or int(digits) > 100:
        raise click.BadParameter(f"{text[:40]!r} is not a percentage: write 20%")
    return int(digits)


UNPARK_ACTIONS = {
    "resume": "Receive a parked message group again, its parked messages first",
    "skip": "Forget the parked messages of a message group",
    "dead-letter": "Make the parked messages of a message group dead letters",
}
OPTIONAL = ("BROKERS", "RETRY", "BACK-OFF", "LITE", "CHECK-POINTS", "DURABILITY")
PARKED_COLUMNS = ("broker", "topic", "key", "queue", "messages", "parked_ms", "state")


def run_unpark(args: Args) -> int:
    request = admin.UnparkRequest(
        group=args.name, topic=args.topic, key=args.key, action=args.action
    )
    with client_of(args) as client, nearest_named(client, topic=args.topic, group=args.name):
        messages = client.call_admin(request, admin.UnparkReply).messages
    text = f"{args.action}: {messages} messages of message group {args.key!r}"
    print_rows(args, [{"action": args.action, "messages": messages}], [text])
    return 0


_RETRY = (
    option(
        "--back-off",
        type=Parsed("durations", back_off_argument),
        default=(),
        metavar="1s,5s,10s",
        help="Customised steps: the wait after each failed delivery.",
    ),
    option("--retry", type=click.Choice(RETRIES)),
    option("--initial", type=DURATION, metavar="1s", help="Exponential: the first wait."),
    option("--max", type=DURATION, metavar="2h", help="Exponential: the longest."),
    option(
        "--multiplier",
        type=Parsed("multiplier", multiplier_argument),
        metavar="2",
        help="Exponential: from each wait to the next.",
    ),
    option(
        "--jitter",
        type=Parsed("percent", percent_argument),
        metavar="20%",
        help="Exponential: up to so much longer.",
    ),
)


def _topic_options(*, altered: bool) -> list[click.Parameter]:
    """Of `create` and `alter`; what `alter` is not given stays as it is."""
    return [
        argument("name", **({"type": TOPIC} if altered else {})),
        option("--type", type=click.Choice(TOPIC_TYPES), default=None if altered else "normal"),
        option(
            "--queues",
            type=COUNT,
            default=0,
            metavar="N",
            help="" if altered else "[default: the setting topic.queues (8)]",
        ),
        option("--permission", type=click.Choice(PERMISSIONS), default=None if altered else "rw"),
        option(
            "--durability",
            type=click.Choice(DURABILITIES),
            default=None if altered else "disk",
            help="What a send waits for: disks, or the memory of all in-sync replicas.",
        ),
        option(
            "--brokers",
            type=Parsed("names", broker_groups_argument),
            default=(),
            metavar="broker-a,broker-b",
            help="The broker groups that message groups and lite topics are placed over (create: "
            "all that take messages); altered, keys lose their order unless all is consumed.",
        ),
        option(
            "--retention",
            type=Parsed("duration", retention_argument),
            default=0,
            metavar="24h",
            help="How long messages are kept; `store`: as long as the store keeps any.",
        ),
        option(
            "--lite-ttl",
            type=Parsed("duration", lite_ttl_argument),
            default=0,
            metavar="3d",
            help="Of type lite: how long a lite topic lives without a message; `default`: as the "
            "setting lite.ttl_ms says.",
        ),
    ]


def _group_options(*, altered: bool) -> list[click.Parameter]:
    return [
        argument("name", **({"type": GROUP} if altered else {})),
        option("--type", type=click.Choice(GROUP_TYPES), default=None if altered else "normal"),
        option(
            "--max-attempts",
            type=COUNT,
            default=0,
            metavar="N",
            help="" if altered else "[default: the setting group.max_attempts (17)]",
        ),
        option("--start", type=click.Choice(STARTS), default=None if altered else "oldest"),
        *_RETRY,
        option(
            "--check-points",
            type=click.Choice(CHECK_POINTS),
            default=None if altered else "durable",
        ),
    ]


topic = group(
    "topic",
    [
        command(
            "create",
            on_topic(admin.CreateTopicRequest),
            *_topic_options(altered=False),
            help="Make a topic.",
            examples=("popmq topic create orders --type fifo --queues 16",),
            namespaced=True,
        ),
        command(
            "alter",
            on_topic(admin.AlterTopicRequest),
            *_topic_options(altered=True),
            help="Change what is given, leave the rest.",
            examples=("popmq topic alter orders --retention 24h",),
            namespaced=True,
        ),
        command(
            "delete",
            on_topic(admin.DeleteTopicRequest),
            argument("name", type=TOPIC),
            YES,
            help="Delete a topic and its messages. Asks on a terminal.",
            examples=("popmq topic delete orders --yes",),
            namespaced=True,
        ),
        command(
            "purge",
            run_purge,
            argument("name", type=TOPIC),
            flag("--dry-run", help="Only show what would be done."),
            YES,
            help="Let every group skip what is stored in a topic.",
            examples=("popmq topic purge orders --dry-run", "popmq topic purge orders --yes"),
            namespaced=True,
        ),
        command(
            "show",
            on_topic(admin.DescribeTopicRequest),
            argument("name", type=TOPIC),
            help="Show the settings of a topic.",
            examples=("popmq topic show orders -o yaml",),
            namespaced=True,
        ),
        command(
            "list",
            run_topic_list,
            flag("--system", help="popmq's own topics too."),
            help="List topics.",
            examples=("popmq topic list -o wide",),
            namespaced=True,
        ),
    ],
    help="Create, change and list topics.",
)
group_command = group(
    "group",
    [
        command(
            "create",
            on_group(admin.CreateGroupRequest),
            *_group_options(altered=False),
            values={"complete": True},
            help="Make a consumer group.",
            examples=("popmq group create billing --max-attempts 5 --back-off 1s,10s,1m",),
            namespaced=True,
        ),
        command(
            "alter",
            on_group(admin.AlterGroupRequest),
            *_group_options(altered=True),
            values={"complete": False},
            help="Change what is given, leave the rest.",
            examples=("popmq group alter billing --max-attempts 10",),
            namespaced=True,
        ),
        command(
            "delete",
            on_group(admin.DeleteGroupRequest),
            argument("name", type=GROUP),
            YES,
            help="Delete a consumer group with its offsets. Asks on a terminal.",
            examples=("popmq group delete billing --yes",),
            namespaced=True,
        ),
        command(
            "show",
            run_group_show,
            argument("name", type=GROUP),
            help="Show a group: settings, lag by topic, and parked message groups.",
            examples=("popmq group show billing",),
            namespaced=True,
        ),
        command(
            "list",
            run_group_list,
            help="List consumer groups.",
            examples=("popmq group list -o json",),
            namespaced=True,
        ),
        *(
            command(
                name,
                run_unpark,
                argument("name", metavar="GROUP", type=GROUP),
                option("--topic", required=True, type=TOPIC, metavar="T"),
                option(
                    "--key",
                    required=True,
                    metavar="K",
                    help="The message group; '' for messages without.",
                ),
                values={"action": name},
                help=text,
                examples=(f"popmq group {name} billing --topic orders --key customer-7",),
                namespaced=True,
            )
            for name, text in UNPARK_ACTIONS.items()
        ),
    ],
    help="Create, change and list consumer groups.",
)
