"""Clients that are older than their server: they open no telemetry stream and tell no settings.

Everything is served all the same, to a client that sends its id in a header and the fields that the
first clients of this protocol sent.  Each call is one of the wire, with no library in between.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest
from e2e.many import Up
from google.protobuf.message import Message as Protobuf

from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

SERVICE = "/apache.rocketmq.v2.MessagingService/"
GROUP = pb.Resource(name="old-group")
OLD = (
    ("x-mq-client-id", "old@1@0@abc"),
    ("x-mq-protocol", "v2"),
    ("x-mq-language", "JAVA"),
    ("x-mq-client-version", "5.0.0"),
)
CALL_S = 10.0
POLL_S = 3.0
INVISIBLE_MS = 500

Reply = TypeVar("Reply", bound=Protobuf)


class OldClient:
    """Calls of an old client; what is not asked of it, it does not do."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def ask(self, method: str, request: Protobuf, reply: type[Reply]) -> Any:
        """The answer, whose status is OK."""
        call = self._channel.unary_unary(
            SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        answer: Any = call(request, metadata=OLD, timeout=CALL_S)
        assert answer.status.code == pb.OK, answer.status.message
        return answer

    def send(self, topic: str, name: str, **system: Any) -> service.SendResultEntry:
        properties = pb.SystemProperties(
            message_id=name,
            body_encoding=pb.IDENTITY,
            **{"message_type": pb.NORMAL, "born_host": "old", **system},
        )
        properties.born_timestamp.GetCurrentTime()
        resource = pb.Resource(name=topic)
        message = pb.Message(topic=resource, body=name.encode(), system_properties=properties)
        request = service.SendMessageRequest(messages=[message])
        (entry,) = self.ask("SendMessage", request, service.SendMessageResponse).entries
        assert entry.status.code == pb.OK
        assert entry.message_id == name
        found_entry: service.SendResultEntry = entry
        return found_entry

    def receive(self, topic: str, **how: Any) -> list[pb.Message]:
        """Without the poll's length and an attempt id, which came later: the deadline ends it."""
        request = service.ReceiveMessageRequest(
            group=GROUP,
            message_queue=pb.MessageQueue(topic=pb.Resource(name=topic), id=0),
            filter_expression=pb.FilterExpression(type=pb.TAG, expression="*"),
            batch_size=16,
            **how,
        )
        call = self._channel.unary_stream(
            SERVICE + "ReceiveMessage",
            request_serializer=service.ReceiveMessageRequest.SerializeToString,
            response_deserializer=service.ReceiveMessageResponse.FromString,
        )
        parts = list(call(request, metadata=OLD, timeout=POLL_S))
        codes = [part.status.code for part in parts if part.HasField("status")]
        assert codes in ([pb.OK], [pb.MESSAGE_NOT_FOUND])
        return [part.message for part in parts if part.HasField("message")]

    def one(self, topic: str, **how: Any) -> pb.Message:
        (message,) = self.receive(topic, **how)
        return message

    def ack(self, message: pb.Message) -> None:
        entry = service.AckMessageEntry(
            message_id=message.system_properties.message_id,
            receipt_handle=message.system_properties.receipt_handle,
        )
        request = service.AckMessageRequest(group=GROUP, topic=message.topic, entries=[entry])
        self.ask("AckMessage", request, service.AckMessageResponse)


@pytest.fixture(scope="module")
def up(served_by: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("old"), {}) as process:
        yield process


@pytest.fixture
def old(up: Up) -> Iterator[OldClient]:
    with grpc.insecure_channel(up.endpoints[0]) as channel:
        yield OldClient(channel)
    assert up.metric("popmq_proxy_open_streams") == 0, "nobody opened one"


@pytest.fixture
def topic_of(up: Up) -> Callable[[str], str]:
    def make(kind: str) -> str:
        up.popmq("topic", "create", f"old-{kind}", "--type", kind)
        return f"old-{kind}"

    return make


@pytest.mark.more
def test_a_consumer_without_settings_is_assigned_receives_and_acknowledges(
    old: OldClient, topic_of: Callable[[str], str]
) -> None:
    topic = topic_of("normal")
    resource = pb.Resource(name=topic)
    route = service.QueryRouteRequest(topic=resource)
    assert old.ask("QueryRoute", route, service.QueryRouteResponse).message_queues
    asked = service.QueryAssignmentRequest(topic=resource, group=GROUP)
    assert old.ask("QueryAssignment", asked, service.QueryAssignmentResponse).assignments
    old.send(topic, "first")
    # As its push consumer does: no invisible duration, the server renews.
    first = old.one(topic, auto_renew=True)
    assert (first.body, first.system_properties.delivery_attempt) == (b"first", 1)
    assert first.system_properties.body_digest.type == pb.MD5
    # It was not managed, and comes again when the client says.
    change = service.ChangeInvisibleDurationRequest(
        group=GROUP,
        topic=resource,
        receipt_handle=first.system_properties.receipt_handle,
        message_id="first",
    )
    change.invisible_duration.FromMilliseconds(1_000)
    changed_s = time.monotonic()
    answer = old.ask("ChangeInvisibleDuration", change, service.ChangeInvisibleDurationResponse)
    assert answer.receipt_handle
    again = old.one(topic, auto_renew=True)
    assert time.monotonic() - changed_s >= 0.99
    assert (again.body, again.system_properties.delivery_attempt) == (b"first", 2)
    old.ack(again)
    assert old.receive(topic, auto_renew=True) == []


def test_what_such_a_simple_consumer_does_not_acknowledge_comes_again(
    old: OldClient, topic_of: Callable[[str], str]
) -> None:
    topic = topic_of("fifo")
    for number in range(2):
        old.send(topic, f"fifo-{number}", message_type=pb.FIFO, message_group="one")
    how = service.ReceiveMessageRequest()
    how.invisible_duration.FromMilliseconds(INVISIBLE_MS)
    first = old.receive(topic, invisible_duration=how.invisible_duration)
    assert [item.body for item in first] == [b"fifo-0", b"fifo-1"]
    again = old.receive(topic, invisible_duration=how.invisible_duration)
    assert [item.system_properties.delivery_attempt for item in again] == [2, 2]
    for message in again:
        old.ack(message)


@pytest.mark.more
def test_it_ends_transactions_delays_and_gives_up_messages(
    old: OldClient, topic_of: Callable[[str], str], up: Up
) -> None:
    halves, later, normal = topic_of("transaction"), topic_of("delay"), topic_of("mixed")
    entry = old.send(halves, "half", message_type=pb.TRANSACTION)
    end = service.EndTransactionRequest(
        topic=pb.Resource(name=halves),
        message_id="half",
        transaction_id=entry.transaction_id,
        resolution=pb.COMMIT,
        source=pb.SOURCE_CLIENT,
    )
    old.ask("EndTransaction", end, service.EndTransactionResponse)
    assert old.one(halves, auto_renew=True).body == b"half"

    due_s = int(time.time()) + 2
    delayed = pb.SystemProperties()
    delayed.delivery_timestamp.FromSeconds(due_s)
    old.send(later, "later", message_type=pb.DELAY, delivery_timestamp=delayed.delivery_timestamp)
    assert old.one(later, auto_renew=True).body == b"later"
    assert time.time() >= due_s

    old.send(normal, "poison")
    poison = old.one(normal, auto_renew=True)
    forward = service.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP,
        topic=poison.topic,
        receipt_handle=poison.system_properties.receipt_handle,
        message_id="poison",
        delivery_attempt=1,
        max_delivery_attempts=1,
    )
    old.ask(
        "ForwardMessageToDeadLetterQueue",
        forward,
        service.ForwardMessageToDeadLetterQueueResponse,
    )
    assert "poison" in up.popmq("dlq", "list", GROUP.name)


def test_its_heartbeat_and_its_good_bye_are_heard(old: OldClient) -> None:
    beat = service.HeartbeatRequest(group=GROUP, client_type=pb.PUSH_CONSUMER)
    old.ask("Heartbeat", beat, service.HeartbeatResponse)
    bye = service.NotifyClientTerminationRequest(group=GROUP)
    old.ask("NotifyClientTermination", bye, service.NotifyClientTerminationResponse)
