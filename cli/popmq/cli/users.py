"""`popmq user`, `popmq acl` and `popmq auth`: users, their rights, and whether callers are asked.

A secret is made here and sent to the proxy, which seals it; no reply ever holds one.
"""

import secrets
from collections.abc import Sequence

import click

from popmq.cli.resource_names import client_of
from popmq.cli.terminal.arguments import DURATION, Parsed, size_argument
from popmq.cli.terminal.command_line import Args, argument, command, flag, group, option
from popmq.cli.terminal.confirmation import YES, confirm
from popmq.cli.terminal.output import Row, columns, print_note, print_rows
from popmq.common.users import (
    ACTIONS,
    QUOTA_LIMIT,
    QUOTA_NAMES,
    AuthMode,
    PolicyEntry,
    format_clock_offset,
    parse_clock_offset,
    unique,
)
from popmq.common.wire import admin_pb2 as admin

COLUMNS = ("NAME", "TYPE", "STATE", "SECRETS", "NETWORKS", "CLOCK", "QUOTAS", "ENTRIES")
TYPES = ("super", "normal")
STATES = ("enabled", "disabled")
# What a role may: actions on topics, on groups, and on the cluster.
ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "publisher": (("pub",), (), ()),
    "consumer": (("sub",), ("sub", "update"), ()),
    "operator": (
        ("create", "update", "delete", "get", "list"),
        ("create", "update", "delete", "get", "list"),
        (),
    ),
    "viewer": (("get", "list"), ("get", "list"), ()),
}


def run_create(args: Args) -> int:
    secret = new_secret()
    request = admin.CreateUserRequest(
        name=args.name, type=args.type, secret=secret, networks=args.networks or ()
    )
    with client_of(args) as client:
        client.call_admin(request, admin.UserReply)
    _print_credentials(args, f"created user {args.name}", secret)
    return 0


def run_alter(args: Args) -> int:
    """With --new-secret the older secret stays good for --retire."""
    secret = new_secret() if args.new_secret else ""
    request = admin.AlterUserRequest(
        name=args.name,
        type=args.type or "",
        state=args.state or "",
        secret=secret,
        retire_ms=args.retire,
        drop_secret=args.drop_secret,
        networks=[] if args.networks == ("any",) else args.networks or (),
        any_network=args.networks == ("any",),
        quotas=dict(args.quota or ()),
    )
    with client_of(args) as client:
        reply = client.call_admin(request, admin.UserReply)
    if secret:
        _print_credentials(args, f"user {args.name} has a new secret", secret)
    else:
        _print_users(args, [reply.user])
    return 0


def run_delete(args: Args) -> int:
    with client_of(args) as client:
        confirm(args, f"user {args.name} is deleted, and its clients are refused")
        client.call_admin(admin.DeleteUserRequest(name=args.name), admin.UserReply)
    print_rows(args, [{"deleted": args.name}], [f"deleted user {args.name}"])
    return 0


def run_list(args: Args) -> int:
    with client_of(args) as client:
        reply = client.call_admin(admin.ListUsersRequest(), admin.ListUsersReply)
    _print_users(args, reply.users)
    return 0


def run_show(args: Args) -> int:
    with client_of(args) as client:
        request = admin.DescribeUserRequest(name=args.name)
        user = client.call_admin(request, admin.UserReply).user
    lines = [_table(args, [user])]
    lines += ["", *(_entry_text(entry) for entry in user.entries)] if user.entries else []
    print_rows(args, [user_row(user)], lines)
    return 0


def run_grant(args: Args) -> int:
    request = admin.GrantRequest(name=args.name, entries=entries_of(args))
    with client_of(args) as client:
        user = client.call_admin(request, admin.UserReply).user
    _print_entries(args, user)
    return 0


def run_revoke(args: Args) -> int:
    entries = [] if args.all else entries_of(args)
    request = admin.RevokeRequest(name=args.name, entries=entries, all=args.all)
    with client_of(args) as client:
        user = client.call_admin(request, admin.UserReply).user
    _print_entries(args, user)
    return 0


