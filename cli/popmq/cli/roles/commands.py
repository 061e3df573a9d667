"""The commands of the roles: `up`, `controller`, `broker` with `broker list`, `proxy`, `operator`.

They are declared apart from what they run: a help text imports no role.
"""

from collections.abc import Callable
from importlib import import_module

import click

from popmq.cli.brokers import broker_list
from popmq.cli.terminal.arguments import COUNT, PORT, Parsed, range_argument
from popmq.cli.terminal.command_line import Args, Run, command, flag, group, option
from popmq.common.settings.replication_settings import MOST_REPLICAS

PARENT_FLAG = "--parent"  # hidden: the process that supervises this one


def _later(module: str, function: str) -> Run:
    """A function of a module that is imported when the command runs."""

    def run(args: Args) -> int:
        result: Callable[[Args], int] = getattr(import_module(module), function)
        return result(args)

    return run


MOST_GROUPS = 26  # their names end in a letter
_PROCESS = "popmq.cli.roles.role_process"
_CONFIG = option("--config", metavar="FILE", help="A TOML file of settings.")
_PARENT = option(PARENT_FLAG, type=int, hidden=True)
_OPEN = flag("--open-to-anybody", help="Serve any machine that reaches the ports, in plain text.")
_TRANSPORT = (
    option(
        "--workers",
        type=COUNT,
        metavar="N",
        help="Processes that share the public port.  [default: 1]",
    ),
    option(
        "--transport", metavar="NAME", help="What serves gRPC: lean or grpcio.  [default: lean]"
    ),
)


def _role(name: str, run: Run, *params: click.Parameter, help: str) -> click.Command:
    return command(
        name,
        run,
        _CONFIG,
        *params,
        help=help,
        examples=(f"popmq {name} --config popmq.toml",),
        connects=False,
        prints=False,
    )


up = command(
    "up",
    _later(_PROCESS, "run_up"),
    option("--data", metavar="DIR", help="The data directory.  [default: ./popmq-data]"),
    option("--host", default="127.0.0.1", help="The address to listen on.  [default: 127.0.0.1]"),
    option("--port", type=PORT, default=8081, help="The public gRPC port.  [default: 8081]"),
    option("--http-port", type=PORT, default=5557, help="The metrics port.  [default: 5557]"),
    option(
        "--remoting-port",
        type=PORT,
        metavar="N",
        help="One more port for clients that speak Remoting; the public port serves them too.",
    ),
    option(
        "--admin-port",
        type=PORT,
        metavar="N",
        help="A port of 127.0.0.1 for commands that administer, instead of a unix socket.",
    ),
    _OPEN,
    option("--advertise", metavar="HOST:PORT", help="The address that clients get to connect to."),
    option(
        "--console-port",
        type=PORT,
        metavar="N",
        help="Serve the web console on this port of 127.0.0.1, in a process of its own.",
    ),
    flag("--auth", help="Callers must be users; makes the user admin (DIR/admin.json)."),
    _CONFIG,
    option(
        "--groups",
        type=Parsed("groups", range_argument(1, MOST_GROUPS)),
        default=1,
        metavar="N",
        help="Broker groups.  [default: 1]",
    ),
    option(
        "--replicas",
        type=Parsed("replicas", range_argument(1, MOST_REPLICAS)),
        default=1,
        metavar="R",
        help="Brokers of each group; with more than one broker each is a process of its own.  "
        "[default: 1]",
    ),
    *_TRANSPORT,
    help="Run controller, broker and proxy in one process.",
    examples=("popmq up", "popmq up --port 18081 --http-port 15557", "popmq up --replicas 3"),
    connects=False,
    prints=False,
)
controller = _role(
    "controller",
    _later(_PROCESS, "run_controller"),
    _PARENT,
    help="Run a controller, which registers brokers and answers routes.",
)
broker = group(
    "broker",
    [broker_list],
    help="Run a broker, which stores and delivers messages; or list brokers.",
    alone=_role(
        "broker",
        _later(_PROCESS, "run_broker"),
        _PARENT,
        help="Run a broker, which stores and delivers messages.",
    ),
)
proxy = _role(
    "proxy",
    _later(_PROCESS, "run_proxy"),
    _PARENT,
    option(
        "--admin-listen",
        metavar="HOST:PORT|unix:PATH",
        help="Where administration is served.  [default: a unix socket that commands find]",
    ),
    _OPEN,
    *_TRANSPORT,
    help="Run a proxy, which speaks the public gRPC API.",
)
operator = _role(
    "operator",
    _later("popmq.cli.roles.operator_role", "run_operator"),
    help="Run the operator, which looks after BrokerClusters of Kubernetes.",
)
console = command(
    "console",
    _later("popmq.console.web.command", "run_console"),
    option(
        "--listen",
        default="127.0.0.1:8082",
        metavar="HOST:PORT",
        help="A loopback address, unless --login.  [default: 127.0.0.1:8082]",
    ),
    flag(
        "--open-to-anybody",
        help="Listen on a network address. Any user who reaches it administers the cluster.",
    ),
    flag(
        "--login",
        help="Show nothing without a login, also on an address of the network, while auth.mode is "
        "off, too.",
    ),
    option("--prometheus", metavar="URL", help="Plot what this Prometheus has about the cluster."),
    option("--reports", metavar="DIR|URL", help="Link the HTML pages of `popmq report` there."),
    _CONFIG,
    _PARENT,
    help="Serve web pages about a cluster, in a process of its own that keeps nothing on disk.",
    examples=("popmq console --endpoint 127.0.0.1:8081",),
    prints=False,
)
