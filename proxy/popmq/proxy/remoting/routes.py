"""GET_ROUTEINFO_BY_TOPIC: this proxy as the name server of Remoting clients.

Every broker group keeps its own name, which comes back in later requests, with the address of a
proxy.  Names and queues are the same from every proxy and stay in their order: consumers share the
queues out by themselves, each from its own copy of this list.
"""

from collections.abc import Sequence
from functools import partial

from popmq.common.errors import Code, Refused, TopicNotFound, Unavailable
from popmq.common.settings.settings import Settings, format_address, parse_address
from popmq.common.topics import (
    Permission,
    TopicConfig,
    check_group_name,
    check_readable_topic_name,
    group_of_pull_retry,
)
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.remoting.connection import RemotingConnection
from popmq.proxy.remoting.frames import Command
from popmq.proxy.remoting.request import Request, json_bytes
from popmq.proxy.remoting.stored_message import Host

DEFAULT_TOPIC = "TBW102"  # its route lets a producer send to a topic that does not exist yet
_GO = 317  # the version that every Go client up to 2.1.2 sends


class Addresses:
    """The addresses that routes name, and the one that messages have as their store host."""

    def __init__(self, settings: Settings) -> None:
        own = settings.remoting.advertise
        if not own and settings.proxy.transport == "lean":
            own = settings.proxy.advertise
        self._advertised = parse_address(own) if own else None
        self._group_ports = settings.remoting.ports_of_groups()

    def of(self, connection: RemotingConnection) -> Host:
        """Where this client reaches a proxy again, with what it names in a request."""
        return self.of_group(connection, connection.broker_group) or self._public(connection)

    def of_group(self, connection: RemotingConnection, broker_group: str) -> Host | None:
        """The port for requests of that broker group which do not name it, if there is one."""
        port = self._group_ports.get(broker_group)
        return (self._public(connection)[0], port) if port else None

    def of_route(
        self, connection: RemotingConnection, command: Command, broker_groups: Sequence[str]
    ) -> Sequence[Host]:
        """The address for each of all broker groups.

        Raises BAD_REQUEST for a client that cannot name a broker group and lacks a port for one:
        a route to some of the groups would leave messages of the others unread.
        """
        public = self._public(connection)
        if not _names_no_broker(command):
            return [public] * len(broker_groups)
        ports = [self.of_group(connection, name) for name in broker_groups]
        if len(broker_groups) > 1 and None in ports:
            lacking = [name for name, port in zip(broker_groups, ports, strict=True) if not port]
            raise Refused(
                Code.BAD_REQUEST,
                f"this client ({command.language}, version {command.version}) cannot name a broker "
                f"group, and there are {len(broker_groups)}; no port stands for "
                f"{', '.join(lacking)} (remoting.group_ports)",
            )
        return [port or public for port in ports]

    def _public(self, connection: RemotingConnection) -> Host:
        return self._advertised or connection.local


class TopicRoutes:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        addresses: Addresses,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._cluster = settings.cluster.name
        self._topic_settings = settings.topic
        self._addresses = addresses

    def route(self, request: Request) -> None:
        name = request.text("topic")
        if name == DEFAULT_TOPIC:
            if not self._topic_settings.auto_create:
                raise TopicNotFound("topics are not made at their first send (topic.auto_create)")
            self._answer(request, TopicConfig(0, name, self._topic_settings.queues))
            return
        if name == f"{self._cluster}_REPLY_TOPIC":
            self._answer(request, TopicConfig(0, name, queues=1))  # replies are never stored
            return
        if group := group_of_pull_retry(name):
            check_group_name(group)
            # Also before the first retry: a consumer takes the queue when it balances next.
            self._answer(request, TopicConfig(0, name, queues=1))
            return
        check_readable_topic_name(name)
        then = request.rpc.guard(partial(self._answer, request))
        self._routes.topic(name, then)

    def _answer(self, request: Request, topic: TopicConfig) -> None:
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        addresses = self._addresses.of_route(request.connection, request.command, names)
        permission = int(topic.permission if topic.id else Permission.READ_WRITE)
        content = {
            "brokerDatas": [
                {
                    "brokerAddrs": {"0": format_address(*address)},
                    "brokerName": name,
                    "cluster": self._cluster,
                    "enableActingMaster": False,
                }
                for name, address in zip(names, addresses, strict=True)
            ],
            "filterServerTable": {},
            "queueDatas": [
                {
                    "brokerName": name,
                    "perm": permission,
                    "readQueueNums": topic.queues,
                    "topicSysFlag": 0,
                    "writeQueueNums": topic.queues,
                }
                for name in names
            ],
        }
        request.ok(body=json_bytes(content))


def _names_no_broker(command: Command) -> bool:
    """Clients from before 4.9.5, and those in C++, Go up to 2.1.2 and Node, send no `bname`; 5.0
    sends it with everything but sends."""
    version = command.version
    if command.language == "JAVA":
        return version < 403 or 411 <= version <= 432
    return command.language in ("CPP", "PYTHON") or (command.language == "GO" and version <= _GO)