def run_clock(args: Args) -> int:
    request = admin.SetUserClockRequest(
        name=args.name,
        add=map(parse_clock_offset, args.add or ()),
        remove=map(parse_clock_offset, args.remove or ()),
        learn=args.learn,
    )
    with client_of(args) as client:
        user = client.call_admin(request, admin.UserReply).user
    _print_users(args, [user])
    return 0


def run_check(args: Args) -> int:
    """Exit status 1 when the answer is no."""
    request = admin.CheckAccessRequest(
        user=args.user, action=args.action, resource=args.resource, address=args.source
    )
    with client_of(args) as client:
        reply = client.call_admin(request, admin.CheckAccessReply)
    answer = "yes" if reply.allowed else "no"
    row: Row = {
        "user": args.user,
        "action": args.action,
        "resource": args.resource,
        "allowed": reply.allowed,
        "reason": reply.reason,
    }
    print_rows(args, [row], [f"{answer}: {reply.reason}"])
    return 0 if reply.allowed else 1


def run_mode(args: Args) -> int:
    with client_of(args) as client:
        reply = client.call_admin(admin.SetAuthModeRequest(mode=args.mode), admin.AuthModeReply)
    print_rows(args, [{"mode": reply.mode}], [f"auth.mode is {reply.mode}"])
    return 0


def new_secret() -> str:
    return secrets.token_hex(20)


def entries_of(args: Args) -> list[admin.UserEntry]:
    """What --topic, --group, --namespace, --cluster and a role name, as policy entries."""
    networks, deny = args.networks or (), bool(args.deny)
    if args.role:
        return [
            admin.UserEntry(resources=resources, actions=actions, networks=networks)
            for resources, actions in _of_role(args)
        ]
    resources = [
        *(f"topic:{name}" for name in args.topic or ()),
        *(f"group:{name}" for name in args.group or ()),
        *(f"namespace:{name}" for name in args.in_namespace or ()),
        *(("cluster",) if args.cluster else ()),
    ]
    actions = args.deny or args.allow
    return [admin.UserEntry(resources=resources, actions=actions, networks=networks, deny=deny)]


def _of_role(args: Args) -> list[tuple[list[str], tuple[str, ...]]]:
    on_topics, on_groups, on_cluster = ROLES[args.role]
    entries = [
        ([f"topic:{args.prefix}*"], on_topics),
        ([f"group:{args.prefix}*"], on_groups),
        (["cluster"], on_cluster),
    ]
    return [(resources, actions) for resources, actions in entries if actions]


def check_entry_options(args: Args) -> None:
    """Raises UsageError for options that contradict each other."""
    if getattr(args, "all", False):
        return
    named = args.topic or args.group or args.in_namespace or args.cluster
    if args.role:
        if named or args.allow or args.deny:
            raise click.UsageError("--role says the actions and, with --prefix, the resources")
        if args.prefix is None:
            raise click.UsageError("--role needs --prefix: of the topics and groups that it is for")
        return
    if not named:
        raise click.UsageError("name a resource: --topic, --group, --namespace or --cluster")
    if bool(args.allow) == bool(args.deny):
        raise click.UsageError("one of --allow and --deny has to say which actions")


def actions_argument(text: str) -> tuple[str, ...]:
    """`pub,sub`, or `all`."""
    names = unique(text.lower().split(","))
    if names == ("all",):
        return ACTIONS
    for name in names:
        if name not in ACTIONS:
            raise click.BadParameter(f"{name[:40]!r} is no action: {', '.join(ACTIONS)} or all")
    return names


def networks_argument(text: str) -> tuple[str, ...]:
    """`10.0.0.0/8,192.0.2.7/32`, checked by the proxy."""
    return unique(text.split(","))


