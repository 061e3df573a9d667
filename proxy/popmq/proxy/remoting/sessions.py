"""HEART_BEAT, UNREGISTER_CLIENT and the lists of consumers: who is at which connection.

A client leaves a group by saying so, by a heartbeat without the group, or with its connection:
clients in Go have no other way.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from popmq.common.clock import Clock
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import FilterType
from popmq.common.topics import GROUP_NAME_LIMIT, check_group_name
from popmq.common.wire.admin_pb2 import ConnectedClient
from popmq.proxy.auth.calls import AuthorizedCall
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.messaging.client_directory import ClientDirectory, add_group, printable
from popmq.proxy.remoting.clients import Clients
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import ONE_WAY, Command, release
from popmq.proxy.remoting.members import GroupMembership
from popmq.proxy.remoting.producers import Producers
from popmq.proxy.remoting.request import Request, json_bytes
from popmq.proxy.remoting.request_codes import RequestCode
from popmq.proxy.rpc.validate import SQL, filter_of

CLIENT_ID_LIMIT = 255
INNER_PRODUCER = "CLIENT_INNER_PRODUCER"  # which each client has, for its send-backs
GROUPS_LIMIT = 1_000  # of one heartbeat, and the same for subscriptions of a group

Subscription = tuple[FilterType, str]


class ConsumerGroup(NamedTuple):
    """A group as one client has it: whether its members share queues out, its filters, and whether
    the application itself pulls."""

    shares_queues: bool
    subscriptions: Mapping[str, Subscription]
    pulls: bool = False


class Sessions:
    def __init__(
        self,
        brokers: BrokerPorts,
        clock: Clock,
        producers: Producers,
        clients: Clients,
        directory: ClientDirectory,
    ) -> None:
        self.membership = GroupMembership(brokers, clock, self._notify)
        self._producers = producers
        self._clients = clients
        self._directory = directory
        self._groups: dict[RemotingConnection, dict[str, ConsumerGroup]] = {}

    def heartbeat(self, request: Request) -> None:
        """Heartbeat V2 is not announced, so that each heartbeat is complete."""
        content = request.json_body()
        client_id = checked_client_id(content.get("clientID"))
        groups = dict(_consumer_groups(content.get("consumerDataSet")))
        producers = set(_producer_groups(content.get("producerDataSet")))
        connection = request.connection
        if connection not in self._groups:
            connection.on_lost(partial(self._lost, connection))
            self._groups[connection] = {}
        if connection.client_id != client_id:
            self._replace(connection, {})
            self._clients.disconnect(connection.client_id, connection)
            self._rename(connection, client_id)
        self._clients.connect(client_id, connection)
        self._replace(connection, groups)
        caller = request.rpc.call
        user = caller.user if isinstance(caller, AuthorizedCall) else ""
        self._producers.replace(connection, producers, user)
        produces = _produces(content.get("producerDataSet"))
        client = _described(client_id, request.command, groups, produces=produces)
        self._directory.on_remoting(client, connection.peer)
        request.ok()

    def unregister(self, request: Request) -> None:
        group = request.text("consumerGroup", "")
        known = self._groups.get(request.connection, {})
        if group in known and request.text("clientID") == request.connection.client_id:
            left = {name: consumer_group for name, consumer_group in known.items() if name != group}
            self._replace(request.connection, left)
        if producers := request.text("producerGroup", ""):
            self._producers.remove(request.connection, producers)
        request.ok()

    def consumer_ids(self, request: Request) -> None:
        """GET_CONSUMER_LIST_BY_GROUP."""
        group, client_id = request.text("consumerGroup"), request.connection.client_id
        then = request.rpc.guard(
            lambda members: request.ok(body=json_bytes({"consumerIdList": members}))
        )
        self.membership.when_known(group, client_id, then)

    def subscription(
        self, connection: RemotingConnection, group: str, topic: str
    ) -> Subscription | None:
        """The filter of that client; None while no heartbeat of it has named the topic."""
        known = self._groups.get(connection, {}).get(group)
        return None if known is None else known.subscriptions.get(topic)

    def _replace(self, connection: RemotingConnection, groups: dict[str, ConsumerGroup]) -> None:
        before = _sharing(self._groups[connection])
        self._groups[connection] = groups
        now = _sharing(groups)
        for group in now - before:
            self.membership.join(group, connection.client_id)
        for group in before - now:
            self.membership.leave(group, connection.client_id)

    def _lost(self, connection: RemotingConnection) -> None:
        self._replace(connection, {})
        self._producers.replace(connection, ())
        self._clients.disconnect(connection.client_id, connection)
        del self._groups[connection]
        self._rename(connection, "")

    def _rename(self, connection: RemotingConnection, client_id: str) -> None:
        """The connection is that of another client from now on, or of none."""
        before, connection.client_id = connection.client_id, client_id
        if before and all(other.client_id != before for other in self._groups):
            self._directory.on_left(before)

    def _notify(self, group: str) -> None:
        """Tell the consumers of the group here that they have to balance."""
        for connection, groups in self._groups.items():
            if group in groups and groups[group].shares_queues:
                code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
                connection.request(code, {"consumerGroup": group}, flag=ONE_WAY)


def _sharing(groups: Mapping[str, ConsumerGroup]) -> set[str]:
    return {name for name, group in groups.items() if group.shares_queues}


def _consumer_groups(data: object) -> Iterator[tuple[str, ConsumerGroup]]:
    """Of a heartbeat. Raises BAD_REQUEST for what is no list of groups, and for too many."""
    for entry in _objects(data, "consumerDataSet"):
        name = entry.get("groupName")
        if not isinstance(name, str):
            raise Refused(Code.BAD_REQUEST, "a group of the heartbeat has no groupName")
        check_group_name(name)
        subscriptions: dict[str, Subscription] = {}
        for subscribed in _objects(entry.get("subscriptionDataSet"), "subscriptionDataSet"):
            topic, expression = subscribed.get("topic"), subscribed.get("subString")
            if isinstance(topic, str) and isinstance(expression, str):
                kind = str(subscribed.get("expressionType", "TAG"))
                subscriptions[topic] = expression_of(kind, expression)
        shares_queues = entry.get("messageModel") != "BROADCASTING"
        pulls = entry.get("consumeType") == "CONSUME_ACTIVELY"
        yield name, ConsumerGroup(shares_queues, subscriptions, pulls)


def _produces(data: object) -> bool:
    """Whether the application has producers: each Java consumer brings one of its own."""
    return any(
        entry.get("groupName") != INNER_PRODUCER for entry in _objects(data, "producerDataSet")
    )


def _described(
    client_id: str, command: Command, groups: Mapping[str, ConsumerGroup], *, produces: bool
) -> ConnectedClient:
    kinds = ["producer"] if produces else []
    kinds += sorted(
        {"pull consumer" if group.pulls else "push consumer" for group in groups.values()}
    )
    client = ConnectedClient(
        client_id=client_id,
        language=printable(command.language),
        version=release(command.version),
        protocol="remoting",
        kind=", ".join(kinds),
    )
    for name, group in sorted(groups.items()):
        subscriptions = group.subscriptions.items()
        topics = [(printable(topic), expression) for topic, (_, expression) in subscriptions]
        add_group(client, name, topics)
    return client


def _producer_groups(data: object) -> Iterator[str]:
    for entry in _objects(data, "producerDataSet"):
        name = entry.get("groupName")
        # A name that no group may have is that of producers that send no half messages.
        if isinstance(name, str) and name != INNER_PRODUCER and len(name) <= GROUP_NAME_LIMIT:
            yield name


def _objects(data: object, name: str) -> Iterator[Mapping[str, object]]:
    items = data if isinstance(data, list) else []
    if len(items) > GROUPS_LIMIT:
        raise Refused(
            Code.BAD_REQUEST, f"{name} of {len(items)} is over the limit of {GROUPS_LIMIT}"
        )
    return (item for item in items if isinstance(item, dict))


def expression_of(kind: str, expression: str) -> Subscription:
    """Raises ILLEGAL_FILTER_EXPRESSION for another kind than TAG and SQL92."""
    if kind not in ("TAG", "SQL92", ""):
        raise Refused(
            Code.ILLEGAL_FILTER_EXPRESSION, f"expression type {kind[:40]!r}: it is TAG or SQL92"
        )
    return filter_of(SQL if kind == "SQL92" else 0, expression)


def checked_client_id(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused(Code.CLIENT_ID_REQUIRED, "the heartbeat has no clientID")
    if len(value.encode()) > CLIENT_ID_LIMIT:
        raise Refused(
            Code.BAD_REQUEST,
            f"clientID of {len(value.encode())} bytes is over the limit of {CLIENT_ID_LIMIT} bytes",
        )
    return value
