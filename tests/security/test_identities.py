"""Calls in the name of another client.  The attacker has an address of its own: 127.0.0.2."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from proxy.lean.peer import prefixed
from security.http2 import RawClient
from security.target import SERVICE, Target, attacking

from popmq.cli.client import Client
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.transport.lean import frames

pytestmark = pytest.mark.more
ELSEWHERE = "127.0.0.2"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("identities")) as running:
        yield running


class Caller:
    """A client that is what it says."""

    def __init__(self, channel: grpc.Channel, client_id: str) -> None:
        self._channel = channel
        self._metadata = (("x-mq-client-id", client_id),)

    def call(self, method: str, request: Any, response: Any) -> Any:
        send: Any = self._channel.unary_unary(f"{SERVICE}{method}")
        reply = send(request.SerializeToString(), metadata=self._metadata, timeout=60)
        return response.FromString(reply)

    def receive(self, topic: str, group: str) -> list[pb.Message]:
        request = service.ReceiveMessageRequest(batch_size=1, auto_renew=True)
        request.group.name, request.message_queue.topic.name = group, topic
        request.long_polling_timeout.seconds = 1
        send: Any = self._channel.unary_stream(f"{SERVICE}ReceiveMessage")
        parts = send(request.SerializeToString(), metadata=self._metadata, timeout=60)
        replies: list[Any] = [service.ReceiveMessageResponse.FromString(part) for part in parts]
        return [reply.message for reply in replies if reply.HasField("message")]

    def send(self, topic: str, body: bytes, **system: Any) -> Any:
        sent = pb.SystemProperties(message_id=body.hex(), **system)
        message = pb.Message(topic=pb.Resource(name=topic), body=body, system_properties=sent)
        request = service.SendMessageRequest(messages=[message])
        reply = self.call("SendMessage", request, service.SendMessageResponse)
        assert reply.status.code == Code.OK.value
        return reply

    def commands(self, settings: pb.Settings) -> Iterator[service.TelemetryCommand]:
        """What the server sends on a telemetry stream with these settings."""
        requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        requests.put(service.TelemetryCommand(settings=settings).SerializeToString())
        stream: Any = self._channel.stream_stream(f"{SERVICE}Telemetry")
        for command in stream(iter(requests.get, None), metadata=self._metadata, timeout=60):
            yield service.TelemetryCommand.FromString(command)


@contextmanager
def client(target: Target, client_id: str) -> Iterator[Caller]:
    with grpc.insecure_channel(target.ready.endpoint) as channel:
        yield Caller(channel, client_id)


def calls(raw: RawClient, method: str, request: Any, client_id: str, times: int) -> None:
    """Calls in the name of a client, until they are answered."""
    answered = len(raw.statuses)
    for _ in range(times):
        raw.open(f"{SERVICE}{method}", [("x-mq-client-id", client_id)])
        raw.data(prefixed(request.SerializeToString()), frames.END_STREAM)
    raw.until_answered(answered + times)
    assert not raw.closed


def test_a_hundred_good_byes_in_another_clients_name(target: Target) -> None:
    heartbeat = service.HeartbeatRequest(client_type=pb.ClientType.PUSH_CONSUMER)
    good_bye = service.NotifyClientTerminationRequest(group=pb.Resource(name="readers"))
    with client(target, "victim") as victim, client(target, "next") as other:
        victim.send("letters", b"private")
        (held,) = victim.receive("letters", "readers")
        with attacking(target), RawClient(target.address, ELSEWHERE) as attacker:
            calls(attacker, "Heartbeat", heartbeat, "victim", 100)
            calls(attacker, "NotifyClientTermination", good_bye, "victim", 100)
            assert other.receive("letters", "readers") == []
        assert target.metric("popmq_proxy_foreign_good_byes_total") == 100
        ack = service.AckMessageRequest(group=pb.Resource(name="readers"))
        ack.topic.name = "letters"
        ack.entries.add(receipt_handle=held.system_properties.receipt_handle, message_id="m")
        reply = victim.call("AckMessage", ack, service.AckMessageResponse)
        assert reply.status.code == Code.OK.value


def test_a_good_bye_from_the_clients_own_address_returns_its_deliveries(target: Target) -> None:
    good_bye = service.NotifyClientTerminationRequest(group=pb.Resource(name="readers"))
    with client(target, "leaver") as leaver, client(target, "follower") as follower:
        leaver.send("parcels", b"left behind")
        (held,) = leaver.receive("parcels", "readers")
        leaver.call("NotifyClientTermination", good_bye, service.NotifyClientTerminationResponse)
        (again,) = follower.receive("parcels", "readers")
        assert (held.body, again.body) == (b"left behind", b"left behind")
        assert again.system_properties.delivery_attempt == 2


def test_twenty_streams_that_name_a_topic_of_transactions(target: Target) -> None:
    settings = pb.Settings(client_type=pb.ClientType.PRODUCER)
    settings.publishing.topics.add(name="payments")
    command = service.TelemetryCommand(settings=settings).SerializeToString()
    heartbeat = service.HeartbeatRequest(client_type=pb.ClientType.PRODUCER)
    with Client(target.ready.endpoint) as tool:
        topic = admin.Topic(name="payments", queues=1, type="transaction")
        tool.call_admin(admin.CreateTopicRequest(topic=topic), admin.TopicReply)
    with (
        client(target, "payer") as payer,
        attacking(target),
        RawClient(target.address, ELSEWHERE) as attacker,
    ):
        for number in range(20):
            name = "payer" if number % 2 else f"attacker-{number}"
            attacker.open(f"{SERVICE}Telemetry", [("x-mq-client-id", name)])
            attacker.data(prefixed(command))
        calls(attacker, "Heartbeat", heartbeat, "payer", 1)
        soon: Any = timedelta(seconds=1)
        payer.send(
            "payments",
            b"pay 100",
            message_type=pb.TRANSACTION,
            orphaned_transaction_recovery_duration=soon,
        )
        for received in payer.commands(settings):
            if received.HasField("recover_orphaned_transaction_command"):
                break
        assert received.recover_orphaned_transaction_command.message.body == b"pay 100"
        calls(attacker, "Heartbeat", heartbeat, "payer", 1)
        assert b"pay 100" not in attacker.content


def test_the_attacker_of_these_tests_reads_what_streams_receive(tmp_path: Path) -> None:
    """Else `attacker.content` would be without bodies for another reason."""
    with Target(tmp_path) as target, RawClient(target.address, ELSEWHERE) as raw:
        settings = pb.Settings(client_type=pb.ClientType.PRODUCER)
        settings.publishing.topics.add(name="a-topic-that-is-echoed")
        raw.open(f"{SERVICE}Telemetry", [("x-mq-client-id", "me")])
        raw.data(prefixed(service.TelemetryCommand(settings=settings).SerializeToString()))
        heartbeat = service.HeartbeatRequest(client_type=pb.ClientType.PRODUCER)
        calls(raw, "Heartbeat", heartbeat, "me", 1)
        assert b"a-topic-that-is-echoed" in raw.content
