"""`popmq clients` with two proxies, a client at each, and a broker that dies."""

import json
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e.processes import Cluster

from popmq.cli.client import Client
from popmq.common.errors import PopmqError
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

MESSAGING = "/apache.rocketmq.v2.MessagingService/"
WAIT_S = 30.0


class GrpcClient:
    """A consumer with a Telemetry stream, as official clients have one."""

    def __init__(self, endpoint: str, name: str) -> None:
        # Of its own: channels to the same place would share a connection.
        self._channel = grpc.insecure_channel(
            endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._metadata = (
            ("x-mq-client-id", name),
            ("x-mq-language", "JAVA"),
            ("x-mq-client-version", "5.0.7"),
        )
        self._commands: queue.SimpleQueue[service.TelemetryCommand | None] = queue.SimpleQueue()

    def start(self, group: str, topic: str) -> None:
        entry = pb.SubscriptionEntry(topic=pb.Resource(name=topic))
        subscription = pb.Subscription(group=pb.Resource(name=group), subscriptions=[entry])
        settings = pb.Settings(client_type=pb.SIMPLE_CONSUMER, subscription=subscription)
        stream = self._channel.stream_stream(
            MESSAGING + "Telemetry",
            request_serializer=service.TelemetryCommand.SerializeToString,
            response_deserializer=service.TelemetryCommand.FromString,
        )
        self._commands.put(service.TelemetryCommand(settings=settings))
        answers = stream(iter(self._commands.get, None), metadata=self._metadata)
        next(answers)

    def beat(self) -> None:
        request = service.HeartbeatRequest(client_type=pb.SIMPLE_CONSUMER)
        self._unary("Heartbeat", request, service.HeartbeatResponse)

    def leave(self) -> None:
        request = service.NotifyClientTerminationRequest()
        self._unary("NotifyClientTermination", request, service.NotifyClientTerminationResponse)

    def close(self) -> None:
        self._commands.put(None)
        self._channel.close()

    def _unary(self, method: str, request: Any, reply: Any) -> None:
        call = self._channel.unary_unary(
            MESSAGING + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        assert call(request, metadata=self._metadata, timeout=10).status.code == pb.OK


@contextmanager
def client(endpoint: str, name: str, group: str) -> Iterator[GrpcClient]:
    opened = GrpcClient(endpoint, name)
    try:
        opened.start(group, "orders")
        yield opened
    finally:
        opened.close()


def rows(cluster: Cluster, *arguments: str) -> list[dict[str, Any]]:
    return list(map(json.loads, cluster.popmq("clients", "--json", *arguments).splitlines()))


def until_listed(cluster: Cluster, clients: dict[str, GrpcClient], *expected: str) -> None:
    """While the clients send heartbeats."""
    deadline_s = time.monotonic() + WAIT_S
    ids: list[str] = []
    with Client(cluster.endpoints[0]) as asking:
        while ids != list(expected):
            assert time.monotonic() < deadline_s, f"listed are {ids}"
            for name in expected:
                clients[name].beat()
            with suppress(PopmqError):  # no broker answers for a while
                reply = asking.call_admin(admin.ListClientsRequest(), admin.ListClientsReply)
                ids = [listed.client_id for listed in reply.clients]
            time.sleep(0.05)  # between two looks


@pytest.mark.more
def test_clients_of_both_proxies_are_listed_also_after_the_broker_was_killed(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, proxies=2) as cluster:
        cluster.create(topic="orders", groups=["billing", "audit"])
        first_proxy, second_proxy = cluster.endpoints
        with (
            client(first_proxy, "one@1", "billing") as first,
            client(second_proxy, "two@1", "audit") as second,
        ):
            clients = {"one@1": first, "two@1": second}
            until_listed(cluster, clients, "one@1", "two@1")
            for name, group, proxy in (
                ("one@1", "billing", first_proxy),
                ("two@1", "audit", second_proxy),
            ):
                (row,) = rows(cluster, "--group", group)
                assert (row["client_id"], row["kind"]) == (name, "simple consumer")
                assert (row["language"], row["version"]) == ("JAVA", "5.0.7")
                assert row["groups"][0]["subscriptions"][0]["topic"] == "orders"
                assert [item["proxy"] for item in row["connections"]] == [proxy]
            cluster.broker.kill9()
            cluster.broker.restart()
            until_listed(cluster, clients, "one@1", "two@1")
            (row,) = rows(cluster, "--topic", "orders", "--group", "audit")
            assert row["client_id"] == "two@1"
            second.leave()
            until_listed(cluster, clients, "one@1")
            watched = cluster.popmq("lag", "--watch", "--group", "billing")
            assert "one@1" in watched
            assert "two@1" not in watched
