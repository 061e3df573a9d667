"""`popmq context`: endpoints with a name, so that commands need no --endpoint."""

import os
from dataclasses import replace

from popmq.cli.terminal.command_line import Args, argument, command, group, option
from popmq.cli.terminal.contexts import (
    ENDPOINT_VARIABLE,
    Connection,
    check_admin_endpoint,
    check_endpoint,
    read_contexts,
    write_contexts,
)
from popmq.cli.terminal.output import columns, print_note, print_rows
from popmq.common.errors import ConfigError
from popmq.common.namespaces import check_namespace
from popmq.common.signing import SECRET_VARIABLE


def run_add(args: Args) -> int:
    """An existing context of that name is replaced; the first one is used from then on."""
    check_endpoint(args.address)
    if args.admin_address:
        check_admin_endpoint(args.admin_address)
    if args.namespace:
        check_namespace(args.namespace)
    if args.tls_ca and not os.path.isfile(args.tls_ca):
        raise ConfigError(f"--tls-ca {args.tls_ca}: there is no such file")
    tls_ca = os.path.abspath(args.tls_ca) if args.tls_ca else ""
    contexts = read_contexts()
    added = Connection(
        args.address,
        tls_ca,
        args.namespace,
        args.admin_address,
        args.access_key,
        _secret_of(args),
    )
    known = {**contexts.known, args.name: added}
    write_contexts(replace(contexts, known=known, used=contexts.used or args.name))
    print_rows(args, [{"added": args.name}], [f"added context {args.name}: {args.address}"])
    return 0


def _secret_of(args: Args) -> str:
    """From a file or the environment: arguments can be read by every user of the machine."""
    if not args.access_key:
        return ""
    if not args.secret_file:
        if secret := os.environ.get(SECRET_VARIABLE, ""):
            return secret
        raise ConfigError(f"--access-key needs --secret-file, or {SECRET_VARIABLE}")
    try:
        with open(args.secret_file, encoding="utf-8") as file:
            text = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--secret-file {args.secret_file}: cannot be read: {error}") from error
    if text.startswith("{"):
        import json

        try:
            return str(json.loads(text)["secret"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--secret-file {args.secret_file}: {error!r}") from error
    return text


def run_list(args: Args) -> int:
    contexts = read_contexts()
    rows = [
        {
            "name": name,
            "used": name == contexts.used,
            "endpoint": connection.endpoint,
            "admin_endpoint": connection.admin_endpoint or None,
            "tls_ca": connection.tls_ca or None,
            "namespace": connection.namespace or None,
            "access_key": connection.access_key or None,
        }
        for name, connection in sorted(contexts.known.items())
    ]
    cells = [["*" if row["used"] else "", *(row[name] or "-" for name in _SHOWN)] for row in rows]
    header = ("USED", *(name.upper().replace("_", "-") for name in _SHOWN))
    table = columns(
        header, cells, wide=args.output == "wide", optional=("TLS-CA", "ADMIN-ENDPOINT")
    )
    print_rows(args, rows, [table if rows else "no context: add one with `popmq context add`"])
    if os.environ.get(ENDPOINT_VARIABLE):
        print_note(f"{ENDPOINT_VARIABLE} is set, and wins over the context that is used")
    return 0


def run_use(args: Args) -> int:
    contexts = read_contexts()
    contexts.named(args.name)
    write_contexts(replace(contexts, used=args.name))
    print_rows(args, [{"used": args.name}], [f"using context {args.name}"])
    return 0


def run_remove(args: Args) -> int:
    contexts = read_contexts()
    contexts.named(args.name)
    known = {name: item for name, item in contexts.known.items() if name != args.name}
    used = "" if contexts.used == args.name else contexts.used
    write_contexts(replace(contexts, known=known, used=used))
    print_rows(args, [{"removed": args.name}], [f"removed context {args.name}"])
    return 0


_SHOWN = ("name", "endpoint", "namespace", "access_key", "admin_endpoint", "tls_ca")

context = group(
    "context",
    [
        command(
            "add",
            run_add,
            argument("name"),
            option("--endpoint", "address", required=True, metavar="HOST:PORT"),
            option(
                "--admin-endpoint",
                "admin_address",
                default="",
                metavar="HOST:PORT",
                help="Where it is administered, or unix:PATH.",
            ),
            option("--tls-ca", default="", metavar="FILE", help="A PEM file of what to trust."),
            option("--namespace", default="", metavar="NS", help="Of topics and groups."),
            option("--access-key", default="", metavar="USER", help="The user that signs calls."),
            option(
                "--secret-file",
                metavar="FILE",
                help="What holds the user's secret, alone or as JSON.  [default: POPMQ_SECRET]",
            ),
            help="Add a context, or replace it. The first one is used at once.",
            examples=(
                "popmq context add prod --endpoint tls://mq.example.org:8081 --tls-ca ca.pem",
            ),
            connects=False,
        ),
        command(
            "list",
            run_list,
            help="List the contexts; a star marks the one that is used.",
            examples=("popmq context list",),
            connects=False,
        ),
        command(
            "use",
            run_use,
            argument("name"),
            help="Use a context from now on.",
            examples=("popmq context use prod",),
            connects=False,
        ),
        command(
            "remove",
            run_remove,
            argument("name"),
            help="Forget a context.",
            examples=("popmq context remove prod",),
            connects=False,
        ),
    ],
    help="Endpoints with a name: add, list, use and remove them.",
)
