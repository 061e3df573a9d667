"""All commands by sections, how one is run, and the exit status of each kind of end.

| status | meaning |
| 0 | done |
| 1 | refused, or not all was done; standard error says why |
| 2 | wrong usage |
| 3 | no answer: nobody listens, a broker is away, or the time ran out |
| 4 | no topic, group or message of that name |
| 130 | ended by Ctrl-C |
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from enum import IntEnum

import click

from popmq.cli.terminal.command_line import WIDTH, Entry, Invocation, LazyGroup
from popmq.common.errors import Code, PopmqError
from popmq.common.escaping import escaped, escaped_lines
from popmq.common.version import VERSION


class Status(IntEnum):
    DONE = 0
    REFUSED = 1
    USAGE = 2
    NO_ANSWER = 3
    NOT_FOUND = 4
    INTERRUPTED = 130
    NOT_READ = 141  # as a shell says it of a program that SIGPIPE ended


_STATUS_OF_CODE: dict[int, Status] = {
    Code.HA_NOT_AVAILABLE: Status.NO_ANSWER,
    Code.PROXY_TIMEOUT: Status.NO_ANSWER,
    Code.TOPIC_NOT_FOUND: Status.NOT_FOUND,
    Code.CONSUMER_GROUP_NOT_FOUND: Status.NOT_FOUND,
    Code.MESSAGE_NOT_FOUND: Status.NOT_FOUND,
    Code.NOT_FOUND: Status.NOT_FOUND,
}

RUNNING = "Run popmq"
MESSAGES = "Send and receive"
LOOKING = "Look"
CHANGING = "Change"
SETTING_UP = "Set up"
_ROLES = "popmq.cli.roles.commands"
COMMANDS = {
    "up": Entry(_ROLES, "up", "controller, broker and proxy in one process", RUNNING),
    "controller": Entry(_ROLES, "controller", "registers brokers and answers routes", RUNNING),
    "broker": Entry(_ROLES, "broker", "stores and delivers; `broker list` shows them", RUNNING),
    "proxy": Entry(_ROLES, "proxy", "speaks the public gRPC API", RUNNING),
    "operator": Entry(_ROLES, "operator", "looks after BrokerClusters of Kubernetes", RUNNING),
    "console": Entry(_ROLES, "console", "web pages about a cluster", RUNNING),
    "send": Entry("popmq.cli.send", "send", "send messages", MESSAGES),
    "recv": Entry("popmq.cli.recv", "recv", "receive messages, or look at the latest", MESSAGES),
    "ack": Entry("popmq.cli.recv", "ack", "ack received messages", MESSAGES),
    "nack": Entry("popmq.cli.recv", "nack", "return a received message at once", MESSAGES),
    "extend": Entry("popmq.cli.recv", "extend", "keep a message invisible for longer", MESSAGES),
    "status": Entry("popmq.cli.status", "status", "is the cluster well?", LOOKING),
    "top": Entry("popmq.cli.status", "top", "brokers, groups and topics, live", LOOKING),
    "lag": Entry("popmq.cli.consumer_offsets", "lag", "what groups have still to do", LOOKING),
    "clients": Entry(
        "popmq.cli.clients", "clients", "clients that are connected, at all proxies", LOOKING
    ),
    "explain": Entry("popmq.cli.explain", "explain", "what became of a message", LOOKING),
    "message": Entry("popmq.cli.lookup", "message", "find stored messages", LOOKING),
    "timers": Entry("popmq.cli.timers", "timers", "messages that wait for their time", LOOKING),
    "report": Entry("popmq.cli.report", "report", "lag, retries and delays by Spark", LOOKING),
    "topic": Entry("popmq.cli.metadata", "topic", "create, change and list topics", CHANGING),
    "group": Entry("popmq.cli.metadata", "group_command", "the same for groups", CHANGING),
    "dlq": Entry("popmq.cli.dlq", "dlq", "dead letters: look, and send back", CHANGING),
    "reset-offset": Entry(
        "popmq.cli.consumer_offsets", "reset_offset", "set where a group reads on", CHANGING
    ),
    "user": Entry("popmq.cli.users", "user", "users, their secrets and rights", CHANGING),
    "acl": Entry("popmq.cli.users", "acl", "what a user may, and why", LOOKING),
    "auth": Entry("popmq.cli.users", "auth", "whether callers must be users", CHANGING),
    "keys": Entry("popmq.cli.keys", "keys", "rotate the keys of receipt handles", CHANGING),
    "drain": Entry("popmq.cli.drain", "drain", "empty a broker group before it goes", CHANGING),
    "failover": Entry("popmq.cli.brokers", "failover", "make another broker the master", CHANGING),
    "context": Entry("popmq.cli.local.context", "context", "endpoints with a name", SETTING_UP),
    "config": Entry(
        "popmq.cli.local.config", "config", "settings, and where they came from", SETTING_UP
    ),
    "completion": Entry(
        "popmq.cli.local.completion", "completion", "for bash, zsh and fish", SETTING_UP
    ),
    "doctor": Entry(
        "popmq.cli.local.doctor", "doctor", "check and repair a data directory", SETTING_UP
    ),
    "bench": Entry("popmq.cli.load.bench", "bench", "measure a cluster", SETTING_UP),
    # What Spark calls the image with: not for people.
    "driver": Entry("popmq.cli.report", "driver", "a driver's pod"),
    "executor": Entry("popmq.cli.report", "executor", "an executor's pod"),
}


def run(arguments: Sequence[str], *, interrupts: bool = False) -> int:
    """The exit status.  With `interrupts` Ctrl-C is a KeyboardInterrupt once the command runs."""
    if _has_no_output(arguments):
        return Status.REFUSED
    # Texts of the system's locale would be cut where it has no such characters.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parsed: Invocation | int = 0
    try:
        parsed = parse(_as_options(arguments))
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = parsed if isinstance(parsed, int) else parsed.run(parsed.args)
        sys.stdout.flush()
        return status
    except click.UsageError as error:
        usage = io.StringIO()
        error.show(usage)
        print(escaped_lines(usage.getvalue().expandtabs(4)), end="", file=sys.stderr)
        return Status.USAGE
    except click.Abort:
        return Status.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) has enough; nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.NOT_READ
    except (PopmqError, OSError) as error:
        print("popmq:", escaped(" ".join(_text_of(error, parsed).split())), file=sys.stderr)
        return _STATUS_OF_CODE.get(_number_of(error), Status.REFUSED)
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    except Exception as error:  # a fault of ours, perhaps after the command had an effect
        from popmq.common.settings.settings import TRACEBACK, environment

        if _is_role(arguments) or environment().get(TRACEBACK):
            raise
        shown = escaped(" ".join(f"{type(error).__name__}: {error}".split()))
        print(
            f"popmq: internal error: {shown}; what the command did may have an effect "
            f"({TRACEBACK}=1 shows where it failed)",
            file=sys.stderr,
        )
        return Status.REFUSED


def _text_of(error: Exception, parsed: Invocation | int) -> str:
    """Of a full disk what it has no room for."""
    from popmq.common.disk import NO_ROOM, no_room_text

    data = "" if isinstance(parsed, int) else getattr(parsed.args, "data", None) or ""
    if isinstance(error, OSError) and error.errno in NO_ROOM and os.path.isdir(data):
        return no_room_text(data, error.errno)
    return str(error)


def _as_options(arguments: Sequence[str]) -> Sequence[str]:
    """`help COMMAND` and `version` as what they stand for."""
    match arguments:
        case ["help", *words]:
            return [*words, "--help"]
        case ["version"]:
            return ["--version"]
    return arguments


def _has_no_output(arguments: Sequence[str]) -> bool:
    """Python has None for a stream that is closed (`>&-`); no command need know of it.

    True: what would be printed would be lost, a received message for one.  Nothing was done.
    """
    closed = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # as long as the process
    if not closed or _is_role(arguments):
        return False
    print(
        "popmq: standard output is closed: nothing was done (>/dev/null hides it)", file=sys.stderr
    )
    return True


def _is_role(arguments: Sequence[str]) -> bool:
    entry = COMMANDS.get(arguments[0]) if arguments else None
    return entry is not None and entry.section == RUNNING


def _number_of(error: Exception) -> int:
    """The code of a refusal here, or of one that a server answered; 0 for other errors."""
    return int(getattr(error, "number", getattr(error, "code", 0)))


def parse(arguments: Sequence[str]) -> Invocation | int:
    """The command and its arguments; the exit status when the answer is a help text."""
    main = root().main(
        list(arguments), prog_name="popmq", standalone_mode=False, max_content_width=WIDTH
    )
    if isinstance(main, Invocation):
        return main
    return main if isinstance(main, int) else Status.DONE


def root() -> LazyGroup:
    return LazyGroup(
        COMMANDS,
        name="popmq",
        help="A RocketMQ-5-style message queue.",
        epilog="Exit status: 0 done, 1 refused, 2 wrong usage, 3 no answer, 4 not found, "
        "130 Ctrl-C (0 where it ends a live view), 141 the output was not read to its end. "
        "See `popmq COMMAND --help`.",
        context_settings={"help_option_names": ["-h", "--help"]},
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Show the version.",
            )
        ],
    )


def _print_version(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested:
        click.echo(f"popmq {VERSION}")
        context.exit()
