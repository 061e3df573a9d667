"""QueryRoute and QueryAssignment: where a client should go.

Every endpoint is this proxy's (or the load balancer's in front of it): clients never see a
broker's address.  Queue numbers in a route only have to look right to the clients.
"""

import ipaddress
from collections.abc import Sequence
from functools import partial

from popmq.common.errors import PopmqError, Unavailable
from popmq.common.settings.settings import parse_address
from popmq.common.topics import (
    Permission,
    SubscriptionGroup,
    TopicConfig,
    check_group_name,
    check_readable_topic_name,
)
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.rpc.convert import name_of, ok, parse
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.rpc.validate import check_readable

_PERMISSIONS = {
    Permission.NONE: pb.Permission.NONE,
    Permission.READ: pb.Permission.READ,
    Permission.WRITE: pb.Permission.WRITE,
    Permission.READ_WRITE: pb.Permission.READ_WRITE,
}
ANY_QUEUE = -1


class EndpointChooser:
    """Says which address clients shall use.

    `listening` is where the transport listens; it is right to set it once the port is known.
    """

    def __init__(self, advertise: str, listen: str) -> None:
        self._advertised = parse_address(advertise) if advertise else None
        self.listening = parse_address(listen)

    def choose(self, asked: pb.Endpoints) -> pb.Endpoints:
        if self._advertised is not None:
            return endpoints([self._advertised])
        if asked.addresses:
            return endpoints([(address.host, address.port) for address in asked.addresses])
        host, port = self.listening
        return endpoints([("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)])


def endpoints(addresses: Sequence[tuple[str, int]]) -> pb.Endpoints:
    """With the scheme that clients can dial: literal addresses of one kind, else one host name.

    The Python client cannot open IPv4 with a host name in it, nor several host names.
    """
    versions = {_ip_version(host) for host, _ in addresses}
    scheme = pb.AddressScheme.DOMAIN_NAME
    if versions == {4}:
        scheme = pb.AddressScheme.IPv4
    elif versions == {6}:
        scheme = pb.AddressScheme.IPv6
    else:
        addresses = addresses[:1]
    found_addresses = [pb.Address(host=host, port=port) for host, port in addresses]
    return pb.Endpoints(scheme=scheme, addresses=found_addresses)


class RouteQueries:
    def __init__(
        self, brokers: BrokerPorts, routes: MetadataCache, endpoints: EndpointChooser
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._endpoints = endpoints

    def route(self, rpc: Rpc) -> None:
        request = parse(service.QueryRouteRequest, rpc.data)
        name = name_of(request.topic)
        check_readable_topic_name(name)
        then = rpc.guard(partial(self._route_known, rpc, request.endpoints))
        self._routes.topic_of_receive(name, then)

    def _route_known(self, rpc: Rpc, asked: pb.Endpoints, topic: TopicConfig) -> None:
        reply = service.QueryRouteResponse(status=ok())
        where = self._endpoints.choose(asked)
        for broker in self._known_brokers():
            for queue in range(topic.queues):
                entry = _queue(topic, broker, queue, where)
                entry.accept_message_types.extend(
                    pb.MessageType.ValueType(kind) for kind in topic.type.accepted
                )
                reply.message_queues.append(entry)
        rpc.reply(reply.SerializeToString())

    def assignment(self, rpc: Rpc) -> None:
        request = parse(service.QueryAssignmentRequest, rpc.data)
        topic, group = name_of(request.topic), name_of(request.group)
        check_readable_topic_name(topic)
        check_group_name(group)
        then = partial(self._topic_known, rpc, group, request.endpoints)
        self._routes.topic_of_receive(topic, rpc.guard(then))

    def _topic_known(self, rpc: Rpc, group: str, asked: pb.Endpoints, topic: TopicConfig) -> None:
        check_readable(topic)
        where = self._endpoints.choose(asked)
        self._routes.group(group, partial(rpc.run, self._assign, rpc, topic, where))

    def _assign(
        self,
        rpc: Rpc,
        topic: TopicConfig,
        where: pb.Endpoints,
        group: SubscriptionGroup | PopmqError,
    ) -> None:
        """Every consumer of a group gets the same list: brokers share the messages out (POP)."""
        each = not isinstance(group, PopmqError) and topic.kind.receives_by_queue(group)
        queues = range(topic.queues) if each else (ANY_QUEUE,)
        reply = service.QueryAssignmentResponse(status=ok())
        for broker in self._known_brokers():
            for queue in queues:
                reply.assignments.add(message_queue=_queue(topic, broker, queue, where))
        rpc.reply(reply.SerializeToString())

    def _known_brokers(self) -> Sequence[str]:
        names = self._brokers.names()
        if not names:
            raise Unavailable("no broker is known yet")
        return names


def _queue(topic: TopicConfig, broker: str, queue: int, where: pb.Endpoints) -> pb.MessageQueue:
    return pb.MessageQueue(
        topic=pb.Resource(name=topic.name),
        id=queue,
        permission=_PERMISSIONS[topic.permission],
        # 0 means the master.  The Node client uses nothing else.
        broker=pb.Broker(name=broker, id=0, endpoints=where),
    )


def _ip_version(host: str) -> int:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version
    except ValueError:
        return 0