def quota_argument(text: str) -> tuple[str, int]:
    """`calls=200`, `bytes=2MiB`, `topics=none`."""
    name, equals, limit = text.partition("=")
    if name not in QUOTA_NAMES or not equals:
        raise click.BadParameter(f"{text[:60]!r} is no NAME=LIMIT of {', '.join(QUOTA_NAMES)}")
    if limit == "none":
        return name, 0
    value = size_argument(limit) if name == "bytes" else int(limit) if limit.isdecimal() else 0
    if not 1 <= value <= QUOTA_LIMIT:
        raise click.BadParameter(f"{text[:60]!r}: a limit from 1 to {QUOTA_LIMIT}, or none")
    return name, value


def _print_credentials(args: Args, text: str, secret: str) -> None:
    row: Row = {"access_key": args.name, "secret": secret}
    lines = [text, f"access key: {args.name}", f"secret: {secret}"]
    if args.output == "json":  # one object: scripts read it as it is
        import json

        print(json.dumps(row))
    else:
        print_rows(args, [row], lines)
    print_note("the secret is not shown again")


def _print_users(args: Args, users: Sequence[admin.User]) -> None:
    print_rows(args, list(map(user_row, users)), [_table(args, users) if users else "no user"])


def _print_entries(args: Args, user: admin.User) -> None:
    lines = [_entry_text(entry) for entry in user.entries] or [f"user {user.name} may do nothing"]
    print_rows(args, [user_row(user)], lines)


def _table(args: Args, users: Sequence[admin.User]) -> str:
    cells = [
        [
            user.name,
            user.type,
            "enabled" if user.enabled else "disabled",
            ",".join(secret.id for secret in user.secrets) or "-",
            ",".join(user.networks) or "any",
            _clock_text(user),
            _quota_text(user),
            len(user.entries),
        ]
        for user in users
    ]
    return columns(
        COLUMNS, cells, wide=args.output == "wide", optional=("SECRETS", "NETWORKS", "QUOTAS")
    )


def user_row(user: admin.User) -> Row:
    return {
        "name": user.name,
        "type": user.type,
        "enabled": user.enabled,
        "secrets": [
            {"id": secret.id, "key": secret.key, "until_ms": secret.until_ms or None}
            for secret in user.secrets
        ],
        "entries": [
            {
                "effect": "deny" if entry.deny else "allow",
                "resources": list(entry.resources),
                "actions": list(entry.actions),
                "networks": list(entry.networks),
            }
            for entry in user.entries
        ],
        "networks": list(user.networks),
        "clock_offsets": list(map(format_clock_offset, user.clock_offsets)),
        "learns_clock": user.learns_clock,
        "quotas": dict(sorted(user.quotas.items())),
    }


def _clock_text(user: admin.User) -> str:
    offsets = ",".join(map(format_clock_offset, user.clock_offsets))
    return offsets or ("learns" if user.learns_clock else "-")


def _quota_text(user: admin.User) -> str:
    return ",".join(f"{name}={limit}" for name, limit in sorted(user.quotas.items())) or "-"


def _entry_text(entry: admin.UserEntry) -> str:
    return str(
        PolicyEntry(tuple(entry.resources), tuple(entry.actions), tuple(entry.networks), entry.deny)
    )


_NAME = argument("name")
_ACTIONS = Parsed("actions", actions_argument)
_NETWORKS = Parsed("networks", networks_argument)
_FROM = option(
    "--networks", type=_NETWORKS, metavar="NET,NET", help="Networks that it may call from."
)
_ENTRY = (
    option("--topic", multiple=True, metavar="T", help="A topic, or its beginning and *."),
    option("--group", multiple=True, metavar="G", help="A consumer group, or its beginning and *."),
    option(
        "--namespace",
        "in_namespace",
        multiple=True,
        metavar="NS",
        help="All topics and groups of a namespace.",
    ),
    flag("--cluster", help="Brokers, settings and users."),
    option("--allow", type=_ACTIONS, metavar="A,A", help=f"Of {', '.join(ACTIONS)}, or all."),
    option("--deny", type=_ACTIONS, metavar="A,A", help="The same; it wins over every --allow."),
    option("--role", type=click.Choice(tuple(ROLES)), help="A set of actions."),
    option("--prefix", metavar="TEXT", help="With --role: of the topics and groups it is for."),
    option("--networks", type=_NETWORKS, metavar="NET,NET", help="Only from these networks."),
)

