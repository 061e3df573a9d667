"""`popmq keys`: the keys that sign receipt handles and transaction ids, by broker group, and those
that seal users' secrets."""

from popmq.cli.client import CallFailed, Client
from popmq.cli.resource_names import client_of
from popmq.cli.terminal.command_line import Args, command, flag, group
from popmq.cli.terminal.output import Row, columns, print_rows
from popmq.common.quantities import iso_time
from popmq.common.wire import admin_pb2 as admin

COLUMNS = ("BROKER GROUP", "KEY", "STATE")


def run_list(args: Args) -> int:
    with client_of(args) as client:
        _print(args, client, look=True)
    return 0


def run_rotate(args: Args) -> int:
    with client_of(args) as client:
        if args.sealing:
            _reseal(args, client)
        else:
            _print(args, client, look=False)
    return 0


def _reseal(args: Args, client: Client) -> None:
    """All secrets; the proxy does some at a time."""
    resealed = 0
    while True:
        reply = client.call_admin(admin.ResealSecretsRequest(), admin.ResealSecretsReply)
        resealed += reply.resealed
        if not reply.left:
            break
        if not reply.resealed:
            raise CallFailed(f"{reply.left} secrets are still sealed with another key: try again")
    row: Row = {"key": reply.key, "resealed": resealed}
    print_rows(args, [row], [f"{resealed} secrets are now sealed with key {reply.key}"])


def _print(args: Args, client: Client, *, look: bool) -> None:
    reply = client.call_admin(admin.RotateKeysRequest(look=look), admin.RotateKeysReply)
    rows: list[Row] = [
        {"broker": key.broker, "id": key.id, "until_ms": key.until_ms or None} for key in reply.keys
    ]
    cells = [
        [key.broker, key.id, f"until {iso_time(key.until_ms)}" if key.until_ms else "signs"]
        for key in reply.keys
    ]
    print_rows(args, rows, [columns(COLUMNS, cells, wide=args.output == "wide")])


keys = group(
    "keys",
    [
        command(
            "rotate",
            run_rotate,
            flag("--sealing", help="Seal users' secrets with the first key of auth.key_file."),
            help="Sign receipt handles and transaction ids with a new key, in every broker group. "
            "Older keys count as long as what they signed may be used.",
            examples=("popmq keys rotate", "popmq keys rotate --sealing"),
        ),
        command("list", run_list, help="List the keys that count.", examples=("popmq keys list",)),
    ],
    help="The keys of receipt handles and transaction ids.",
)
