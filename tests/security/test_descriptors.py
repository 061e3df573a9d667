"""Descriptors of a process are few: clients may not take those that the store needs."""

import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from security.target import SERVICE, Target, attacking

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

pytestmark = pytest.mark.more


def send(endpoint: str, *messages: tuple[str, int]) -> list[str]:
    """One message to each (topic, number); what was refused."""
    refused = []
    with grpc.insecure_channel(endpoint) as channel:
        call = channel.unary_unary(
            f"{SERVICE}SendMessage",
            request_serializer=service.SendMessageRequest.SerializeToString,
            response_deserializer=service.SendMessageResponse.FromString,
        )
        for topic, number in messages:
            message = pb.Message(topic=pb.Resource(name=topic), body=b"x")
            message.system_properties.message_id = f"{topic}-{number}"
            request = service.SendMessageRequest(messages=[message])
            status = call(request, metadata=(("x-mq-client-id", "me"),), timeout=60).status
            if status.code != pb.Code.OK:
                refused.append(status.message)
    return refused


def idle_sockets(stack: ExitStack, address: tuple[str, int], count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(address, 30)) for _ in range(count)]


def test_a_thousand_idle_sockets_leave_the_store_its_descriptors(tmp_path: Path) -> None:
    with Target(tmp_path, files=1_024) as target, ExitStack() as stack:
        send(target.ready.endpoint, ("others", 0))
        with attacking(target):
            with grpc.insecure_channel(target.ready.endpoint) as channel:
                grpc.channel_ready_future(channel).result(30)
                idle_sockets(stack, target.address, 1_012)
                with Client(target.ready.endpoint) as client:
                    made = admin.CreateTopicRequest(topic=admin.Topic(name="new", queues=8))
                    assert client.call_admin(made, admin.TopicReply).topic.name == "new"
            assert target.open_files() < 1_024 // 2 + 128


def test_eighty_idle_sockets_on_the_metrics_port_and_more_that_follow(tmp_path: Path) -> None:
    with Target(tmp_path) as target, attacking(target) as attack, ExitStack() as stack:
        for probes in (5, 10, 15, 20):
            idle_sockets(stack, target.metrics_address, 80)
            while len(attack.livez_s) < probes:
                target.livez_s()


def test_topics_with_three_thousand_queues_need_few_descriptors_also_at_the_next_start(
    tmp_path: Path,
) -> None:
    with Target(tmp_path, files=2_048) as target:
        with Client(target.ready.endpoint) as client:
            for name in ("a", "b", "c"):
                made = admin.CreateTopicRequest(topic=admin.Topic(name=name, queues=1_024))
                client.call_admin(made, admin.TopicReply)
        messages = [(topic, number) for topic in ("a", "b", "c") for number in range(400)]
        assert send(target.ready.endpoint, *messages) == []
        assert target.open_files() < 700
        target.kill9()
        target.restart()
        assert send(target.ready.endpoint, ("a", 0), ("b", 1), ("c", 2)) == []
        target.kill9()  # a clean end syncs a thousand files
    with Target(tmp_path, files=256) as target:
        assert send(target.ready.endpoint, ("a", 0), ("b", 1), ("c", 2)) == []
        assert target.open_files() < 256
        target.kill9()
