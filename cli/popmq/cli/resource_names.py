"""Names of topics and groups: completed by the shell, and the nearest when one is unknown."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from popmq.cli.client import CALL_TIMEOUT_MS, CallRefused, Client
from popmq.cli.terminal.command_line import Args, nearest
from popmq.cli.terminal.contexts import connection_of
from popmq.common.errors import Code, GroupNotFound, PopmqError, Refused, TopicNotFound
from popmq.common.signing import Signer
from popmq.common.topics import is_system_topic
from popmq.common.wire import admin_pb2 as admin

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# A broker that is silent costs a command that looks or changes at once no more, and is named.
QUICK_TIMEOUT_MS = 2_500
COMPLETION_TIMEOUT_MS = 1_000  # a shell that waits longer seems to hang


class ResourceName(click.ParamType[str]):
    """A topic's or a consumer group's; the shell completes it with those that there are."""

    def __init__(self, kind: str) -> None:
        self.name = kind

    def shell_complete(
        self, context: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        given = context.params
        try:
            connection = connection_of(
                given.get("endpoint"), given.get("context"), given.get("admin_endpoint")
            )
            with Client(
                connection.endpoint,
                tls_ca=connection.tls_ca,
                signer=connection.signer,
                admin_endpoint=connection.admin_endpoint,
                timeout_ms=COMPLETION_TIMEOUT_MS,
            ) as client:
                names = names_of(client, self.name)
        except (PopmqError, OSError):
            return []  # nothing may be printed on the line that is being typed
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


TOPIC = ResourceName("topic")
GROUP = ResourceName("group")


def client_of(args: Args, signer: Signer | None = None) -> Client:
    """Of the endpoint that the arguments name, and of their user unless it is another one's."""
    return Client(
        args.endpoint,
        tls_ca=args.tls_ca,
        signer=Signer(args.access_key, args.secret) if signer is None else signer,
        admin_endpoint=args.admin_endpoint,
        timeout_ms=args.timeout or CALL_TIMEOUT_MS,
        quick_timeout_ms=0 if args.timeout else QUICK_TIMEOUT_MS,
    )


def names_of(client: Client, kind: str) -> list[str]:
    topics = client.topics(system=False) if kind == "topic" else client.groups()
    return sorted(resource.name for resource in topics)


@contextmanager
def nearest_named(client: Client, *, topic: str = "", group: str = "") -> Iterator[None]:
    """Turn a refusal because there is no such topic or group into one that names the nearest."""
    try:
        yield
    except CallRefused as error:
        if error.number == Code.TOPIC_NOT_FOUND and topic:
            # Of system topics the broker itself names those that there are.
            text = str(error) if is_system_topic(topic) else unknown_text(client, "topic", topic)
            raise TopicNotFound(text) from error
        if error.number == Code.CONSUMER_GROUP_NOT_FOUND and group:
            raise GroupNotFound(unknown_text(client, "group", group)) from error
        raise


def check_names(client: Client, *, topic: str = "", group: str = "") -> None:
    """Raises TopicNotFound or GroupNotFound; an empty name is none. Creates nothing.

    A user that may not look at a name may use it nevertheless.
    """
    with nearest_named(client, topic=topic, group=group):
        if topic:
            _look(client, admin.DescribeTopicRequest(name=topic), admin.TopicReply)
        if group:
            _look(client, admin.DescribeGroupRequest(name=group), admin.GroupReply)


def _look(
    client: Client,
    request: admin.DescribeTopicRequest | admin.DescribeGroupRequest,
    reply: type[admin.TopicReply] | type[admin.GroupReply],
) -> None:
    try:
        client.call_admin(request, reply)
    except CallRefused as refused:
        if refused.number != Code.FORBIDDEN:
            raise


def check_broker_group(client: Client, name: str) -> None:
    """Raises NOT_FOUND with the nearest name."""
    reply = client.call_admin(admin.ListBrokersRequest(), admin.ListBrokersReply)
    names = [state.group for state in reply.found.groups]
    if name not in names:
        near = nearest(name, names)
        known = f"did you mean {near}?" if near else f"there are {', '.join(names) or 'none'}"
        raise Refused(Code.NOT_FOUND, f"no broker group {name}: {known}")


def unknown_text(client: Client, kind: str, name: str) -> str:
    near = nearest(name, names_of(client, kind))
    known = f"did you mean {near}?" if near else f"`popmq {kind} list` shows those that there are"
    return f"no {kind} {name}: {known}"