user = group(
    "user",
    [
        command(
            "create",
            run_create,
            _NAME,
            option("--type", type=click.Choice(TYPES), default="normal", help="[default: normal]"),
            _FROM,
            help="Make a user, and print its secret, once.",
            examples=("popmq user create ann -o json",),
        ),
        command(
            "alter",
            run_alter,
            _NAME,
            option("--type", type=click.Choice(TYPES)),
            option("--state", type=click.Choice(STATES)),
            flag("--new-secret", help="Make one more secret, and print it, once."),
            option(
                "--retire",
                type=DURATION,
                default="1h",
                metavar="1h",
                help="How long the older secret is good beside the new one.  [default: 1h]",
            ),
            option("--drop-secret", default="", metavar="ID", help="End a secret now."),
            option(
                "--networks",
                type=_NETWORKS,
                metavar="NET,NET",
                help="Networks that it may call from; `any` for all.",
            ),
            option(
                "--quota",
                type=Parsed("quota", quota_argument),
                multiple=True,
                metavar="NAME=N",
                help=f"{', '.join(QUOTA_NAMES)}; calls and bytes are a second. `none` ends one.",
            ),
            help="Change what is given, leave the rest.",
            examples=(
                "popmq user alter ann --new-secret --retire 24h",
                "popmq user alter ann --state disabled",
                "popmq user alter ann --quota calls=500 --quota bytes=2MiB --quota topics=none",
            ),
        ),
        command(
            "delete",
            run_delete,
            _NAME,
            YES,
            help="Delete a user. Asks on a terminal.",
            examples=("popmq user delete ann --yes",),
        ),
        command("list", run_list, help="List users.", examples=("popmq user list -o wide",)),
        command(
            "show",
            run_show,
            _NAME,
            help="Show a user and its policy.",
            examples=("popmq user show ann -o yaml",),
        ),
        command(
            "grant",
            run_grant,
            _NAME,
            *_ENTRY,
            check=check_entry_options,
            help="Add a policy entry.",
            examples=(
                "popmq user grant ann --topic orders --allow pub,sub",
                "popmq user grant ann --role consumer --prefix billing-",
                "popmq user grant ann --topic 'orders-*' --deny delete",
            ),
        ),
        command(
            "revoke",
            run_revoke,
            _NAME,
            *_ENTRY,
            flag("--all", help="Every entry."),
            check=check_entry_options,
            help="Remove a policy entry, named as it was granted.",
            examples=(
                "popmq user revoke ann --topic orders --allow pub,sub",
                "popmq user revoke ann --all",
            ),
        ),
        command(
            "clock",
            run_clock,
            _NAME,
            option("--add", multiple=True, metavar="+HH:MM", help="Clients' local time is good."),
            option("--remove", multiple=True, metavar="+HH:MM", help="It is not any more."),
            flag("--learn", help="Take it from the first success."),
            help="Set how far the clocks of a user's clients are from UTC.",
            examples=("popmq user clock ann --add +05:45", "popmq user clock ann --learn"),
        ),
    ],
    help="Users, their secrets and what they may.",
)
acl = group(
    "acl",
    [
        command(
            "check",
            run_check,
            argument("user"),
            argument("action"),
            argument("resource"),
            option("--from", "source", default="", metavar="IP", help="The caller's address."),
            help="Print whether a user may do something, and the entry that decides.",
            examples=("popmq acl check ann pub topic:orders --from 10.1.2.3",),
        ),
    ],
    help="What a user may, and why.",
)
auth = group(
    "auth",
    [
        command(
            "mode",
            run_mode,
            argument("mode", type=click.Choice([mode.value for mode in AuthMode])),
            help="Set whether callers must be users, for the whole cluster. With observe nothing "
            "is refused, and what would be is counted and logged.",
            examples=("popmq auth mode observe", "popmq auth mode on"),
        ),
    ],
    help="Whether callers must be users.",
)
